"""Paged attention in plain torch: the oracle of the kernel, and what rollouts on a CPU run.

Every product is a batched one whose matrices have the shape of one row: [H/G, C] x [C, split] and back. BLAS picks
its order of summation by the shape of a matrix, so a prefill chunk and a decode step give a row the same bits; one
larger product over the rows of a chunk would not (measured). Rows that stand alone (decode) are reduced in one batch
over (cut, sequence); the rows of a chunk share their keys through a stride of zero.

Letters: N rows, S sequences, I items (one row and one cut), R rows of one sequence, B keys' batch (I, or 1 shared),
H query heads, G KV heads, C channels, P pages, T tokens of a page, U tokens of a cut.
"""

from __future__ import annotations

import torch

#: Partial softmax of rows over one cut: max and sum of exponentials [rows, H], weighted values [rows, H, C]; fp32.
Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def paged_attention(
    q_NHC: torch.Tensor,
    k_cache_PTGC: torch.Tensor,
    v_cache_PTGC: torch.Tensor,
    page_table_SP: torch.Tensor,
    cu_rows_S1: torch.Tensor,
    kv_tokens_S: torch.Tensor,
    *,
    split_tokens: int,
) -> torch.Tensor:
    """See the contract in kernels.paged_attention. Products and softmax are fp32; the result is rounded once."""
    caches = _Cuts(k_cache_PTGC, split_tokens), _Cuts(v_cache_PTGC, split_tokens)
    q32_NHC = q_NHC.float() * q_NHC.shape[-1] ** -0.5
    o_NHC = torch.empty_like(q32_NHC)
    cu_rows, kv_tokens = cu_rows_S1.tolist(), kv_tokens_S.tolist()
    # Longest first, so that the sequences that have a cut are a prefix.
    alone = sorted((s for s in range(len(kv_tokens)) if cu_rows[s + 1] - cu_rows[s] == 1), key=lambda s: -kv_tokens[s])
    if alone:
        rows_S = torch.tensor([cu_rows[s] for s in alone], device=q_NHC.device)
        page_table = page_table_SP[torch.tensor(alone, device=q_NHC.device)].long()
        o_NHC[rows_S] = _attend_alone(q32_NHC[rows_S], *caches, page_table, [kv_tokens[s] for s in alone])
    for s, kv in enumerate(kv_tokens):
        rows = slice(cu_rows[s], cu_rows[s + 1])
        if rows.stop - rows.start > 1:
            o_NHC[rows] = _attend_chunk(q32_NHC[rows], *caches, page_table_SP[s : s + 1].long(), kv)
    return o_NHC.to(q_NHC.dtype)


