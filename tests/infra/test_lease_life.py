"""A lease from the inside: its end never fails, its heartbeat tells of progress, and who waits says for whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra import leases
from infra.leases import FinishedEpoch, Lease, Superseded, acquire, finished, release
from infra.store import ObjectStore
from infra.store_local import LocalStore
from infra.stores import open_store
from schemas import keys
from schemas.errors import ContractError, StoreError
from tests.support.s3_proxy import Proxy
from tests.support.s3_server import S3Server

OWNED = "runs/r/00000/rollout/abc/p00000"
HEAD = """
import os, sys, time
from infra.leases import acquire, release
from infra.stores import open_store
from schemas.errors import ContractError
store, OWNED = open_store({root!r}), {owned!r}
"""


def take(store: ObjectStore, dead_after: float = 3600.0, **more: Any) -> Lease:
    lease = acquire(store, OWNED, owner={"name": "owner"}, dead_after_seconds=dead_after, **more)
    assert isinstance(lease, Lease)
    return lease


def start(store: ObjectStore, code: str, **more: Any) -> subprocess.Popen[str]:
    head = HEAD.format(root=store.root, owned=OWNED)
    return subprocess.Popen(
        [sys.executable, "-c", head + code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, **more
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def counter(store: ObjectStore, epoch: int = 1) -> int:
    beat = leases._heartbeat(store, OWNED, epoch)
    return beat["counter"] if beat else 0


def beats_in(store: ObjectStore, seconds: float, epoch: int = 1) -> int:
    before = counter(store, epoch)
    time.sleep(seconds)
    return counter(store, epoch) - before


def until(what: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Refusing(LocalStore):
    """A store that refuses to write, or hangs in it, from when it is told to."""

    refusing = False
    hanging: threading.Event | None = None

    def within(self, _seconds: float) -> Refusing:
        return self

    def put(self, key: str, data: Any) -> None:
        if self.hanging is not None:
            self.hanging.wait(60)
        if self.refusing:
            raise StoreError(key, expected="room", found="none")
        super().put(key, data)


# --- the end


def test_a_release_that_fails_ends_the_lease_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = Refusing(tmp_path)
    with take(store, 30.0):
        until(lambda: counter(store))
        store.refusing = True
    assert "ends without a word" in caplog.text
    assert not [t for t in threading.enumerate() if t.name.startswith("heartbeat")]
    store.refusing = False
    began = time.monotonic()
    assert take(store, 30.0).epoch == 2
    assert time.monotonic() - began < 5


def test_a_release_that_fails_masks_no_error_and_fails_no_finished_work(tmp_path: Path):
    store = Refusing(tmp_path)
    lease = take(store, 30.0)
    store.refusing = True
    with pytest.raises(KeyError, match="the block's own"), lease:
        raise KeyError("the block's own")
    store.refusing = False
    with take(store, 30.0) as lease:
        until(lambda: counter(store, 2))
        store.refusing = True
        lease.finish({"rows": 1})
    assert finished(store, OWNED) == FinishedEpoch(3, {"rows": 1})


def test_nobody_waits_behind_a_beat_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leases, "_ENDING_SECONDS", 0.2)
    store = Refusing(tmp_path)
    store.hanging = hanging = threading.Event()
    lease = take(store, 30.0)
    lease.start_heartbeat(0.01)
    time.sleep(0.1)
    began = time.monotonic()
    lease.check()
    lease.finish({"rows": 1})
    assert time.monotonic() - began < 5
    assert finished(store, OWNED) == FinishedEpoch(2, {"rows": 1})
    hanging.set()


# --- of this very process


def test_to_wait_for_ones_own_lease_is_an_error(store: ObjectStore):
    with take(store, 30.0) as lease:
        for wait in (True, False):
            began = time.monotonic()
            with pytest.raises(ContractError, match="which this very process holds") as caught:
                take(store, 30.0, wait=wait)
            assert str(os.getpid()) in caught.value.found
            assert time.monotonic() - began < 5
        lease.check()
    assert take(store, 30.0).epoch == 2


def test_another_thread_waits_for_the_end_of_the_work(store: ObjectStore):
    found: list[int] = []
    with take(store, 30.0):
        waiting = threading.Thread(target=lambda: found.append(take(store, 30.0).epoch))
        waiting.start()
        time.sleep(0.3)
        assert not found
    waiting.join(30)
    assert found == [2]


def test_what_was_interrupted_between_store_and_lease_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = LocalStore(tmp_path)
    monkeypatch.setattr(leases, "Lease", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        acquire(store, OWNED, owner={}, dead_after_seconds=3600.0)
    monkeypatch.undo()
    assert take(store).epoch == 2


# --- progress


def test_a_heartbeat_stops_without_progress_and_goes_on_with_it(store: ObjectStore):
    lease = take(store, 30.0, patience_seconds=0.4)
    lease.start_heartbeat(0.02)
    until(lambda: counter(store) > 0)
    for move in (lease.progress, lease.check):
        until(lambda: beats_in(store, 0.6) == 0)
        before = counter(store)
        move()
        until(lambda before=before: counter(store) > before)
    with lease.patience(60.0):
        time.sleep(1.0)
        before = counter(store)
        until(lambda: counter(store) > before)
    until(lambda: beats_in(store, 0.6) == 0)
    release(lease)


def test_an_owner_that_stands_still_is_superseded_and_learns_of_it_by_its_next_progress(store: ObjectStore):
    owner = start(
        store,
        """
