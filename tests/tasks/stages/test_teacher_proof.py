"""Before the first token: teachers whose settings do not say enough are loaded once, in a process of their own."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from infra import launch
from infra.store_local import LocalStore
from schemas import config
from schemas.errors import ConfigError
from tasks.runs.session import Session
from tasks.stages.teacher_proof import prove_teachers
from tests.support.fake_spark import FakeSpark
from tests.support.families import FAMILIES, family_model
from tests.support.tiny import tiny_model


def session_of(folder: Path, **teachers: tuple[Path, str]) -> Session:
    run = config.parse({
        "run_id": "r", "data": str(folder / "data"), "scratch": str(folder / "scratch"),
        "student": {"path": str(folder / "student")},
        "teachers": [{"id": i, "path": str(p), "kind": kind} for i, (p, kind) in teachers.items()],
        "prompts": {"datasets": [{"name": "g", "size": 1, "teachers": [next(iter(teachers))]}]},
    })  # fmt: skip
    return Session(run, LocalStore(folder / "data"), FakeSpark())  # type: ignore[arg-type]


def test_a_teacher_that_cannot_teach_stops_the_run_and_others_are_proved_once(tmp_path, monkeypatch):
    student = tiny_model(tmp_path / "student")
    phi = family_model(tmp_path / "phi", "Phi", tokenizer=student)
    monkeypatch.setitem(
        FAMILIES, "Bert",
        {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
         "intermediate_size": 64, "max_position_embeddings": 512, "initializer_range": 0.15},
    )  # fmt: skip
    bert = family_model(tmp_path / "bert", "Bert", tokenizer=student, is_decoder=False)
    with pytest.raises(ConfigError, match="BertLMHeadModel to give states that do not depend on later tokens"):
        prove_teachers(session_of(tmp_path, a=(phi, "transformers"), b=(bert, "transformers")))
    session = session_of(tmp_path, a=(phi, "transformers"), b=(student, "opd"))
    prove_teachers(session)

    def started(*_arguments, **_named):
        raise AssertionError("nothing is left to be proved")

    monkeypatch.setattr(launch, "run_group", started)
    prove_teachers(session)
    prove_teachers(session_of(tmp_path, a=(student, "opd")))
