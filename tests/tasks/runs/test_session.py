"""What a session is to the machine it runs on: one folder for each life of a run, marked while a driver lives."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from infra.stores import open_store
from schemas import config
from tasks.operate.upkeep import upkeep
from tasks.runs import session as sessions
from tasks.runs.session import IN_USE, life_of, open_session
from tests.support.fake_spark import FakeSpark
from tests.support.tiny import tiny_model


@pytest.fixture
def run(tmp_path, monkeypatch) -> config.RunConfig:
    tiny_model(tmp_path / "student")
    (tmp_path / "own.jsonl").write_text('{"text": "q", "answer": 1}\n')
    monkeypatch.setattr(sessions, "spark_child", lambda *_: nullcontext(FakeSpark()))
    return config.parse({
        "run_id": "r", "data": str(tmp_path / "data"), "scratch": str(tmp_path / "scratch"),
        "student": {"path": str(tmp_path / "student")}, "teachers": [{"id": "a", "path": str(tmp_path / "student")}],
        "prompts": {"per_iteration": 1, "heldout": 0, "files": [
            {"path": str(tmp_path / "own.jsonl"), "teachers": ["a"]}]},
    })  # fmt: skip


def scratch_of(run: config.RunConfig) -> Path:
    with open_session(run) as session:
        (session.scratch / "wal").mkdir(exist_ok=True)
        return session.scratch


def test_a_new_root_does_not_meet_the_old_ones_scratch(run, tmp_path):
    first = scratch_of(run)
    assert scratch_of(run) == first, "every driver of a run's life has the same"
    shutil.rmtree(tmp_path / "data")
    second = scratch_of(run)
    assert second != first
    assert second.parent == first.parent == tmp_path / "scratch" / "r"


def test_upkeep_takes_the_folders_of_other_lives_when_nobody_drives_them(run, tmp_path):
    old = scratch_of(run)
    shutil.rmtree(tmp_path / "data")
    with open_session(run) as session:
        for path in (tmp_path / "scratch").rglob("*"):
            os.utime(path, (time.time() - 90_000, time.time() - 90_000))
        assert life_of(open_store(run.data), "r") == session.life
        with open(old / IN_USE, "rb") as held:
            sessions.fcntl.flock(held, sessions.fcntl.LOCK_SH)
            upkeep(run.data, scratch=tmp_path / "scratch")
            assert old.exists(), "somebody drives it, under another root"
        upkeep(run.data, scratch=tmp_path / "scratch")
        assert not old.exists()
        assert session.scratch.exists()
