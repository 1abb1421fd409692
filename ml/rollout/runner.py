"""One engine step on the device: planned rows in, sampled tokens and their log-probabilities out, one step later.

    launch: ids, positions, slots of the rows -> Transformer, whose attention writes and reads pages
            -> head on the sampled rows -> sample -> ids kept for the next step's rows
    collect: the launched step's results on the host

Owns the paged KV cache and, a row a slot, the page tables, sampling keys and last sampled ids. Steps run in the order
of their launches, so a step may be launched before the one that samples its input ids has ended.
Invariant: a row's results and KV have the bits that its tokens and the weights give them, whatever else is in the
step, however its sequence was cut into steps, and whether the step was replayed from a graph.

Letters: N rows, D decode rows, S sequences, R sampled rows, V vocabulary, L layers, P pages, T tokens of a page, G KV
heads, C channels, M positions of one sequence, X integers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kernels.paged_attention import paged_attention
from kernels.rows import rotate_into_pages
from kernels.sampling import sample
from kernels.step_rows import decode_rows, keep_results
from ml.device import copy_to_host, host_buffer, plain_buffer, to_device, to_host, wait_for
from ml.model import Rotation, Transformer
from ml.rollout.pages import pages_for
from ml.rollout.sampling import SamplingParams
from ml.rollout.scheduler import Admitted, Plan
from ml.rollout.steps import Collected, Placed, StepRows, Ticket

#: Sizes of graphs: what is missing to the next one is filled up with rows that nobody reads. Decode rows above the last
#: go in steps of 64. More chunk rows keep the device busy for longer than the host takes to launch them one by one.
_DECODE_ROWS = (16, 32, 48, 64, 96, 128)
_CHUNK_ROWS = (128, 256, 512, 1024, 2048)
_CHUNKS = (16, 64)
#: Positions of KV that are copied at once between host and device: the device holds a second copy of these.
_COPIED_POSITIONS = 4096
#: Pages, of all layers, that are copied at once from one sequence to another.
_COPIED_PAGES = 16
#: Page-locked memory takes 0.6 s a GB to get on an H200's host; but torch keeps what is given back, so pieces of up to
#: this size are had for nothing after a few.
_REUSED_BYTES = 64 << 20


class Runner:
    """vocab_size: ids that can be sampled. split_tokens: where attention cuts keys (kernels.paged_attention).

    max_sequences: slots, numbered from 0. graphs: replay decode rows and short chunks from CUDA
    graphs, which are captured when their size first occurs.
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
        self.spare_page, self.spare_slot = num_pages, max_sequences
        kv_heads = model.group.share(model.config.kv_heads)
        shape = (model.config.layers, num_pages + 1, page_tokens, kv_heads, model.config.head_channels)
        self.k_LPTGC = torch.zeros(shape, dtype=model.compute, device=self.device)
        self.v_LPTGC = torch.zeros(shape, dtype=model.compute, device=self.device)
        self.max_pages = min(num_pages, pages_for(model.config.max_positions, page_tokens))
        self.tables = self._state((max_sequences + 1, self.max_pages), torch.int32)
        self.keys = self._state((max_sequences + 1,), torch.int64)
        self.last_ids = self._state((max_sequences + 1,), torch.int64)
        self.tables[self.spare_slot] = self.spare_page
        self._graphs = _Graphs() if graphs else None

    def clear(self) -> None:
        """Wipe all that was computed, after the launched steps; the graphs stay."""
        for state in (self.k_LPTGC, self.v_LPTGC, self.tables, self.keys, self.last_ids):
            state.zero_()
        self.tables[self.spare_slot] = self.spare_page

    def admit(self, admitted: Seq[Admitted], keys: Seq[int]) -> None:
        """Give sequences their slots. keys: their 64-bit sampling keys. Whole prefixes are in place afterwards."""
        self.place(Placed.of(admitted, keys))

    def launch(self, plan: Plan) -> Ticket:
        """Start the step of `plan`, before it is marked as launched. An id that the host does not know yet, since
        the step that samples it has not been collected, is the last one sampled in the sequence's slot."""
        sequences = plan.decode + [c.sequence for c in plan.chunks if c.samples]
        if plan.guessed:
            sequences = [s for s in sequences for _ in range(1 + len(plan.guessed.get(s, ())))]
        return Ticket(sequences, self.run(StepRows.of(plan, self.page_tokens)), plan.guessed)

    def collect(self, ticket: Ticket) -> Collected:
        """Wait for a launched step; steps are collected in the order of their launches."""
        ids_R, raw_R, sampled_R = ticket.results()
        return Collected(ids_R, raw_R.view(np.float32), sampled_R.view(np.float32))

    def read_kv(
        self, pages: Seq[int], num_positions: int, *, to_return: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions 0..num_positions-1 as the launched steps leave them, [M, L, G, C] on the host.

        to_return: they come page-locked from a GPU, to go back as fast; else large ones in memory that is had in less
        time.
        """
        shape, dtype = (num_positions, self.k_LPTGC.shape[0], *self.k_LPTGC.shape[3:]), self.k_LPTGC.dtype
        locked = to_return or math.prod(shape) * dtype.itemsize <= _REUSED_BYTES
        k_MLGC, v_MLGC = (
            host_buffer(shape, dtype, self.device) if locked else plain_buffer(shape, dtype) for _ in range(2)
        )
        for rows, slots_M in self._cache_slots(pages, num_positions):
            for cache, host_MLGC in ((self.k_LPTGC, k_MLGC), (self.v_LPTGC, v_MLGC)):
                kept_MLGC = cache.flatten(1, 2).index_select(1, slots_M).transpose(0, 1).contiguous()
                if locked:
                    host_MLGC[rows].copy_(kept_MLGC, non_blocking=True)
                else:
                    copy_to_host(kept_MLGC, host_MLGC[rows])
        wait_for(self.device)
        return k_MLGC, v_MLGC

    def write_kv(self, pages: Seq[int], k_MLGC: torch.Tensor, v_MLGC: torch.Tensor) -> None:
        """Put keys and values of positions 0..M-1 into pages. Page-locked ones are copied while the host goes on."""
        for rows, slots_M in self._cache_slots(pages, len(k_MLGC)):
            for cache, host_MLGC in ((self.k_LPTGC, k_MLGC), (self.v_LPTGC, v_MLGC)):
                kept_MLGC = to_device(host_MLGC[rows], self.device)
                cache.flatten(1, 2).index_copy_(1, slots_M, kept_MLGC.transpose(0, 1))

    # --- on the device, from numbers alone: ranks that share the model all do the same

    def place(self, placed: Placed) -> None:
        """What `admit` does."""
        slots_A = self._upload(placed.slots_A)
        self.tables[:, : placed.tables_AP.shape[1]].index_copy_(0, slots_A, self._upload(placed.tables_AP))
        self.keys.index_copy_(0, slots_A, self._upload(placed.keys_A))
        if len(placed.copies_C2):
            sources, targets = self._upload(placed.copies_C2).unbind(1)
            for cache_LPTGC in (self.k_LPTGC, self.v_LPTGC):
                # All layers at once, since the host would take longer to launch them one by one than a step takes.
                for pages in zip(sources.split(_COPIED_PAGES), targets.split(_COPIED_PAGES), strict=True):
                    cache_LPTGC.index_copy_(1, pages[1], cache_LPTGC.index_select(1, pages[0]))

    @torch.no_grad()
    def run(self, rows: StepRows) -> Callable[[], np.ndarray]:
        """Start a step; the call that it returns waits for the results of `_forward`."""
        num_chunk_rows = sum(len(ids) for _, _, ids, _ in rows.chunks)
        short = num_chunk_rows <= _CHUNK_ROWS[-1] and len(rows.chunks) <= _CHUNKS[-1]
        graphs = self._graphs if short else None
        batches = [self._decode_batch(rows, full=graphs is not None)] if rows.decode_4D.shape[1] else []
        batches += [self._chunk_batch(rows, full=graphs is not None)] if rows.chunks else []
        if graphs is None:
            out_3R = self._forward([batch.part(self._upload(batch.integers_X)) for batch in batches])
            return _fetch(out_3R, out_3R.shape[1])
        # One after the other, so that few sizes occur: weights that are read twice cost less than single launches.
        results = [graphs.replay(batch, lambda x, part=batch.part: self._forward([part(x)])) for batch in batches]
        return lambda: np.concatenate([result() for result in results], 1)

    def _decode_batch(self, rows: StepRows, *, full: bool) -> _Batch:
        """full: in a size that graphs have."""
        num_rows, width = rows.decode_4D.shape[1], rows.width
        size, firsts = num_rows, None
        if full:
            size, width = _size_for(num_rows, _DECODE_ROWS), self._full_width(width)
        else:
            # Guessed rows share their sequence's keys, which a CPU then reads once.
            firsts = np.flatnonzero(np.diff(rows.decode_4D[2], prepend=-1))
            firsts = None if len(firsts) == num_rows else firsts
        rows_4N = np.array([[0], [0], [self.spare_slot], [self.spare_page]], np.int32).repeat(size, 1)
        rows_4N[:, :num_rows] = rows.decode_4D
        part = functools.partial(self._decode_part, num_rows=size, width=width, firsts=firsts)
        return _Batch(("decode", size, width), rows_4N.ravel(), num_rows, part)

    def _chunk_batch(self, rows: StepRows, *, full: bool) -> _Batch:
        """full: in a size that graphs have."""
        slots, starts, ids, samples = zip(*rows.chunks, strict=True)
        counts = np.array([len(x) for x in ids])
        ends, cu_rows_S1, sampling = starts + counts, np.cumsum([0, *counts]), np.flatnonzero(samples)
        num_rows, width = int(cu_rows_S1[-1]), pages_for(int(ends.max()), self.page_tokens)
        sizes = num_rows, len(slots), len(sampling)
        if full:
            # The rows that fill up belong to no sequence, the sequences have no row: attention computes neither.
            sequences = _size_for(len(slots), _CHUNKS)
            sizes, width = (_size_for(num_rows, _CHUNK_ROWS), sequences, sequences), self._full_width(width)
        integers = (
            _filled(np.concatenate(ids), sizes[0], 0),
            _filled(np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)]), sizes[0], 0),
            _filled(np.repeat(slots, counts), sizes[0], self.spare_slot),
            _filled(slots, sizes[1], self.spare_slot),
            _filled(ends, sizes[1], 0),
            _filled(cu_rows_S1, sizes[1] + 1, num_rows),
            _filled(cu_rows_S1[1:][sampling] - 1, sizes[2], 0),
            _filled(np.array(slots)[sampling], sizes[2], self.spare_slot),
        )
        part = functools.partial(self._chunk_part, sizes=sizes, width=width)
        return _Batch(("chunks", *sizes, width), np.concatenate(integers), len(sampling), part)

    def _full_width(self, width: int) -> int:
        """Pages of 4, 6, 8, 12, 16, 24, ...: a wider table costs empty programs, more widths more captures."""
        octave = 1 << max(2, (width - 1).bit_length() - 1)
        return min(self.max_pages, next(w for w in (octave, octave * 3 // 2, octave * 2) if w >= width))

    # --- on the device, without a question to the host

    def _decode_part(self, integers_X: torch.Tensor, *, num_rows: int, width: int, firsts: np.ndarray | None) -> _Part:
        """StepRows.decode_4D. The tables learn the pages. firsts: the first row of each sequence, where some have
        several; None: attention takes each row for a sequence of its own."""
        rows = decode_rows(
            integers_X.view(4, num_rows), self.tables, self.last_ids, self.keys, page_tokens=self.page_tokens,
            width=width,
        )  # fmt: skip
        table_SP, cu_rows_S1, kv_tokens_S = rows.table_NW, rows.cu_rows_N1, rows.kv_tokens_N
        if firsts is not None:
            cu_rows_S1 = self._upload(np.append(firsts, num_rows).astype(np.int32))
            table_SP, kv_tokens_S = table_SP[cu_rows_S1[:-1].long()], kv_tokens_S[cu_rows_S1[1:].long() - 1]
        return _Part(
            ids_N=rows.ids_N,
            positions_N=rows.positions_N,
            kv_slots_N=rows.kv_slots_N,
            table_SP=table_SP,
            cu_rows_S1=cu_rows_S1,
            kv_tokens_S=kv_tokens_S,
            single_rows=firsts is None,
            last_R=None,
            slots_R=rows.slots_N,
            keys_R=rows.keys_N,
            next_R=rows.next_positions_N,
        )

    def _chunk_part(self, integers_X: torch.Tensor, *, sizes: tuple[int, int, int], width: int) -> _Part:
        """Ids, positions, slots of the rows; slots, ends, row offsets of the sequences; rows and slots to sample."""
        num_rows, sequences, sampled = sizes
        lengths = [3 * num_rows, sequences, sequences, sequences + 1, sampled, sampled]
        rows_X, slots_S, kv_tokens_S, cu_rows_S1, last_R, slots_R = integers_X.split(lengths)
        ids_N, positions_N, slots_N = rows_X.view(3, num_rows).long().unbind(0)
        pages_N = self.tables[slots_N, positions_N // self.page_tokens].long()
        return _Part(
            ids_N=ids_N,
            positions_N=positions_N,
            kv_slots_N=pages_N * self.page_tokens + positions_N % self.page_tokens,
            table_SP=self.tables[:, :width].index_select(0, slots_S),
            cu_rows_S1=cu_rows_S1,
            kv_tokens_S=kv_tokens_S,
            single_rows=False,
            last_R=last_R.long(),
            slots_R=slots_R.long(),
            keys_R=self.keys[slots_R],
            next_R=positions_N[last_R] + 1,
        )

    def _forward(self, parts: Seq[_Part]) -> torch.Tensor:
        """Compute the rows, leaving their KV in the cache, and sample: int32 [3, R], ids and the bits of the two
        log-probabilities, part after part."""
        ids_N, positions_N, kv_slots_N = (
            _join(x) for x in zip(*((p.ids_N, p.positions_N, p.kv_slots_N) for p in parts), strict=True)
        )
        h_ND = self.model(ids_N, positions_N, _PagedAttention(self, parts, kv_slots_N))
        slots_R = _join([part.slots_R for part in parts])
        if not len(slots_R):
            return slots_R.new_empty((3, 0), dtype=torch.int32)
        if len(parts) > 1 or parts[0].last_R is not None:
            offsets = accumulate((len(part.ids_N) for part in parts[:-1]), initial=0)
            last_R = _join([part.last() + offset for part, offset in zip(parts, offsets, strict=True)])
            h_ND = h_ND[last_R]
        keys_R, next_R = _join([part.keys_R for part in parts]), _join([part.next_R for part in parts])
        ids_R, raw_R, sampled_R = sample(
            self.model.logits(h_ND, self.vocab_size), keys_R, next_R,
            temperature=self.sampling.temperature, top_k=self.sampling.top_k, top_p=self.sampling.top_p,
        )  # fmt: skip
        # Of rows with guesses it stays open which one is kept here, and the next step knows its ids from the host.
        return keep_results(ids_R, raw_R, sampled_R, slots_R, self.last_ids)

    # --- between host and device

    def _state(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        """On the device in the order of launches. The array is not used again."""
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), self.device)

    def _cache_slots(self, pages: Seq[int], num_positions: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Blocks of the first positions, and their places in a layer's cache."""
        table, tokens = np.array(pages), self.page_tokens
        for first in range(0, num_positions, _COPIED_POSITIONS):
            positions = np.arange(first, min(first + _COPIED_POSITIONS, num_positions))
            slots = table[positions // tokens] * tokens + positions % tokens
            yield slice(first, first + len(positions)), self._upload(slots)


@dataclass(frozen=True)
class _Batch:
    """Rows of a step as they go to the device. key: their sizes, for each of which there is a graph. num_results: how
    many of the sampled rows somebody waits for, the first ones. part: of integers_X on the device."""

    key: tuple
    integers_X: np.ndarray
    num_results: int
    part: Callable[[torch.Tensor], _Part]


@dataclass(frozen=True)
class _Part:
    """Decode rows, or those of the chunks, of a step: one call of attention (kernels.paged_attention), since their
    page tables differ in width.

    int64: ids, positions, places in the cache of the rows; rows to be sampled, None for all; their sequences' slots and
    keys, and the positions of what is sampled. The rest is int32.
    """

    ids_N: torch.Tensor
    positions_N: torch.Tensor
    kv_slots_N: torch.Tensor
    table_SP: torch.Tensor
    cu_rows_S1: torch.Tensor
    kv_tokens_S: torch.Tensor
    single_rows: bool
    last_R: torch.Tensor | None
    slots_R: torch.Tensor
    keys_R: torch.Tensor
    next_R: torch.Tensor

    def last(self) -> torch.Tensor:
        return torch.arange(len(self.ids_N), device=self.ids_N.device) if self.last_R is None else self.last_R


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


def _fetch(out_3R: torch.Tensor, num_results: int) -> Callable[[], np.ndarray]:
    """Start to bring results to the host; the call that it returns waits for them."""
    arrived = to_host(out_3R)
    return lambda: arrived().numpy()[:, :num_results]


def _join(tensors: Seq[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _size_for(count: int, sizes: tuple[int, ...]) -> int:
    return next((size for size in sizes if size >= count), -(-count // 64) * 64)


def _filled(values: Any, size: int, filler: int) -> np.ndarray:
    return np.concatenate([np.asarray(values, np.int32), np.full(size - len(values), filler, np.int32)])


class _Graphs:
    """CUDA graphs by the key of the batches that they compute. They share their memory, since they run in turn."""

    def __init__(self) -> None:
        self._graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._pool: Any = None
        self._stream = torch.cuda.Stream()

    def replay(self, batch: _Batch, forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], np.ndarray]:
        """forward: integers -> int32 [3, R], whose first columns are the batch's results."""
        host_X = torch.from_numpy(batch.integers_X).pin_memory()
        if batch.key in self._graphs:
            graph, inputs_X, out_3R = self._graphs[batch.key]
            inputs_X.copy_(host_X, non_blocking=True)
            graph.replay()
            return _fetch(out_3R, batch.num_results)
        inputs_X = host_X.to("cuda")
        # The first one of a size is computed without a graph: kernels are compiled and libraries set up outside.
        results = _fetch(forward(inputs_X), batch.num_results)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            out_3R = forward(inputs_X)
            graph.capture_end()
        self._pool = self._pool or graph.pool()
        self._graphs[batch.key] = graph, inputs_X, out_3R
        return results