lease = acquire(store, OWNED, owner={"name": "owner"}, dead_after_seconds=0.5, patience_seconds=0.2)
lease.start_heartbeat(0.05)
print("owner", flush=True)
input()
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    try:
        lease.progress()
    except ContractError as error:
        print("heir" in error.found, flush=True)
        break
""",
    )
    assert line(owner) == "owner"
    heir = acquire(store, OWNED, owner={"name": "heir"}, dead_after_seconds=0.5)
    assert isinstance(heir, Lease)
    owner.communicate("\n")
    assert owner.returncode == 0


def test_a_worker_whose_pipe_nobody_reads_falls_silent(store: ObjectStore):
    """Its parent is stopped: what it says fills the pipe, and its next word never ends."""
    worker = start(
        store,
        """
lease = acquire(store, OWNED, owner={"name": "worker"}, dead_after_seconds=0.5, patience_seconds=0.3)
lease.start_heartbeat(0.05)
print("owner", flush=True)
while True:
    lease.progress()
    print("x" * 1000, flush=True)
""",
    )
    try:
        assert line(worker) == "owner"
        until(lambda: beats_in(store, 0.3) == 0)
        assert worker.poll() is None
        assert isinstance(acquire(store, OWNED, owner={"name": "heir"}, dead_after_seconds=0.5), Lease)
    finally:
        worker.kill()
        worker.communicate()


# --- epochs of the run


def test_an_owner_under_an_older_epoch_of_the_run_is_superseded_at_once(store: ObjectStore):
    owner = start(
        store,
        """
lease = acquire(store, OWNED, owner={"name": "zombie's"}, dead_after_seconds=600.0, run_epoch=3)
lease.start_heartbeat(0.05)
print("owner", flush=True)
input()
""",
    )
    assert line(owner) == "owner"
    try:
        began = time.monotonic()
        heir = take(store, 600.0, run_epoch=4)
        assert time.monotonic() - began < 5
        assert heir.epoch == 2
        with pytest.raises(Superseded, match="under epoch 4"):
            take(store, 0.0, run_epoch=3)
        release(heir)
        with pytest.raises(Superseded, match="under epoch 4"):
            take(store, 0.0, run_epoch=3)
        take(store, 600.0, run_epoch=4).finish({"rows": 1})
        assert acquire(store, OWNED, owner={}, dead_after_seconds=0.0, run_epoch=3) == FinishedEpoch(4, {"rows": 1})
    finally:
        owner.kill()
        owner.communicate()


def test_an_owner_of_the_same_run_epoch_or_of_none_is_watched(store: ObjectStore):
    for theirs, ours in ((4, 4), (None, 4), (4, None)):
        owned = f"runs/{theirs}-{ours}/lease"
        body = leases.epochs.body("lease", 1, "n", {"name": "elsewhere"}, **({"run_epoch": theirs} if theirs else {}))
        assert leases.epochs.put(store, owned, 1, body)
        began = time.monotonic()
        assert isinstance(acquire(store, owned, owner={}, dead_after_seconds=0.3, run_epoch=ours), Lease)
        assert time.monotonic() - began >= 0.3


# --- words


def test_who_waits_says_for_whom(store: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leases, "_FIRST_WORD_SECONDS", 0.5)
    monkeypatch.setattr(leases, "_NEXT_WORD_SECONDS", 0.3)
    store.list("")  # a store's first answer takes longer
    owner = start(
        store,
        """
