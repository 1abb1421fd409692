"""Who owns a run, a partition of a stage or a table's next commit: numbered epochs in the object store.

    OWNED/epochs/000001.json       {"kind": "lease", "epoch": 1, "nonce": ..., "owner": {...}}
    OWNED/epochs/000002.json       {"kind": "manifest", "epoch": 2, "nonce": ..., "owner": ..., "manifest": {...}}
    OWNED/heartbeats/000001.json   {"counter": 17, "nonce": ..., "released": false}

Each epoch object is created once (put_if_absent) and never changed, and numbers have no gaps. The newest one
decides: a lease names the owner, a manifest says that the work is finished for good. An owner finishes by
putting the manifest at the number after its own, so whoever was superseded cannot finish and what is finished
cannot be taken over. A store cannot stop a superseded owner from writing: nothing it writes is ever read.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.store import ObjectStore
from schemas import keys
from schemas.errors import ContractError, FormatError, StoreError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """The work is done: the epoch number of its manifest, and the manifest."""

    epoch: int
    manifest: dict[str, Any]


class Lease:
    """Ownership of `owned` from epoch `epoch` until a newer epoch object exists.

    As a context manager it beats five times per dead_after_seconds and, if the block ends without `finish`,
    releases. One Lease belongs to one process.
    """

    def __init__(
        self, store: ObjectStore, owned: str, epoch: int, nonce: str, owner: dict[str, Any], dead_after_seconds: float
    ) -> None:
        self.owned, self.epoch, self.owner = owned, epoch, owner
        self.dead_after_seconds = dead_after_seconds
        self._store, self._nonce = store, nonce
        self._counter = 0
        self._ended = False
        self._write_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def heartbeat(self) -> None:
        """Show observers that the owner lives. StoreError if the store cannot be reached."""
        self._beat(released=False)

    def start_heartbeat(self, every_seconds: float) -> None:
        """Beat from a background thread until finish, release or the end of the process.

        A beat that fails is logged and the next one tried: if too many fail another owner takes over, and
        `check` and `finish` say so here.
        """
        if self._thread is not None:
            raise RuntimeError(f"{self.owned}: heartbeat already started")
        self._thread = threading.Thread(
            target=self._keep_beating, args=(every_seconds,), name=f"heartbeat {self.owned}", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """ContractError if this owner has been superseded."""
        newer = _read(self._store, self.owned, self.epoch + 1)
        if newer is not None and newer["nonce"] != self._nonce:
            raise self._superseded(newer)

    def finish(self, manifest: dict[str, Any]) -> None:
        """Publish `manifest` as the result, once and for good; ContractError if this owner was superseded."""
        body = _body("manifest", self.epoch + 1, self._nonce, self.owner, manifest)
        if not _put_epoch(self._store, self.owned, self.epoch + 1, body):
            newer = _read(self._store, self.owned, self.epoch + 1)
            raise self._superseded(newer or {})
        self._end()

    def _superseded(self, newer: dict[str, Any]) -> ContractError:
        return ContractError(
            keys.epoch(self.owned, self.epoch),
            expected="to be the newest epoch",
            found=f"epoch {newer.get('epoch')}, a {newer.get('kind')} of {describe_owner(newer.get('owner', {}))}",
            safe="the newer owner's work; what this process wrote is not read",
        )

    def _beat(self, *, released: bool) -> None:
        with self._write_lock:
            if self._ended:
                return
            self._counter += 1
            body = {"counter": self._counter, "nonce": self._nonce, "released": released}
            self._store.put(keys.heartbeat(self.owned, self.epoch), keys.canonical_json(body))
            self._ended = released

    def _keep_beating(self, every_seconds: float) -> None:
        while True:
            try:
                self.heartbeat()
                self.check()
            except StoreError as error:
                _log.warning("no heartbeat of %s at epoch %d: %s", self.owned, self.epoch, error)
            except ContractError as error:
                _log.warning("heartbeat stops: %s", error)
                return
            if self._stop.wait(every_seconds):
                return

    def _end(self) -> None:
        with self._write_lock:
            self._ended = True
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Lease:
        self.start_heartbeat(self.dead_after_seconds / 5)
        return self

    def __exit__(self, *_: object) -> None:
        release(self)


def acquire(
    store: ObjectStore, owned: str, *, owner: dict[str, Any], dead_after_seconds: float, wait: bool = True
) -> Lease | Finished:
    """Become the owner of `owned`, or learn that it is finished.

    owner: JSON-ready facts for people (name of the flow run, stage); host and process are added to them.
    A previous owner is superseded when it released, when its process is gone from this same host, or when its
    heartbeat did not change for dead_after_seconds of this process's own watching. With wait=False a
    heartbeat that moves ends the call with a ContractError that names the live owner; with wait=True the call
    lasts until that owner finishes or dies.
    """
    owner = {**owner, "process": _this_process()}
    nonce = uuid.uuid4().hex
    while True:
        newest = newest_epoch(store, owned)
        number = newest["epoch"] if newest else 0
        if newest is not None:
            if newest["kind"] == "manifest":
                return Finished(number, newest["manifest"])
            if not _gone(store, owned, newest, dead_after_seconds, wait):
                continue
        if _put_epoch(store, owned, number + 1, _body("lease", number + 1, nonce, owner)):
            return Lease(store, owned, number + 1, nonce, owner, dead_after_seconds)


def finished(store: ObjectStore, owned: str) -> Finished | None:
    """The manifest of `owned`, or None while there is none."""
    newest = newest_epoch(store, owned)
    if newest is None or newest["kind"] != "manifest":
        return None
    return Finished(newest["epoch"], newest["manifest"])


def release(lease: Lease) -> None:
    """A clean stop without a result: an heir need not wait. Harmless after finish or a second time."""
    lease._beat(released=True)
    lease._end()


def newest_epoch(store: ObjectStore, owned: str) -> dict[str, Any] | None:
    """The newest epoch object of `owned`, or None if nobody ever owned it."""
    numbers = []
    for key in store.list(keys.epochs(owned)):
        stem = key.rpartition("/")[2].removesuffix(".json")
        if not stem.isdecimal():
            raise FormatError(key, expected="epoch objects only", found="another name")
        numbers.append(int(stem))
    return _read(store, owned, max(numbers)) if numbers else None


def describe_owner(owner: dict[str, Any]) -> str:
    """One line for messages: what the owner calls itself, its host and process id."""
    facts = [f"{name} {value}" for name, value in sorted(owner.items()) if name != "process"]
    process = owner.get("process", {})
    return ", ".join([*facts, f"process {process.get('pid')} on {process.get('host')}"])


def _body(kind: str, number: int, nonce: str, owner: dict[str, Any], manifest: dict[str, Any] | None = None) -> bytes:
    body = {"kind": kind, "epoch": number, "nonce": nonce, "owner": owner}
    return keys.canonical_json(body if manifest is None else {**body, "manifest": manifest})


def _put_epoch(store: ObjectStore, owned: str, number: int, body: bytes) -> bool:
    """True if this very body stands at the number, also when the answer to an earlier try was lost."""
    key = keys.epoch(owned, number)
    try:
        if store.put_if_absent(key, body):
            return True
    except StoreError:
        if store.head(key) is None:
            raise
    return store.get(key) == body


def _read(store: ObjectStore, owned: str, number: int) -> dict[str, Any] | None:
    key = keys.epoch(owned, number)
    if store.head(key) is None:
        return None
    try:
        body = json.loads(store.get(key))
        whole = isinstance(body, dict) and body["epoch"] == number and isinstance(body["nonce"], str)
        whole = whole and isinstance(body["owner"], dict)
        whole = whole and (
            body["kind"] == "lease" or (body["kind"] == "manifest" and isinstance(body["manifest"], dict))
        )
    except (ValueError, KeyError) as error:
        raise FormatError(key, expected="an epoch object", found=repr(error)) from error
    if not whole:
        raise FormatError(key, expected=f"the lease or manifest of epoch {number}", found="another JSON value")
    return body


def _gone(store: ObjectStore, owned: str, lease: dict[str, Any], dead_after_seconds: float, wait: bool) -> bool:
    """Watch the owner of `lease`: True once it may be superseded, False once the epochs have moved on."""
    if _process_ended(lease["owner"].get("process", {})):
        return True
    number = lease["epoch"]
    poll_seconds = min(max(dead_after_seconds / 20, 0.01), 0.5)
    first = last = _heartbeat(store, owned, number)
    silent_seconds, seen = 0.0, time.monotonic()
    while True:
        if last is not None and last["released"]:
            return True
        if silent_seconds >= dead_after_seconds:
            return True
        if not wait and last != first:
            raise ContractError(
                owned,
                expected="no live owner",
                found=f"{describe_owner(lease['owner'])}, whose heartbeat moves",
                safe="the owner's work goes on",
                next_command="stop that process first, or wait for it to end",
            )
        time.sleep(poll_seconds)
        if store.head(keys.epoch(owned, number + 1)) is not None:
            return False
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


def _this_process() -> dict[str, Any]:
    """Identity of this process; boot and namespace are empty where the system does not tell."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot_id": _first_line("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _pid_namespace(),
        "pid": pid,
        "pid_start": _start_ticks(pid),
    }


def _process_ended(process: dict[str, Any]) -> bool:
    """True only if the process ran under this very kernel and process namespace and is no longer there."""
    here = _this_process()
    for name in ("host", "boot_id", "pid_namespace"):
        if not here[name] or process.get(name) != here[name]:
            return False
    pid, start = process.get("pid"), process.get("pid_start")
    return isinstance(pid, int) and bool(start) and _start_ticks(pid) != start


def _start_ticks(pid: int) -> str:
    """Start time of a living process in clock ticks since boot; "" if there is none or it is only a zombie."""
    stat = _first_line(f"/proc/{pid}/stat")
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    if len(fields) < 20 or fields[0] in ("Z", "X"):
        return ""
    return fields[19]


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
