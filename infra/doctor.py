"""Does an object store keep the promises that runs rely on, and has this machine what they need?

The store's promises are tried on the store itself, with objects under doctor/ that are removed again. A service may
ignore what it does not know: a PUT that should be conditional overwrites, a range returns the whole object. Such a
breach raises no error at once, but lets two processes own the same thing later. So each promise is tested by what a
breach of it would show.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from infra import confine, jars
from infra.owners import this_process
from infra.spark import SparkChild, check_log, version
from infra.store import ObjectStore
from infra.stores import open_store, place
from schemas import keys
from schemas.config import Spark
from schemas.errors import ContractError, OpdError, StoreError
from schemas.keys import digest_bytes

_RACERS, _ROUNDS = 8, 3
_DISK_BYTES = 2 << 30
_BODY = bytes(range(256)) * 64


@dataclass(frozen=True)
class Promise:
    """One promise, and what was found; kept tells whether that is it.

    exit_status: that of a command that ends because the promise is broken.
    """

    name: str
    kept: bool
    found: str
    exit_status: int = ContractError.exit_status


def examine(root: str, scratch: Path, shm_bytes: int, spark: Spark) -> Iterator[Promise]:
    """Every promise that a run relies on, one after another as they are tried; no broken one raises.

    root: data root; scratch: local folder of logs and model copies; shm_bytes: what the training loader takes of
    /dev/shm.
    """
    yield _answered("Java", jars.java)
    yield _room(scratch, _DISK_BYTES)
    yield _room(Path("/dev/shm"), shm_bytes)
    yield _confinement()
    try:
        yield from check_store(open_store(root))
    except OpdError as error:
        yield _broken("object store", error)
        return
    yield _answered("Spark and Delta", lambda: _try_spark(root, scratch, spark))


def _confinement() -> Promise:
    """Kept in any case: runs go on without namespaces, and say so."""
    why = confine.missing()
    found = (
        f"no namespaces ({why}): verifiers reach the network, and files and processes of this user" if why else "kept"
    )
    return Promise("verifiers apart from network and processes", True, found)


def _broken(name: str, error: OpdError) -> Promise:
    return Promise(name, False, str(error), error.exit_status)


def _answered(name: str, check: Callable[[], str]) -> Promise:
    """What check() answers, or the error that it raises."""
    try:
        return Promise(name, True, check())
    except OpdError as error:
        return _broken(name, error)


def _room(folder: Path, needed_bytes: int) -> Promise:
    name = f"room in {folder}"
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    found = f"{free / 1e9:.1f} GB free of {needed_bytes / 1e9:.1f} GB needed"
    return Promise(name, free >= needed_bytes, found, StoreError.exit_status)


def _try_spark(root: str, scratch: Path, settings: Spark) -> str:
    """Starts Spark over the root's tables; on S3 it must create log entries conditionally, or commits can be lost."""
    with SparkChild(root, settings.model_dump(), scratch.absolute() / "logs" / "doctor.log") as spark:
        if place(root).folder is not None:
            spark.call(version)
            return "a session starts"
        store, key = open_store(root), f"doctor/{uuid.uuid4().hex}/00000000000000000000.json"
        try:
            breach = spark.call(check_log, root=root, key=key)
        finally:
            store.delete(key)
    if breach:
        raise ContractError(
            f"Delta log in {root}", expected="entries that are created once (PUT with If-None-Match)", found=breach,
            safe="nothing was started", next_command="use a service with conditional PUT",
        )  # fmt: skip
    return "a session starts, and log entries are created once"


def check_store(store: ObjectStore, rounds: int = _ROUNDS) -> list[Promise]:
    """Try every promise, races `rounds` times. Raises StoreError only if the store cannot be written, read and cleaned
    at all."""
    prefix = f"doctor/{uuid.uuid4().hex}"
    try:
        _write_and_read(store, prefix)
        promises = {**_PROMISES, "one winner of a race": functools.partial(_race, rounds=rounds)}
        if place(store.root).folder is not None:
            promises["file locks"] = _file_lock
        return [_tried(name, check, store, prefix) for name, check in promises.items()]
    finally:
        with contextlib.suppress(OpdError):  # a failure to clean up is never the news
            for key in store.list(f"{prefix}/"):
                store.delete(key)
        if place(store.root).folder is not None:
            shutil.rmtree(Path(store.root) / prefix, ignore_errors=True)  # the empty folders


