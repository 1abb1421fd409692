"""Leases: one owner, one result, whatever dies, stops, races or gets no answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

import pytest

from infra import leases, owners
from infra.leases import FinishedEpoch, Lease, acquire, finished, release
from infra.store import ObjectStore
from schemas import keys
from schemas.errors import ContractError

OWNED = "runs/r/00000/rollout/abc/p00000"


def take(store: ObjectStore, name: str = "someone", dead_after: float = 3600.0, wait: bool = True) -> Lease:
    """A lease as a process of another host takes it: this process cannot see whether its owner lives."""
    outcome = take_or_find(store, name, dead_after, wait)
    assert isinstance(outcome, Lease)
    return outcome


def take_or_find(store: ObjectStore, name: str, dead_after: float, wait: bool = True) -> Lease | FinishedEpoch:
    process = {**owners.this_process(), "host": uuid.uuid4().hex}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owners, "this_process", lambda: process)
        outcome = acquire(store, OWNED, owner={"name": name}, dead_after_seconds=dead_after, wait=wait)
    if isinstance(outcome, Lease):
        del leases._held[outcome._nonce]
    return outcome


def take_here(store: ObjectStore, dead_after: float = 3600.0, wait: bool = True) -> Lease:
    lease = acquire(store, OWNED, owner={"name": "here"}, dead_after_seconds=dead_after, wait=wait)
    assert isinstance(lease, Lease)
    return lease


def start(store: ObjectStore, code: str) -> subprocess.Popen[str]:
    """A process with `store` and `OWNED` at hand, which prints one line when it is where the test wants it."""
    head = f"""
import os, sys, time
from infra.leases import FinishedEpoch, acquire, finished, release
from infra.stores import open_store
from schemas.errors import ContractError
store, OWNED = open_store({store.root!r}), {OWNED!r}
"""
    return subprocess.Popen(
        [sys.executable, "-c", head + code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def test_the_first_owner_gets_epoch_one_and_its_result_is_final(store: ObjectStore):
    assert finished(store, OWNED) is None
    lease = take(store)
    assert (lease.owned, lease.epoch) == (OWNED, 1)
    assert finished(store, OWNED) is None
    lease.check()
    lease.finish({"rows": 3})
    assert finished(store, OWNED) == FinishedEpoch(2, {"rows": 3})
    assert acquire(store, OWNED, owner={}, dead_after_seconds=0.0) == FinishedEpoch(2, {"rows": 3})
    assert json.loads(store.get(keys.epoch(OWNED, 2)))["kind"] == "manifest"


def test_finishing_twice_with_one_result_is_one_finish_and_with_another_is_refused(store: ObjectStore):
    lease = take(store)
    lease.finish({"rows": 3})
    lease.finish({"rows": 3})
    with pytest.raises(ContractError):
        lease.finish({"rows": 4})
    assert finished(store, OWNED) == FinishedEpoch(2, {"rows": 3})


def test_a_released_lease_is_taken_at_once_and_its_old_owner_cannot_finish(store: ObjectStore):
    first = take(store)
    first.heartbeat()
    release(first)
    release(first)
    second = take(store)
    assert second.epoch == 2
    with pytest.raises(ContractError):
        first.finish({"rows": 1})
    second.finish({"rows": 2})
    assert finished(store, OWNED) == FinishedEpoch(3, {"rows": 2})


def test_a_heartbeat_after_release_does_not_revive(store: ObjectStore):
    first = take(store)
    release(first)
    first.heartbeat()
    assert take(store).epoch == 2


def test_a_silent_owner_is_superseded_after_the_time_and_not_before(store: ObjectStore):
    first = take(store)
    first.heartbeat()
    began = time.monotonic()
    second = take(store, "heir", dead_after=0.4)
    assert time.monotonic() - began >= 0.4
    assert second.epoch == 2
    with pytest.raises(ContractError) as caught:
        first.check()
    assert "name heir" in caught.value.found
    with pytest.raises(ContractError):
        first.finish({})
    second.check()


def test_without_wait_a_live_owner_is_named(store: ObjectStore):
    first = take(store, "campaign nightly")
    first.start_heartbeat(0.02)
    with pytest.raises(ContractError) as caught:
        take(store, dead_after=30.0, wait=False)
    assert "campaign nightly" in caught.value.found
    assert str(os.getpid()) in caught.value.found
    release(first)
    assert take(store, dead_after=30.0, wait=False).epoch == 2


def test_with_wait_the_result_of_the_live_owner_is_awaited(store: ObjectStore):
    first = take(store)
    first.start_heartbeat(0.02)
    timer = threading.Timer(0.3, first.finish, [{"rows": 9}])
    timer.start()
    assert acquire(store, OWNED, owner={}, dead_after_seconds=30.0) == FinishedEpoch(2, {"rows": 9})
    timer.join()


def test_a_block_left_by_an_exception_releases(store: ObjectStore):
    with pytest.raises(KeyError), take(store):
        raise KeyError
    assert take(store).epoch == 2
    assert not [t for t in threading.enumerate() if t.name.startswith("heartbeat")]


def test_a_block_that_finished_stays_finished(store: ObjectStore):
    with take(store) as lease:
        lease.finish({"rows": 1})
    assert finished(store, OWNED) == FinishedEpoch(2, {"rows": 1})


def test_the_process_of_an_owner_on_this_host_is_seen_to_be_dead(store: ObjectStore):
    owner = start(store, "acquire(store, OWNED, owner={}, dead_after_seconds=9.0); print(1, flush=True); input()")
    assert line(owner) == "1"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    began = time.monotonic()
    assert take_here(store, wait=False).epoch == 2
    assert time.monotonic() - began < 60


def _forge(store: ObjectStore, **process: Any) -> None:
    owner = {"process": {**owners.this_process(), **process}}
    body = {"kind": "lease", "epoch": 1, "nonce": "n", "owner": owner}
    store.put(keys.epoch(OWNED, 1), keys.canonical_json(body))


def test_another_process_that_got_the_same_pid_is_not_the_owner(store: ObjectStore):
    _forge(store, pid_start="12345678901")
    assert take_here(store).epoch == 2


@pytest.mark.parametrize("elsewhere", ["host", "boot_id", "pid_namespace"])
def test_a_pid_of_elsewhere_says_nothing(store: ObjectStore, elsewhere: str):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    _forge(store, **{elsewhere: "another", "pid": gone.pid, "pid_start": "1"})
    began = time.monotonic()
    assert take_here(store, dead_after=0.3).epoch == 2
    assert time.monotonic() - began >= 0.3


def _starter(store: ObjectStore, owned: str, barrier: threading.Barrier, winners: list[int], losers: list[int]) -> None:
    """Try to own `owned`; the owner shows its life until the three others have given up."""
    barrier.wait()
    try:
        lease = acquire(store, owned, owner={}, dead_after_seconds=10.0, wait=False)
    except ContractError:
        losers.append(0)
        return
    assert isinstance(lease, Lease)
    winners.append(lease.epoch)
    lease.start_heartbeat(0.05)
    while len(losers) < 3:
        time.sleep(0.002)
    lease._end()


def test_four_starters_in_the_same_moment_have_one_owner(store: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    here = owners.this_process()
    monkeypatch.setattr(owners, "this_process", lambda: {**here, "host": f"host {threading.get_ident()}"})
    monkeypatch.setattr(leases, "_refuse_own", lambda *_: None)
    for round_index in range(8):
        owned = f"runs/{round_index}/lease"
        barrier = threading.Barrier(4)
        winners: list[int] = []
        losers: list[int] = []
        threads = [threading.Thread(target=_starter, args=(store, owned, barrier, winners, losers)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert winners == [1]
        assert store.list(keys.epochs(owned)) == [keys.epoch(owned, 1)]


def test_a_zombie_that_wakes_is_refused_and_its_objects_are_not_in_the_result(store: ObjectStore):
    zombie = start(
        store,
        """
