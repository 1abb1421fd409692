"""One segment of the token log on the local disk, while it is written: what the log's safety asks of the system."""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from pathlib import Path

import numpy as np

from ml.rollout import wal_format as fmt
from ml.rollout import wal_records

_ROOM_BYTES = 1 << 20
# A step waits as its five columns, to be encoded by whoever writes the group: the engine pays for copies alone.
Payload = bytes | list[np.ndarray]
PendingRecord = tuple[int, int, Payload]  # type, sequence number, payload


class Disk:
    """The calls on the operating system that the log's safety rests on; a test puts a failing one in its place."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_durably(disk: Disk, fd: int, data: bytes, offset: int = 0) -> None:
    written = 0
    while written < len(data):
        count = disk.write(fd, memoryview(data)[written:] if written else data, offset + written)
        if count <= 0:
            raise OSError(f"write returned {count}")
        written += count
    disk.sync(fd)


class SegmentFile:
    """One segment being written; `size` and the running digest cover its content.

    The file is longer than its content: a write that reaches its end carries zeros up to the next multiple of
    _ROOM_BYTES, and the writes after it fill them. A sync then finds the file's length unchanged, and need not wait
    for the file system's journal as well.
    """

    def __init__(self, disk: Disk, path: Path, header: fmt.SegmentHeader) -> None:
        self.path, self.header = path, header
        self.size, self.num_records, self.last_sequence = 0, 0, header.first_sequence - 1
        self._disk, self._digest, self._salt_crc = disk, hashlib.sha256(), zlib.crc32(header.salt)
        self._fd = disk.create(path)
        try:
            self._write(fmt.encode_header(header))
            disk.sync_folder(path.parent)
        except BaseException:
            self.abandon()
            raise
        self._file_bytes = self.size
        self.born = time.monotonic()

    def _write(self, data: bytes, room: int = 0) -> None:
        write_durably(self._disk, self._fd, data + bytes(room) if room else data, self.size)
        self._digest.update(data)
        self.size += len(data)

    def write_group(self, group: list[PendingRecord]) -> None:
        data = b"".join(
            [
                fmt.encode_frame(self._salt_crc, kind, sequence, _encoded(payload), place)
                for place, (kind, sequence, payload) in enumerate(group)
            ]
        )
        end = self.size + len(data)
        room = -end % _ROOM_BYTES if end > self._file_bytes else 0
        self._write(data, room)
        self._file_bytes = max(self._file_bytes, end + room)
        self.num_records += len(group)
        self.last_sequence = group[-1][1]

    def seal(self) -> bytes:
        """Cuts the zeros off, writes the footer, closes the file and returns the digest of all of its bytes."""
        self._disk.truncate(self._fd, self.size)
        payload = fmt.encode_seal(self.num_records, self._digest.digest())
        self._write(fmt.encode_frame(self._salt_crc, fmt.SEAL, self.last_sequence, payload))
        self._disk.close(self._fd)
        return self._digest.digest()

    def abandon(self) -> None:
        self._disk.close(self._fd)


def _encoded(payload: Payload) -> bytes:
    if isinstance(payload, bytes):
        return payload
    numbers, firsts, ids, raw, sampled = payload
    return wal_records.encode_step(numbers, firsts, np.ones(len(numbers), np.uint32), ids, raw, sampled)


def make_folder(disk: Disk, folder: Path) -> None:
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        disk.sync_folder(path.parent)
