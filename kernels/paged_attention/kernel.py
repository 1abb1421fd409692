"""Paged attention on the GPU: the decode kernel, the merge of its cuts, and the launch of both kernels.

`_decode` serves sequences with one row: a program reduces one cut of one KV head's keys, then `_merge_cuts` adds the
cuts in ascending order. Sequences with more rows go to `prefill`, which walks its cuts in that order in one program.

Invariant: decode and prefill reduce a cut with the same chain of operations. Both give 64 query rows to a group of
four warps, so that a row's scores lie in one warp and its sum runs in one order, and both write every sum that reaches
a row as fma, so that no compiler contracts one and not the other. The chains are `_decode`'s loop and `merge` here,
`_softmax`, `_walk` and `_merge` in prefill.py.

Shape letters: M query rows of a tile (a row is one head of one token), B keys of a tile, C channels of a head,
G KV heads, H query heads, N rows of the call, S sequences.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.early import launch_early, starts_early
from kernels.paged_attention import prefill
from schemas.errors import ContractError

LOG2_E = 1.4426950408889634
#: The warp group's product has 64 rows, whatever part of them is in use.
DECODE_ROWS = 64
#: Triton counts the page lookup as a stage of its own, and halves the rest: 5 gives three buffers of keys and values.
DECODE_STAGES = 5
#: Heads that one program merges where sequences have few cuts, so that programs are few.
MERGED_HEADS, FEW_CUTS = 8, 4
#: Keys of one tile, for decode and prefill alike: they decide bits, so it is one number for pages of any size.
KEYS = 64


@triton.jit
def merge(total_MC, total_max_M, total_sum_M, acc_MC, max_M, sum_M):
    """Add a finished cut to the total of the cuts before it."""
    new_max_M = tl.maximum(total_max_M, max_M)
    old_M = tl.exp2(total_max_M - new_max_M)
    new_M = tl.exp2(max_M - new_max_M)
    total_sum_M = tl.fma(sum_M, new_M, total_sum_M * old_M)
    total_MC = tl.fma(acc_MC, tl.broadcast_to(new_M[:, None], acc_MC.shape), total_MC * old_M[:, None])
    return total_MC, new_max_M, total_sum_M


# The width is not worth a kernel of its own.
@triton.jit(do_not_specialize=["table_width"])
def _decode(
    q_ptr,
    k_desc,
    v_desc,
    table_ptr,
    cu_rows_ptr,
    kv_tokens_ptr,
    acc_ptr,
    stats_ptr,
    o_ptr,
    table_width,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    C: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    starts_early(EARLY)
    # KV heads vary fastest: programs that run side by side read neighbouring bytes of the same tokens.
    kv_head = tl.program_id(0)
    cut = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(cu_rows_ptr + sequence)
    rows = tl.load(cu_rows_ptr + sequence + 1) - first_row
    kv_tokens = tl.load(kv_tokens_ptr + sequence)
    if (rows != 1) | (cut * SPLIT >= kv_tokens):
        return
    m_M = tl.arange(0, ROWS)
    head_M = kv_head * GROUP + tl.minimum(m_M, GROUP - 1)
    channel_C = tl.arange(0, C)
    q_MC = tl.load(q_ptr + first_row.to(tl.int64) * (HEADS * C) + head_M[:, None] * C + channel_C[None, :])
    acc_MC = tl.zeros([ROWS, C], tl.float32)
    max_M = tl.full([ROWS], float("-inf"), tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)
    table_ptr += sequence.to(tl.int64) * table_width
    last = tl.minimum((cut + 1) * SPLIT, kv_tokens)
    for key in tl.range(cut * SPLIT, last, KEYS, num_stages=STAGES):
        slot = tl.load(table_ptr + key // PAGE) * PAGE + key % PAGE
        k_BC = k_desc.load([slot, kv_head * C])
        v_BC = v_desc.load([slot, kv_head * C])
        key_B = key + tl.arange(0, KEYS)
        score_MB = tl.where(key_B[None, :] < kv_tokens, tl.dot(q_MC, tl.trans(k_BC)), float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(score_MB, 1) * scale)
        weight_MB = tl.exp2(tl.fma(score_MB, scale, -new_max_M[:, None]))
        decay_M = tl.exp2(max_M - new_max_M)
        sum_M = tl.fma(sum_M, decay_M, tl.sum(weight_MB, 1))
        max_M = new_max_M
        acc_MC = tl.dot(weight_MB.to(v_BC.dtype), v_BC, acc_MC * decay_M[:, None])
    used_M = m_M < GROUP
    if kv_tokens <= SPLIT:
        # What `_merge_cuts` would make of one cut: it multiplies by one and adds zero.
        o_MC = (acc_MC / sum_M[:, None]).to(o_ptr.dtype.element_ty)
        o_ptrs = o_ptr + first_row.to(tl.int64) * (HEADS * C) + head_M[:, None] * C + channel_C[None, :]
        tl.store(o_ptrs, o_MC, mask=used_M[:, None])
        return
    partial_M = (sequence.to(tl.int64) * tl.num_programs(1) + cut) * HEADS + head_M
    tl.store(acc_ptr + partial_M[:, None] * C + channel_C[None, :], acc_MC, mask=used_M[:, None])
    tl.store(stats_ptr + partial_M * 2, max_M, mask=used_M)
    tl.store(stats_ptr + partial_M * 2 + 1, sum_M, mask=used_M)


@triton.jit(do_not_specialize=["cuts"])
def _merge_cuts(
    acc_ptr,
    stats_ptr,
    cu_rows_ptr,
    kv_tokens_ptr,
    o_ptr,
    cuts,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    TOGETHER: tl.constexpr,
    UNROLL: tl.constexpr,
    EARLY: tl.constexpr,
):
    starts_early(EARLY)
    sequence = tl.program_id(0)
    first_row = tl.load(cu_rows_ptr + sequence)
    if tl.load(cu_rows_ptr + sequence + 1) - first_row != 1:
        return
    kv_tokens = tl.load(kv_tokens_ptr + sequence)
    if kv_tokens <= SPLIT:
        return
    head_M = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    channel_C = tl.arange(0, C)
    total_MC = tl.zeros([TOGETHER, C], tl.float32)
    total_max_M = tl.full([TOGETHER], float("-inf"), tl.float32)
    total_sum_M = tl.zeros([TOGETHER], tl.float32)
    # Unrolled, so that several cuts are on their way at once.
    for cut in tl.range(0, tl.cdiv(kv_tokens, SPLIT), loop_unroll_factor=UNROLL):
        partial_M = (sequence.to(tl.int64) * cuts + cut) * HEADS + head_M
        acc_MC = tl.load(acc_ptr + partial_M[:, None] * C + channel_C[None, :])
        max_M = tl.load(stats_ptr + partial_M * 2)
        sum_M = tl.load(stats_ptr + partial_M * 2 + 1)
        total_MC, total_max_M, total_sum_M = merge(total_MC, total_max_M, total_sum_M, acc_MC, max_M, sum_M)
    o_MC = total_MC / total_sum_M[:, None]
    offset_MC = first_row.to(tl.int64) * (HEADS * C) + head_M[:, None] * C + channel_C[None, :]
    tl.store(o_ptr + offset_MC, o_MC.to(o_ptr.dtype.element_ty))


def paged_attention(
    q_NHC: torch.Tensor,
    k_cache_PTGC: torch.Tensor,
    v_cache_PTGC: torch.Tensor,
    page_table_SP: torch.Tensor,
    cu_rows_S1: torch.Tensor,
    kv_tokens_S: torch.Tensor,
    *,
    split_tokens: int,
    single_rows: bool = False,
) -> torch.Tensor:
    """The contract of `kernels.paged_attention` for bf16 on CUDA: C 64 or 128, pages and cuts multiples of 64 tokens.

    The caches hold finite numbers everywhere, also past a sequence's last token: allocate them zeroed.
    Scratch: S * cuts * H * (C + 2) * 4 bytes, cuts = tokens of the page table's width / split_tokens, rounded up; none
    for one cut.
    """
    rows, heads, channels = q_NHC.shape
    pages, page_tokens, kv_heads, _ = k_cache_PTGC.shape
    sequences, table_width = page_table_SP.shape
    if page_tokens % KEYS or split_tokens % KEYS:
        raise ContractError(
            "paged_attention on CUDA", expected="pages and cuts of a multiple of 64 tokens",
            found=f"pages of {page_tokens}, cuts of {split_tokens}",
        )  # fmt: skip
    if channels not in (64, 128):
        raise ContractError("paged_attention on CUDA", expected="heads of 64 or 128 channels", found=str(channels))
    o_NHC = torch.empty_like(q_NHC)
    if rows == 0:
        return o_NHC
    caches = [cache.view(pages * page_tokens, kv_heads * channels) for cache in (k_cache_PTGC, v_cache_PTGC)]
    tables = (page_table_SP, cu_rows_S1, kv_tokens_S)
    scale = channels**-0.5 * LOG2_E
    sizes = {"HEADS": heads, "C": channels, "SPLIT": split_tokens}
    tile = {"GROUP": heads // kv_heads, "PAGE": page_tokens, "KEYS": KEYS, **sizes}
    cuts = -(-table_width * page_tokens // split_tokens)
    parts = sequences * cuts * heads if cuts > 1 else 0
    acc = torch.empty(parts * channels, dtype=torch.float32, device=q_NHC.device)
    stats = torch.empty(parts * 2, dtype=torch.float32, device=q_NHC.device)
    descriptors = [TensorDescriptor.from_tensor(cache, [KEYS, channels]) for cache in caches]
    _decode[(kv_heads, cuts, sequences)](
        q_NHC,
        *descriptors,
        *tables,
        acc,
        stats,
        o_NHC,
        table_width,
        scale,
        ROWS=DECODE_ROWS,
        STAGES=DECODE_STAGES,
        num_warps=4,
        **launch_early(q_NHC.device),
        **tile,
    )
    if cuts > 1:
        # One head a program where there are many cuts, since what a cut adds waits for the cut before it.
        together = math.gcd(heads, MERGED_HEADS) if cuts <= FEW_CUTS else 1
        options: dict[str, Any] = launch_early(q_NHC.device) | sizes
        options |= {"TOGETHER": together, "UNROLL": 8 if together == 1 else 2, "num_warps": 1}
        _merge_cuts[(sequences, heads // together)](acc, stats, cu_rows_S1, kv_tokens_S, o_NHC, cuts, **options)
    # As many sequences as rows may still hide a chunk beside an empty sequence; one row cannot.
    if rows > 1 and not single_rows:
        prefill.prefill(q_NHC, *caches, *tables, o_NHC, scale, tile)
    return o_NHC
