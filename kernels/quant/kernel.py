"""The casts of kernels.quant in Triton, each one pass: what is read is read once, what is written is written once.

Scales come from the bits of amax: with amax = m * 2^e and largest = l * 2^p (1 <= m, l < 2), the exponent of the
scale is e - p, plus one where m > l. inf and NaN are the largest bit patterns, so an integer maximum finds them.

Legend: M rows of activations, N rows and K columns of a weight. An MXFP4 block is 32 columns; rows of blocks are
contiguous, so block-wise casts see a [num_blocks, 32] matrix.
"""

# Triton adds launch options to a kernel's own parameters, which the type checker cannot see.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

# The largest code of each format as fp32: exponent, and mantissa bits.
_E2M1_EXPONENT, _E2M1_MANTISSA = tl.constexpr(2), tl.constexpr(0x400000)  # 6
_E4M3_EXPONENT, _E4M3_MANTISSA = tl.constexpr(8), tl.constexpr(0x600000)  # 448
_TWO_TO_126 = tl.constexpr(2.0**126)
_INFINITY = tl.constexpr(0x7F800000)
_BLOCKS_A_PROGRAM = 128
_ROWS_A_PROGRAM = 32


def mxfp4_quantize(x_NK):
    N, K = x_NK.shape
    blocks = torch.empty(N, K // 2, dtype=torch.uint8, device=x_NK.device)
    scales = torch.empty(N, K // 32, dtype=torch.uint8, device=x_NK.device)
    count = scales.numel()
    if count:
        _mxfp4_quantize[(_parts(count, _BLOCKS_A_PROGRAM),)](
            x_NK, blocks, scales, count, BLOCKS=_BLOCKS_A_PROGRAM, num_warps=4
        )
    return blocks, scales


def mxfp4_dequantize(blocks, scales, dtype):
    values = torch.empty(blocks.shape[0], blocks.shape[1] * 2, dtype=dtype, device=blocks.device)
    count = scales.numel()
    if count:
        _mxfp4_dequantize[(_parts(count, _BLOCKS_A_PROGRAM),)](
            blocks, scales, values, count, BLOCKS=_BLOCKS_A_PROGRAM, num_warps=4
        )
    return values


def mxfp4_to_fp8(blocks, scales):
    N, K = blocks.shape[0], blocks.shape[1] * 2
    grid = (_parts(N, 128), _parts(K, 128))
    codes = torch.empty(N, K, dtype=torch.float8_e4m3fn, device=blocks.device)
    tile_scales = torch.empty(grid, dtype=torch.float32, device=blocks.device)
    exact = torch.empty(grid, dtype=torch.bool, device=blocks.device)
    if codes.numel():
        _mxfp4_to_fp8[grid](blocks, scales, codes, tile_scales, exact, N, K, num_warps=8)
    return codes, tile_scales, exact


def fp8_quantize_tiles(w_NK):
    N, K = w_NK.shape
    grid = (_parts(N, 128), _parts(K, 128))
    codes = torch.empty(N, K, dtype=torch.float8_e4m3fn, device=w_NK.device)
    scales = torch.empty(grid, dtype=torch.float32, device=w_NK.device)
    if codes.numel():
        _fp8_tiles[grid](w_NK, codes, scales, N, K, num_warps=8)
    return codes, scales


def fp8_quantize_rows(x_MK):
    M, K = x_MK.shape
    codes = torch.empty(M, K, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales = torch.empty(M, _parts(K, 128), dtype=torch.float32, device=x_MK.device)
    if codes.numel():
        grid = (_parts(M, _ROWS_A_PROGRAM), scales.shape[1])
        _fp8_rows[grid](x_MK, codes, scales, M, K, ROWS=_ROWS_A_PROGRAM, num_warps=4)
    return codes, scales


def fp8_quantize_both(x_MK):
    M, K = x_MK.shape
    codes = torch.empty(M, K, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales = torch.empty(M, _parts(K, 128), dtype=torch.float32, device=x_MK.device)
    codes_t = torch.empty(K, M, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales_t = torch.empty(K, _parts(M, 128), dtype=torch.float32, device=x_MK.device)
    if codes.numel():
        grid = (scales_t.shape[1], scales.shape[1])
        # As bytes: Triton 3.6 can corrupt a transposed store of FP8 beside a plain one on Hopper.
        _fp8_both[grid](x_MK, codes, scales, codes_t.view(torch.uint8), scales_t, M, K, num_warps=8)
    return codes, scales, codes_t, scales_t


def _parts(length: int, size: int) -> int:
    return -(-length // size)


@triton.jit
def _scale_exponent(top_bits, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Exponent of the scale for an amax of these bits, at least -126."""
    above = ((top_bits & 0x7FFFFF) > MANTISSA).to(tl.int32)
    return tl.maximum((top_bits >> 23) - 127 - EXPONENT + above, -126)


@triton.jit
def _power_of_two(exponent):
    """2^exponent in fp32 for -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _e4m3(x, exponent, broken):
    return tl.where(broken, 0.0, x * _power_of_two(-exponent)).to(tl.float8e4nv)


@triton.jit
def _fp8_scale(exponent, broken):
    return tl.where(broken, float("nan"), _power_of_two(exponent))


@triton.jit
def _mxfp4_quantize(x, blocks, scales, count, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < count
    column = tl.arange(0, 32)
    values = tl.load(x + block[:, None] * 32 + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    top = tl.max(_magnitude_bits(values), 1)
    broken = top >= _INFINITY
    exponent = _scale_exponent(tl.where(broken, 0, top), _E2M1_EXPONENT, _E2M1_MANTISSA)
    magnitude = tl.abs(values) * _power_of_two(-exponent)[:, None]
    # The seven middles between codes, a tie going to the even one.
    codes = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
    codes += (magnitude >= 1.75).to(tl.int32) + (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    codes += (magnitude > 5.0).to(tl.int32)
    codes |= (values.to(tl.int32, bitcast=True) >> 28) & 8
    codes = tl.where(broken[:, None], 0, codes)
    low, high = tl.split(tl.reshape(codes, (BLOCKS, 16, 2)))
    pair = tl.arange(0, 16)
    packed = (low | (high << 4)).to(tl.uint8)
    tl.store(blocks + block[:, None] * 16 + pair[None, :], packed, mask=inside[:, None])
    tl.store(scales + block, tl.where(broken, 255, exponent + 127).to(tl.uint8), mask=inside)


@triton.jit
def _mxfp4_values(packed, scale_bytes, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """fp32 [ROWS, GROUPS * 32] of packed codes [ROWS, GROUPS * 16] and scale bytes [ROWS, GROUPS]."""
    byte = packed.to(tl.int32)
    codes = tl.reshape(tl.join(byte & 15, byte >> 4), (ROWS, GROUPS, 32))
    # Two exponent bits and one mantissa bit set into fp32's places give value * 2^-126, subnormals included.
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    values = bits.to(tl.float32, bitcast=True) * _TWO_TO_126
    byte = scale_bytes.to(tl.int32)
    # Byte 0 is the subnormal 2^-127, byte 255 is NaN.
    scale = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    scale = scale.to(tl.float32, bitcast=True)
    return tl.reshape(values * scale[:, :, None], (ROWS, GROUPS * 32))


@triton.jit
def _mxfp4_dequantize(blocks, scales, out, count, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < count
    pair = tl.arange(0, 16)
    packed = tl.load(blocks + block[:, None] * 16 + pair[None, :], mask=inside[:, None], other=0)
    scale = tl.load(scales + block, mask=inside, other=127)
    values = _mxfp4_values(packed, scale[:, None], BLOCKS, 1)
    column = tl.arange(0, 32)
    tl.store(out + block[:, None] * 32 + column[None, :], values.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _mxfp4_to_fp8(blocks, scales, codes, tile_scales, exact, N, K):
    row = (tl.program_id(0) * 128 + tl.arange(0, 128)).to(tl.int64)
    first = tl.program_id(1)
    pair = first * 64 + tl.arange(0, 64)
    group = first * 4 + tl.arange(0, 4)
    column = first * 128 + tl.arange(0, 128)
    rows = row[:, None] < N
    # Ragged edges read zero codes of scale one.
    packed = tl.load(blocks + row[:, None] * (K // 2) + pair[None, :], mask=rows & (pair[None, :] < K // 2), other=0)
    scale = tl.load(
        scales + row[:, None] * (K // 32) + group[None, :], mask=rows & (group[None, :] < K // 32), other=127
    )
    values = _mxfp4_values(packed, scale, 128, 4)
    top = tl.max(tl.max(_magnitude_bits(values), 1), 0)
    broken = top >= _INFINITY
    exponent = _scale_exponent(tl.where(broken, 0, top), _E4M3_EXPONENT, _E4M3_MANTISSA)
    fp8 = _e4m3(values, exponent, broken)
    differs = (fp8.to(tl.float32) * _power_of_two(exponent) != values).to(tl.int32)
    tl.store(codes + row[:, None] * K + column[None, :], fp8, mask=rows & (column[None, :] < K))
    tile = tl.program_id(0) * tl.num_programs(1) + first
    tl.store(tile_scales + tile, _fp8_scale(exponent, broken))
    tl.store(exact + tile, tl.max(tl.max(differs, 1), 0) == 0)


@triton.jit
def _fp8_tiles(x, codes, scales, N, K):
    row = (tl.program_id(0) * 128 + tl.arange(0, 128)).to(tl.int64)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (row[:, None] < N) & (column[None, :] < K)
    values = tl.load(x + row[:, None] * K + column[None, :], mask=inside, other=0.0).to(tl.float32)
    top = tl.max(tl.max(_magnitude_bits(values), 1), 0)
    broken = top >= _INFINITY
    exponent = _scale_exponent(tl.where(broken, 0, top), _E4M3_EXPONENT, _E4M3_MANTISSA)
    tl.store(codes + row[:, None] * K + column[None, :], _e4m3(values, exponent, broken), mask=inside)
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), _fp8_scale(exponent, broken))


@triton.jit
def _fp8_rows(x, codes, scales, M, K, ROWS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (row[:, None] < M) & (column[None, :] < K)
    values = tl.load(x + row[:, None] * K + column[None, :], mask=inside, other=0.0).to(tl.float32)
    _store_rows(values, codes, scales, row, column, M, K, tl.program_id(1), tl.num_programs(1))


@triton.jit
def _store_rows(values, codes, scales, row, column, M, K, group, num_groups):
    top = tl.max(_magnitude_bits(values), 1)
    broken = top >= _INFINITY
    exponent = _scale_exponent(tl.where(broken, 0, top), _E4M3_EXPONENT, _E4M3_MANTISSA)
    fp8 = _e4m3(values, exponent[:, None], broken[:, None])
    inside = (row[:, None] < M) & (column[None, :] < K)
    tl.store(codes + row[:, None] * K + column[None, :], fp8, mask=inside)
    tl.store(scales + row * num_groups + group, _fp8_scale(exponent, broken), mask=row < M)


@triton.jit
def _fp8_both(x, codes, scales, codes_t, scales_t, M, K):
    row = (tl.program_id(0) * 128 + tl.arange(0, 128)).to(tl.int64)
    column = (tl.program_id(1) * 128 + tl.arange(0, 128)).to(tl.int64)
    inside = (row[:, None] < M) & (column[None, :] < K)
    values = tl.load(x + row[:, None] * K + column[None, :], mask=inside, other=0.0).to(tl.float32)
    _store_rows(values, codes, scales, row, column, M, K, tl.program_id(1), tl.num_programs(1))
    top = tl.max(_magnitude_bits(values), 0)
    broken = top >= _INFINITY
    exponent = _scale_exponent(tl.where(broken, 0, top), _E4M3_EXPONENT, _E4M3_MANTISSA)
    fp8 = _e4m3(values, exponent[None, :], broken[None, :]).to(tl.uint8, bitcast=True)
    tl.store(codes_t + column[None, :] * M + row[:, None], fp8, mask=inside)
    scale = _fp8_scale(exponent, broken)
    tl.store(scales_t + column * tl.num_programs(0) + tl.program_id(0), scale, mask=column < K)
