"""The object store's contract: whole objects under slash-separated keys. `infra.stores` opens the kinds of it.

Invariant: a key shows either nothing or one whole object, across crashes and racing writers; of any
number of `put_if_absent` calls for one key, exactly one returns True; what a call reported as written is
durable and seen by every later `get`, `list` and `head`. Fencing (`infra.leases`) rests on these three.

Every method raises StoreError for a cause outside this code, ConfigError for a key that is not well formed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from infra.threads import at_once
from schemas.errors import ConfigError, StoreError

_T = TypeVar("_T")
#: What is being written on a disk lies in a folder of this name at the root, which no key may begin with.
TMP = ".tmp"
_PATIENCE = "OPD_STORE_PATIENCE_SECONDS"
Data = bytes | bytearray | memoryview
#: Of a large object: what one request reads or writes.
PART_BYTES = 32 << 20
#: Requests for parts of one object at once: a connection to S3 has a tenth of what a host can take.
PARTS_AT_ONCE = 8
#: Of one view by `within`: calls that hang after they were given up, before the next ones are not even begun.
_CALLS_GIVEN_UP = 8


@dataclass(frozen=True)
class ObjectInfo:
    """size_bytes of an object, and its SHA-256 in hexadecimal where the store keeps one."""

    size_bytes: int
    digest: str | None


@dataclass(frozen=True)
class UnfinishedWrite:
    """What a killed writer left, which no key shows. where: for people; size_bytes: that it takes in the store."""

    where: str
    size_bytes: int
    name: tuple[str, ...]


class ObjectStore(Protocol):
    """What the rest of the project may ask of a store. Thread-safe; a child process opens its own."""

    root: str

    def get(self, key: str) -> bytes:
        """The whole object; a missing key is a StoreError."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`; a range that passes the object's end is a StoreError."""
        ...

    def put(self, key: str, data: Data | Sequence[Data]) -> None:
        """Write or replace the object: readers see the old one or the new one, never a mixture.

        data: its bytes, or parts that follow one another, which need not be joined first.
        """
        ...

    def put_if_absent(self, key: str, data: Data) -> bool:
        """Create the object; False, with nothing changed, if the key already has one."""
        ...

    def list(self, prefix: str) -> list[str]:
        """All keys that start with `prefix` (any string, not only a folder), sorted; `""` lists everything."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """None for a missing key."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; a missing key is no error."""
        ...

    def unfinished_writes(self, age_seconds: float) -> list[UnfinishedWrite]:
        """Those of files that nobody wrote to for `age_seconds`, of uploads begun then; by the store's own clock."""
        ...

    def discard(self, write: UnfinishedWrite) -> None:
        """Remove what it left; no error if it is gone. A writer that still lives fails, and leaves no object."""
        ...

    def within(self, seconds: float) -> ObjectStore:
        """The same store, each call of which ends within so many seconds, by a StoreError if need be.

        It has a client of its own and a fresh connection for each try, so that neither a forgotten connection nor the
        calls of this store hold it up. A write that was given up may still happen.
        """
        ...


def set_patience(seconds: float) -> None:
    """How long calls are tried when the store does not answer: of stores opened from now on, here and in children."""
    os.environ[_PATIENCE] = f"{seconds:g}"


def patience_seconds() -> float:
    """What `set_patience` said, here or in the parent process."""
    text = os.environ.get(_PATIENCE, "300")
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"environment {_PATIENCE}", expected="seconds", found=repr(text)) from None


class InTime:
    """A store whose calls end in time, whatever they wait for: a server, a name service, a file system that hangs."""

    def __init__(self, store: ObjectStore, seconds: float) -> None:
        self.root = store.root
        self._store, self._seconds = store, seconds
        # Calls that were given up hold a thread until what they wait for ends; a store that hangs must not take all.
        self._slots = threading.BoundedSemaphore(_CALLS_GIVEN_UP)

    def get(self, key: str) -> bytes:
        return self._in_time(key, lambda: self._store.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._in_time(key, lambda: self._store.get_range(key, start, length))

    def put(self, key: str, data: Data | Sequence[Data]) -> None:
        self._in_time(key, lambda: self._store.put(key, data))

    def put_if_absent(self, key: str, data: Data) -> bool:
        return self._in_time(key, lambda: self._store.put_if_absent(key, data))

    def list(self, prefix: str) -> list[str]:
        return self._in_time(prefix, lambda: self._store.list(prefix))

    def head(self, key: str) -> ObjectInfo | None:
        return self._in_time(key, lambda: self._store.head(key))

    def delete(self, key: str) -> None:
        self._in_time(key, lambda: self._store.delete(key))

    def unfinished_writes(self, age_seconds: float) -> list[UnfinishedWrite]:
        return self._in_time("", lambda: self._store.unfinished_writes(age_seconds))

    def discard(self, write: UnfinishedWrite) -> None:
        self._in_time(write.where, lambda: self._store.discard(write))

    def within(self, seconds: float) -> ObjectStore:
        return self._store.within(seconds)

    def _in_time(self, key: str, call: Callable[[], _T]) -> _T:
        deadline = time.monotonic() + self._seconds
        answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def work() -> None:
            try:
                answers.put((True, call()))
            except BaseException as error:
                answers.put((False, error))
            finally:
                self._slots.release()

        if self._slots.acquire(timeout=self._seconds):
            threading.Thread(target=work, name=f"store call in {self._seconds:g} s", daemon=True).start()
            with contextlib.suppress(queue.Empty):
                answered, answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
                if answered:
                    return answer
                raise answer
        raise StoreError(
            f"{self.root}/{key}", expected=f"an answer within {self._seconds:g} s", found="none so far",
            safe="every object written so far", next_command="opd doctor; once it answers, the same command again",
        )  # fmt: skip


def read_parts(store: ObjectStore, key: str, size_bytes: int) -> memoryview:
    """The first `size_bytes` of an object in memory of the caller's own, by several range requests at once.

    For large objects whose digest the caller knows: parts of two versions are not told apart.
    """
    buffer = np.empty(size_bytes, np.uint8).data

    def read(start: int) -> None:
        length = min(PART_BYTES, size_bytes - start)
        buffer[start : start + length] = store.get_range(key, start, length)

    at_once(read, range(0, size_bytes, PART_BYTES), PARTS_AT_ONCE)
    return buffer


def check_key(key: str) -> str:
    """The key itself, if it is relative, without empty, '.' or '..' parts and writable on both kinds of store."""
    parts = key.split("/")
    if (
        any(part in ("", ".", "..") for part in parts)
        or parts[0] == TMP
        or any(ord(c) < 32 or c == "\\" or 0xD800 <= ord(c) < 0xE000 for c in key)
        or len(key.encode("utf-8", "replace")) > 900
        or any(len(part.encode("utf-8", "replace")) > 255 for part in parts)
    ):
        raise ConfigError("object key", expected="names joined by '/', none empty, '.' or '..'", found=repr(key))
    return key
