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
from kernels.quant.turned import fp8_quantize_both as fp8_quantize_both

_TWO_TO_126 = tl.constexpr(2.0**126)
_ROUND_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
_BLOCKS_A_PROGRAM = 128
_ROWS_A_PROGRAM = 16


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


def mxfp4_to_fp8(blocks, scales):
    N, K = blocks.shape[0], blocks.shape[1] * 2
    grid = (_parts(N, 128), _parts(K, 128))
    codes = torch.empty(N, K, dtype=torch.float8_e4m3fn, device=blocks.device)
    tile_scales = torch.empty(grid, dtype=torch.float32, device=blocks.device)
    exact = torch.empty(grid, dtype=torch.bool, device=blocks.device)
    if codes.numel():
        words, eights = blocks.view(torch.int32), codes.view(torch.int64)
        _mxfp4_to_fp8[grid](words, scales, eights, tile_scales, exact.view(torch.uint8), N, K, num_warps=4)
    return codes, tile_scales, exact


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
    scales = torch.empty(M, _parts(K, 128), dtype=torch.float32, device=x_MK.device)
    if codes.numel():
        # One dimension: the others end at 65,535 programs, a million rows.
        grid = (scales.shape[1] * _parts(M, _ROWS_A_PROGRAM),)
        _fp8_rows[grid](x_MK, codes.view(torch.uint8), scales, M, K, ROWS=_ROWS_A_PROGRAM, num_warps=4)
    return codes, scales


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
def _mxfp4_to_fp8(words, scales, codes, tile_scales, exact, N, K):
    """words: eight codes each, four to a group of 32. A group's eight FP8 magnitudes make a table of eight bytes,
    which `prmt` looks up four codes at a time; what a group holds follows from the OR of its words."""
    first_row, first_group = tl.program_id(0) * 128, tl.program_id(1) * 4
    row, group = tl.arange(0, 512) // 4, tl.arange(0, 512) % 4
    inside = (row < N - first_row) & (group < K // 32 - first_group)
    corner = first_row.to(tl.int64) * (K // 8) + first_group * 4
    words, codes = words + corner, codes + corner
    place = row * (K // 8) + group * 4
    word0 = tl.load(words + place, mask=inside, other=0)
    word1 = tl.load(words + place + 1, mask=inside, other=0)
    word2 = tl.load(words + place + 2, mask=inside, other=0)
    word3 = tl.load(words + place + 3, mask=inside, other=0)
    scale = scales + first_row.to(tl.int64) * (K // 32) + first_group
    byte = tl.load(scale + row * (K // 32) + group, mask=inside, other=127).to(tl.int32)
    seen = word0 | word1 | word2 | word3
    seen_top = (word0 & (word0 << 1)) | (word1 & (word1 << 1)) | (word2 & (word2 << 1)) | (word3 & (word3 << 1))
    # floor(log2) of the largest magnitude of a group: codes 6-7, 4-5, 2-3, 1.
    top = tl.where((seen & 0x44444444) != 0, 1, tl.where((seen & 0x22222222) != 0, 0, -1))
    top = tl.where((seen_top & 0x44444444) != 0, 2, top) + byte
    # NaN and what overflows fp32 break the tile; a group of zeros has no say.
    zero = (seen & 0x77777777) == 0
    largest = tl.max(tl.where(byte == 255, 1000, tl.where(zero, 0, top)), 0)
    broken = largest >= 255
    tile_byte = tl.maximum(tl.where(broken, 0, largest) - E4M3_EXPONENT, 1)
    shift = byte - tile_byte
    low, high = _table(((tl.maximum(shift, -126) + 127) << 23).to(tl.float32, bitcast=True))
    # Joined so that whole sectors are stored: [512, 2, 2] counts the words of a group as 0, 1, 2, 3.
    even = tl.join(_eight_codes(word0, low, high), _eight_codes(word2, low, high))
    odd = tl.join(_eight_codes(word1, low, high), _eight_codes(word3, low, high))
    group_codes = tl.reshape(tl.join(even, odd), (512, 4))
    tl.store(codes + place[:, None] + tl.arange(0, 4)[None, :], group_codes, mask=inside[:, None])
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(tile_scales + tile, tl.where(broken, 0x7FC00000, tile_byte << 23).to(tl.float32, bitcast=True))
    # Every code times 2^-8 is a multiple of 2^-9, E4M3's smallest step; below that it depends on the codes.
    is_exact = tl.min(tl.where(zero, 0, shift), 0) >= -8
    if is_exact:
        tl.store(exact + tile, tl.where(broken, 0, 1).to(tl.uint8))
    else:
        low, high = _lossy_table(shift)
        lossy = _any_byte(word0, low, high) | _any_byte(word1, low, high)
        lossy |= _any_byte(word2, low, high) | _any_byte(word3, low, high)
        any_lossy = tl.max((lossy != 0).to(tl.int32), 0)
        tl.store(exact + tile, tl.where(broken, 0, 1 - any_lossy).to(tl.uint8))


@triton.jit
def _table(unit):
    """E4M3 codes of the eight magnitudes 0, .5, 1, 1.5 | 2, 3, 4, 6 times a unit, a byte each."""
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 v<7>;
        .reg .b16 h<4>;
        mul.f32 v0, $2, 0f3F000000;
        mul.f32 v1, $2, 0f3FC00000;
        mul.f32 v2, $2, 0f40000000;
        mul.f32 v3, $2, 0f40400000;
        mul.f32 v4, $2, 0f40800000;
        mul.f32 v5, $2, 0f40C00000;
        mov.f32 v6, 0f00000000;
        cvt.rn.satfinite.e4m3x2.f32 h0, v0, v6;
        cvt.rn.satfinite.e4m3x2.f32 h1, v1, $2;
        cvt.rn.satfinite.e4m3x2.f32 h2, v3, v2;
        cvt.rn.satfinite.e4m3x2.f32 h3, v5, v4;
        mov.b32 $0, {h0, h1};
        mov.b32 $1, {h2, h3};
        }""",
        "=&r,=&r,f",
        [unit],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _lossy_table(shift):
    """Of the eight magnitudes times 2^shift, a byte each: whether E4M3 drops a bit, all of which lie above 2^-9.

    The lowest bits of 0.5, 1, 1.5, 2, 3, 4 and 6 are 2^-1, 2^0, 2^-1, 2^1, 2^0, 2^2 and 2^1.
    """
    below8, below9 = (shift < -8).to(tl.int32), (shift < -9).to(tl.int32)
    below10, below11 = (shift < -10).to(tl.int32), (shift < -11).to(tl.int32)
    low = (below8 << 8) | (below9 << 16) | (below8 << 24)
    return low, below10 | (below9 << 8) | (below11 << 16) | (below10 << 24)


@triton.jit
def _eight_codes(word, low_table, high_table):
    magnitude, sign = word & 0x77777777, (word >> 3) & 0x11111111
    low = _look_up(low_table, high_table, magnitude) | _look_up(0x8000, 0, sign)
    high = _look_up(low_table, high_table, magnitude >> 16) | _look_up(0x8000, 0, sign >> 16)
    return low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int64) << 32)


@triton.jit
def _any_byte(word, low_table, high_table):
    magnitude = word & 0x77777777
    return _look_up(low_table, high_table, magnitude) | _look_up(low_table, high_table, magnitude >> 16)


@triton.jit
def _look_up(low_table, high_table, selectors):
    """Four bytes of an eight-byte table, one for each of the low four nibbles of the selectors."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [low_table, high_table, selectors],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


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
    tl.store(scales + row * blocks + block, scale, mask=row < M)