lease = acquire(store, OWNED, owner={"name": "nightly"}, dead_after_seconds=600.0)
lease.heartbeat()
print("owner", flush=True)
time.sleep(0.4)
input()
release(lease)
""",
    )
    assert line(owner) == "owner"
    said: list[str] = []
    began = time.monotonic()
    threading.Timer(2.4, lambda: owner.communicate("\n")).start()
    assert take(store, 40.0, on_wait=said.append).epoch == 2
    assert len(said) <= (time.monotonic() - began) / 0.3
    held = [word for word in said if "held by" in word]  # on a slow store also: no answer yet, taking epoch 2
    assert len(held) >= 3
    for word in held:
        assert word.startswith(f"waiting for {OWNED}, held by name nightly, process {owner.pid} on ")
        assert "(epoch 1): silent for " in word
        assert word.endswith(" s, taken over after 40 s of silence")
    assert int(held[-1].partition("silent for ")[2].partition(" s")[0]) >= 1
    number = len(said)
    time.sleep(0.5)
    assert len(said) <= number + 1  # nothing is waited for any more


def test_a_store_that_does_not_answer_is_waited_for_with_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leases, "_FIRST_WORD_SECONDS", 0.1)

    class Slow(LocalStore):
        def list(self, prefix: str) -> list[str]:
            time.sleep(0.5)
            return super().list(prefix)

    said: list[str] = []
    assert take(Slow(tmp_path), on_wait=said.append).epoch == 1
    assert said == [f"waiting for {OWNED}: no answer of the store yet"]


# --- a store that is away


def test_an_outage_shorter_than_dead_after_costs_no_owner_its_work(tmp_path: Path):
    class Away(LocalStore):
        away = False

        def within(self, _seconds: float) -> Away:
            return self

        def head(self, key: str) -> Any:
            if self.away:
                raise StoreError(key, expected="an answer", found="none")
            return super().head(key)

    store = Away(tmp_path)
    lease = take(store, 0.6)
    lease.heartbeat()
    store.away = True
    lease.check()
    time.sleep(0.7)
    with pytest.raises(StoreError):
        lease.check()
    store.away = False
    lease.check()
    # An heir that came meanwhile is seen, outage or not, once it has been heard of.
    lease._ask(store)
    assert leases.epochs.put(store, OWNED, 2, leases.epochs.body("lease", 2, "n", {"name": "heir"}))
    with pytest.raises(Superseded):
        lease.check()
    store.away = True
    for ask in (lease.check, lease.progress):
        with pytest.raises(Superseded, match="name heir"):
            ask()


def test_a_pause_of_the_process_counts_as_no_progress(store: ObjectStore):
    owner = start(
        store,
        """
lease = acquire(store, OWNED, owner={"name": "owner"}, dead_after_seconds=30.0, patience_seconds=0.5)
lease.start_heartbeat(0.02)
print("owner", flush=True)
input()
""",
    )
    assert line(owner) == "owner"
    try:
        until(lambda: counter(store) > 0)
        owner.send_signal(signal.SIGSTOP)
        time.sleep(0.7)
        owner.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        assert beats_in(store, 0.3) == 0
        assert store.head(keys.epoch(OWNED, 2)) is None
    finally:
        owner.kill()
        owner.communicate()


# --- a connection that goes silent


@pytest.mark.s3
def test_a_connection_that_goes_silent_costs_no_live_owner_its_lease(
    s3: str, s3_process: S3Server, monkeypatch: pytest.MonkeyPatch
):
    """Every connection of the owner goes silent again and again; a new one works. The observer has a network of its
    own, and waits for five beats without a change."""
    proxy = Proxy(s3_process.port)
    observer = open_store(s3)
    observer.list("")
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    store = open_store(s3)
    lease = take(store, 6.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_process.environment["AWS_ENDPOINT_URL"])
    stop = threading.Event()

    def forget() -> None:
        while not stop.wait(2.0):
            proxy.forget()

    forgetting = threading.Thread(target=forget)
    said: list[str] = []
    with lease:
        until(lambda: counter(observer))
        forgetting.start()
        watching = threading.Thread(target=lambda: said.append(outcome(observer)))
        watching.start()
        time.sleep(8.0)
        assert said == []
        proxy.forget()
        began = time.monotonic()
        lease.check()
        assert time.monotonic() - began < 5.0
        lease.finish({"rows": 1})
        assert time.monotonic() - began < 10.0
        stop.set()
        forgetting.join()
    watching.join(60)
    assert said == ["finished"]
    proxy.close()


def outcome(store: ObjectStore) -> str:
    found = acquire(store, OWNED, owner={"name": "observer"}, dead_after_seconds=6.0)
    return "finished" if isinstance(found, FinishedEpoch) else "took it over"
