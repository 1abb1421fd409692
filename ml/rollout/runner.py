"""One engine step on the device: planned rows in, sampled tokens and their log-probabilities out, one step later.

    launch: ids, positions, slots of the rows -> Transformer, whose attention writes and reads pages
            -> head on the sampled rows -> sample -> ids kept for the next step's rows
    collect: the launched step's results on the host

Owns the paged KV cache and, a row a slot, the page tables, sampling keys and last sampled ids. Steps run in the order
of their launches, so a step may be launched before the one that samples its input ids has ended.
Invariant: a row's results and KV have the bits that its tokens and the weights give them, whatever else is in the
step, however its sequence was cut into steps, and whether the step was replayed from a graph.

Letters: N rows of the step, D decode rows, S sampled rows, B rows of a graph, V vocabulary, L layers, P pages, T tokens
of a page, G KV heads, C channels, M positions of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch

from kernels.paged_attention import paged_attention
from kernels.rows import rotate_into_pages
from kernels.sampling import sample
from ml.model import Rotation, Transformer
from ml.rollout.pages import pages_for
from ml.rollout.sampling import SamplingParams
from ml.rollout.scheduler import Admitted, Plan, Sequence

#: Rows of a decode graph, up to 128; from there on multiples of 64. Padding costs less than a graph more.
_GRAPH_ROWS = (16, 32, 48, 64, 96, 128)
#: Positions of KV that are copied at once between host and device: the device holds a second copy of these.
_COPIED_POSITIONS = 4096


@dataclass(frozen=True)
class Ticket:
    """A launched step. sequences: of the sampled rows, in the order of its results."""

    sequences: list[Sequence]
    results: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Collected:
    """ids int32 [S]; log-probabilities fp32 [S] of the raw model and of the distribution sampled from."""

    ids_S: np.ndarray
    raw_S: np.ndarray
    sampled_S: np.ndarray


@dataclass(frozen=True)
class Placed:
    """Sequences that get their slots: int64 slots [A], page tables int32 [A, P], sampling keys int64 [A], and copied
    pages int64 [C, 2], from and to."""

    slots_A: np.ndarray
    tables_AP: np.ndarray
    keys_A: np.ndarray
    copies_C2: np.ndarray

    @classmethod
    def of(cls, admitted: Seq[Admitted], keys: Seq[int]) -> Placed:
        width = max(len(a.sequence.pages) for a in admitted)
        tables_AP = np.zeros((len(admitted), width), np.int32)
        for row, a in zip(tables_AP, admitted, strict=True):
            row[: len(a.sequence.pages)] = a.sequence.pages
        slots_A = np.array([a.sequence.slot for a in admitted], np.int64)
        copies = np.array([a.copied for a in admitted if a.copied is not None], np.int64).reshape(-1, 2)
        return cls(slots_A, tables_AP, np.array(keys, np.uint64).view(np.int64), copies)


@dataclass(frozen=True)
class StepRows:
    """Rows of a step. decode int32 [4, D]: ids, or -1 for the last one sampled in the slot, positions, slots, pages;
    width: of their widest page table. chunks: slot, first position, ids, and whether the last row is sampled."""

    decode_4D: np.ndarray
    width: int
    chunks: list[tuple[int, int, np.ndarray, bool]]

    @classmethod
    def of(cls, plan: Plan) -> StepRows:
        decode = plan.decode
        rows_4D = np.empty((4, len(decode)), np.int32)
        rows_4D[0] = [s.tokens[s.num_kept] if len(s.tokens) > s.num_kept else -1 for s in decode]
        rows_4D[1] = [s.num_kept for s in decode]
        rows_4D[2] = [s.slot for s in decode]
        rows_4D[3] = [s.pages[-1] for s in decode]
        width = max((len(s.pages) for s in decode), default=0)
        chunks = [
            (c.sequence.slot, c.start, np.array(c.sequence.tokens[c.start : c.start + c.count]), c.samples)
            for c in plan.chunks
        ]
        return cls(rows_4D, width, chunks)


class Runner:
    """vocab_size: ids that can be sampled. split_tokens: where attention cuts keys (kernels.paged_attention).

    max_sequences: slots, numbered from 0. graphs: replay pure decode steps from CUDA
    graphs, one for each number of rows and width of page tables that occurs, captured when it first does.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        max_sequences: int,
        num_pages: int,
        page_tokens: int,
        split_tokens: int,
        vocab_size: int,
        sampling: SamplingParams,
        graphs: bool,
    ) -> None:
        self.model, self.page_tokens, self.split_tokens = model, page_tokens, split_tokens
        self.vocab_size, self.sampling = vocab_size, sampling
        self.device = model.head_weight.device
        # A page and a slot more than the scheduler knows: rows that only fill up a graph live there.
        kv_heads = model.group.share(model.config.kv_heads)
        shape = (model.config.layers, num_pages + 1, page_tokens, kv_heads, model.config.head_channels)
        self.k_LPTGC = torch.zeros(shape, dtype=model.compute, device=self.device)
        self.v_LPTGC = torch.zeros(shape, dtype=model.compute, device=self.device)
        self.max_pages = min(num_pages, pages_for(model.config.max_positions, page_tokens))
        self.tables = self._state((max_sequences + 1, self.max_pages), torch.int32)
        self.keys = self._state((max_sequences + 1,), torch.int64)
        self.last_ids = self._state((max_sequences + 1,), torch.int64)
        spare = 0, 0, max_sequences, num_pages
        self._graphs = _DecodeGraphs(self._decode, max_sequences, self.max_pages, spare) if graphs else None

    def admit(self, admitted: Seq[Admitted], keys: Seq[int]) -> None:
        """Give sequences their slots. keys: their 64-bit sampling keys. Whole prefixes are in place afterwards."""
        self.place(Placed.of(admitted, keys))

    def launch(self, plan: Plan) -> Ticket:
        """Start the step of `plan`, before it is marked as launched. An id that the host does not know yet, since
        the step that samples it has not been collected, is the last one sampled in the sequence's slot."""
        sequences = plan.decode + [c.sequence for c in plan.chunks if c.samples]
        return Ticket(sequences, self.run(StepRows.of(plan)))

    def collect(self, ticket: Ticket) -> Collected:
        """Wait for a launched step; steps are collected in the order of their launches."""
        ids_S, raw_S, sampled_S = ticket.results().numpy()
        return Collected(ids_S, raw_S.view(np.float32), sampled_S.view(np.float32))

    def read_kv(self, pages: Seq[int], num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions 0..num_positions-1 as the launched steps leave them, [M, L, G, C] on the host,
        where they come page-locked from a GPU."""
        shape = num_positions, self.k_LPTGC.shape[0], *self.k_LPTGC.shape[3:]
        locked = self.device.type != "cpu"
        k_MLGC, v_MLGC = (torch.empty(shape, dtype=self.k_LPTGC.dtype, pin_memory=locked) for _ in range(2))
        for rows, slots_M in self._cache_slots(pages, num_positions):
            for cache, host_MLGC in ((self.k_LPTGC, k_MLGC), (self.v_LPTGC, v_MLGC)):
                kept_MLGC = cache.flatten(1, 2).index_select(1, slots_M).transpose(0, 1).contiguous()
                host_MLGC[rows].copy_(kept_MLGC, non_blocking=True)
        if locked:
            torch.cuda.synchronize(self.device)
        return k_MLGC, v_MLGC

    def write_kv(self, pages: Seq[int], k_MLGC: torch.Tensor, v_MLGC: torch.Tensor) -> None:
        """Put keys and values of positions 0..M-1 into pages. Page-locked ones are copied while the host goes on."""
        for rows, slots_M in self._cache_slots(pages, len(k_MLGC)):
            for cache, host_MLGC in ((self.k_LPTGC, k_MLGC), (self.v_LPTGC, v_MLGC)):
                kept_MLGC = self._to_device(host_MLGC[rows])
                cache.flatten(1, 2).index_copy_(1, slots_M, kept_MLGC.transpose(0, 1))

    # --- on the device, from numbers alone: ranks that share the model all do the same

    def place(self, placed: Placed) -> None:
        """What `admit` does."""
        slots_A = self._upload(placed.slots_A)
        self.tables[:, : placed.tables_AP.shape[1]].index_copy_(0, slots_A, self._upload(placed.tables_AP))
        self.keys.index_copy_(0, slots_A, self._upload(placed.keys_A))
        if len(placed.copies_C2):
            sources, targets = self._upload(placed.copies_C2).unbind(1)
            for cache_PTGC in (*self.k_LPTGC, *self.v_LPTGC):
                cache_PTGC.index_copy_(0, targets, cache_PTGC.index_select(0, sources))

    @torch.no_grad()
    def run(self, rows: StepRows) -> Callable[[], torch.Tensor]:
        """Start a step; the call that it returns waits for the results of `_sample`."""
        decode_4D, chunks = rows.decode_4D, rows.chunks
        num_decode = decode_4D.shape[1]
        if self._graphs is not None and not chunks:
            return self._graphs.replay(decode_4D, rows.width)
        parts = [self._decode_rows(self._upload(decode_4D), rows.width)] if num_decode else []
        parts += [self._chunk_rows(chunks)] if chunks else []
        h_ND = self._states(parts)
        ends = accumulate((len(ids) for _, _, ids, _ in chunks), initial=num_decode - 1)
        sampled = [end for end, (*_, samples) in zip(islice(ends, 1, None), chunks, strict=True) if samples]
        if not num_decode and not sampled:
            return lambda: torch.empty(3, 0, dtype=torch.int32)
        rows_S = self._upload(np.array([*range(num_decode), *sampled]))
        slots_N, positions_N = (torch.cat(x) for x in zip(*((p.slots_N, p.positions_N) for p in parts), strict=True))
        return _fetch(self._sample(h_ND[rows_S], slots_N[rows_S], positions_N[rows_S]))

    def _decode(self, rows_4B: torch.Tensor, width: int) -> torch.Tensor:
        """A step of decode rows alone, int32 [4, B] -> [3, B] of `_sample`; asks the host for nothing."""
        part = self._decode_rows(rows_4B, width)
        return self._sample(self._states([part]), part.slots_N, part.positions_N)

    def _decode_rows(self, rows_4D: torch.Tensor, width: int) -> _Part:
        """rows: ids, or -1 for the last one sampled, positions, slots, pages. The tables learn the pages."""
        ids_D, positions_D, slots_D, pages_D = rows_4D.long().unbind(0)
        places_D = slots_D * self.tables.shape[1] + positions_D // self.page_tokens
        self.tables.view(-1).index_copy_(0, places_D, rows_4D[3])
        return _Part(
            ids_N=torch.where(ids_D < 0, self.last_ids[slots_D], ids_D),
            positions_N=positions_D,
            slots_N=slots_D,
            kv_slots_N=pages_D * self.page_tokens + positions_D % self.page_tokens,
            table_SP=self.tables[:, :width].index_select(0, slots_D),
            cu_rows_S1=torch.arange(len(ids_D) + 1, dtype=torch.int32, device=self.device),
            kv_tokens_S=rows_4D[1] + 1,
            single_rows=True,
        )

    def _chunk_rows(self, chunks: Seq[tuple[int, int, np.ndarray, bool]]) -> _Part:
        counts, slots = [len(ids) for _, _, ids, _ in chunks], np.array([slot for slot, *_ in chunks])
        ends = [start + len(ids) for _, start, ids, _ in chunks]
        ids = np.concatenate([ids for _, _, ids, _ in chunks])
        positions = np.concatenate([np.arange(start, start + len(ids)) for _, start, ids, _ in chunks])
        rows_3N = self._upload(np.stack([ids, positions, np.repeat(slots, counts)]))
        ids_N, positions_N, slots_N = rows_3N.unbind(0)
        width = max(pages_for(end, self.page_tokens) for end in ends)
        pages_N = self.tables[slots_N, positions_N // self.page_tokens].long()
        return _Part(
            ids_N=ids_N,
            positions_N=positions_N,
            slots_N=slots_N,
            kv_slots_N=pages_N * self.page_tokens + positions_N % self.page_tokens,
            table_SP=self.tables[:, :width].index_select(0, self._upload(slots)),
            cu_rows_S1=self._upload(np.cumsum([0, *counts], dtype=np.int32)),
            kv_tokens_S=self._upload(np.array(ends, np.int32)),
            single_rows=False,
        )

    def _states(self, parts: Seq[_Part]) -> torch.Tensor:
        """Final states of the rows, part after part; their KV is in the cache afterwards."""
        if len(parts) == 1:
            return self.model(parts[0].ids_N, parts[0].positions_N, _PagedAttention(self, parts, parts[0].kv_slots_N))
        ids_N, positions_N, kv_slots_N = (
            torch.cat(column) for column in zip(*((p.ids_N, p.positions_N, p.kv_slots_N) for p in parts), strict=True)
        )
        return self.model(ids_N, positions_N, _PagedAttention(self, parts, kv_slots_N))

    def _sample(self, h_SD: torch.Tensor, slots_S: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
        """int32 [3, S]: ids, and the bits of the two log-probabilities. positions: of the rows h comes from."""
        logits_SV = self.model.logits(h_SD, self.vocab_size)
        ids_S, raw_S, sampled_S = sample(
            logits_SV, self.keys[slots_S], positions_S + 1,
            temperature=self.sampling.temperature, top_k=self.sampling.top_k, top_p=self.sampling.top_p,
        )  # fmt: skip
        self.last_ids.index_copy_(0, slots_S, ids_S)
        return torch.stack((ids_S.int(), raw_S.view(torch.int32), sampled_S.view(torch.int32)))

    # --- between host and device

    def _state(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        """On the device in the order of launches. The array is not used again."""
        return self._to_device(torch.from_numpy(np.ascontiguousarray(array)))

    def _to_device(self, x: torch.Tensor) -> torch.Tensor:
        """Without waiting for the device."""
        return x if self.device.type == "cpu" else x.pin_memory().to(self.device, non_blocking=True)

    def _cache_slots(self, pages: Seq[int], num_positions: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Blocks of the first positions, and their places in a layer's cache."""
        table, tokens = np.array(pages), self.page_tokens
        for first in range(0, num_positions, _COPIED_POSITIONS):
            positions = np.arange(first, min(first + _COPIED_POSITIONS, num_positions))
            slots = table[positions // tokens] * tokens + positions % tokens
            yield slice(first, first + len(positions)), self._upload(slots)


@dataclass(frozen=True)
class _Part:
    """Decode rows, or those of the chunks, of a step: one call of attention (kernels.paged_attention), since their
    page tables differ in width.

    int64 [N]: ids, positions, slots of the rows' sequences, places in the cache; the rest int32.
    """

    ids_N: torch.Tensor
    positions_N: torch.Tensor
    slots_N: torch.Tensor
    kv_slots_N: torch.Tensor
    table_SP: torch.Tensor
    cu_rows_S1: torch.Tensor
    kv_tokens_S: torch.Tensor
    single_rows: bool


class _PagedAttention:
    """Attention strategy of one step (ml.model.Attend)."""

    def __init__(self, runner: Runner, parts: Seq[_Part], kv_slots_N: torch.Tensor) -> None:
        self.runner, self.parts, self.kv_slots_N = runner, parts, kv_slots_N

    def __call__(self, layer_index: int, q_NHC, k_NGC, v_NGC, rotation: Rotation) -> torch.Tensor:
        k_PTGC, v_PTGC = self.runner.k_LPTGC[layer_index], self.runner.v_LPTGC[layer_index]
        q_NHC = rotate_into_pages(q_NHC, k_NGC, v_NGC, *rotation, k_PTGC, v_PTGC, self.kv_slots_N)
        o_NHC = [
            paged_attention(q, k_PTGC, v_PTGC, part.table_SP, part.cu_rows_S1, part.kv_tokens_S,
                            split_tokens=self.runner.split_tokens, single_rows=part.single_rows)
            for part, q in zip(self.parts, q_NHC.split([len(part.ids_N) for part in self.parts]), strict=True)
        ]  # fmt: skip
        return o_NHC[0] if len(o_NHC) == 1 else torch.cat(o_NHC)


def _fetch(out_3S: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to bring a result to the host; the call that it returns waits for it."""
    if out_3S.device.type == "cpu":
        return lambda: out_3S
    host = torch.empty(out_3S.shape, dtype=out_3S.dtype, pin_memory=True)
    host.copy_(out_3S, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def results() -> torch.Tensor:
        arrived.synchronize()
        return host

    return results


class _DecodeGraphs:
    """Replays step(rows int32 [4, B], width) -> int32 [3, B] from a CUDA graph a (B, width), captured when first met.

    spare: ids, position, slot and page of a row that only fills up a graph.
    """

    def __init__(
        self, step: Callable[[torch.Tensor, int], torch.Tensor], max_rows: int, max_width: int, spare: Seq[int]
    ) -> None:
        self._step, self._max_width = step, max_width
        self._spare_41 = np.array(spare, np.int32)[:, None]
        self._sizes = [n for n in (*_GRAPH_ROWS, *range(192, max_rows + 64, 64)) if n < max_rows + 64]
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._pool: Any = None

    def replay(self, rows_4D: np.ndarray, width: int) -> Callable[[], torch.Tensor]:
        num_rows = rows_4D.shape[1]
        size, width = next(n for n in self._sizes if n >= num_rows), self._class_of(width)
        rows_4B = torch.empty(4, size, dtype=torch.int32, pin_memory=True)
        rows_4B.numpy()[:, :num_rows] = rows_4D
        rows_4B.numpy()[:, num_rows:] = self._spare_41
        graph, inputs_4B, out_3B = self._graphs.get((size, width)) or self._capture(size, width)
        inputs_4B.copy_(rows_4B, non_blocking=True)
        graph.replay()
        fetched = _fetch(out_3B)
        return lambda: fetched()[:, :num_rows]

    def _class_of(self, width: int) -> int:
        """The next width of 4, 6, 8, 12, 16, 24, ...: wider tables cost empty programs, more classes more captures."""
        octave = 1 << max(2, (width - 1).bit_length() - 1)
        return min(self._max_width, next(w for w in (octave, octave * 3 // 2, octave * 2) if w >= width))

    def _capture(self, size: int, width: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
        inputs_4B = torch.from_numpy(np.repeat(self._spare_41, size, 1)).to("cuda")
        # Once without capture, on spare rows: kernels are compiled and libraries set up outside of the graph.
        self._step(inputs_4B, width)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out_3B = self._step(inputs_4B, width)
        self._pool = self._pool or graph.pool()
        self._graphs[size, width] = graph, inputs_4B, out_3B
        return self._graphs[size, width]