class _Cuts:
    """Reads cuts of sequences, split_tokens positions each, out of a paged cache."""

    def __init__(self, cache_PTGC: torch.Tensor, split_tokens: int) -> None:
        self.page_tokens, self.split_tokens = cache_PTGC.shape[1], split_tokens
        self.block_tokens = min(split_tokens, self.page_tokens)
        self.blocks = cache_PTGC.reshape(-1, self.block_tokens, *cache_PTGC.shape[2:])

    def read(self, page_table_IP: torch.Tensor, cut_I: torch.Tensor, kv_tokens_I: torch.Tensor) -> torch.Tensor:
        """fp32 [I, U, G, C] of cut number cut_I; positions at or past kv_tokens_I hold whatever the pages hold."""
        in_cut = torch.arange(0, self.split_tokens, self.block_tokens, device=cut_I.device)
        positions_IB = cut_I[:, None] * self.split_tokens + in_cut
        # Past the last page the table holds no page: read the last one again, it is masked.
        positions_IB = torch.minimum(positions_IB, (kv_tokens_I - 1)[:, None])
        pages_IB = page_table_IP.gather(1, positions_IB // self.page_tokens)
        blocks_a_page = self.page_tokens // self.block_tokens
        blocks_IB = pages_IB * blocks_a_page + positions_IB % self.page_tokens // self.block_tokens
        read = self.blocks.index_select(0, blocks_IB.flatten())
        return read.view(len(cut_I), self.split_tokens, *read.shape[2:]).float()


def _attend_alone(
    q_SHC: torch.Tensor, keys: _Cuts, values: _Cuts, page_table_SP: torch.Tensor, kv_tokens: list[int]
) -> torch.Tensor:
    """One row a sequence, at its last position; kv_tokens descends. fp32 [S, H, C]."""
    split = keys.split_tokens
    counts = [sum(kv > first for kv in kv_tokens) for first in range(0, kv_tokens[0], split)]
    items = [(s, cut, kv_tokens[s]) for cut, count in enumerate(counts) for s in range(count)]
    sequence_I, cut_I, kv_tokens_I = torch.tensor(items, device=q_SHC.device).unbind(1)
    where = page_table_SP[sequence_I], cut_I, kv_tokens_I
    visible_I = (kv_tokens_I - cut_I * split).clamp(max=split)
    parts = _partial(q_SHC[sequence_I], keys.read(*where), values.read(*where), visible_I, visible_I)
    first, state = 0, _rows(parts, 0, counts[0])
    for cut, count in enumerate(counts):
        if cut:
            _fold(_rows(state, 0, count), _rows(parts, first, first + count))
        first += count
    return state[2] / state[1].unsqueeze(-1)


def _attend_chunk(
    q_RHC: torch.Tensor, keys: _Cuts, values: _Cuts, page_table_1P: torch.Tensor, kv_tokens: int
) -> torch.Tensor:
    """The last R positions of one sequence. fp32 [R, H, C]."""
    split, num_rows = keys.split_tokens, q_RHC.shape[0]
    kv_tokens_1 = torch.tensor([kv_tokens], device=q_RHC.device)
    seen_R = torch.arange(kv_tokens - num_rows + 1, kv_tokens + 1, device=q_RHC.device)
    state = None
    for cut in range(-(-kv_tokens // split)):
        # Rows before the cut see nothing of it, those from `first` on do.
        first = max(0, cut * split - (kv_tokens - num_rows))
        where = page_table_1P, torch.tensor([cut], device=q_RHC.device), kv_tokens_1
        visible_R = (seen_R[first:] - cut * split).clamp(max=split)
        part = _partial(q_RHC[first:], keys.read(*where), values.read(*where), visible_R, visible_R[-1:])
        if state is None:
            state = part
        else:
            _fold(_rows(state, first, num_rows), part)
    assert state is not None
    return state[2] / state[1].unsqueeze(-1)


def _partial(
    q_IHC: torch.Tensor, k_BUGC: torch.Tensor, v_BUGC: torch.Tensor, visible_I: torch.Tensor, written_B: torch.Tensor
) -> Partial:
    """Softmax of each row over the first visible_I (at least one) positions of its cut; written_B hold values."""
    num_items = len(q_IHC)
    # BLAS shares out whole matrices among its threads, unless there are fewer than threads: then it may cut one.
    missing = max(0, 2 * torch.get_num_threads() - num_items)
    if missing:
        q_IHC, k_BUGC, v_BUGC, visible_I, written_B = (
            _repeat_first(x, missing) if len(x) == num_items else x
            for x in (q_IHC, k_BUGC, v_BUGC, visible_I, written_B)
        )
    tokens_U = torch.arange(k_BUGC.shape[1], device=q_IHC.device)
    # A weight of zero does not silence the NaN that an unwritten slot may hold.
    unwritten = (tokens_U >= written_B[:, None]).flatten().nonzero().squeeze(1)
    v_BUGC.flatten(0, 1).index_fill_(0, unwritten, 0.0)
    scores_IHU = _by_kv_head(q_IHC, k_BUGC.permute(2, 0, 3, 1))
    scores_IHU.masked_fill_((tokens_U >= visible_I[:, None])[:, None], float("-inf"))
    max_IH = scores_IHU.amax(-1)
    weights_IHU = torch.exp_(scores_IHU.sub_(max_IH.unsqueeze(-1)))
    out_IHC = _by_kv_head(weights_IHU, v_BUGC.permute(2, 0, 1, 3))
    return _rows((max_IH, weights_IHU.sum(-1), out_IHC), 0, num_items)


def _by_kv_head(a_IHx: torch.Tensor, b_GBxy: torch.Tensor) -> torch.Tensor:
    """Batched products [I, H, y] of each head with its KV head's matrix; B is I, or 1 for one under every row.

    Bits also depend on how the matrices lie in memory: a and what b views are contiguous in every call.
    """
    parts = zip(a_IHx.chunk(len(b_GBxy), 1), b_GBxy, strict=True)
    return torch.cat([torch.bmm(a, b.expand(len(a_IHx), -1, -1)) for a, b in parts], 1)


def _repeat_first(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat((x, x[:1].expand(count, *x.shape[1:])))


def _rows(partial: Partial, first: int, stop: int) -> Partial:
    """Views."""
    return partial[0][first:stop], partial[1][first:stop], partial[2][first:stop]


def _fold(state: Partial, part: Partial) -> None:
    """Merge a later cut of the same rows into the state, in place."""
    (max_RH, sum_RH, out_RHC), (part_max_RH, part_sum_RH, part_out_RHC) = state, part
    merged_RH = torch.maximum(max_RH, part_max_RH)
    keep_RH, add_RH = torch.exp(max_RH - merged_RH), torch.exp(part_max_RH - merged_RH)
    max_RH.copy_(merged_RH)
    sum_RH.mul_(keep_RH).add_(part_sum_RH * add_RH)
    out_RHC.mul_(keep_RH.unsqueeze(-1)).add_(part_out_RHC * add_RH.unsqueeze(-1))
