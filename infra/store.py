"""The object store: whole objects under slash-separated keys, in a local folder or in an S3 bucket.

Invariant, on both: a key shows either nothing or one whole object, across crashes and racing writers; of any
number of `put_if_absent` calls for one key, exactly one returns True; what a call reported as written is
durable and seen by every later `get`, `list` and `head`. Fencing (`infra.leases`) rests on these three.

    LocalStore   ROOT/KEY is the object; ROOT/.tmp/ holds what is being written and is never listed
    S3Store      s3://BUCKET/PREFIX/KEY (infra.store_s3)

Every method raises StoreError for a cause outside this code, ConfigError for a key that is not well formed.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from infra.threads import at_once
from infra.waiting import Wait, waiting
from schemas.errors import ConfigError, StoreError, without_credentials
from schemas.root import DataRoot

_T = TypeVar("_T")
_TMP = ".tmp"
#: Errors of a write that may pass: somebody makes room, a server of files comes back.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT)
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


def open_store(root: str) -> ObjectStore:
    """The store at `root`, as schemas.root reads it.

    For S3, endpoint, region, credentials and checksum settings come from the standard AWS_* environment.
    Nothing is touched yet: a wrong bucket or key shows at the first call, as a StoreError.
    """
    parsed = DataRoot.parse(root)
    if not parsed.on_s3:
        return LocalStore(Path(parsed.path))
    from infra.store_s3 import S3Store  # boto3 costs a third of a second, which local runs need not pay

    return S3Store(parsed.bucket, parsed.prefix, patience_seconds())


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


def s3_endpoint() -> str | None:
    """URL of the S3 service by the standard environment; None stands for AWS itself.

    ConfigError for one with a user's name and password: no S3 client sends them, and all print them.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    if endpoint is not None and without_credentials(endpoint) != endpoint:
        raise ConfigError(
            "environment AWS_ENDPOINT_URL", expected="http(s)://HOST[:PORT]",
            found=f"{endpoint}, with a user's name and password before it",
            next_command="give keys by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, then the same command again",
        )  # fmt: skip
    return endpoint


def check_key(key: str) -> str:
    """The key itself, if it is relative, without empty, '.' or '..' parts and writable on both kinds of store."""
    parts = key.split("/")
    if (
        any(part in ("", ".", "..") for part in parts)
        or parts[0] == _TMP
        or any(ord(c) < 32 or c == "\\" or 0xD800 <= ord(c) < 0xE000 for c in key)
        or len(key.encode("utf-8", "replace")) > 900
        or any(len(part.encode("utf-8", "replace")) > 255 for part in parts)
    ):
        raise ConfigError("object key", expected="names joined by '/', none empty, '.' or '..'", found=repr(key))
    return key


