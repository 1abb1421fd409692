"""The object store in a local folder: ROOT/KEY is the object; ROOT/.tmp/ holds what is being written, never listed."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from infra import jars
from infra.store import TMP, Data, InTime, ObjectInfo, ObjectStore, UnfinishedWrite, check_key, patience_seconds
from infra.waiting import Wait, waiting
from schemas.errors import StoreError
from schemas.root import DataRoot

#: Errors of a write that may pass: somebody makes room, a server of files comes back.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT)


class LocalPlace:
    """See `infra.stores.Place`."""

    def __init__(self, root: DataRoot) -> None:
        self.folder = Path(root.path)

    def open(self) -> ObjectStore:
        return LocalStore(self.folder)

    def delta_options(self) -> dict[str, str] | None:
        return None

    def spark_options(self) -> dict[str, str]:
        return {}

    def spark_jars(self, folder: Path, progress: Callable[[str], None]) -> list[Path]:
        return jars.fetch(folder, progress)


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
                    folders[:] = [name for name in folders if name != TMP]
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
        folder = self._root / TMP
        if not folder.is_dir():
            return []
        old = []
        # The age is told by the file system's clock, from a file made now, so that hosts with other clocks agree.
        with self._explained(TMP), self._written(TMP, b"") as probe:
            now = probe.stat().st_mtime
            for path in sorted(folder.iterdir()):
                with contextlib.suppress(FileNotFoundError):  # a living writer has just finished
                    if path != probe and now - path.stat().st_mtime >= age_seconds:
                        old.append(UnfinishedWrite(str(path), path.stat().st_size, (path.name,)))
        return old

    def discard(self, write: UnfinishedWrite) -> None:
        (name,) = write.name
        with self._explained(TMP), contextlib.suppress(FileNotFoundError):
            (self._root / TMP / name).unlink()

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
        tmp = self._root / TMP / f"{os.getpid()}-{uuid.uuid4().hex}"
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