lease = acquire(store, OWNED, owner={"name": "zombie"}, dead_after_seconds=0.5)
lease.start_heartbeat(0.05)
print("owner", flush=True)
input()
store.put(OWNED + "/e000001/rows.jsonl", b"late")
try:
    lease.finish({"rows_key": OWNED + "/e000001/rows.jsonl"})
    print("finished", flush=True)
except ContractError as error:
    print(error.exit_status, "heir" in error.found, flush=True)
""",
    )
    assert line(zombie) == "owner"
    zombie.send_signal(signal.SIGSTOP)
    heir = take(store, "heir", dead_after=0.5)
    heir.finish({"rows_key": OWNED + "/e000002/rows.jsonl"})
    zombie.send_signal(signal.SIGCONT)
    assert zombie.stdin is not None
    zombie.stdin.write("\n")
    zombie.stdin.flush()
    assert line(zombie) == "5 True"
    assert zombie.wait() == 0
    assert finished(store, OWNED) == FinishedEpoch(3, {"rows_key": OWNED + "/e000002/rows.jsonl"})


def test_a_pause_of_owner_and_observer_together_is_not_a_death(store: ObjectStore):
    owner = start(
        store,
        """
lease = acquire(store, OWNED, owner={}, dead_after_seconds=3.0)
lease.start_heartbeat(1.0)
print("owner", flush=True)
input()
lease.finish({"by": "owner"})
""",
    )
    assert line(owner) == "owner"
    observer = start(
        store,
        """
print("watching", flush=True)
print(acquire(store, OWNED, owner={}, dead_after_seconds=3.0).manifest["by"], flush=True)
""",
    )
    assert line(observer) == "watching"
    time.sleep(0.5)
    for process in (owner, observer):
        process.send_signal(signal.SIGSTOP)
    time.sleep(3.2)
    observer.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    owner.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    assert owner.stdin is not None
    owner.stdin.write("\n")
    owner.stdin.flush()
    assert line(observer) == "owner"
    assert owner.wait() == 0
    assert observer.wait() == 0
