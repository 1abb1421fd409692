"""Trajectories that kill their worker, hang it, or never go on: found, given up if that is allowed, never silently."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra import leases
from schemas import keys, shards
from schemas.errors import StageError
from schemas.typed_json import from_json
from schemas.work.rollout import RolloutWork
from tasks.runs.session import silent
from tasks.workers import pool as workers
from tasks.workers.pool import Limits, Pool
from tests.support.forked import FORKS, leave
from tests.support.rollout_site import OWNED, Site
from tests.support.tiny import tiny_model

AT = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), seed=3)


class Stage:
    """Three trajectories, two at a time, as the parent of their workers runs them."""

    def __init__(self, folder: Path, model: Path, monkeypatch) -> None:
        self.site, self.model, self._monkeypatch = Site(folder, model), model, monkeypatch
        self.site.work["engine"]["max_sequences"] = 2
        entry = self.site.work["partitions"][0]
        entry["requests"] = sorted(entry["requests"][1:4], key=lambda r: r["trajectory_id"])
        self.ids = [r["trajectory_id"] for r in entry["requests"]]
        self.pool: Pool | None = None

    def run(self, poison: dict[str, tuple[int, str]], **limits: float) -> None:
        self._monkeypatch.setenv("OPD_TEST_POISON", json.dumps(poison))
        self._monkeypatch.setattr(
            workers,
            "RankCommand",
            lambda module, *rest: workers.launch.RankCommand("tests.support.poisoned_rollout", *rest),
        )
        facts = {"progress": silent, "moves": lambda: None, "store": self.site.store}
        session = SimpleNamespace(scratch=self.site.folder / "node", **facts)
        written = self.site.work | {"scratch": str(session.scratch / "logs")}
        work = from_json(RolloutWork, written, "work")
        todo = {entry.partition: entry for entry in work.partitions}
        self.pool = Pool(session, "rollout", 0, replace(work, partitions=()), todo, 1)  # pyright: ignore
        self.pool.run(Limits(max_attempts=2, grace_seconds=5.0, **limits))  # pyright: ignore

    def drive(self, poison: dict[str, tuple[int, str]], told: Path) -> int:
        """`run` in a process of its own, whose error is written to `told`; its exit status."""

        driver = FORKS.Process(target=_drive, args=(self.site.folder, self.model, poison, told))
        driver.start()
        driver.join(120)
        assert driver.exitcode is not None
        return driver.exitcode

    def lives(self) -> int:
        return len(self.site.store.list(keys.epochs(OWNED)))

    def columns(self) -> tuple[dict[str, dict], dict[str, dict], dict[str, str]]:
        """(row, token columns of each trajectory; why those given up were)."""
        found = leases.finished(self.site.store, OWNED)
        assert found is not None
        rows = [json.loads(line) for line in self.site.store.get(found.manifest["rows_key"]).splitlines()]
        columns = shards.decode(self.site.store.get(found.manifest["objects"][0]["key"]), "shard")
        tokens = {
            r["trajectory_id"]: {
                name: columns[name][r["first_row"] : r["first_row"] + r["response_tokens"]].tolist()
                for name in ("response_ids", "logprobs_raw", "logprobs_sampled", "sampled_mask")
            }
            for r in rows
        }
        return {r["trajectory_id"]: r for r in rows}, tokens, found.manifest["given_up"]


def _drive(folder: Path, model: Path, poison: dict[str, tuple[int, str]], told: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        try:
            Stage(folder, model, patch).run(poison)
        except StageError as error:
            told.write_text(str(error))
            leave(6)
    leave(0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model) -> dict[str, dict]:
    """Token columns of an uninterrupted run."""
    with pytest.MonkeyPatch.context() as patch:
        stage = Stage(tmp_path_factory.mktemp("whole"), model, patch)
        stage.run({})
        return stage.columns()[1]


@pytest.fixture
def stage(tmp_path, model, monkeypatch) -> Stage:
    return Stage(tmp_path, model, monkeypatch)


def assert_all_but(stage: Stage, whole: dict[str, dict], poison: str, at: int) -> str:
    """The others are whole, the poison's row says how far it came; returns why it was given up."""
    rows, tokens, given_up = stage.columns()
    assert list(given_up) == [poison]
    length = rows[poison]["response_tokens"]
    # It dies of its durable tokens, and some steps may be on their way to the disk.
    assert at <= length < len(whole[poison]["response_ids"])
    assert f", 3 times after {length} tokens" in given_up[poison]
    for trajectory_id, columns in tokens.items():
        if trajectory_id == poison:
            assert columns == {name: values[:length] for name, values in whole[poison].items()}
        else:
            assert columns == whole[trajectory_id]
    found = {i: (r["status"], r["finish_reason"] == "error", r["reward"] is None) for i, r in rows.items()}
    assert found == {i: ("given_up", True, True) if i == poison else ("finished", False, False) for i in stage.ids}
    assert rows[poison]["sampled_tokens"] == length
    return given_up[poison]


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, AT])
def test_poison_fails_the_stage_unless_it_may_be_given_up(stage, whole, at):
    poison = stage.ids[1]
    with pytest.raises(StageError) as caught:
        stage.run({poison: (at, "die")})
    for part in (poison, "at most 0 given up", "SIGSEGV, 3 times after", "rollout.max_given_up=1"):
        assert part in str(caught.value)
    assert leases.finished(stage.site.store, OWNED) is None
    lives = stage.lives()
    stage.run({poison: (at, "die")}, max_given_up=1)
    assert stage.lives() == lives + 2, "another driver tries it no more"
    assert "unseen by this driver" in assert_all_but(stage, whole, poison, at)


@pytest.mark.slow
def test_what_was_given_up_stays_so_for_another_parent(stage, whole):
    """The log tells it: the next parent neither tries it again nor lets it pass when it allows less."""
    poison, last = stage.ids[0], stage.ids[2]
    with pytest.raises(StageError):
        stage.run({poison: (AT, "die"), last: (AT, "die")}, max_given_up=1)
    assert stage.pool is not None
    assert poison in stage.pool.given_up[3]
    with pytest.raises(StageError):
        stage.run({})
    stage.run({}, max_given_up=1)
    assert_all_but(stage, whole, poison, AT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"), [("hang", "no step in 2 s"), ("starve", "no token while others went on in 2 s")]
)
def test_what_stands_still_is_killed_and_given_up(stage, whole, how, text):
    poison = stage.ids[0]
    stage.run({poison: (AT, how)}, max_given_up=1, stuck_seconds=2)
    assert text in assert_all_but(stage, whole, poison, AT)


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["kept", "lost"])
def test_poison_that_takes_its_driver_along_is_named_by_a_later_one(stage, tmp_path, disk):
    """As where a container is killed whole for its memory; another node has the store's copy of the log alone."""
    poison, told = stage.ids[1], tmp_path / "told"
    statuses = []
    while not statuses or statuses[-1] == -signal.SIGKILL:
        assert len(statuses) < 9
        statuses.append(stage.drive({poison: (AT, "die with driver")}, told))
        if disk == "lost":
            shutil.rmtree(stage.site.folder / "node")
    assert statuses[-1] == 6
    assert len(statuses) >= 4
    for part in (poison, "its worker ended unseen by this driver, 3 times after", "at most 0 given up"):
        assert part in told.read_text()
    assert stage.lives() == len(statuses) - 1, "the last driver knows without another life"