def rely_on(store: ObjectStore) -> None:
    """At the start of every run: the promises are tried at the root's first one, and noted there.

    A root of before the note, or of before a promise was known, is tried at its next start.
    """
    if store.head(keys.promises()) is None:
        kept = require_promises(store)
        store.put_if_absent(keys.promises(), keys.canonical_json({"kept": kept, "tried_by": this_process()}))


def require_promises(store: ObjectStore) -> list[str]:
    """Names of the promises, all kept; ContractError that names every broken one."""
    promises = check_store(store, rounds=1)
    broken = [f"{promise.name}: {promise.found}" for promise in promises if not promise.kept]
    if broken:
        raise ContractError(
            store.root,
            expected="a store that keeps the promises of leases and logs",
            found="; ".join(broken),
            safe="nothing was started",
            next_command="opd doctor, with another store or a newer version of this one",
        )
    return [promise.name for promise in promises]


def _tried(name: str, check: Callable[[ObjectStore, str], str], store: ObjectStore, prefix: str) -> Promise:
    try:
        breach = check(store, f"{prefix}/{name.replace(' ', '-')}")
    except OpdError as error:
        breach = str(error)
    return Promise(name, not breach, breach or "kept")


def _write_and_read(store: ObjectStore, prefix: str) -> str:
    key = f"{prefix}/object"
    store.put(key, b"first")
    store.put(key, _BODY)
    if store.get(key) != _BODY:
        return "another object than the one just written"
    info = store.head(key)
    if info is None or info.size_bytes != len(_BODY) or info.digest not in (None, digest_bytes(_BODY)):
        return f"head says {info}"
    store.delete(key)
    return "" if store.head(key) is None else "a deleted object is still there"


def _range(store: ObjectStore, prefix: str) -> str:
    store.put(f"{prefix}/object", _BODY)
    return "" if store.get_range(f"{prefix}/object", 1000, 301) == _BODY[1000:1301] else "another range than asked for"


def _create_once(store: ObjectStore, prefix: str) -> str:
    if not store.put_if_absent(f"{prefix}/object", b"first"):
        return "a new key counts as taken"
    if store.put_if_absent(f"{prefix}/object", b"second"):
        return "a taken key was given a second time"
    return "" if store.get(f"{prefix}/object") == b"first" else "the refused object is there"


def _race(store: ObjectStore, prefix: str, rounds: int = _ROUNDS) -> str:
    """Racers of several rounds; a service that checks first and then writes gives a round to more than one."""
    for round_index in range(rounds):
        key = f"{prefix}/{round_index}"
        barrier = threading.Barrier(_RACERS)
        won: list[int] = []
        threads = [threading.Thread(target=_contend, args=(store, key, i, barrier, won)) for i in range(_RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(won) != 1 or store.get(key) != b"%d" % won[0]:
            return f"{len(won)} winners of one key"
    return ""


def _file_lock(store: ObjectStore, prefix: str) -> str:
    """Commits to tables in a folder rely on flock, which some file systems of a network grant to everybody."""
    path = Path(store.root) / prefix / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "ab") as first, open(path, "ab") as second:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return ""
            return "a lock was given to two"
    except OSError as error:
        return f"no lock: {error.strerror}"


def _contend(store: ObjectStore, key: str, index: int, barrier: threading.Barrier, won: list[int]) -> None:
    barrier.wait()
    with contextlib.suppress(OpdError):  # a racer without an answer has not won, and the count tells
        if store.put_if_absent(key, b"%d" % index):
            won.append(index)


def _list_after_put(store: ObjectStore, prefix: str) -> str:
    written: list[str] = []
    for index in range(20):
        written.append(f"{prefix}/{index:02d}")
        store.put(written[-1], b"")
        if store.list(f"{prefix}/") != written:
            return f"a listing without the object written before it, {written[-1]}"
    store.delete(written.pop())
    return "" if store.list(f"{prefix}/") == written else "a listing with a deleted object"


_PROMISES = {
    "read after write": _write_and_read,
    "byte ranges": _range,
    "create once": _create_once,
    "one winner of a race": _race,
    "list after write": _list_after_put,
}
