"""One stage alone: which stages before it are asked, with what, and where it ends. The stages stand in by name."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

from flows import single
from schemas import config
from schemas.errors import ConfigError, StageError
from schemas.work.manifest import StageManifest
from schemas.work.record import RunRecord
from tasks.runs.finished import STAGES, StageResult
from tasks.runs.records import History

RUN = config.parse({
    "run_id": "r", "data": "d", "iterations": 3, "student": {"path": "s"}, "teachers": [{"id": "a", "path": "t"}],
    "prompts": {"files": [{"path": "p.jsonl", "teachers": ["a"]}]},
})  # fmt: skip


class Stages:
    """finished: names of "STAGE ITERATION" that have a manifest; asking for another one that is no target fails."""

    def __init__(self, patch: pytest.MonkeyPatch, past: int = 0) -> None:
        self.asked: list[str] = []
        self.history = History(
            tuple(
                (n, RunRecord({}, {}, (), "s", from_iteration=k)) for n, k in ((1, 0), *([(2, past)] if past else []))
            )
        )
        self.target: tuple[int, str] | None = None
        for name in STAGES:
            patch.setattr(getattr(single, name), name, lambda _, number, *given, name=name: self(name, number, *given))
        patch.setattr(single, "open_session", self.open)
        patch.setattr(single, "student_of", lambda _, trained: f"student of {trained and trained.iteration}")
        patch.setattr(single, "past_iteration", lambda _, number: {name: self.result(name, number) for name in STAGES})

    @contextmanager
    def open(self, _config: Any, *, progress: Any, target: tuple[int, str]):
        self.target = target
        yield self

    @staticmethod
    def result(name: str, number: int) -> StageResult:
        return StageResult(name, number, "f", f"{name} {number}", StageManifest(name, number, "f", {}, {}, {}, {}, "o"))

    def __call__(self, name: str, number: int, *given: Any) -> StageResult:
        said = [g if isinstance(g, str) else ",".join(g) if isinstance(g, dict) else g.output_digest for g in given]
        self.asked.append(f"{name} {number}: {'; '.join(said)}")
        return self.result(name, number)


def test_every_earlier_stage_is_asked_and_none_after(monkeypatch):
    stages = Stages(monkeypatch)
    assert single.run_single(RUN, "dispatch", 1).output_digest == "dispatch 1"
    assert stages.target == (1, "dispatch")
    assert stages.asked == [
        "rollout 0: student of None",
        "teach 0: rollout 0",
        "dispatch 0: rollout 0; teach 0",
        "train 0: student of None; rollout,teach,dispatch",
        "rollout 1: student of 0",
        "teach 1: rollout 1",
        "dispatch 1: rollout 1; teach 1",
    ]


def test_iterations_of_an_older_record_are_read_and_never_asked(monkeypatch):
    stages = Stages(monkeypatch, past=2)
    assert single.run_single(RUN, "train", 1).output_digest == "train 1"
    assert stages.asked == []
    assert single.run_single(RUN, "rollout", 2).output_digest == "rollout 2"
    assert stages.asked == ["rollout 2: student of 1"]


def test_an_iteration_that_the_run_has_not_is_refused(monkeypatch):
    stages = Stages(monkeypatch)
    for iteration in (-1, 3):
        with pytest.raises(ConfigError, match="0 to 2"):
            single.run_single(RUN, "train", iteration)
    assert stages.target is None


def test_an_error_of_an_earlier_stage_is_the_answer(monkeypatch):
    stages = Stages(monkeypatch)

    def unfinished(*_: Any) -> StageResult:
        raise StageError("teach of iteration 0", expected="a finished stage", found="none")

    monkeypatch.setattr(single.teach, "teach", unfinished)
    with pytest.raises(StageError, match="teach of iteration 0"):
        single.run_single(RUN, "train", 0)
    assert stages.asked == ["rollout 0: student of None"]
