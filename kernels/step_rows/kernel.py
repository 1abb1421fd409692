"""One launch each: a program is one row."""

# Triton adds launch options to a kernel's own parameters and calls kernels from kernels; the type checker sees neither.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.early import launch_early, starts_early
from kernels.step_rows import DecodeRows

_RESULTS = 128


def decode_rows(rows_4N, tables_SP, last_ids_S, keys_S, *, page_tokens, width):
    rows = rows_4N.shape[1]
    long_6N = torch.empty(6, rows, dtype=torch.int64, device=rows_4N.device)
    table_NW = torch.empty(rows, width, dtype=torch.int32, device=rows_4N.device)
    cu_rows_N1 = torch.empty(rows + 1, dtype=torch.int32, device=rows_4N.device)
    kv_tokens_N = torch.empty(rows, dtype=torch.int32, device=rows_4N.device)
    if rows:
        _decode_rows[(rows,)](
            rows_4N, tables_SP, last_ids_S, keys_S, long_6N, table_NW, cu_rows_N1, kv_tokens_N, rows,
            tables_SP.shape[1], width, PAGE=page_tokens, BLOCK=min(1024, triton.next_power_of_2(width)), num_warps=1,
            **launch_early(rows_4N.device),
        )  # fmt: skip
    else:
        cu_rows_N1.zero_()
    return DecodeRows(*long_6N.unbind(0), table_NW, cu_rows_N1, kv_tokens_N)


@triton.jit(do_not_specialize=["rows", "pages", "width"])
def _decode_rows(
    rows_ptr,
    tables_ptr,
    last_ids_ptr,
    keys_ptr,
    long_ptr,
    table_ptr,
    cu_rows_ptr,
    kv_tokens_ptr,
    rows,
    pages,
    width,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    starts_early(EARLY)
    n = tl.program_id(0)
    token = tl.load(rows_ptr + n).to(tl.int64)
    position = tl.load(rows_ptr + rows + n).to(tl.int64)
    slot = tl.load(rows_ptr + 2 * rows + n).to(tl.int64)
    page = tl.load(rows_ptr + 3 * rows + n)
    last = tl.load(last_ids_ptr + slot)
    place = position // PAGE
    tl.store(tables_ptr + slot * pages + place, page)
    tl.store(long_ptr + n, tl.where(token < 0, last, token))
    tl.store(long_ptr + rows + n, position)
    tl.store(long_ptr + 2 * rows + n, page.to(tl.int64) * PAGE + position % PAGE)
    tl.store(long_ptr + 3 * rows + n, slot)
    tl.store(long_ptr + 4 * rows + n, tl.load(keys_ptr + slot))
    tl.store(long_ptr + 5 * rows + n, position + 1)
    tl.store(cu_rows_ptr + n + 1, n + 1)
    if n == 0:
        tl.store(cu_rows_ptr, 0)
    tl.store(kv_tokens_ptr + n, (position + 1).to(tl.int32))
    for first in range(0, width, BLOCK):
        column_B = first + tl.arange(0, BLOCK)
        entry_B = tl.load(tables_ptr + slot * pages + column_B, mask=column_B < width, other=0)
        # The new page may not have reached memory yet.
        entry_B = tl.where(column_B == place, page, entry_B)
        tl.store(table_ptr + n.to(tl.int64) * width + column_B, entry_B, mask=column_B < width)


def keep_results(ids_R, raw_R, sampled_R, slots_R, last_ids_S):
    rows = len(ids_R)
    out_3R = torch.empty(3, rows, dtype=torch.int32, device=ids_R.device)
    if rows:
        _keep_results[(triton.cdiv(rows, _RESULTS),)](
            ids_R, raw_R.view(torch.int32), sampled_R.view(torch.int32), slots_R, last_ids_S, out_3R, rows,
            BLOCK=_RESULTS, num_warps=1, **launch_early(ids_R.device),
        )  # fmt: skip
    return out_3R


@triton.jit(do_not_specialize=["rows"])
def _keep_results(
    ids_ptr, raw_ptr, sampled_ptr, slots_ptr, last_ids_ptr, out_ptr, rows, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    starts_early(EARLY)
    r_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside_B = r_B < rows
    id_B = tl.load(ids_ptr + r_B, mask=inside_B)
    slot_B = tl.load(slots_ptr + r_B, mask=inside_B, other=0)
    tl.store(last_ids_ptr + slot_B, id_B, mask=inside_B)
    tl.store(out_ptr + r_B, id_B.to(tl.int32), mask=inside_B)
    tl.store(out_ptr + rows + r_B, tl.load(raw_ptr + r_B, mask=inside_B), mask=inside_B)
    tl.store(out_ptr + 2 * rows + r_B, tl.load(sampled_ptr + r_B, mask=inside_B), mask=inside_B)
