"""Who owns a run, a partition of a stage or a table's next commit, and for how long.

    OWNED/epochs/000001.json       one object an epoch (infra.epochs): a lease, a manifest or a revocation
    OWNED/heartbeats/000001.json   {"counter": 17, "nonce": ..., "released": false}, written again by the owner

To own, a process puts a lease at the next number. To finish, it puts the manifest at the number after its own lease. So
a superseded owner cannot finish, and what is finished cannot be taken over. A store cannot stop a superseded owner from
writing, but nothing that it writes is ever read.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from infra import epochs, owners
from infra.epochs import FinishedEpoch, finished, revoke
from infra.store import ObjectStore
from schemas import keys
from schemas.errors import ContractError, FormatError, StoreError

__all__ = ["FinishedEpoch", "Lease", "Superseded", "acquire", "finish_with", "finished", "release", "revoke"]

_log = logging.getLogger(__name__)

#: How long an owner may work without a sign of progress before its heartbeat stops: between two steps or batches; and
#: while it reads a model, replays a log, or writes what it has made.
PATIENCE_SECONDS, LONG_SECONDS = 900.0, 7200.0
#: How long the end of a lease waits for a beat in flight.
_ENDING_SECONDS = 1.0
#: Who waits says so after the first time, then again each time the second has passed.
_FIRST_WORD_SECONDS, _NEXT_WORD_SECONDS = 3.0, 10.0
#: Nonces of leases that this process holds or is taking: (process id, thread) of the taker.
_held: dict[str, tuple[int, int]] = {}


class Superseded(ContractError):
    """Another owner has followed: what this one still writes is not read."""


class Lease:
    """Ownership of `owned` from epoch `epoch` until a newer epoch object exists.

    As a context manager it beats five times per dead_after_seconds and, if the block ends without `finish`,
    releases, which never fails. A beat proves that the working thread moves: it must call `progress` (or `check`) at
    least once in patience_seconds, or declare a longer step by `patience`. One Lease belongs to one process.
    """

    def __init__(
        self, store: ObjectStore, owned: str, epoch: int, nonce: str, owner: dict[str, Any],
        dead_after_seconds: float, patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:  # fmt: skip
        self.owned, self.epoch, self.owner = owned, epoch, owner
        self.dead_after_seconds = dead_after_seconds
        self._store, self._nonce = store, nonce
        self._patience_seconds = patience_seconds
        self._counter = itertools.count(1)
        self._ended = False
        # An observer that has seen nothing since then cannot have waited long enough.
        self._seen_alive = self._moved = time.monotonic()
        self._heir: dict[str, Any] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, _held.pop, nonce, None).atexit = False  # a lease that was dropped is held by nobody

    @functools.cached_property
    def _beats(self) -> ObjectStore:
        """The store for what must be quick or fail: one connection gone silent must not cost the lease."""
        return self._store.within(min(max(self.dead_after_seconds / 5, 2.0), 5.0))

    # --- the working thread

    def progress(self) -> None:
        """The work moves. Costs nothing; Superseded once the heartbeat has learnt of another owner."""
        self._moved = time.monotonic()
        if self._heir is not None:
            raise self._superseded(self._heir)

    @contextlib.contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """A step of the block may take `seconds` without `progress` (never less than the lease's own patience)."""
        usual = self._patience_seconds
        self._patience_seconds = max(usual, seconds)
        self._moved = time.monotonic()
        try:
            yield
        finally:
            self._moved = time.monotonic()
            self._patience_seconds = usual

    def check(self) -> None:
        """Superseded if another owner has followed; progress, too.

        While the store does not answer, a heartbeat that arrived less than dead_after_seconds ago is answer enough:
        nobody can have waited longer. After that StoreError, once the store's own patience has ended.
        """
        self._moved = time.monotonic()
        if self._heir is not None:
            raise self._superseded(self._heir)
        try:
            self._ask(self._beats)
        except StoreError:
            if time.monotonic() - self._seen_alive >= self.dead_after_seconds:
                self._ask(self._store)
            self._moved = time.monotonic()

    def finish(self, manifest: dict[str, Any]) -> None:
        """Publish `manifest` as the result, once and for good; Superseded if another owner has followed."""
        self._moved = time.monotonic()
        body = epochs.body("manifest", self.epoch + 1, self._nonce, self.owner, manifest=manifest)
        try:
            won = epochs.put(self._beats, self.owned, self.epoch + 1, body)
        except StoreError:  # a try that still arrives has the same body
            won = epochs.put(self._store, self.owned, self.epoch + 1, body)
        if not won:
            raise self._superseded(epochs.read(self._store, self.owned, self.epoch + 1) or {})
        self._end()

    # --- the heartbeat

    def heartbeat(self) -> None:
        """Show observers that the owner lives. StoreError if the store cannot be reached in time."""
        if not self._ended:
            began = time.monotonic()
            self._put_heartbeat(released=False)
            self._seen_alive = began

    def start_heartbeat(self, every_seconds: float) -> None:
        """Beat from a background thread until finish, release or the end of the process, while the work moves.

        A beat that fails is logged and the next one tried: if too many fail another owner takes over, and
        `progress`, `check` and `finish` say so here.
        """
        if self._thread is not None:
            raise RuntimeError(f"{self.owned}: heartbeat already started")
        self._thread = threading.Thread(
            target=self._keep_beating, args=(every_seconds,), name=f"heartbeat {self.owned}", daemon=True
        )
        self._thread.start()

    def _keep_beating(self, every_seconds: float) -> None:
        silent, noticed = False, 0.0
        while True:
            began, moved = time.monotonic(), self._moved
            still_seconds = began - moved
            stands_still = still_seconds > self._patience_seconds and moved == noticed
            noticed = moved
            if silent != stands_still:
                silent = stands_still
                said = f"stops: no progress in {still_seconds:.0f} s" if silent else "goes on"
                _log.warning("heartbeat of %s at epoch %d %s", self.owned, self.epoch, said)
            try:
                if not silent:
                    self.heartbeat()
                self._ask(self._beats)
            except Superseded as error:
                _log.warning("heartbeat ends: %s", error)
                return
            except Exception as error:  # whatever it is, the next beat may arrive
                _log.warning("no heartbeat of %s at epoch %d: %s", self.owned, self.epoch, error)
            if self._stop.wait(max(every_seconds - (time.monotonic() - began), every_seconds / 10)):
                return

    def _put_heartbeat(self, *, released: bool) -> None:
        # Without a lock: a beat may hang in the store, and nobody may have to wait for it. One that arrives late shows
        # an owner as alive a little longer, which delays an heir and harms nothing.
        body = {"counter": next(self._counter), "nonce": self._nonce, "released": released}
        self._beats.put(keys.heartbeat(self.owned, self.epoch), keys.canonical_json(body))

    def _ask(self, store: ObjectStore) -> None:
        newer = epochs.read(store, self.owned, self.epoch + 1)
        if newer is not None and newer["nonce"] != self._nonce:
            self._heir = newer
            raise self._superseded(newer)

    def _superseded(self, newer: dict[str, Any]) -> Superseded:
        kind = epochs.KINDS.get(newer.get("kind", ""), "an object")
        return Superseded(
            keys.epoch(self.owned, self.epoch),
            expected="to be the newest epoch",
            found=f"epoch {newer.get('epoch')}, {kind} of {owners.describe(newer.get('owner', {}))}",
            safe="the newer owner's work; what this process wrote is not read",
        )

    # --- the end

    def _end(self) -> bool:
        """Stop the heartbeat; False if it had ended before."""
        first, self._ended = not self._ended, True
        self._stop.set()
        _held.pop(self._nonce, None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_ENDING_SECONDS)
        return first

    def __enter__(self) -> Lease:
        self.start_heartbeat(self.dead_after_seconds / 5)
        return self

    def __exit__(self, *_: object) -> None:
        release(self)


def release(lease: Lease) -> None:
    """A clean stop without a result: an heir need not wait. Harmless after finish or a second time.

    Whatever the store says, the lease has ended here: heirs then wait until its silence has lasted long enough, those
    of this process not at all.
    """
    if not lease._end():
        return
    try:
        lease._put_heartbeat(released=True)
    except Exception as error:  # the block's own error, or its success, is what counts
        _log.warning("%s at epoch %d ends without a word: %s", lease.owned, lease.epoch, error)


def acquire(
    store: ObjectStore, owned: str, *, owner: dict[str, Any], dead_after_seconds: float, wait: bool = True,
    run_epoch: int | None = None, patience_seconds: float = PATIENCE_SECONDS,
    on_wait: Callable[[str], object] = _log.warning,
) -> Lease | FinishedEpoch:  # fmt: skip
    """Become the owner of `owned`, or learn that it is finished.

    owner: JSON-ready facts for people (name of the flow run, stage); host and process are added to them. run_epoch:
    epoch of the run's own lease under which this one is wanted. patience_seconds: see Lease.
    A previous owner is superseded when it released, when its process has certainly ended, when it is of this process
    and no longer held, when it worked under an older run_epoch, or when its heartbeat did not change for
    dead_after_seconds of this process's own watching. With wait=False a heartbeat that moves ends the call with a
    ContractError that names the live owner; with wait=True the call lasts until that owner finishes or dies, and
    on_wait is told, from another thread, for whom it lasts: after a few seconds, then every ten.
    Superseded for a run_epoch older than the owner's; ContractError for a lease that the calling thread holds itself.
    """
    owner = {**owner, "process": owners.this_process()}
    nonce = uuid.uuid4().hex
    facts = {} if run_epoch is None else {"run_epoch": run_epoch}
    _held[nonce] = (os.getpid(), threading.get_ident())
    lease: Lease | None = None
    try:
        with _Words(f"waiting for {owned}: no answer of the store yet", on_wait) as words:
            while True:
                newest = epochs.newest(store, owned)
                number = newest["epoch"] if newest else 0
                if newest is not None and newest["kind"] == "manifest":
                    return FinishedEpoch(number, newest["manifest"])
                if newest is not None and newest["kind"] == "lease":
                    _refuse_older(owned, newest, run_epoch)
                    if not _ends(store, owned, newest, dead_after_seconds, wait, run_epoch, words):
                        continue
                words.text = f"waiting for {owned}: taking epoch {number + 1}"
                if epochs.put(store, owned, number + 1, epochs.body("lease", number + 1, nonce, owner, **facts)):
                    lease = Lease(store, owned, number + 1, nonce, owner, dead_after_seconds, patience_seconds)
                    return lease
    finally:
        if lease is None:
            _held.pop(nonce, None)


class _Words:
    """Tells `say` what the calling thread waits for, while it may itself be stuck in the store."""

    def __init__(self, text: str, say: Callable[[str], object]) -> None:
        self.text, self._say = text, say
        self._stop = threading.Event()

    def __enter__(self) -> _Words:
        threading.Thread(target=self._speak, name="waiting", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _speak(self) -> None:
        pause = _FIRST_WORD_SECONDS
        while not self._stop.wait(pause):
            self._say(self.text)
            pause = _NEXT_WORD_SECONDS


def _refuse_own(owned: str, lease: dict[str, Any], wait: bool) -> None:
    """To wait for what the caller itself holds would be to wait for ever."""
    pid, thread = _held.get(lease["nonce"], (0, 0))
    if pid == os.getpid() and (thread == threading.get_ident() or not wait):
        raise ContractError(
            owned, expected="no owner in this process",
            found=f"epoch {lease['epoch']}, which this very process holds: {owners.describe(lease['owner'])}",
            safe="the owner's work goes on",
            next_command="let the work that holds it end first (in a notebook: close the session), or restart it",
        )  # fmt: skip


def finish_with(owned: Lease | FinishedEpoch, make: Callable[[Lease], dict[str, Any]]) -> None:
    """Make what is not finished yet: the manifest that make(lease) returns ends the lease, an exception releases it."""
    if isinstance(owned, Lease):
        with owned:
            owned.finish(make(owned))


def _refuse_older(owned: str, lease: dict[str, Any], run_epoch: int | None) -> None:
    """What was started under a run's older epoch takes nothing from the run's heir, not even what that released."""
    if run_epoch is not None and run_epoch < lease.get("run_epoch", run_epoch):
        raise Superseded(
            owned, expected=f"no owner under an epoch of the run after {run_epoch}",
            found=f"one under epoch {lease['run_epoch']}: {owners.describe(lease['owner'])}",
            safe="the newer owner's work",
        )  # fmt: skip


def _is_over(lease: dict[str, Any], run_epoch: int | None) -> bool:
    """Needs no watching: an owner under an older epoch of the run, a process that has ended, one's own lost lease."""
    if run_epoch is not None and lease.get("run_epoch", run_epoch) < run_epoch:
        return True
    process = lease["owner"].get("process", {})
    return owners.has_ended(process) or (owners.is_this_process(process) and lease["nonce"] not in _held)


def _ends(
    store: ObjectStore, owned: str, lease: dict[str, Any], dead_after_seconds: float, wait: bool,
    run_epoch: int | None, words: _Words,
) -> bool:  # fmt: skip
    """Watch the owner of `lease`: True once it may be superseded, False once the epochs have moved on."""
    if _is_over(lease, run_epoch):
        return True
    _refuse_own(owned, lease, wait)
    number = lease["epoch"]
    poll_seconds = min(max(dead_after_seconds / 20, 0.01), 0.5)
    first = last = _heartbeat(store, owned, number)
    silent_seconds, seen = 0.0, time.monotonic()
    while True:
        words.text = (
            f"waiting for {owned}, held by {owners.describe(lease['owner'])} (epoch {number}): silent for "
            f"{silent_seconds:.0f} s, taken over after {dead_after_seconds:g} s of silence"
        )
        if (last is not None and last["released"]) or silent_seconds >= dead_after_seconds:
            return True
        if not wait and last != first:
            raise ContractError(
                owned,
                expected="no live owner",
                found=f"{owners.describe(lease['owner'])}, whose heartbeat moves",
                safe="the owner's work goes on",
                next_command="stop that process first, or wait for it to end",
            )
        time.sleep(poll_seconds)
        if store.head(keys.epoch(owned, number + 1)) is not None:
            return False
        if _is_over(lease, run_epoch):
            return True
        now = time.monotonic()
        beat = _heartbeat(store, owned, number)
        # A pause of this process is not silence of the owner: it may have stopped both.
        silent_seconds = silent_seconds + min(now - seen, 2 * poll_seconds) if beat == last else 0.0
        last, seen = beat, now


def _heartbeat(store: ObjectStore, owned: str, number: int) -> dict[str, Any] | None:
    key = keys.heartbeat(owned, number)
    if store.head(key) is None:
        return None
    try:
        beat = json.loads(store.get(key))
        return {"counter": int(beat["counter"]), "released": bool(beat["released"])}
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(key, expected="a heartbeat", found=repr(error)) from error
