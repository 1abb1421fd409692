"""The operations between the products on the GPU, each one pass: what is read is read once, in fp32, rounded once.

Invariant: a row is the work of programs that see nothing else, of a shape that the widths alone decide, so its bits
do not depend on the number of rows. Rows may lie apart, as the parts of one wide product do.

Shape letters: N rows, D width, I feed-forward width, H query heads, G KV heads, C channels, M positions, X heads of a
program, B columns of a program.
"""

# Triton adds launch options to a kernel's own parameters and calls kernels from kernels; the type checker sees neither.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.early import launch_early, starts_early

_GATE_COLUMNS = 1024
_HEADS = 8


def rms_norm(x_ND, weight_D, epsilon):
    y_ND = torch.empty(x_ND.shape, dtype=x_ND.dtype, device=x_ND.device)
    _launch_norm(x_ND, x_ND, weight_D, x_ND, y_ND, epsilon, add=False)
    return y_ND


def add_rms_norm(h_ND, delta_ND, weight_D, epsilon):
    sum_ND = torch.empty(h_ND.shape, dtype=h_ND.dtype, device=h_ND.device)
    y_ND = torch.empty_like(sum_ND)
    _launch_norm(h_ND, delta_ND, weight_D, sum_ND, y_ND, epsilon, add=True)
    return sum_ND, y_ND


def _launch_norm(x_ND, delta_ND, weight_D, sum_ND, y_ND, epsilon, *, add):
    rows, width = x_ND.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(width)
    strides = x_ND.stride(0), delta_ND.stride(0)
    _rms_norm[(rows,)](
        x_ND, delta_ND, weight_D, sum_ND, y_ND, *strides, width, epsilon,
        ADD=add, BLOCK=block, num_warps=min(8, max(1, block // 256)),
        **launch_early(x_ND.device),
    )  # fmt: skip


def silu_gate(gate_NI, up_NI):
    rows, width = gate_NI.shape
    y_NI = torch.empty(rows, width, dtype=gate_NI.dtype, device=gate_NI.device)
    if y_NI.numel():
        tiles = triton.cdiv(width, _GATE_COLUMNS)
        _silu_gate[(rows * tiles,)](
            gate_NI, up_NI, y_NI, gate_NI.stride(0), up_NI.stride(0), width, tiles, BLOCK=_GATE_COLUMNS, num_warps=4,
            **launch_early(gate_NI.device),
        )  # fmt: skip
    return y_NI


def rotate(q_NHC, k_NGC, rotary, norms):
    turned_NGC = torch.empty(k_NGC.shape, dtype=k_NGC.dtype, device=k_NGC.device)
    return _launch_rotate(q_NHC, k_NGC, None, rotary, norms, turned_NGC, None, None), turned_NGC


def rotate_into_pages(q_NHC, k_NGC, v_NGC, rotary, norms, k_PTGC, v_PTGC, slots_N):
    return _launch_rotate(q_NHC, k_NGC, v_NGC, rotary, norms, k_PTGC, v_PTGC, slots_N)


def _launch_rotate(q_NHC, k_NGC, v_NGC, rotary, norms, k_slots, v_slots, slots_N):
    """k_slots and v_slots: contiguous [slots, G, C]. Without slots_N row n goes to slot n; without v_NGC no value."""
    rows, heads, channels = q_NHC.shape
    kv_heads, half = k_NGC.shape[1], channels // 2
    turned_NHC = torch.empty(q_NHC.shape, dtype=q_NHC.dtype, device=q_NHC.device)
    if rows == 0:
        return turned_NHC
    q_tiles, kv_tiles = triton.cdiv(heads, _HEADS), triton.cdiv(kv_heads, _HEADS)
    # What a launch does not read, a pointer of the right type stands for.
    q_weight_C, k_weight_C, epsilon = rotary.cos_MC, rotary.cos_MC, 0.0
    if norms is not None:
        q_weight_C, k_weight_C, epsilon = norms.q_weight_C, norms.k_weight_C, norms.epsilon
    values = k_NGC if v_NGC is None else v_NGC
    # Rows and tiles on one axis: the others end at 65,535.
    tiles = q_tiles + (1 if v_NGC is None else 2) * kv_tiles
    _rotate[(rows * tiles,)](
        q_NHC, k_NGC, values, rotary.cos_MC, rotary.sin_MC, rotary.positions_N, q_weight_C, k_weight_C, turned_NHC,
        k_slots, k_slots if v_slots is None else v_slots, rotary.positions_N if slots_N is None else slots_N,
        q_NHC.stride(0), k_NGC.stride(0), values.stride(0), epsilon, tiles,
        HEADS=heads, KV_HEADS=kv_heads, Q_TILES=q_tiles, KV_TILES=kv_tiles, HALF=half,
        BLOCK_C=triton.next_power_of_2(half), BLOCK_X=_HEADS, NORM=norms is not None, SLOTS=slots_N is not None,
        num_warps=4, **launch_early(q_NHC.device),
    )  # fmt: skip
    return turned_NHC


@triton.jit
def _rms_norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    x_stride,
    delta_stride,
    width,
    epsilon,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    starts_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column_B = tl.arange(0, BLOCK)
    inside_B = column_B < width
    x_B = tl.load(x_ptr + row * x_stride + column_B, mask=inside_B, other=0.0).to(tl.float32)
    weight_B = tl.load(weight_ptr + column_B, mask=inside_B, other=0.0).to(tl.float32)
    if ADD:
        x_B += tl.load(delta_ptr + row * delta_stride + column_B, mask=inside_B, other=0.0).to(tl.float32)
        # The norm is that of the stream as it is stored.
        rounded_B = x_B.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + column_B, rounded_B, mask=inside_B)
        x_B = rounded_B.to(tl.float32)
    mean = tl.sum(x_B * x_B, 0) / width
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))
    y_B = (x_B * scale) * weight_B
    tl.store(y_ptr + row * width + column_B, y_B.to(y_ptr.dtype.element_ty), mask=inside_B)


