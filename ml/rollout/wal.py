"""The token log of one (partition, epoch): what was sampled is durable before anyone else may see it.

    append_*() -> buffer -> commit(): one write + fdatasync in a thread of its own -> `acknowledged`
    segment full or old -> seal, in the same thread -> upload, in a second thread -> `store_durable`

A group is what one write makes durable: everything committed while the group before it was written. Who waits for a
group that nobody has begun writes it himself, which saves two changes of threads. The first segment is the base: all
that the heir of an older epoch recovered, sealed and uploaded before the log opens.
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
from ml.rollout import wal_records
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_records import Floats, Ints
from ml.rollout.wal_recovery import Recovered, base_segment
from ml.rollout.wal_segment import Disk, Payload, PendingRecord, SegmentFile, make_folder, write_durably
from schemas.errors import ContractError, OpdError, StoreError

Upload = Callable[[int, bytes], object]
#: Sealed segments that wait for the store, on the local disk alone: then the sampler waits, too.
_WAITING_BYTES = 1 << 30
#: A log that is abandoned does not wait longer for an upload on its way, which ends with the process.
_LAST_UPLOAD_SECONDS = 5.0


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
        self._admission, lock = threading.Lock(), threading.Lock()
        self._work, self._progress = threading.Condition(lock), threading.Condition(lock)
        self._appended: list[PendingRecord] = []
        self._committed: list[PendingRecord] = []
        self._seal_to = 0
        self._failure: OpdError | None = None
        self._closing = False
        self._file_lock = threading.Lock()  # held to write or seal; taken before the other lock, never after it
        self._file: SegmentFile | None = None
        self._uploads: queue.SimpleQueue[tuple[int, Path, int] | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
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
        with self._admission:
            if trajectory_id not in self._numbers:
                number = len(self._numbers)
                self._append(
                    fmt.ADMIT,
                    wal_records.encode_admit(wal_records.Admit(number, trajectory_id, prompt_digest, prompt_tokens)),
                )
                self._numbers[trajectory_id] = number
            return self._numbers[trajectory_id]

    def number(self, trajectory_id: str) -> int:
        """Number of a trajectory that is in the log."""
        return self._numbers[trajectory_id]

    def append_step(self, numbers: Ints, first_token_indices: Ints, ids: Ints, raw: Floats, sampled: Floats) -> int:
        """n sampled tokens: columns [n], copied before the call returns.

        numbers: as `admit` gave them; several tokens of one trajectory in their order. first_token_indices: response
        tokens that stand before the token. ids: int32.
        raw, sampled: float32 log-probabilities. Raises ValueError when the columns differ in length.
        """
        columns = [np.array(column, np.int32) for column in (numbers, first_token_indices, ids)]
        columns += [np.array(column, np.float32) for column in (raw, sampled)]
        if any(column.shape != (len(columns[0]),) for column in columns):
            raise ValueError(f"a step needs columns of one length, not {[column.shape for column in columns]}")
        return self._append(fmt.STEP, columns)

    def append_observation(self, number: int, first_token_index: int, ids: Ints) -> int:
        """Response tokens that came from the environment: mask 0, no log-probability."""
        return self._append(fmt.OBSERVATION, wal_records.encode_observation(number, first_token_index, ids))

    def append_intent(self, number: int, first_token_index: int, action: bytes) -> int:
        """Must be store durable before the action is taken."""
        return self._append(
            fmt.INTENT, wal_records.encode_intent(number, wal_records.Intent(first_token_index, action))
        )

    def append_spill(self, number: int, spill: wal_records.Spill) -> int:
        return self._append(fmt.SPILL, wal_records.encode_spill(number, spill))

    def append_finish(self, number: int, response_tokens: int, reason: str) -> int:
        return self._append(fmt.FINISH, wal_records.encode_finish(number, response_tokens, reason))

    def _append(self, record_type: int, payload: Payload) -> int:
        size = len(payload) if isinstance(payload, bytes) else wal_records.step_bytes(len(payload[0]))
        if size > fmt.MAX_PAYLOAD_BYTES:
            limit = f"a record of at most {fmt.MAX_PAYLOAD_BYTES} bytes"
            raise ContractError(f"token log {self.folder}", expected=limit, found=f"{size} bytes")
        with self._progress:
            self._raise_failure()
            if self._closing:
                raise ValueError(f"{self.folder}: appended to a closed log")
            self._sequence += 1
            self._appended.append((record_type, self._sequence, payload))
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
        with self._work:
            self._collect()
            self._work.notify()

    def wait_local(self, sequence: int) -> None:
        """Commits everything appended so far and waits until `acknowledged` >= sequence.

        While a gigabyte of sealed segments waits for its upload it waits for the store, too.
        """
        leads = self._acknowledged < sequence and not self._seal_due()  # the thread that seals must not starve
        if leads and self._file_lock.acquire(blocking=False):
            try:
                with self._work:
                    self._collect()
                self._write_committed()
            finally:
                self._file_lock.release()
        else:
            self.commit()
        self._wait(lambda: self._acknowledged >= sequence and self._waiting_bytes <= _WAITING_BYTES)

    def seal(self) -> None:
        """Commits, seals and uploads everything appended so far, and waits for it."""
        with self._work:
            self._collect()
            target = self._seal_to = self._sequence
            self._work.notify()
        self._wait(lambda: self._stored >= target)

    def _collect(self) -> None:
        self._raise_failure()
        self._committed += self._appended
        self._appended = []

    def close(self) -> None:
        """Seals and uploads what is left and ends the threads. Raises what stopped the log, if anything did."""
        try:
            if not self._closing:
                self.seal()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Ends the threads and leaves what was not sealed to whoever recovers the folder."""
        with self._work:
            self._closing = True
            self._work.notify()
        self._uploads.put(None)
        commits, sends = self._threads
        commits.join()
        sends.join(_LAST_UPLOAD_SECONDS)
        with self._file_lock:
            if self._file is not None:
                self._file.abandon()
                self._file = None

    def __enter__(self) -> TokenLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind is None else self.abandon()

    def _wait(self, reached: Callable[[], bool]) -> None:
        with self._progress:
            self._progress.wait_for(lambda: reached() or self._failure is not None)
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
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        failure = error if isinstance(error, OpdError) else self._store_error(error)
        with self._work:
            self._failure = self._failure or failure
            self._work.notify()
            self._progress.notify_all()

    def _store_error(self, error: BaseException) -> StoreError:
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
            make_folder(self._disk, self.folder)
            if any(self.folder.iterdir()):
                raise ContractError(str(self.folder), expected="no log of this epoch", found="files in its folder",
                                    next_command="move the folder away and start the worker again")  # fmt: skip
            # Under its own name only when whole: an epoch without a base has no log, whatever else lies there.
            part = path.with_suffix(".part")
            fd = self._disk.create(part)
            try:
                write_durably(self._disk, fd, data)
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
            with self._work:
                while not self._has_work():
                    self._work.wait(self._seconds_to_seal())
                if self._closing or self._failure is not None:
                    return
            with self._file_lock:
                self._write_committed()
                if self._file is not None and self._seal_due():
                    self._seal_file(self._file)

    def _has_work(self) -> bool:
        return self._closing or self._failure is not None or bool(self._committed) or self._seal_due()

    def _seconds_to_seal(self) -> float | None:
        file = self._file
        return None if file is None else max(0.0, file.born + self._seal_seconds - time.monotonic())

    def _seal_due(self) -> bool:
        file = self._file
        if file is None:
            return False
        old = time.monotonic() >= file.born + self._seal_seconds
        return old or file.size >= self._segment_bytes or self._sealed < self._seal_to <= self._acknowledged

    def _write_committed(self) -> None:
        """Makes one group of all that is committed durable; the caller holds the file lock. Raises StoreError."""
        with self._work:
            self._raise_failure()
            group, self._committed = self._committed, []
        if not group:
            return
        try:
            opened = self._file is None
            if self._file is None:
                number, previous = self._next_segment, self._previous_digest
                header = fmt.SegmentHeader(self.header, number, group[0][1], os.urandom(8), previous)
                self._file = SegmentFile(self._disk, self._path(number), header)
            self._file.write_group(group)
        except BaseException as error:  # an interrupted write too: nobody knows how much of it is in the file
            self._fail(error)
            if isinstance(error, Exception):
                self._raise_failure()
            raise
        with self._work:
            self._acknowledged = group[-1][1]
            self._progress.notify_all()
            if opened or self._seal_due():
                self._work.notify()

    def _seal_file(self, file: SegmentFile) -> None:
        self._previous_digest = file.seal()
        self._file = None
        self._next_segment += 1
        with self._progress:
            self._sealed = file.last_sequence
            if self._upload is None:
                self._stored = file.last_sequence
            else:
                self._waiting_bytes += file.size
            self._progress.notify_all()
        if self._upload is not None:
            self._uploads.put((file.header.segment, file.path, file.last_sequence))

    def _sends(self) -> None:
        while (item := self._uploads.get()) is not None:
            segment, path, last_sequence = item
            data = path.read_bytes()
            if self._upload is not None:
                self._upload(segment, data)
            with self._progress:
                self._stored = last_sequence
                self._waiting_bytes -= len(data)
                self._progress.notify_all()