class LocalStore:
    """Objects as files of one folder, for one machine or a file system that has atomic rename and hard links.

    A write that finds the disk full, or a server of files gone, is made anew from its first byte until the patience of
    `patience_seconds` is over: nothing of it has been visible. Every other error, EIO above all, is raised at once: a
    disk that fails does not heal.
    """

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._root = Path(root).absolute()
        self._patience_seconds = patience_seconds()

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with self._explained(key):
            return path.read_bytes()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)
        with self._explained(key), open(path, "rb", buffering=0) as file:
            data = _pread_all(file.fileno(), start, length)
            size = os.fstat(file.fileno()).st_size
        if len(data) != length:
            raise StoreError(
                f"{self._where(key)}, bytes {start} to {start + length}",
                expected=f"an object of at least {start + length} bytes",
                found=f"{size} bytes",
            )
        return data

    def put(self, key: str, data: Data | Sequence[Data]) -> None:
        path = self._path(key)
        with self._explained(key), self._written(key, data) as tmp:
            self._make_folder(path.parent)
            os.replace(tmp, path)
            _fsync_folder(path.parent)

    def put_if_absent(self, key: str, data: Data) -> bool:
        path = self._path(key)
        with self._explained(key):
            if path.is_file():
                won = False
            else:
                with self._written(key, data) as tmp:
                    self._make_folder(path.parent)
                    try:
                        os.link(tmp, path)  # the one call that is atomic, exclusive and shows a whole file
                        won = True
                    except FileExistsError:
                        if path.is_dir():
                            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path)) from None
                        won = False
            # The loser syncs as well: it must not act on a name that the winner's crash could still take back.
            _fsync_folder(path.parent)
        return won

    def list(self, prefix: str) -> list[str]:
        folder = prefix.rpartition("/")[0]
        start = self._root / check_key(folder) if folder else self._root
        keys: list[str] = []
        with self._explained(prefix):
            for parent, folders, names in os.walk(start, onerror=_raise_unless_missing):
                relative = os.path.relpath(parent, self._root)
                if relative == ".":
                    folders[:] = [name for name in folders if name != _TMP]
                base = "" if relative == "." else relative.replace(os.sep, "/") + "/"
                keys.extend(base + name for name in names if (base + name).startswith(prefix))
        return sorted(keys)

    def head(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        with self._explained(key):
            try:
                return ObjectInfo(path.stat().st_size, None) if path.is_file() else None
            except FileNotFoundError:
                return None

    def delete(self, key: str) -> None:
        path = self._path(key)
        # Folders stay: removing one would race with a writer that has just made it.
        with self._explained(key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            _fsync_folder(path.parent)

    def unfinished_writes(self, age_seconds: float) -> list[UnfinishedWrite]:
        folder = self._root / _TMP
        if not folder.is_dir():
            return []
        old = []
        # The age is told by the file system's clock, from a file made now, so that hosts with other clocks agree.
        with self._explained(_TMP), self._written(_TMP, b"") as probe:
            now = probe.stat().st_mtime
            for path in sorted(folder.iterdir()):
                with contextlib.suppress(FileNotFoundError):  # a living writer has just finished
                    if path != probe and now - path.stat().st_mtime >= age_seconds:
                        old.append(UnfinishedWrite(str(path), path.stat().st_size, (path.name,)))
        return old

    def discard(self, write: UnfinishedWrite) -> None:
        (name,) = write.name
        with self._explained(_TMP), contextlib.suppress(FileNotFoundError):
            (self._root / _TMP / name).unlink()

    def within(self, seconds: float) -> ObjectStore:
        view = copy.copy(self)
        view._patience_seconds = seconds
        return InTime(view, seconds)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _where(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _make_folder(self, folder: Path) -> None:
        """Make `folder` and its parents, each durable in its own parent before anything is put in it."""
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            _fsync_folder(folder.parent)

    @contextlib.contextmanager
    def _written(self, key: str, data: Data | Sequence[Data]) -> Iterator[Path]:
        """A file outside every listing that durably holds `data`; gone when the block ends, however it ends."""
        tmp = self._root / _TMP / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            with waiting(self._where(key), self._patience_seconds) as wait:
                while not self._write(tmp, data, wait):
                    pass
            yield tmp
        finally:
            with contextlib.suppress(OSError):  # never in the place of the block's own error; upkeep removes it
                tmp.unlink()

    def _write(self, tmp: Path, data: Data | Sequence[Data], wait: Wait) -> bool:
        """One try; False when it failed in passing and another one is worth it."""
        try:
            self._make_folder(tmp.parent)
            with open(tmp, "wb", buffering=0) as file:
                for part in [data] if isinstance(data, Data) else data:
                    rest = memoryview(part).cast("B")
                    while rest:
                        rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                tmp.unlink()  # its part of a full disk
            if error.errno not in _PASSING or not wait.pause(str(error)):
                raise
            return False
        return True

    @contextlib.contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _explain(error, self._where(key)) from error


def _explain(error: OSError, where: str) -> StoreError:
    safe = "every object written so far; this one is as it was before"
    if error.errno in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR):
        return StoreError(where, expected="an object", found=f"none ({os.strerror(error.errno)})",
                          safe="every other object", next_command="opd repair RUN")  # fmt: skip
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StoreError(where, expected="room for the object", found=f"{error.strerror}", safe=safe,
                          next_command="free space there (df -h), then the same command again")  # fmt: skip
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreError(where, expected="a folder that this user may read and write, on a file system with hard "
                          "links", found=f"{error.strerror}", safe=safe, next_command="opd doctor")  # fmt: skip
    return StoreError(where, expected="the file system to do as asked", found=str(error), safe=safe,
                      next_command="opd doctor")  # fmt: skip


def _pread_all(fd: int, start: int, length: int) -> bytes:
    if start < 0 or length < 0:
        raise ValueError(f"range of {length} bytes from {start}")
    pieces = []
    while length and (piece := os.pread(fd, length, start)):
        pieces.append(piece)
        start, length = start + len(piece), length - len(piece)
    return b"".join(pieces)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _raise_unless_missing(error: OSError) -> None:
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        raise error
