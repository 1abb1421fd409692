"""The parent of a group of ranks: deaths that come further and deaths that do not, standing still, being stopped."""

from __future__ import annotations

import os
import signal
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra import launch
from schemas.errors import StageError
from tasks.runs.session import silent
from tasks.workers import pool as workers
from tasks.workers.pool import Limits, work_folder
from tasks.workers.rank_group import run_group


@dataclass(frozen=True)
class Work:
    threads: int = 1


REPOSITORY = Path(__file__).parents[3]


class Site:
    """A driver of toy ranks. `body` may say what a rank says; `life` counts the starts of its group from 1."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
        prelude = """
            import json, os, signal, sys, time
            from pathlib import Path
            folder = Path(__file__).parent
            rank = int(os.environ.get("RANK", "0"))
            with open(folder / f"lives{rank}", "a") as lives: lives.write("x")
            life = len((folder / f"lives{rank}").read_text())
            def say(event, **facts): print(json.dumps({"event": event, **facts}), flush=True)
            def progress(): say("progress", done=1, total=2, unit="micro-batches")
        """
        (folder / "toy.py").write_text(textwrap.dedent(prelude) + textwrap.dedent(body))
        self.folder = folder
        commands = launch.group_commands
        monkeypatch.setattr(launch, "group_commands", lambda _module, *rest: commands("toy", *rest))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(REPOSITORY)]))
        self.session: Any = SimpleNamespace(scratch=folder / "scratch", progress=silent, moves=lambda: None)

    def run(self, ranks: int = 1, stuck_seconds: float = 60.0, grace_seconds: float = 20.0) -> None:
        folder = work_folder(self.session, "train", 3)
        limits = Limits(3, grace_seconds, stuck_seconds)
        run_group(self.session, "train", 3, Work(), ranks=ranks, limits=limits, folder=folder)

    def lives(self) -> int:
        return len((self.folder / "lives0").read_text())


def test_a_plan_outlives_many_deaths_as_long_as_each_comes_further(tmp_path, monkeypatch, capfd):
    site = Site(
        tmp_path, monkeypatch,
        """
        progress()
        if life < 6:
            say("checkpoint", steps=life)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )  # fmt: skip
    site.run()
    assert site.lives() == 6
    assert "train of iteration 3: rank 0 ended with signal SIGKILL" in capfd.readouterr().err


def test_a_step_that_kills_its_group_ends_the_stage(tmp_path, monkeypatch):
    site = Site(
        tmp_path, monkeypatch,
        """
        say("resumed_at", steps=16 if life > 2 else 8)
        progress()
        sys.exit(1)
        """,
    )  # fmt: skip
    with pytest.raises(StageError) as caught:
        site.run()
    assert site.lives() == 5
    assert "to come further in 3 attempts" in str(caught.value)
    assert "checkpoint of step 16" in caught.value.safe


@pytest.mark.parametrize("phase", ["start", "progress"])
def test_a_group_that_stands_still_is_killed_and_counted(tmp_path, monkeypatch, phase):
    monkeypatch.setattr(workers, "_LOADING_SECONDS", 1.0)
    site = Site(
        tmp_path, monkeypatch,
        f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if {phase == "progress"}:
            progress()
        while True:
            time.sleep(0.05)
            say("stored", steps=1)  # an upload beside it is no progress
        """,
    )  # fmt: skip
    with pytest.raises(StageError, match=f"no {phase} in {1.0 if phase == 'start' else 0.25:g} s"):
        site.run(ranks=2, stuck_seconds=0.25)
    assert site.lives() == 3


def test_a_stopped_driver_says_what_it_waits_for_and_what_stands(tmp_path, monkeypatch, capfd):
    site = Site(
        tmp_path, monkeypatch,
        """
        def stop(*_):
            time.sleep(0.7)
            say("stopped", steps=7, saved=7, stored=5)
            os._exit(75)
        signal.signal(signal.SIGTERM, stop)
        progress()
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
        """,
    )  # fmt: skip
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        site.run()
    said = capfd.readouterr().err
    assert "train of iteration 3: stopping, up to 1" in said or "train of iteration 3: stopping, up to 2" in said
    assert "checkpoint of step 7 on this node; the store has step 5" in said


def test_a_group_that_others_stop_counts_no_attempt(tmp_path, monkeypatch, capfd):
    """Schedulers may send SIGTERM to every process, and some to one rank before the driver."""
    site = Site(
        tmp_path, monkeypatch,
        """
        progress()
        if life < 5:
            say("stopped", steps=4, saved=4, stored=4)
            sys.exit(75)
        """,
    )  # fmt: skip
    site.run()
    assert site.lives() == 5
    assert "checkpoint of step 4, which is in the store" in capfd.readouterr().err


def test_work_files_are_of_one_attempt(tmp_path):
    session: Any = SimpleNamespace(scratch=tmp_path)
    first = work_folder(session, "train", 1)
    other = work_folder(session, "train", 11)
    assert work_folder(session, "train", 1) not in (first, other)
    assert not first.exists()
    assert other.exists()
