"""The same in plain torch: the oracle of the kernels, and what a CPU runs."""

from __future__ import annotations

import torch

from kernels.step_rows import DecodeRows


def decode_rows(rows_4N, tables_SP, last_ids_S, keys_S, *, page_tokens, width):
    ids_N, positions_N, slots_N, pages_N = rows_4N.long().unbind(0)
    tables_SP[slots_N, positions_N // page_tokens] = rows_4N[3]
    return DecodeRows(
        ids_N=torch.where(ids_N < 0, last_ids_S[slots_N], ids_N),
        positions_N=positions_N,
        kv_slots_N=pages_N * page_tokens + positions_N % page_tokens,
        slots_N=slots_N,
        keys_N=keys_S[slots_N],
        next_positions_N=positions_N + 1,
        table_NW=tables_SP[slots_N, :width],
        cu_rows_N1=torch.arange(rows_4N.shape[1] + 1, dtype=torch.int32, device=rows_4N.device),
        kv_tokens_N=rows_4N[1] + 1,
    )


def keep_results(ids_R, raw_R, sampled_R, slots_R, last_ids_S):
    last_ids_S[slots_R] = ids_R
    return torch.stack((ids_R.int(), raw_R.view(torch.int32), sampled_R.view(torch.int32)))
