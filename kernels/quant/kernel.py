"""The casts of kernels.quant in Triton, each one pass: what is read is read once, what is written is written once.

Scales come from the bits of amax: with amax = m * 2^e and largest = l * 2^p (1 <= m, l < 2), the exponent of the
scale is e - p, plus one where m > l: a carry out of the mantissa, if the right constant is added. Exponents are kept
with fp32's (and E8M0's) bias of 127. inf and NaN are the largest bit patterns.

Legend: M rows of activations, N rows and K columns of a weight. An MXFP4 block is 32 columns; rows of blocks are
contiguous, so block-wise casts see a [num_blocks, 32] matrix.
"""

# Triton adds launch options to a kernel's own parameters and calls kernels from kernels; the type checker sees neither.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.quant import both
from kernels.quant.bits import (
    E2M1_CARRY,
    E2M1_EXPONENT,
    E4M3_CARRY,
    E4M3_EXPONENT,
    INFINITY,
    e4m3,
    fp8_scale,
    inverse_scale,
    scale_byte,
    top_bits,
)
from kernels.quant.lossless import mxfp4_to_fp8 as mxfp4_to_fp8

_TWO_TO_126 = tl.constexpr(2.0**126)
_ROUND_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
_BLOCKS_A_PROGRAM = 128
# Whose scales of 128 columns are a line.
_ROWS_A_PROGRAM = 32


