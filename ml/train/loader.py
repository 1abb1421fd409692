"""The shared-memory loader of a node: one fetcher fills a ring of frames, every rank of the node maps it.

A folder in shared memory holds `ring` (the bytes of the frames in flight), `records` (one record a frame of the
schedule), `lock` (held while the owner lives: the kernel drops it on SIGKILL) and, after a failure, `error`.

    record: u64 start | u64 length | u32 CRC-32 of the bytes | u32 state | 8 bytes of zeros

The fetcher writes bytes, then start, length and CRC, then the state READY; the consumer checks the CRC, uses the
frame in place and writes RELEASED, which frees its bytes. Nothing else is written by two sides. A frame is fetched
as soon as the ring has room, so prefetch depth follows loader_bytes; a frame is freed with its micro-batch.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from ml.train import batches
from ml.train.batches import Frame, FrameArrays, HiddenRange, PackedSequence
from ml.train.micro_batch import MicroBatch, Segment
from ml.train.tokens import TokenShard, TokenShards
from schemas.errors import ConfigError, ContractError, FormatError, OpdError, StoreError
from schemas.shards import BlobReader, TensorSpec, check_block_crcs, decode_header, read_head

SHARED_MEMORY = Path("/dev/shm")
_RECORD_BYTES = 32
_STATE_OFFSET = 20
_PLACE = struct.Struct("<QQI")
_STATE = struct.Struct("<I")
_READY, _RELEASED = 1, 2
_FETCH_THREADS = 4  # ranges of one frame read at once: latency of a remote store, not bandwidth, is what they hide
#: Of the file that says what the fetcher died of: seven parts, each cut there, at twelve bytes a character at most.
_ERROR_BYTES, _PART_CHARACTERS = 128 << 10, 1500


class NodeLoader:
    """Owner of a node's ring: creates the folder, runs the fetcher thread, removes both in close().

    Raises ConfigError when loader_bytes cannot hold one wave of frames, StoreError when shared memory is full.
    """

    def __init__(
        self,
        frames: list[Frame],
        read: BlobReader,
        *,
        ranks: int,
        loader_bytes: int,
        job_id: str,
        root: Path = SHARED_MEMORY,
    ) -> None:
        self._frames, self._reader = frames, _Assembler(read)
        sizes = [batches.layout(f)[1] if f.sequences else 0 for f in frames]
        capacity = _capacity(sizes, ranks, loader_bytes)
        self.folder, self._lock = _create_folder(root, job_id)
        try:
            self._ring = _allocate(self.folder / "ring", capacity)
            self._records = _allocate(self.folder / "records", max(1, len(frames)) * _RECORD_BYTES)
            # Room for why the fetcher dies, which may be that there is no more room.
            _allocate(_unfinished(self.folder / "error"), _ERROR_BYTES).close()
        except BaseException:
            self._remove()
            raise
        self._capacity = capacity
        self._live: deque[tuple[int, int, int]] = deque()  # (frame, start, end), in order
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fetch_all, name="loader", daemon=True)
        self._thread.start()

    def close(self, patience_seconds: float | None = None) -> None:
        """patience_seconds: how long a read that has begun is waited for; None: until it ends."""
        self._stop.set()
        self._thread.join(patience_seconds)
        self._reader.close(wait=not self._thread.is_alive())
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _fetch_all(self) -> None:
        try:
            for index, frame in enumerate(self._frames):
                if not frame.sequences:
                    continue
                length = batches.layout(frame)[1]
                start = self._reserve(length)
                if start is None:
                    return
                data = memoryview(self._ring)[start : start + length]
                self._reader.fill(frame, batches.view(frame, data))
                place = index * _RECORD_BYTES
                _PLACE.pack_into(self._records, place, start, length, zlib.crc32(data))
                _STATE.pack_into(self._records, place + _STATE_OFFSET, _READY)
                self._live.append((index, start, start + length))
        except BaseException as error:  # every rank must hear of it, whatever it was
            _write_error(self.folder / "error", error)

    def _reserve(self, length: int) -> int | None:
        """Start of `length` free bytes, waiting for consumers; None once the loader is closed."""
        while not self._stop.is_set():
            while self._live and self._state(self._live[0][0]) == _RELEASED:
                self._live.popleft()
            if not self._live:
                return 0
            first, last = self._live[0][1], self._live[-1][2]
            if last <= first:  # the live run wraps: only the gap between its ends is free
                if first - last >= length:
                    return last
            elif self._capacity - last >= length:
                return last
            elif first >= length:
                return 0
            self._stop.wait(0.002)
        return None

    def _state(self, index: int) -> int:
        return _STATE.unpack_from(self._records, index * _RECORD_BYTES + _STATE_OFFSET)[0]


class RankBatches:
    """One rank's way through the schedule. Every rank of the node opens the folder that the owner created."""

    def __init__(self, folder: Path, frames: list[Frame], *, rank: int, ranks: int, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._mine = [(i, f) for i, f in enumerate(frames) if i % ranks == rank]
        self._next = 0
        self._ring, self._records = _map(folder / "ring"), _map(folder / "records")

    def mini_batch(self, phase: batches.Phase, step: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of one mini-batch, in order; each is valid until the next one is asked for.

        Raises FormatError or StoreError where reading failed, StoreError where the fetcher is gone.
        """
        while self._next < len(self._mine):
            index, frame = self._mine[self._next]
            if (frame.phase, frame.step) != (phase, step):
                return
            self._next += 1
            if not frame.sequences:
                yield self._empty(frame)
                continue
            yield self._load(index, frame)
            _STATE.pack_into(self._records, index * _RECORD_BYTES + _STATE_OFFSET, _RELEASED)

    def _load(self, index: int, frame: Frame) -> MicroBatch:
        place = index * _RECORD_BYTES
        pause = 0.0005
        while _STATE.unpack_from(self._records, place + _STATE_OFFSET)[0] != _READY:
            _raise_error(self._folder / "error")
            if not _is_locked(self._folder / "lock"):
                _raise_error(self._folder / "error")
                raise StoreError(
                    f"loader {self._folder}",
                    expected="its owner, rank 0 of this node, alive",
                    found="its lock free",
                    next_command="start the train stage again",
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        start, length, crc = _PLACE.unpack_from(self._records, place)
        data = memoryview(self._ring)[start : start + length]
        if zlib.crc32(data) != crc:
            raise FormatError(
                f"loader {self._folder}, frame {index}", expected=f"CRC {crc:08x}", found=f"{zlib.crc32(data):08x}"
            )
        return self._tensors(frame, batches.view(frame, data))

    def _tensors(self, frame: Frame, arrays: FrameArrays) -> MicroBatch:
        def to_device(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.from_numpy(array)
            if array.dtype == np.uint16:
                tensor = tensor.view(torch.bfloat16)
            return tensor.to(self._device, dtype)

        row, out = 0, []
        for run, hidden_RE in zip(batches.segments(frame), arrays.hidden_RE, strict=True):
            lengths, first = [s.response_tokens for s in run], run[0]
            part = slice(row, row + sum(lengths))
            row = part.stop
            with_advantage = "advantage" in first.needs
            advantage_R = (
                np.repeat(np.array([s.advantage for s in run], np.float32), lengths) if with_advantage else None
            )
            with_behaviour = "behaviour_logprobs" in first.needs
            out.append(
                Segment(
                    first.objective,
                    first.teacher_index,
                    to_device(arrays.rows_R[part], torch.int64),
                    to_device(arrays.response_R[part], torch.int64),
                    to_device(arrays.weight_R[part], torch.float32),
                    to_device(arrays.logged_R[part], torch.float32),
                    hidden_RE=to_device(hidden_RE, torch.bfloat16) if first.teacher_index is not None else None,
                    behaviour_R=to_device(arrays.behaviour_R[part], torch.float32) if with_behaviour else None,
                    advantage_R=to_device(advantage_R, torch.float32) if advantage_R is not None else None,
                )
            )
        return MicroBatch(
            frame,
            to_device(arrays.ids_N, torch.int64),
            to_device(arrays.positions_N, torch.int64),
            arrays.cu_tokens.tolist(),
            tuple(out),
        )

    def _empty(self, frame: Frame) -> MicroBatch:
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        return MicroBatch(frame, zero, zero, [0, 1], ())


class _Assembler:
    """Reads the objects that a frame names, checks them, and writes the frame's arrays."""

    def __init__(self, read: BlobReader) -> None:
        self._read = read
        self._pool = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="loader")
        self._tokens = TokenShards(read)
        self._specs: dict[str, TensorSpec] = {}

    def close(self, *, wait: bool) -> None:
        self._pool.shutdown(wait, cancel_futures=True)

    def fill(self, frame: Frame, out: FrameArrays) -> None:
        jobs = []
        token = row = 0
        out.cu_tokens[0] = 0
        for run, hidden_RE in zip(batches.segments(frame), out.hidden_RE, strict=True):
            end = 0
            for sequence in run:
                for part in sequence.hidden:
                    jobs.append(self._pool.submit(self._read_hidden, part, hidden_RE[end : end + part.rows]))
                    end += part.rows
        for number, sequence in enumerate(frame.sequences):
            shard = self._tokens.open(sequence.shard_key, sequence.shard_digest)
            jobs.append(self._pool.submit(self._write_tokens, shard, sequence, out, token, row))
            token, row = token + sequence.length, row + sequence.response_tokens
            out.cu_tokens[number + 1] = token
        for job in jobs:
            job.result()

    def _write_tokens(
        self, shard: TokenShard, sequence: PackedSequence, out: FrameArrays, token: int, row: int
    ) -> None:
        read = shard.read(
            sequence.trajectory_id,
            prompt=(sequence.first_prompt_row, sequence.prompt_tokens),
            response=(sequence.first_row, sequence.response_tokens),
            behaviour=len(out.behaviour_R) > 0,
        )
        middle, stop = token + sequence.prompt_tokens, token + sequence.length
        out.ids_N[token:middle] = read["prompt_ids"]
        out.ids_N[middle:stop] = read["response_ids"]
        out.positions_N[token:stop] = np.arange(sequence.length)
        rows = slice(row, row + sequence.response_tokens)
        out.rows_R[rows] = np.arange(middle - 1, stop - 1)
        out.response_R[rows] = read["response_ids"]
        out.weight_R[rows] = np.where(read["sampled_mask"] != 0, np.float32(sequence.weight), 0)
        out.logged_R[rows] = read["logprobs_raw"]
        if len(out.behaviour_R):
            out.behaviour_R[rows] = read["logprobs_sampled"]

    def _read_hidden(self, part: HiddenRange, out_RE: np.ndarray) -> None:
        spec = self._hidden_spec(part.object_key)
        where = f"{part.object_key}, rows {part.first_object_row}..{part.first_object_row + part.rows}"
        if spec.dtype != "BF16" or spec.shape[1:] != (part.width,) or out_RE.shape != (part.rows, part.width):
            raise ContractError(
                where, expected=f"BF16 [{out_RE.shape[0]}, {out_RE.shape[1]}]", found=f"{spec.dtype} {spec.shape}"
            )
        start = spec.start + part.first_object_row * spec.row_bytes
        if part.first_object_row + part.rows > spec.shape[0]:
            raise FormatError(where, expected=f"at most {spec.shape[0]} rows", found="a range beyond the end")
        data = self._read.get_range(part.object_key, start, out_RE.nbytes)
        if len(data) != out_RE.nbytes:
            raise FormatError(where, expected=f"{out_RE.nbytes} bytes", found=f"{len(data)}")
        rows_RE = np.frombuffer(data, np.uint16).reshape(out_RE.shape)
        check_block_crcs(rows_RE, list(part.block_crcs), where)
        out_RE[:] = rows_RE

    def _hidden_spec(self, key: str) -> TensorSpec:
        spec = self._specs.get(key)
        if spec is None:
            specs = decode_header(read_head(self._read, key), key)
            if list(specs) != ["hidden"]:
                raise FormatError(key, expected="one tensor named hidden", found=str(sorted(specs)))
            spec = self._specs[key] = specs["hidden"]
        return spec


def _capacity(sizes: list[int], ranks: int, loader_bytes: int) -> int:
    """Bytes of the ring: the budget, or less when all frames fit.

    Ranks that meet in collectives hold one wave at once. With its bytes plus one more frame there is always room
    for the next frame of a wave, however the ring has wrapped.
    """
    waves = [sum(sizes[i : i + ranks]) for i in range(0, len(sizes), ranks)]
    needed = max(waves, default=0) + max(sizes, default=0)
    if needed > loader_bytes:
        raise ConfigError(
            "train.loader_bytes",
            expected=f"at least {needed} bytes, room for the largest wave of micro-batches and one more",
            found=str(loader_bytes),
            next_command="raise train.loader_bytes, or lower dispatch.pack_tokens in a new run",
        )
    return max(mmap.PAGESIZE, min(loader_bytes, max(needed, sum(sizes))))


def _create_folder(root: Path, job_id: str) -> tuple[Path, int]:
    """A fresh private folder and the descriptor that holds its lock; folders of dead owners are removed first."""
    prefix = f"opd-loader-{os.getuid()}"
    try:
        # One creator at a time: between mkdir and flock a folder looks like a dead owner's.
        with _locked(root / f"{prefix}.lock"):
            for old in root.glob(f"{prefix}-*"):
                if old.is_dir() and not _is_locked(old / "lock"):
                    shutil.rmtree(old, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-{job_id}-", dir=root))
            lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise StoreError(
            f"shared memory {root}", expected="a folder for the loader", found=str(error), next_command=f"df {root}"
        ) from error
    return folder, lock


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_locked(path: Path) -> bool:
    """Whether a living process holds the lock. A missing file counts as free."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _allocate(path: Path, size: int) -> mmap.mmap:
    """A mapped file whose pages are reserved now: a full tmpfs is an error here and not a SIGBUS at first touch."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        raise StoreError(
            f"shared memory {path.parent.parent}",
            expected=f"{size} free bytes for the loader",
            found=str(error),
            safe="everything committed",
            next_command="lower train.loader_bytes, or give the container more shared memory (docker: --shm-size)",
        ) from error
    finally:
        os.close(descriptor)


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except FileNotFoundError:
        raise StoreError(f"loader {path.parent}", expected="the folder of a living loader", found="nothing") from None


def _write_error(path: Path, error: BaseException) -> None:
    parts = {"type": type(error).__name__, "text": f"{type(error).__name__}: {error}"}
    if isinstance(error, OpdError):
        parts |= {"where": error.where, "expected": error.expected, "found": error.found, "safe": error.safe}
        parts |= {"next_command": error.next_command}
    text = json.dumps({name: part[:_PART_CHARACTERS] for name, part in parts.items()}).encode()
    with open(os.open(_unfinished(path), os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
        file.write(text)
        file.truncate()
    _unfinished(path).rename(path)


def _unfinished(path: Path) -> Path:
    return path.with_suffix(".tmp")


def _raise_error(path: Path) -> None:
    """Raise what the fetcher died of, as its own kind; return when it has not died."""
    if not path.exists():
        return
    parts = json.loads(path.read_text())
    kind = {cls.__name__: cls for cls in (ConfigError, ContractError, FormatError, StoreError)}.get(parts["type"])
    if kind is None:
        raise RuntimeError(f"the loader's fetcher failed: {parts['text']}")
    raise kind(
        parts["where"], expected=parts["expected"], found=parts["found"], safe=parts["safe"],
        next_command=parts["next_command"],
    )  # fmt: skip
