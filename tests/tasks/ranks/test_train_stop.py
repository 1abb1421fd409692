"""Training that is stopped, moved to another node, or given damaged checkpoints: what it goes on from, bit for bit."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.store import ObjectStore
from infra.stores import open_store
from schemas.errors import EXIT_PREEMPTED
from tests.support.train_site import (
    OWNED,
    Group,
    change_work,
    content,
    events,
    manifest_of,
    rows_of,
    settings,
    write_base,
    write_work,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("stopped"))


@pytest.fixture(scope="module")
def straight(base) -> Callable[[int, int], Path]:
    """Undisturbed work of so many ranks, in a ZeRO stage."""

    @functools.cache
    def run(ranks: int, stage: int) -> Path:
        work = write_work(base, f"straight-{ranks}-{stage}", settings=settings(zero_stage=stage))
        events(work, ranks)
        return work

    return run


def store_of(work: Path) -> ObjectStore:
    return open_store(json.loads(work.read_text())["root"])


def stored(work: Path) -> list[str]:
    """Markers of checkpoints in the store, without their folder."""
    keys = (key.removeprefix(f"{OWNED}/") for key in store_of(work).list(f"{OWNED}/e"))
    return [key for key in keys if "/checkpoints/" in key and key.endswith("/state.json")]


def scratch(work: Path) -> Path:
    return work.parent / "scratch"


def until(condition: Callable[[], object], group: Group) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, group.output()
        assert group.processes[0].is_alive(), group.output()
        time.sleep(0.002)


def said(told: list[dict], event: str) -> list[dict]:
    return [message for message in told if message["event"] == event]


def stop(work: Path, ranks: int, step: int, to: int = 0) -> dict:
    """SIGTERM to one rank once so many steps were told of; what the group says of its end."""
    group = Group(work, ranks)
    until(lambda: len({r["step"] for m in said(group.told(), "metrics") for r in m["rows"] if r["name"] == "loss"})
          >= step, group)  # fmt: skip
    pid = group.processes[to].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    assert group.statuses() == [EXIT_PREEMPTED] * ranks, group.output()
    (told,) = said(group.told(), "stopped")
    return told


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (2, 1), (2, 3)])
def test_a_stop_keeps_the_last_step_and_another_node_goes_on_with_the_same_bytes(base, straight, ranks, stage):
    """No checkpoint is due by itself; one rank alone is told to stop, and all agree on the step."""
    options = settings(save_every_steps=0, save_every_seconds=0, zero_stage=stage)
    work = write_work(base, f"stop-{ranks}-{stage}", settings=options)
    change_work(work, slow=0.05)
    told = stop(work, ranks, 2, to=ranks - 1)
    assert told["steps"] == told["saved"] == told["stored"] >= 2
    assert stored(work) == [f"e000001/checkpoints/{told['steps']:06d}/state.json"]
    shutil.rmtree(scratch(work))
    change_work(work, slow=0.0)
    heir = events(work, ranks)
    assert [m["steps"] for m in said(heir, "resumed_at")] == [told["steps"]]
    assert content(work) == content(straight(ranks, stage))
    assert rows_of(work) == rows_of(straight(ranks, stage))


def test_a_stop_before_the_first_step_is_at_once_and_keeps_nothing(base):
    work = write_work(base, "early", slow=0.2)
    group = Group(work)
    until(lambda: said(group.told(), "progress"), group)
    began = time.monotonic()
    group.processes[0].terminate()
    assert group.statuses() == [EXIT_PREEMPTED]
    assert time.monotonic() - began < 10
    (told,) = said(group.told(), "stopped")
    assert (told["steps"], told["saved"], told["stored"]) == (0, 0, 0)
    assert stored(work) == []


def test_a_store_that_is_too_slow_for_the_grace_leaves_this_nodes_checkpoint(base, straight):
    options = settings(save_every_steps=0, save_every_seconds=0, grace_seconds=3)
    work = write_work(base, "slow-store", settings=options, slow=0.05, slow_checkpoints=60)
    began = time.monotonic()
    told = stop(work, 1, 2)
    assert time.monotonic() - began < 30
    assert (told["saved"], told["stored"]) == (told["steps"], 0)
    assert stored(work) == []
    change_work(work, slow=0.0, slow_checkpoints=0)
    assert [m["steps"] for m in said(events(work), "resumed_at")] == [told["steps"]]
    assert content(work) == content(straight(1, 1))


def test_every_owner_keeps_two_in_the_store_and_a_finished_one_none(base):
    work = write_work(base, "kept", slow=0.1)
    group = Group(work)
    seen: set[tuple[str, ...]] = set()

    def fifth() -> bool:
        seen.add(tuple(stored(work)))
        return any("000005" in name for name in stored(work))

    until(fifth, group)
    assert group.statuses() == [0], group.output()
    assert max(map(len, seen)) <= 3  # the third for a moment, until the first goes
    assert stored(work) == []
    assert not list(scratch(work).glob("*"))


@pytest.mark.parametrize(("where", "damage"), [("node", "tensors"), ("node", "all"), ("store", "marker")])
def test_of_a_damaged_checkpoint_the_older_one_beside_it_is_taken_and_said(base, straight, where, damage):
    work = write_work(base, f"damaged-{where}-{damage}", slow=0.05)
    group = Group(work)
    until(lambda: len(stored(work)) == 2 and "000004" in stored(work)[1], group)
    group.kill()
    group.statuses()
    folders = sorted((work.parent / "store" / OWNED).glob("e000001/checkpoints/0*"))
    if where == "node":
        folders = sorted(scratch(work).glob("*/e000001/step-*"))
        shutil.rmtree(work.parent / "store" / OWNED / "e000001")
    else:
        shutil.rmtree(scratch(work))
    whole = [f for f in folders if (f / "state.json").exists()]
    for folder in whole if damage == "all" else whole[-1:]:
        path = folder / ("state.json" if damage == "marker" else "tensors-00000.safetensors")
        data = path.read_bytes()
        path.write_bytes(data[:-1] if damage == "marker" else data[:-1] + bytes([data[-1] ^ 1]))
    change_work(work, slow=0.0)
    told = events(work)
    resumed = [m["steps"] for m in said(told, "resumed_at")]
    assert resumed == ([] if damage == "all" else [int(whole[-2].name[-6:])])
    notices = [m["text"] for m in said(told, "notice")]
    assert len(notices) == (len(whole) if damage == "all" else 1)
    assert "passed over" in notices[0]
    assert content(work) == content(straight(1, 1))


def test_a_zombies_export_is_its_own(base, straight):
    """Stopped before it would finish, continued after its heir has exported: the heir's bytes are the heir's."""
    work = write_work(base, "zombie", dead_after_seconds=1.0, pause="SIGSTOP")
    zombie = Group(work)
    pid = zombie.processes[0].pid
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", zombie)
    change_work(work, pause="")
    events(work)
    assert pid is not None
    os.kill(pid, signal.SIGCONT)
    assert zombie.statuses() == [5], zombie.output()
    assert content(work) == content(straight(1, 1))
    assert all("/e000002/" in o["key"] for o in manifest_of(work)["objects"])