def mxfp4_quantize(x_NK):
    N, K = x_NK.shape
    blocks = torch.empty(N, K // 2, dtype=torch.uint8, device=x_NK.device)
    scales = torch.empty(N, K // 32, dtype=torch.uint8, device=x_NK.device)
    count = scales.numel()
    if count:
        wide = x_NK.dtype == torch.float32
        pairs = x_NK.view(torch.int64 if wide else torch.int32)
        per_program = 64 if wide else _BLOCKS_A_PROGRAM
        _mxfp4_quantize[(_parts(count, per_program),)](
            pairs, blocks, scales, count, WIDE=wide, BLOCKS=per_program, num_warps=4
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


def fp8_quantize_tiles(w_NK):
    N, K = w_NK.shape
    grid = (_parts(N, 128), _parts(K, 128))
    codes = torch.empty(N, K, dtype=torch.float8_e4m3fn, device=w_NK.device)
    scales = torch.empty(grid, dtype=torch.float32, device=w_NK.device)
    if codes.numel():
        _fp8_tiles[grid[::-1]](w_NK, codes.view(torch.uint8), scales, N, K, num_warps=8)
    return codes, scales


def fp8_quantize_rows(x_MK):
    M, K = x_MK.shape
    codes = torch.empty(M, K, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales = torch.empty(_parts(K, 128), M, dtype=torch.float32, device=x_MK.device)
    if codes.numel():
        # One dimension: the others end at 65,535 programs, two million rows.
        grid = (len(scales) * _parts(M, _ROWS_A_PROGRAM),)
        _fp8_rows[grid](x_MK, codes.view(torch.uint8), scales, M, K, ROWS=_ROWS_A_PROGRAM, num_warps=8)
    return codes, scales.t()


def fp8_quantize_both(x_MK):
    if x_MK.dtype == torch.bfloat16:
        return both.fp8_quantize_both(x_MK)
    return *fp8_quantize_rows(x_MK), *fp8_quantize_rows(x_MK.t().contiguous())


def _parts(length: int, size: int) -> int:
    return -(-length // size)


@triton.jit
def _mxfp4_quantize(pairs, blocks, scales, count, WIDE: tl.constexpr, BLOCKS: tl.constexpr):
    """pairs: two neighbouring columns in one integer, the even one in its low half; 16 of them are a block."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)
    inside = block < count - first
    place = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    pair = tl.load(pairs + first * 16 + place, mask=inside[:, None], other=0)
    if WIDE:
        low, high = pair.to(tl.int32), (pair >> 32).to(tl.int32)
    else:
        low, high = pair << 16, pair & -65536
    top = tl.max(tl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF), 1)
    byte = scale_byte(top, E2M1_EXPONENT, E2M1_CARRY)
    inverse = inverse_scale(byte)[:, None]
    codes = _e2m1(low, inverse) | (_e2m1(high, inverse) << 4)
    tl.store(blocks + first * 16 + place, codes.to(tl.uint8), mask=inside[:, None])
    tl.store(scales + first + block, tl.where(top >= INFINITY, 255, byte).to(tl.uint8), mask=inside)


@triton.jit
def _e2m1(bits, inverse):
    """Code of the fp32 of these bits over its block's scale, whose inverse is given.

    As a function of the value the code is the least of three lines (slopes 2, 1 and 1/2), rounded to nearest even.
    Adding 1.5 * 2^23 rounds to an integer, once, since multiplying by a power of two is exact.
    """
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    steep = magnitude * (2.0 * inverse) + _ROUND_TO_INTEGER
    middle = magnitude * inverse + (_ROUND_TO_INTEGER + 2.0)
    flat = magnitude * (0.5 * inverse) + (_ROUND_TO_INTEGER + 4.0)
    code = tl.minimum(tl.minimum(steep, middle), flat).to(tl.int32, bitcast=True) & 7
    return code | ((bits >> 28) & 8)


@triton.jit
def _mxfp4_values(packed, scale_bytes, BLOCKS: tl.constexpr):
    """fp32 [BLOCKS, 32] of packed codes [BLOCKS, 16] and scale bytes [BLOCKS]."""
    byte = packed.to(tl.int32)
    codes = tl.reshape(tl.join(byte & 15, byte >> 4), (BLOCKS, 32))
    # Two exponent bits and one mantissa bit set into fp32's places give value * 2^-126, subnormals included.
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    values = bits.to(tl.float32, bitcast=True) * _TWO_TO_126
    byte = scale_bytes.to(tl.int32)
    # Byte 0 is the subnormal 2^-127, byte 255 is NaN.
    scale = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    scale = scale.to(tl.float32, bitcast=True)
    return values * scale[:, None]


@triton.jit
def _mxfp4_dequantize(blocks, scales, out, count, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < count
    pair = tl.arange(0, 16)
    packed = tl.load(blocks + block[:, None] * 16 + pair[None, :], mask=inside[:, None], other=0)
    scale = tl.load(scales + block, mask=inside, other=127)
    values = _mxfp4_values(packed, scale, BLOCKS)
    column = tl.arange(0, 32)
    tl.store(out + block[:, None] * 32 + column[None, :], values.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _fp8_tiles(x, codes, scales, N, K):
    row = (tl.program_id(1) * 128 + tl.arange(0, 128)).to(tl.int64)
    column = tl.program_id(0) * 128 + tl.arange(0, 128)
    inside = (row[:, None] < N) & (column[None, :] < K)
    values = tl.load(x + row[:, None] * K + column[None, :], mask=inside, other=0.0).to(tl.float32)
    top = tl.max(top_bits(values, 1), 0)
    byte = scale_byte(top, E4M3_EXPONENT, E4M3_CARRY)
    tl.store(codes + row[:, None] * K + column[None, :], e4m3(values, byte), mask=inside)
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(scales + tile, fp8_scale(top, byte))


@triton.jit
def _fp8_rows(x, codes, scales, M, K, ROWS: tl.constexpr):
    blocks = tl.cdiv(K, 128)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = block * 128 + tl.arange(0, 128)
    inside = (row[:, None] < M) & (column[None, :] < K)
    values = tl.load(x + row[:, None] * K + column[None, :], mask=inside, other=0.0).to(tl.float32)
    top = top_bits(values, 1)
    byte = scale_byte(top, E4M3_EXPONENT, E4M3_CARRY)
    tl.store(codes + row[:, None] * K + column[None, :], e4m3(values, byte[:, None]), mask=inside)
    scale = fp8_scale(top, byte)
    tl.store(scales + block.to(tl.int64) * M + row, scale, mask=row < M)
