"""KV of one paused trajectory as bytes, and back: what a pre-empted worker leaves so that its heir need not prefill.

A spill is a safetensors shard with the tensors "ids" I32 [M], "k" and "v" [M, L, G, C] in the compute dtype, and the
metadata format, trajectory_id, student_digest, ranks that shared the model, and a CRC-32 (zlib) of each tensor's
bytes; numbers as decimal text.
Invariant: KV is handed back only for the trajectory, the weights, the layout and the very tokens that it was computed
from; anything else is refused, and the caller computes it again.

Letters: M positions kept, L layers, G KV heads, C channels.
"""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch

from ml.model import ModelConfig, Transformer
from schemas import shards
from schemas.errors import ContractError, FormatError

FORMAT = "opd-kv-1"
#: Spills on their way at once. A digest keeps up with a fast disk, but one connection to S3 with a tenth of that.
WRITERS = 8
#: Bytes of KV that are on their way at once, unless one spill alone has more: the host holds a copy of them.
_RUNNING_BYTES = 4 << 30
_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}


@dataclass(frozen=True)
class KvLayout:
    """What KV must agree on before one worker can use another's. dtype: safetensors name.

    ranks: that shared the model (ml.tensor_parallel); where bits do not depend on it, KV is still computed again.
    """

    student_digest: str
    dtype: str
    layers: int
    kv_heads: int
    head_channels: int
    ranks: int = 1

    @classmethod
    def of(cls, model: Transformer, student_digest: str) -> KvLayout:
        config = model.config
        return cls(student_digest, _DTYPES[model.compute], config.layers, config.kv_heads, config.head_channels,
                   model.group.ranks)  # fmt: skip

    @property
    def cache_bytes(self) -> int:
        """Bytes of one position's keys and values, in all layers."""
        itemsize = {"BF16": 2, "F32": 4}[self.dtype]
        return 2 * self.layers * self.kv_heads * self.head_channels * itemsize

    @property
    def position_bytes(self) -> int:
        """Bytes of one position in a spill: its token id, its keys and values."""
        return 4 + self.cache_bytes


@dataclass(frozen=True)
class SpilledKv:
    """Keys and values of a sequence's first M positions, [M, L, G, C] on the CPU."""

    k_MLGC: torch.Tensor
    v_MLGC: torch.Tensor

    @property
    def positions(self) -> int:
        return len(self.k_MLGC)


@dataclass(frozen=True)
class SpillRecord:
    """One spill that was written. name: as given to the writer; digest: SHA-256 of the object, hexadecimal."""

    trajectory_id: str
    name: str
    positions: int
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class PrefillCost:
    """Multiply-adds that compute the KV of a sequence's first n positions anew: linear * n + quadratic * n^2."""

    linear: float
    quadratic: float

    @classmethod
    def of(cls, config: ModelConfig) -> PrefillCost:
        attended = config.heads * config.head_channels
        linears = 2 * attended + 2 * config.kv_heads * config.head_channels + 3 * config.feed_forward
        # Position i reads i keys and as many values: n^2 / 2 of each.
        return cls(linear=config.layers * config.width * linears, quadratic=config.layers * attended)

    def __call__(self, positions: int) -> float:
        return self.linear * positions + self.quadratic * positions**2


@dataclass(frozen=True)
class Spillable:
    """KV that could be written. stored: of how many first positions an earlier spill lies in the store already."""

    trajectory_id: str
    positions: int
    stored: int
    size_bytes: int


