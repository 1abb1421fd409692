"""The token log of one (partition, epoch): what was sampled is durable before anyone else may see it.

    append_*() -> buffer -> commit(): one write + fdatasync in a thread of its own -> `acknowledged`
    segment full or old -> seal, in the same thread -> upload, in a second thread -> `store_durable`

A commit takes everything appended since the one before; the next is written only after it is durable. The first
segment is the base: all that the heir of an older epoch recovered, sealed and uploaded before the log opens.
Invariant: after the first failed write, sync or upload nothing more is acknowledged and every call raises it; a
failed sync is never repeated, because the kernel may have dropped the pages that it could not write.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ml.rollout import wal_format as fmt
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_recovery import Recovered, base_segment
from schemas.errors import ContractError, OpdError, StoreError

Upload = Callable[[int, bytes], object]


class Disk:
    """The calls on the operating system that the log's safety rests on; a test puts a failing one in its place."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

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


def _write_durably(disk: Disk, fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        written = disk.write(fd, rest)
        if written <= 0:
            raise OSError(f"write returned {written}")
        rest = rest[written:]
    disk.sync(fd)


class _SegmentFile:
    """One segment being written; `size` and the running digest cover what was handed to the file."""

    def __init__(self, disk: Disk, path: Path, header: fmt.SegmentHeader) -> None:
        self.path, self.header = path, header
        self.size, self.num_records, self.last_sequence = 0, 0, header.first_sequence - 1
        self._disk, self._digest = disk, hashlib.sha256()
        self._fd = disk.create(path)
        try:
            self.write(fmt.encode_header(header))
            disk.sync_folder(path.parent)
        except BaseException:
            self.abandon()
            raise
        self.born = time.monotonic()

    def write(self, data: bytes) -> None:
        _write_durably(self._disk, self._fd, data)
        self._digest.update(data)
        self.size += len(data)

    def write_group(self, group: list[tuple[int, int, bytes]]) -> None:
        frames = [
            fmt.encode_frame(self.header.salt, kind, sequence, payload, place)
            for place, (kind, sequence, payload) in enumerate(group)
        ]
        self.write(b"".join(frames))
        self.num_records += len(group)
        self.last_sequence = group[-1][1]

    def seal(self) -> bytes:
        """Writes the footer, closes the file and returns the digest of all of its bytes."""
        payload = fmt.encode_seal(self.num_records, self._digest.digest())
        self.write(fmt.encode_frame(self.header.salt, fmt.SEAL, self.last_sequence, payload))
        self._disk.close(self._fd)
        return self._digest.digest()

    def abandon(self) -> None:
        self._disk.close(self._fd)


def _make_folder(disk: Disk, folder: Path) -> None:
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        disk.sync_folder(path.parent)


class TokenLog:
    """One writer, any thread of one process. Use as a context manager, or call `close`.

    folder: made, must hold no log. upload(segment number, bytes): puts a sealed segment where the node's death
    cannot reach it, and raises when it cannot; None: there is no such place, sealed is as durable as it gets.
    Raises StoreError when the disk or the upload fails, from the call that met it or from the next one.
    """

    def __init__(
        self,
        folder: Path,
        header: LogHeader,
        *,
        base: Recovered | None = None,
        segment_bytes: int = 64 << 20,
        seal_seconds: float = 2.0,
        upload: Upload | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.folder, self.header = Path(folder), header
        self._segment_bytes, self._seal_seconds, self._upload = segment_bytes, seal_seconds, upload
        self._disk = disk or Disk()
        self._numbers = {t.trajectory_id: i for i, t in enumerate(base.trajectories)} if base else {}
        self._changed = threading.Condition()
        self._pending: list[tuple[int, int, bytes]] = []
        self._flush_to = self._seal_to = 0
        self._failure: OpdError | None = None
        self._closing = False
        self._file: _SegmentFile | None = None
        self._uploads: queue.SimpleQueue[tuple[int, Path, int] | None] = queue.SimpleQueue()
        self._sequence = self._acknowledged = self._sealed = self._stored = self._write_base(base)
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"token-log-{work.__name__}", daemon=True)
            for work in (self._commits, self._sends)
        ]
        for thread in self._threads:
            thread.start()

    # --- what the engine appends; each call returns the record's sequence number

    def admit(self, trajectory_id: str, *, prompt_digest: bytes, prompt_tokens: int) -> int:
        """Trajectory number for the other calls; one that the base brought is known and not logged again."""
        with self._changed:
            if trajectory_id not in self._numbers:
                number = len(self._numbers)
                self._append(
                    fmt.ADMIT, fmt.encode_admit(fmt.Admit(number, trajectory_id, prompt_digest, prompt_tokens))
                )
                self._numbers[trajectory_id] = number
            return self._numbers[trajectory_id]

    def number(self, trajectory_id: str) -> int:
        """Number of a trajectory that is in the log."""
        return self._numbers[trajectory_id]

    def append_step(
        self, numbers: fmt.Ints, first_token_indices: fmt.Ints, ids: fmt.Ints, raw: fmt.Floats, sampled: fmt.Floats
    ) -> int:
        """One sampled token of each of n trajectories: columns [n], copied before the call returns.

        numbers: as `admit` gave them. first_token_indices: response tokens that stand before the token. ids: int32.
        raw, sampled: float32 log-probabilities. Raises ValueError when the columns differ in length.
        """
        ones = np.ones(len(numbers), "<u4")
        return self._append(fmt.STEP, fmt.encode_step(numbers, first_token_indices, ones, ids, raw, sampled))

    def append_observation(self, number: int, first_token_index: int, ids: fmt.Ints) -> int:
        """Response tokens that came from the environment: mask 0, no log-probability."""
        return self._append(fmt.OBSERVATION, fmt.encode_observation(number, first_token_index, ids))

    def append_intent(self, number: int, first_token_index: int, action: bytes) -> int:
        """Must be store durable before the action is taken."""
        return self._append(fmt.INTENT, fmt.encode_intent(number, fmt.Intent(first_token_index, action)))

    def append_spill(self, number: int, spill: fmt.Spill) -> int:
        return self._append(fmt.SPILL, fmt.encode_spill(number, spill))

    def append_finish(self, number: int, response_tokens: int, reason: str) -> int:
        return self._append(fmt.FINISH, fmt.encode_finish(number, response_tokens, reason))

    def _append(self, record_type: int, payload: bytes) -> int:
        if len(payload) > fmt.MAX_PAYLOAD_BYTES:
            limit = f"a record of at most {fmt.MAX_PAYLOAD_BYTES} bytes"
            raise ContractError(f"token log {self.folder}", expected=limit, found=f"{len(payload)} bytes")
        with self._changed:
            self._raise_failure()
            if self._closing:
                raise ValueError(f"{self.folder}: appended to a closed log")
            self._sequence += 1
            self._pending.append((record_type, self._sequence, payload))
            return self._sequence

    # --- durability

    @property
    def acknowledged(self) -> int:
        """Last sequence number that survives a crash of this process."""
        return self._acknowledged

    @property
    def store_durable(self) -> int:
        """Last sequence number that survives the loss of this node."""
        return self._stored

    def commit(self) -> None:
        """Starts to make everything appended so far locally durable; returns at once."""
        with self._changed:
            self._raise_failure()
            self._flush_to = self._sequence
            self._changed.notify_all()

    def wait_local(self, sequence: int) -> None:
        """Until `acknowledged` >= sequence, which must have been committed."""
        self._wait(lambda: self._acknowledged >= sequence)

    def seal(self) -> None:
        """Commits, seals and uploads everything appended so far, and waits for it."""
        with self._changed:
            self._raise_failure()
            target = self._flush_to = self._seal_to = self._sequence
            self._changed.notify_all()
        self._wait(lambda: self._stored >= target)

    def close(self) -> None:
        """Seals and uploads what is left and ends the threads. Raises what stopped the log, if anything did."""
        try:
            if not self._closing:
                self.seal()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Ends the threads and leaves what was not sealed to whoever recovers the folder."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._uploads.put(None)
        for thread in self._threads:
            thread.join()
        if self._file is not None:
            self._file.abandon()
            self._file = None

    def __enter__(self) -> TokenLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind is None else self.abandon()

    def _wait(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: reached() or self._failure is not None)
            if not reached():
                self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- the two threads

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            failure = error if isinstance(error, OpdError) else self._store_error(error)
            with self._changed:
                self._failure = self._failure or failure
                self._changed.notify_all()

    def _store_error(self, error: Exception) -> StoreError:
        name = self._file.path if self._file is not None else self.folder
        return StoreError(
            str(name), expected="a durable write to the token log", found=f"{type(error).__name__}: {error}",
            safe=f"every acknowledged token (records up to {self._acknowledged})",
            next_command="make room or replace the disk, then start the worker again: it continues from this log",
        )  # fmt: skip

    def _write_base(self, recovered: Recovered | None) -> int:
        data, last = base_segment(recovered, self.header, os.urandom(8))
        path = self._path(0)
        try:
            _make_folder(self._disk, self.folder)
            if any(self.folder.iterdir()):
                raise ContractError(str(self.folder), expected="no log of this epoch", found="files in its folder",
                                    next_command="move the folder away and start the worker again")  # fmt: skip
            # Under its own name only when whole: an epoch without a base has no log, whatever else lies there.
            part = path.with_suffix(".part")
            fd = self._disk.create(part)
            try:
                _write_durably(self._disk, fd, data)
            finally:
                self._disk.close(fd)
            self._disk.rename(part, path)
            self._disk.sync_folder(self.folder)
        except OSError as error:
            raise StoreError(
                str(path), expected="a durable first segment", found=str(error), safe="the log that it continues",
                next_command="make room or replace the disk, then start the worker again",
            ) from error  # fmt: skip
        if self._upload is not None:
            self._upload(0, data)
        self._next_segment, self._previous_digest = 1, hashlib.sha256(data).digest()
        return last

    def _path(self, segment: int) -> Path:
        return self.folder / f"{segment:06d}.seg"

    def _commits(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, timeout=self._seconds_to_seal())
                if self._closing or self._failure is not None:
                    return
                count = sum(sequence <= self._flush_to for _, sequence, _ in self._pending)
                group, self._pending = self._pending[:count], self._pending[count:]
            if group:
                self._write(group)
            if self._file is not None and self._should_seal(self._file):
                self._seal_file(self._file)

    def _has_work(self) -> bool:
        flush = bool(self._pending) and self._pending[0][1] <= self._flush_to
        return self._closing or flush or (self._file is not None and self._should_seal(self._file))

    def _seconds_to_seal(self) -> float | None:
        if self._file is None:
            return None
        return max(0.0, self._file.born + self._seal_seconds - time.monotonic())

    def _should_seal(self, file: _SegmentFile) -> bool:
        old = time.monotonic() >= file.born + self._seal_seconds
        return old or file.size >= self._segment_bytes or self._sealed < self._seal_to <= self._acknowledged

    def _write(self, group: list[tuple[int, int, bytes]]) -> None:
        if self._file is None:
            header = fmt.SegmentHeader(
                self.header, self._next_segment, group[0][1], os.urandom(8), self._previous_digest
            )
            self._file = _SegmentFile(self._disk, self._path(self._next_segment), header)
        self._file.write_group(group)
        with self._changed:
            self._acknowledged = group[-1][1]
            self._changed.notify_all()

    def _seal_file(self, file: _SegmentFile) -> None:
        self._previous_digest = file.seal()
        self._file = None
        self._next_segment += 1
        with self._changed:
            self._sealed = file.last_sequence
            if self._upload is None:
                self._stored = file.last_sequence
            self._changed.notify_all()
        if self._upload is not None:
            self._uploads.put((file.header.segment, file.path, file.last_sequence))

    def _sends(self) -> None:
        while (item := self._uploads.get()) is not None:
            segment, path, last_sequence = item
            if self._upload is not None:
                self._upload(segment, path.read_bytes())
            with self._changed:
                self._stored = last_sequence
                self._changed.notify_all()
