"""One engine step on the device: scheduled rows in, logits of the rows to be sampled out. Owns the paged KV cache.

    tokens of the scheduled rows -> Transformer, whose attention writes and reads pages -> head on the sampled rows

Invariant: a row's logits and KV have the bits that its tokens and the weights give them, whatever else is in the step
and however its sequence was cut into steps.

Letters: N rows of the step, S sequences of the step, V vocabulary, D student width, L layers, P pages, T tokens of a
page, G KV heads, C channels, M positions of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from kernels.paged_attention import paged_attention, write_kv
from ml.model import Transformer
from ml.rollout.scheduler import Rows


class Runner:
    """vocab_size: ids that have a logit. split_tokens: where attention cuts keys (kernels.paged_attention)."""

    def __init__(
        self, model: Transformer, *, num_pages: int, page_tokens: int, split_tokens: int, vocab_size: int
    ) -> None:
        self.model, self.page_tokens, self.split_tokens = model, page_tokens, split_tokens
        self.vocab_size = vocab_size
        self.device = model.head_weight.device
        shape = (model.config.layers, num_pages, page_tokens, model.config.kv_heads, model.config.head_channels)
        self.k_LPTGC = torch.zeros(shape, dtype=model.compute, device=self.device)
        self.v_LPTGC = torch.zeros(shape, dtype=model.compute, device=self.device)

    @torch.no_grad()
    def forward(self, rows: Seq[Rows]) -> torch.Tensor:
        """Compute the rows, keep their KV in their sequences' pages; fp32 logits [rows that sample, V]."""
        ids, positions, slots, cu_rows, last = [], [], [], [0], []
        for row in rows:
            stop = row.start + row.count
            ids += row.sequence.tokens[row.start : stop]
            positions += range(row.start, stop)
            slots.append(self._slots(row.sequence.pages, row.start, stop))
            cu_rows.append(len(ids))
            if row.samples:
                last.append(len(ids) - 1)
        attend = _PagedAttention(self, torch.cat(slots), *self._tables(rows, cu_rows))
        h_ND = self.model(self._tensor(ids), self._tensor(positions), attend)
        return self.model.logits(h_ND[self._tensor(last)], self.vocab_size)

    def read_kv(self, pages: Seq[int], num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions 0..num_positions-1, [M, L, G, C] on the CPU."""
        slots_M = self._slots(pages, 0, num_positions)
        k_LMGC, v_LMGC = (cache.flatten(1, 2).index_select(1, slots_M) for cache in (self.k_LPTGC, self.v_LPTGC))
        return k_LMGC.transpose(0, 1).cpu().contiguous(), v_LMGC.transpose(0, 1).cpu().contiguous()

    def write_kv(self, pages: Seq[int], k_MLGC: torch.Tensor, v_MLGC: torch.Tensor) -> None:
        """Put keys and values of positions 0..M-1 into pages."""
        slots_M = self._slots(pages, 0, len(k_MLGC))
        for cache, rows in ((self.k_LPTGC, k_MLGC), (self.v_LPTGC, v_MLGC)):
            cache.flatten(1, 2).index_copy_(1, slots_M, rows.transpose(0, 1).to(self.device))

    def _tensor(self, values: Seq[int] | Seq[Seq[int]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _slots(self, pages: Seq[int], start: int, stop: int) -> torch.Tensor:
        positions = torch.arange(start, stop)
        slots = torch.tensor(pages)[positions // self.page_tokens] * self.page_tokens + positions % self.page_tokens
        return slots.to(self.device)

    def _tables(self, rows: Seq[Rows], cu_rows: Seq[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        width = max(len(row.sequence.pages) for row in rows)
        table = [row.sequence.pages + [0] * (width - len(row.sequence.pages)) for row in rows]
        kv_tokens = [row.start + row.count for row in rows]
        page_table_SP, cu_rows_S1, kv_tokens_S = (self._tensor(x, torch.int32) for x in (table, cu_rows, kv_tokens))
        return page_table_SP, cu_rows_S1, kv_tokens_S


class _PagedAttention:
    """Attention strategy of one step (ml.model.Attend)."""

    def __init__(self, runner: Runner, slots_N, page_table_SP, cu_rows_S1, kv_tokens_S) -> None:
        self.runner, self.slots_N = runner, slots_N
        self.where = page_table_SP, cu_rows_S1, kv_tokens_S

    def __call__(self, layer_index: int, q_NHC, k_NGC, v_NGC) -> torch.Tensor:
        k_PTGC, v_PTGC = self.runner.k_LPTGC[layer_index], self.runner.v_LPTGC[layer_index]
        write_kv(k_NGC, v_NGC, k_PTGC, v_PTGC, self.slots_N)
        return paged_attention(q_NHC, k_PTGC, v_PTGC, *self.where, split_tokens=self.runner.split_tokens)