@triton.jit
def _silu_gate(gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, width, tiles, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    starts_early(EARLY)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column_B = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    inside_B = column_B < width
    gate_B = tl.load(gate_ptr + row * gate_stride + column_B, mask=inside_B, other=0.0).to(tl.float32)
    up_B = tl.load(up_ptr + row * up_stride + column_B, mask=inside_B, other=0.0).to(tl.float32)
    y_B = gate_B / (1.0 + tl.exp(-gate_B)) * up_B
    tl.store(y_ptr + row * width + column_B, y_B.to(y_ptr.dtype.element_ty), mask=inside_B)


@triton.jit
def _rotate(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    q_weight_ptr,
    k_weight_ptr,
    turned_ptr,
    k_slots_ptr,
    v_slots_ptr,
    slots_ptr,
    q_stride,
    k_stride,
    v_stride,
    epsilon,
    tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_TILES: tl.constexpr,
    KV_TILES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_X: tl.constexpr,
    NORM: tl.constexpr,
    SLOTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    starts_early(EARLY)
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64) if SLOTS else row
    if tile < Q_TILES:
        x_ptr, y_ptr, weight_ptr = q_ptr + row * q_stride, turned_ptr + row * (HEADS * HALF * 2), q_weight_ptr
        first, heads = tile * BLOCK_X, HEADS
    elif tile < Q_TILES + KV_TILES:
        x_ptr, y_ptr, weight_ptr = k_ptr + row * k_stride, k_slots_ptr + slot * (KV_HEADS * HALF * 2), k_weight_ptr
        first, heads = (tile - Q_TILES) * BLOCK_X, KV_HEADS
    else:
        x_ptr, y_ptr, weight_ptr = v_ptr + row * v_stride, v_slots_ptr + slot * (KV_HEADS * HALF * 2), k_weight_ptr
        first, heads = (tile - Q_TILES - KV_TILES) * BLOCK_X, KV_HEADS
    head_X = first + tl.arange(0, BLOCK_X)
    channel_C = tl.arange(0, BLOCK_C)
    inside_XC = (head_X < heads)[:, None] & (channel_C < HALF)[None, :]
    place_XC = head_X[:, None] * (HALF * 2) + channel_C[None, :]
    low_XC = tl.load(x_ptr + place_XC, mask=inside_XC, other=0.0).to(tl.float32)
    high_XC = tl.load(x_ptr + place_XC + HALF, mask=inside_XC, other=0.0).to(tl.float32)
    if tile < Q_TILES + KV_TILES:
        inside_C = channel_C < HALF
        if NORM:
            mean_X = tl.sum(low_XC * low_XC + high_XC * high_XC, 1) / (HALF * 2)
            scale_X = tl.div_rn(1.0, tl.sqrt_rn(mean_X + epsilon))
            low_weight_C = tl.load(weight_ptr + channel_C, mask=inside_C, other=0.0).to(tl.float32)
            high_weight_C = tl.load(weight_ptr + channel_C + HALF, mask=inside_C, other=0.0).to(tl.float32)
            low_XC = (
                ((low_XC * scale_X[:, None]) * low_weight_C[None, :]).to(turned_ptr.dtype.element_ty).to(tl.float32)
            )
            high_XC = (
                ((high_XC * scale_X[:, None]) * high_weight_C[None, :]).to(turned_ptr.dtype.element_ty).to(tl.float32)
            )
        angle = tl.load(positions_ptr + row).to(tl.int64) * HALF + channel_C
        cos_C = tl.load(cos_ptr + angle, mask=inside_C, other=0.0)[None, :]
        sin_C = tl.load(sin_ptr + angle, mask=inside_C, other=0.0)[None, :]
        low_XC, high_XC = low_XC * cos_C - high_XC * sin_C, high_XC * cos_C + low_XC * sin_C
    tl.store(y_ptr + place_XC, low_XC.to(turned_ptr.dtype.element_ty), mask=inside_XC)
    tl.store(y_ptr + place_XC + HALF, high_XC.to(turned_ptr.dtype.element_ty), mask=inside_XC)
