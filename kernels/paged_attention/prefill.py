"""Prefill over pages: 128 query rows a program, two warp groups that compute and one warp that loads.

The loader streams tiles of keys and values through a ring in shared memory. Each computing group owns 64 rows and
walks all tiles in order, so that one group's softmax runs beside the other's products. Invariant: see kernel.py; a
group's chain of operations is that of `_decode`, tile for tile, and a tile that a row may not see leaves its numbers
as they are.

Shape letters: M query rows of a group (a row is one head of one token), B keys of a tile, C channels of a head.
"""

# Kernels are written in Gluon's own types, which pyright takes for Python's.
# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

#: Query rows of a program. Tile t of sequence s is program cu_rows[s] * GROUP // ROWS + s + t, which leaves gaps but
#: needs no table; programs in a gap return at once.
ROWS = gl.constexpr(128)


@gluon.jit
def _load(
    k_desc,
    v_desc,
    k_smem,
    v_smem,
    k_full,
    v_full,
    empty,
    table_ptr,
    kv_head,
    tiles,
    C: gl.constexpr,
    PAGE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    for tile in range(tiles):
        key = tile * KEYS
        row = gl.load(table_ptr + key // PAGE) * PAGE + key % PAGE
        slot = tile % STAGES
        mbarrier.wait(empty.index(slot), ((tile // STAGES) & 1) ^ 1)
        mbarrier.expect(k_full.index(slot), KEYS * C * 2)
        tma.async_copy_global_to_shared(k_desc, [row, kv_head * C], k_full.index(slot), k_smem.index(slot))
        mbarrier.expect(v_full.index(slot), KEYS * C * 2)
        tma.async_copy_global_to_shared(v_desc, [row, kv_head * C], v_full.index(slot), v_smem.index(slot))


@gluon.jit
def _column(x_M, layout: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(x_M, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def _merge(total_MC, total_max_M, total_sum_M, acc_MC, max_M, sum_M):
    layout: gl.constexpr = acc_MC.type.layout
    new_max_M = gl.maximum(total_max_M, max_M)
    old_M = gl.exp2(total_max_M - new_max_M)
    new_M = gl.exp2(max_M - new_max_M)
    total_sum_M = gl.fma(sum_M, new_M, total_sum_M * old_M)
    acc_MC, new_MC = gl.broadcast(acc_MC, _column(new_M, layout))
    return gl.fma(acc_MC, new_MC, total_MC * _column(old_M, layout)), new_max_M, total_sum_M


@gluon.jit
def _walk(
    first_tile,
    last_tile,
    q_smem,
    k_smem,
    v_smem,
    k_full,
    v_full,
    empty,
    position_M,
    scale,
    token_MC,
    max_M,
    sum_M,
    total_MC,
    total_max_M,
    total_sum_M,
    SPLIT: gl.constexpr,
    MASK: gl.constexpr,
    s_layout: gl.constexpr,
    o_layout: gl.constexpr,
):
    """Fold tiles into (weighted values, max, sum) of the cut at hand, and finished cuts into the totals.

    token_MC stands for weighted values whose last product still runs: the next tile's scores are issued behind it.
    """
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    C: gl.constexpr = k_smem.shape[2]
    for tile in range(first_tile, last_tile):
        key = tile * KEYS
        slot = tile % STAGES
        phase = (tile // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        zero_MB = gl.zeros([64, KEYS], gl.float32, s_layout)
        s_token = warpgroup_mma(q_smem, k_smem.index(slot).permute((1, 0)), zero_MB, use_acc=False, is_async=True)
        score_MB, acc_MC = warpgroup_mma_wait(0, deps=(s_token, token_MC))
        # One thread speaks for the group, so all of it must be past the wait.
        gl.thread_barrier()
        mbarrier.arrive(empty.index((tile + STAGES - 1) % STAGES), count=1, pred=tile > 0)
        if (key > 0) & (key % SPLIT == 0):
            total_MC, total_max_M, total_sum_M = _merge(total_MC, total_max_M, total_sum_M, acc_MC, max_M, sum_M)
            acc_MC = gl.zeros([64, C], gl.float32, o_layout)
            max_M = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
            sum_M = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
        if MASK:
            key_B = key + gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
            score_MB = gl.where(key_B[None, :] <= position_M[:, None], score_MB, float("-inf"))
        new_max_M = gl.maximum(max_M, gl.max(score_MB, 1) * scale)
        shift_M = new_max_M
        if MASK:
            # A row that sees nothing of its cut so far: its exponentials are 0, not exp2(-inf + inf).
            shift_M = gl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        scale_MB = gl.full([64, KEYS], 1.0, gl.float32, s_layout) * scale
        score_MB, shift_MB = gl.broadcast(score_MB, -shift_M[:, None])
        weight_MB = gl.exp2(gl.fma(score_MB, scale_MB, shift_MB))
        decay_M = gl.exp2(max_M - shift_M)
        sum_M = gl.fma(sum_M, decay_M, gl.sum(weight_MB, 1))
        max_M = new_max_M
        acc_MC = acc_MC * _column(decay_M, o_layout)
        weight_MB = gl.convert_layout(weight_MB.to(gl.bfloat16), gl.DotOperandLayout(0, o_layout, 2))
        mbarrier.wait(v_full.index(slot), phase)
        token_MC = warpgroup_mma(weight_MB, v_smem.index(slot), acc_MC, is_async=True)
    return token_MC, max_M, sum_M, total_MC, total_max_M, total_sum_M


@gluon.jit
def _compute(
    HALF: gl.constexpr,
    q_ptr,
    o_ptr,
    q_smem,
    k_smem,
    v_smem,
    k_full,
    v_full,
    empty,
    first_row,
    rows,
    kv_tokens,
    first_m,
    kv_head,
    tiles,
    scale,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """64 query rows: number HALF of the program's two groups."""
    KEYS: gl.constexpr = k_smem.shape[1]
    C: gl.constexpr = k_smem.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
    first = first_m + HALF * 64
    # Rows past the end repeat the last one, so that no lane computes with numbers that nobody wrote.
    last_m = rows * GROUP - 1
    q_M = gl.minimum(first + gl.arange(0, 64, gl.SliceLayout(1, q_layout)), last_m)
    q_M = (first_row + q_M // GROUP).to(gl.int64) * (HEADS * C) + (kv_head * GROUP + q_M % GROUP) * C
    q_half = q_smem.index(HALF)
    q_half.store(gl.load(q_ptr + q_M[:, None] + gl.arange(0, C, gl.SliceLayout(0, q_layout))[None, :]))
    fence_async_shared()
    gl.thread_barrier()
    position_M = kv_tokens - rows + gl.minimum(first + gl.arange(0, 64, row_layout), last_m) // GROUP
    first_position = kv_tokens - rows + gl.minimum(first, last_m) // GROUP
    unmasked = gl.minimum((first_position + 1) // KEYS, tiles)
    token_MC = warpgroup_mma_init(gl.zeros([64, C], gl.float32, o_layout))
    max_M = gl.full([64], float("-inf"), gl.float32, row_layout)
    sum_M = gl.zeros([64], gl.float32, row_layout)
    total_MC = gl.zeros([64, C], gl.float32, o_layout)
    total_max_M = gl.full([64], float("-inf"), gl.float32, row_layout)
    total_sum_M = gl.zeros([64], gl.float32, row_layout)
    token_MC, max_M, sum_M, total_MC, total_max_M, total_sum_M = _walk(
        0, unmasked, q_half, k_smem, v_smem, k_full, v_full, empty, position_M, scale,
        token_MC, max_M, sum_M, total_MC, total_max_M, total_sum_M, SPLIT, False, s_layout, o_layout,
    )  # fmt: skip
    token_MC, max_M, sum_M, total_MC, total_max_M, total_sum_M = _walk(
        unmasked, tiles, q_half, k_smem, v_smem, k_full, v_full, empty, position_M, scale,
        token_MC, max_M, sum_M, total_MC, total_max_M, total_sum_M, SPLIT, True, s_layout, o_layout,
    )  # fmt: skip
    acc_MC = warpgroup_mma_wait(0, deps=(token_MC,))
    total_MC, total_max_M, total_sum_M = _merge(total_MC, total_max_M, total_sum_M, acc_MC, max_M, sum_M)
    o_MC = total_MC / _column(total_sum_M, o_layout)
    m_M = first + gl.arange(0, 64, gl.SliceLayout(1, o_layout))
    o_M = gl.minimum(m_M, last_m)
    o_M = (first_row + o_M // GROUP).to(gl.int64) * (HEADS * C) + (kv_head * GROUP + o_M % GROUP) * C
    o_ptrs = o_ptr + o_M[:, None] + gl.arange(0, C, gl.SliceLayout(0, o_layout))[None, :]
    gl.store(o_ptrs, o_MC.to(gl.bfloat16), mask=(m_M <= last_m)[:, None])


@gluon.jit
def _prefill(
    q_ptr,
    k_desc,
    v_desc,
    table_ptr,
    cu_rows_ptr,
    kv_tokens_ptr,
    o_ptr,
    sequences,
    table_width,
    scale,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    C: gl.constexpr,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    kv_head = gl.program_id(0)
    # The last tiles of a sequence have the most keys: they start first, short ones fill the tail.
    program = gl.num_programs(1) - 1 - gl.program_id(1)
    low = 0
    high = sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if gl.load(cu_rows_ptr + middle) * GROUP // ROWS + middle <= program:
            low = middle
        else:
            high = middle - 1
    first_row = gl.load(cu_rows_ptr + low)
    rows = gl.load(cu_rows_ptr + low + 1) - first_row
    first_m = (program - (first_row * GROUP // ROWS + low)) * ROWS
    if (rows > 1) & (first_m < rows * GROUP):
        kv_tokens = gl.load(kv_tokens_ptr + low)
        last_position = kv_tokens - rows + gl.minimum(first_m + ROWS - 1, rows * GROUP - 1) // GROUP
        tiles = (last_position + KEYS) // KEYS
        table_ptr += low.to(gl.int64) * table_width
        q_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, C], gl.bfloat16)
        q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, C], q_shape)
        k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, C], k_desc.layout)
        v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, C], v_desc.layout)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_compute, (0, q_ptr, o_ptr, q_smem, k_smem, v_smem, k_full, v_full, empty, first_row, rows, kv_tokens,
                            first_m, kv_head, tiles, scale, HEADS, GROUP, SPLIT)),
                (_compute, (1, q_ptr, o_ptr, q_smem, k_smem, v_smem, k_full, v_full, empty, first_row, rows, kv_tokens,
                            first_m, kv_head, tiles, scale, HEADS, GROUP, SPLIT)),
                (_load, (k_desc, v_desc, k_smem, v_smem, k_full, v_full, empty, table_ptr, kv_head, tiles, C, PAGE,
                         KEYS, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def prefill(
    q_NHC: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    page_table_SP: torch.Tensor,
    cu_rows_S1: torch.Tensor,
    kv_tokens_S: torch.Tensor,
    o_NHC: torch.Tensor,
    scale: float,
    tile: dict[str, int],
) -> None:
    """Write the output rows of every sequence with two rows or more; leave the others.

    k_rows, v_rows: the caches as [P * T, G * C]. tile: HEADS, GROUP, C, PAGE, SPLIT and KEYS of kernel.py.
    """
    rows, heads, channels = q_NHC.shape
    sequences, table_width = page_table_SP.shape
    box = [tile["KEYS"], channels]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    descriptors = [TensorDescriptor.from_tensor(cache, box, layout) for cache in (k_rows, v_rows)]
    programs = rows * tile["GROUP"] // ROWS.value + sequences
    _prefill[(heads // tile["GROUP"], programs)](
        q_NHC,
        *descriptors,
        page_table_SP,
        cu_rows_S1,
        kv_tokens_S,
        o_NHC,
        sequences,
        table_width,
        scale,
        STAGES=2 if box == [128, 128] else 3,
        num_warps=4,
        **tile,
    )