class SpillQueue:
    """What to write next before `deadline` (of `clock`, seconds): what saves the most prefill a byte.

    What an earlier spill would restore is not saved again, so KV that has not grown since is not written. Up to
    WRITERS are on their way at once. Nothing is started that the time left is not enough for at the rate of the
    largest write so far, in which the store's latency weighs least; nor when it is not enough for all that would be on
    its way, at the rate that the store then had for all: that write's bytes over its share of the seconds, of which n
    writes at once have an n-th each. The smallest goes first and alone, while no rate is known. Ties go by
    trajectory_id.
    """

    def __init__(
        self,
        candidates: Iterable[Spillable],
        cost: PrefillCost,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        saved = {c: cost(c.positions) - cost(c.stored) for c in candidates}
        self._left = sorted(
            (c for c in saved if saved[c] > 0), key=lambda c: (-saved[c] / c.size_bytes, c.trajectory_id)
        )
        self._deadline, self._clock = deadline, clock
        self._running: dict[Spillable, float] = {}  # and `_shared` when it started
        self._shared, self._ticked = 0.0, clock()  # seconds that each of the running has had by then
        self._largest_bytes, self._bytes_per_s, self._all_bytes_per_s = 0, 0.0, 0.0

    def next(self) -> Spillable | None:
        """None when nothing is left that the time is enough for, or should start before another has ended."""
        seconds = self._deadline - self._tick()
        if seconds <= 0 or not self._left or len(self._running) == WRITERS:
            return None
        if self._largest_bytes:
            chosen = next((c for c in self._left if self._fits(c, seconds)), None)
        elif self._running:
            return None
        else:
            chosen = min(self._left, key=lambda c: (c.size_bytes, c.trajectory_id))
        if chosen is not None:
            self._left.remove(chosen)
            self._running[chosen] = self._shared
        return chosen

    def _fits(self, candidate: Spillable, seconds: float) -> bool:
        running_bytes = candidate.size_bytes + sum(c.size_bytes for c in self._running)
        return (
            candidate.size_bytes <= self._bytes_per_s * seconds
            and running_bytes <= self._all_bytes_per_s * seconds
            and (not self._running or running_bytes <= _RUNNING_BYTES)
        )

    def wrote(self, chosen: Spillable, seconds: float) -> None:
        """How long one write took, with the reading of the KV and its encoding."""
        self._tick()
        share = self._shared - self._running.pop(chosen)
        if chosen.size_bytes >= self._largest_bytes:
            self._largest_bytes = chosen.size_bytes
            self._bytes_per_s = chosen.size_bytes / max(seconds, 1e-9)
            self._all_bytes_per_s = chosen.size_bytes / max(share, 1e-9)

    def lost(self, chosen: Spillable) -> None:
        """A write that came to nothing, which tells nothing of the next one's time."""
        self._tick()
        del self._running[chosen]

    def _tick(self) -> float:
        now = self._clock()
        if self._running:
            self._shared += (now - self._ticked) / len(self._running)
        self._ticked = now
        return now


def write_spills(
    queue: SpillQueue,
    read: Callable[[str], SpilledKv],
    encode: Callable[[str, SpilledKv], list[memoryview]],
    write: Callable[[str, list[memoryview]], bool],
) -> list[SpillRecord]:
    """What `queue` yields, up to WRITERS at once; records of what was stored, in the order of their starts.

    read: KV of a trajectory, on the calling thread. encode(trajectory_id, kv), write(name, parts of one object), which
    returns False when it could not be stored: on threads of their own. Raises what they raise.
    """
    started: list[Future[tuple[SpillRecord | None, float]]] = []
    running: dict[Future[tuple[SpillRecord | None, float]], Spillable] = {}
    with ThreadPoolExecutor(WRITERS, "spill") as writers:
        while True:
            while (chosen := queue.next()) is not None:
                clock = time.monotonic()
                kv = read(chosen.trajectory_id)
                future = writers.submit(_write_spill, chosen.trajectory_id, kv, encode, write, clock)
                started.append(future)
                running[future] = chosen
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                record, seconds = future.result()
                chosen = running.pop(future)
                queue.lost(chosen) if record is None else queue.wrote(chosen, seconds)
    return [record for record, _ in (future.result() for future in started) if record is not None]


def _write_spill(
    trajectory_id: str,
    kv: SpilledKv,
    encode: Callable[[str, SpilledKv], list[memoryview]],
    write: Callable[[str, list[memoryview]], bool],
    started: float,
) -> tuple[SpillRecord | None, float]:
    """The record, None when it is not stored, and the seconds since `started`."""
    parts = encode(trajectory_id, kv)
    digest = _Digest(parts)
    name = f"{trajectory_id}.kv"
    record = None
    if write(name, parts):
        record = SpillRecord(trajectory_id, name, kv.positions, sum(len(part) for part in parts), digest.hex())
    return record, time.monotonic() - started


class _Digest:
    """SHA-256 of parts, computed beside their upload; where that is given up it ends with the process, as that does."""

    def __init__(self, parts: list[memoryview]) -> None:
        self._sha256 = hashlib.sha256()
        self._thread = threading.Thread(target=self._update, args=(parts,), name="spill digest", daemon=True)
        self._thread.start()

    def _update(self, parts: list[memoryview]) -> None:
        for part in parts:
            self._sha256.update(part)

    def hex(self) -> str:
        self._thread.join()
        return self._sha256.hexdigest()


def encode_kv(kv: SpilledKv, layout: KvLayout, trajectory_id: str, token_ids: Sequence[int]) -> list[memoryview]:
    """Parts of one object; keys and values, which may be gigabytes, are not copied.

    token_ids: of the whole sequence so far; those of the kept positions are stored.
    """
    tensors = {
        "ids": ("I32", np.array(token_ids[: kv.positions], np.int32)),
        "k": (layout.dtype, _to_numpy(kv.k_MLGC)),
        "v": (layout.dtype, _to_numpy(kv.v_MLGC)),
    }
    crcs = {f"crc_{name}": crc for name, crc in _crcs({name: array for name, (_, array) in tensors.items()}).items()}
    identity = {"format": FORMAT, "trajectory_id": trajectory_id, "student_digest": layout.student_digest,
                "ranks": str(layout.ranks)}  # fmt: skip
    return shards.encode_parts(tensors, identity | crcs)


def decode_kv(
    data: bytes | memoryview, where: str, layout: KvLayout, trajectory_id: str, token_ids: Sequence[int]
) -> SpilledKv:
    """KV of the positions that the spill and the sequence share: min(kept, len(token_ids) - 1) of them.

    data: where it may be written, the KV are views of it. token_ids: prompt and logged response. Raises FormatError for
    damaged bytes; ContractError for KV of another trajectory, student, number of ranks, dtype, layout or other tokens.
    """
    specs = shards.decode_header(data, where)
    metadata = shards.decode_metadata(data, where)
    _agree(where, "format", FORMAT, metadata.get("format"))
    _agree(where, "trajectory", trajectory_id, metadata.get("trajectory_id"))
    _agree(where, "student", layout.student_digest, metadata.get("student_digest"))
    _agree(where, "tensor-parallel ranks", str(layout.ranks), metadata.get("ranks"))
    if set(specs) != {"ids", "k", "v"} or specs["ids"].dtype != "I32":
        raise FormatError(where, expected="I32 ids and tensors k and v", found=", ".join(sorted(specs)))
    shape = (*specs["ids"].shape, layout.layers, layout.kv_heads, layout.head_channels)
    for name in ("k", "v"):
        _agree(where, f"dtype of {name}", layout.dtype, specs[name].dtype)
        _agree(where, f"shape of {name}", shape, specs[name].shape)
    tensors = shards.decode(data, where)
    for name, found in _crcs(tensors).items():
        if (expected := metadata.get(f"crc_{name}")) != found:
            raise FormatError(f"{where}, tensor {name}", expected=f"CRC {expected}", found=found,
                              safe="the token log: KV can be computed again from it")  # fmt: skip
    shared = min(len(tensors["ids"]), len(token_ids) - 1)
    if tensors["ids"][:shared].tolist() != list(token_ids[:shared]):
        raise ContractError(where, expected=f"KV of trajectory {trajectory_id}'s tokens", found="KV of other tokens",
                            safe="the token log")  # fmt: skip
    return SpilledKv(_to_torch(tensors["k"][:shared]), _to_torch(tensors["v"][:shared]))


def _agree(where: str, what: str, expected: object, found: object) -> None:
    if expected != found:
        raise ContractError(
            where, expected=f"{what} {expected}", found=str(found), safe="the token log: KV can be computed again"
        )


def _crcs(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    """CRC-32 of each, as decimal text; keys and values, which may be gigabytes, at the same time."""
    with ThreadPoolExecutor(len(tensors)) as threads:
        found = threads.map(lambda array: zlib.crc32(np.ascontiguousarray(array).data), tensors.values())
        return {name: str(crc) for name, crc in zip(tensors, found, strict=True)}


def _to_numpy(x: torch.Tensor) -> np.ndarray:
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def _to_torch(array: np.ndarray) -> torch.Tensor:
    x = torch.from_numpy(array if array.flags.writeable else array.copy())
    return x.view(torch.bfloat16) if x.dtype == torch.uint16 else x
