"""Prefill over pages: 64 query rows a program, one warp group that walks tiles of keys.

Tiles of keys and values stream through a ring in shared memory. The product of a tile's weights and values runs while
the next tile's softmax is computed, and two or three programs share a multiprocessor. Warps have no roles: from a
kernel that gives them different numbers of registers (`warp_specialize`) ptxas takes the smallest, and then waits for
each product in turn (kernels/BENCH.md).
Invariant: see kernel.py; the chain of operations is that of `_decode`, tile for tile, and a tile that a row may not
see leaves its numbers as they are.

Shape letters: M query rows of a program (a row is one head of one token), B keys of a tile, C channels of a head.
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
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

#: Query rows of a program. Tile t of sequence s is program cu_rows[s] * GROUP // ROWS + s + t, which leaves gaps but
#: needs no table; programs in a gap return at once.
ROWS = gl.constexpr(64)
WARPS = 4
#: By channels, tiles in shared memory, as many as leave room for the programs that registers allow. At least three: one
#: is multiplied with its values, one gives scores, and one is on its way.
STAGES = {64: 4, 128: 3}


@gluon.jit
def _load(tile, tiles, k_desc, v_desc, k_smem, v_smem, full, table_ptr, kv_head, PAGE: gl.constexpr):
    """Start to bring a tile's keys and values; none past the last tile."""
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    C: gl.constexpr = k_smem.shape[2]
    if tile < tiles:
        slot = tile % STAGES
        key = tile * KEYS
        row = gl.load(table_ptr + key // PAGE) * PAGE + key % PAGE
        mbarrier.expect(full.index(slot), 2 * KEYS * C * 2)
        tma.async_copy_global_to_shared(k_desc, [row, kv_head * C], full.index(slot), k_smem.index(slot))
        tma.async_copy_global_to_shared(v_desc, [row, kv_head * C], full.index(slot), v_smem.index(slot))


@gluon.jit
def _wait_for(tile, full):
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(tile % STAGES), (tile // STAGES) & 1)


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
def _scores(q_smem, k_smem, tile, s_layout: gl.constexpr):
    """Start the product of the queries and a tile's keys."""
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    zero_MB = gl.zeros([ROWS, KEYS], gl.float32, s_layout)
    k_CB = k_smem.index(tile % STAGES).permute((1, 0))
    return warpgroup_mma(q_smem, k_CB, zero_MB, use_acc=False, is_async=True)


@gluon.jit
def _softmax(score_MB, key, position_M, scale, max_M, sum_M, MASK: gl.constexpr, o_layout: gl.constexpr):
    """The tile's weights in bf16, what they make of the cut's values so far, and the cut's new max and sum."""
    s_layout: gl.constexpr = score_MB.type.layout
    if MASK:
        key_B = key + gl.arange(0, score_MB.shape[1], gl.SliceLayout(0, s_layout))
        score_MB = gl.where(key_B[None, :] <= position_M[:, None], score_MB, float("-inf"))
    new_max_M = gl.maximum(max_M, gl.max(score_MB, 1) * scale)
    shift_M = new_max_M
    if MASK:
        # A row that sees nothing of its cut so far: its exponentials are 0, not exp2(-inf + inf).
        shift_M = gl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    scale_MB = gl.full(score_MB.shape, 1.0, gl.float32, s_layout) * scale
    score_MB, shift_MB = gl.broadcast(score_MB, -shift_M[:, None])
    weight_MB = gl.exp2(gl.fma(score_MB, scale_MB, shift_MB))
    decay_M = gl.exp2(max_M - shift_M)
    sum_M = gl.fma(sum_M, decay_M, gl.sum(weight_MB, 1))
    weight_MB = gl.convert_layout(weight_MB.to(gl.bfloat16), gl.DotOperandLayout(0, o_layout, 2))
    return weight_MB, decay_M, new_max_M, sum_M


@gluon.jit
def _walk(
    first_tile,
    last_tile,
    tiles,
    q_smem,
    k_smem,
    v_smem,
    full,
    k_desc,
    v_desc,
    table_ptr,
    kv_head,
    position_M,
    scale,
    weight_MB,
    acc_MC,
    max_M,
    sum_M,
    total_MC,
    total_max_M,
    total_sum_M,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    MASK: gl.constexpr,
):
    """Fold tiles into (weighted values, max, sum) of the cut at hand, and finished cuts into the totals.

    weight_MB are those of the tile before, not yet multiplied with its values; that product is begun behind this
    tile's scores. This tile has arrived already.
    """
    row_layout: gl.constexpr = max_M.type.layout
    s_layout: gl.constexpr = row_layout.parent
    o_layout: gl.constexpr = acc_MC.type.layout
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    for tile in range(first_tile, last_tile):
        key = tile * KEYS
        s_token = _scores(q_smem, k_smem, tile, s_layout)
        o_token = warpgroup_mma(weight_MB, v_smem.index((tile - 1) % STAGES), acc_MC, is_async=True)
        score_MB = warpgroup_mma_wait(1, deps=(s_token,))
        ends = key % SPLIT == 0
        cut_max_M = max_M
        cut_sum_M = sum_M
        if ends:
            max_M = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
            sum_M = gl.zeros([ROWS], gl.float32, row_layout)
        weight_MB, decay_M, max_M, sum_M = _softmax(score_MB, key, position_M, scale, max_M, sum_M, MASK, o_layout)
        # Here, since a loop keeps the compiler from waiting for the product before the exponentials.
        _wait_for(gl.minimum(tile + 1, tiles - 1), full)
        acc_MC = warpgroup_mma_wait(0, deps=(o_token,))
        # All warps are past the tile before.
        gl.thread_barrier()
        _load(tile - 1 + STAGES, tiles, k_desc, v_desc, k_smem, v_smem, full, table_ptr, kv_head, PAGE)
        if ends:
            total_MC, total_max_M, total_sum_M = _merge(
                total_MC, total_max_M, total_sum_M, acc_MC, cut_max_M, cut_sum_M
            )
            acc_MC = gl.zeros(acc_MC.shape, gl.float32, o_layout)
        acc_MC = acc_MC * _column(decay_M, o_layout)
    return weight_MB, acc_MC, max_M, sum_M, total_MC, total_max_M, total_sum_M


# Long: the rings of keys and values, their barriers and layouts are made and used in one scope.
# Neither number is worth a kernel of its own.
@gluon.jit(do_not_specialize=["sequences", "table_width"])
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
        s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KEYS, 16])
        o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, C, 16])
        row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
        q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [num_warps, 1], [1, 0])
        q_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C], gl.bfloat16)
        q_smem = gl.allocate_shared_memory(gl.bfloat16, [ROWS, C], q_shape)
        k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, C], k_desc.layout)
        v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, C], v_desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
        fence_async_shared()
        gl.thread_barrier()
        for i in gl.static_range(STAGES):
            _load(i, tiles, k_desc, v_desc, k_smem, v_smem, full, table_ptr, kv_head, PAGE)
        # Rows past the end repeat the last one, so that no lane computes with numbers that nobody wrote.
        last_m = rows * GROUP - 1
        q_M = gl.minimum(first_m + gl.arange(0, ROWS, gl.SliceLayout(1, q_layout)), last_m)
        q_M = (first_row + q_M // GROUP).to(gl.int64) * (HEADS * C) + (kv_head * GROUP + q_M % GROUP) * C
        q_smem.store(gl.load(q_ptr + q_M[:, None] + gl.arange(0, C, gl.SliceLayout(0, q_layout))[None, :]))
        fence_async_shared()
        gl.thread_barrier()
        position_M = kv_tokens - rows + gl.minimum(first_m + gl.arange(0, ROWS, row_layout), last_m) // GROUP
        first_position = kv_tokens - rows + first_m // GROUP
        unmasked = gl.maximum(gl.minimum((first_position + 1) // KEYS, tiles), 1)
        acc_MC = gl.zeros([ROWS, C], gl.float32, o_layout)
        max_M = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        sum_M = gl.zeros([ROWS], gl.float32, row_layout)
        total_MC = gl.zeros([ROWS, C], gl.float32, o_layout)
        total_max_M = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        total_sum_M = gl.zeros([ROWS], gl.float32, row_layout)
        _wait_for(0, full)
        score_MB = warpgroup_mma_wait(0, deps=(_scores(q_smem, k_smem, 0, s_layout),))
        weight_MB, _, max_M, sum_M = _softmax(score_MB, 0, position_M, scale, max_M, sum_M, True, o_layout)
        _wait_for(gl.minimum(1, tiles - 1), full)
        weight_MB, acc_MC, max_M, sum_M, total_MC, total_max_M, total_sum_M = _walk(
            1, unmasked, tiles, q_smem, k_smem, v_smem, full, k_desc, v_desc, table_ptr, kv_head, position_M, scale,
            weight_MB, acc_MC, max_M, sum_M, total_MC, total_max_M, total_sum_M, PAGE, SPLIT, False,
        )  # fmt: skip
        weight_MB, acc_MC, max_M, sum_M, total_MC, total_max_M, total_sum_M = _walk(
            unmasked, tiles, tiles, q_smem, k_smem, v_smem, full, k_desc, v_desc, table_ptr, kv_head, position_M, scale,
            weight_MB, acc_MC, max_M, sum_M, total_MC, total_max_M, total_sum_M, PAGE, SPLIT, True,
        )  # fmt: skip
        o_token = warpgroup_mma(weight_MB, v_smem.index((tiles - 1) % STAGES), acc_MC, is_async=True)
        acc_MC = warpgroup_mma_wait(0, deps=(o_token,))
        total_MC, total_max_M, total_sum_M = _merge(total_MC, total_max_M, total_sum_M, acc_MC, max_M, sum_M)
        o_MC = total_MC / _column(total_sum_M, o_layout)
        m_M = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))
        o_M = gl.minimum(m_M, last_m)
        o_M = (first_row + o_M // GROUP).to(gl.int64) * (HEADS * C) + (kv_head * GROUP + o_M % GROUP) * C
        o_ptrs = o_ptr + o_M[:, None] + gl.arange(0, C, gl.SliceLayout(0, o_layout))[None, :]
        gl.store(o_ptrs, o_MC.to(gl.bfloat16), mask=(m_M <= last_m)[:, None])


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
        STAGES=STAGES[channels],
        num_warps=WARPS,
        **tile,
    )
