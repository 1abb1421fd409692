"""The casts of kernels.quant in Triton, each one pass: what is read is read once, what is written is written once.

Scales come from the bits of amax: with amax = m * 2^e and largest = l * 2^p (1 <= m, l < 2), the exponent of the
scale is e - p, plus one where m > l. inf and NaN are the largest bit patterns, so an integer maximum finds them.

Legend: M rows of activations, N rows and K columns of a weight. An MXFP4 block is 32 columns; rows of blocks are
contiguous, so block-wise casts see a [num_blocks, 32] matrix.
"""

# Triton adds launch options to a kernel's own parameters and calls kernels from kernels; the type checker sees neither.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

# The largest code of each format as fp32: exponent, and mantissa bits.
_E2M1_EXPONENT, _E2M1_MANTISSA = tl.constexpr(2), tl.constexpr(0x400000)  # 6
_E4M3_EXPONENT, _E4M3_MANTISSA = tl.constexpr(8), tl.constexpr(0x600000)  # 448
_TWO_TO_126 = tl.constexpr(2.0**126)
_ROUND_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
_INFINITY = tl.constexpr(0x7F800000)
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
        _mxfp4_to_fp8[grid](words, scales, eights, tile_scales, exact.view(torch.uint8), N, K, num_warps=8)
    return codes, tile_scales, exact


def fp8_quantize_tiles(w_NK):
    N, K = w_NK.shape
    grid = (_parts(N, 128), _parts(K, 128))
    codes = torch.empty(N, K, dtype=torch.float8_e4m3fn, device=w_NK.device)
    scales = torch.empty(grid, dtype=torch.float32, device=w_NK.device)
    if codes.numel():
        _fp8_tiles[grid](w_NK, codes.view(torch.uint8), scales, N, K, num_warps=8)
    return codes, scales


def fp8_quantize_rows(x_MK):
    M, K = x_MK.shape
    codes = torch.empty(M, K, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales = torch.empty(M, _parts(K, 128), dtype=torch.float32, device=x_MK.device)
    if codes.numel():
        grid = (_parts(M, _ROWS_A_PROGRAM), scales.shape[1])
        _fp8_rows[grid](x_MK, codes.view(torch.uint8), scales, M, K, ROWS=_ROWS_A_PROGRAM, num_warps=4)
    return codes, scales


def fp8_quantize_both(x_MK):
    M, K = x_MK.shape
    codes = torch.empty(M, K, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales = torch.empty(M, _parts(K, 128), dtype=torch.float32, device=x_MK.device)
    # Rows of the transpose are padded to 16 bytes, which also lets four codes be stored at a time.
    padded = -(-M // 16) * 16
    codes_t = torch.empty(K, padded, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales_t = torch.empty(K, _parts(M, 128), dtype=torch.float32, device=x_MK.device)
    if codes.numel():
        grid = (scales_t.shape[1], scales.shape[1])
        words_t = codes_t.view(torch.int32)
        _fp8_both[grid](x_MK, codes.view(torch.uint8), scales, words_t, scales_t, M, K, padded // 4, num_warps=8)
    return codes, scales, codes_t[:, :M], scales_t


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
def _e4m3(x, exponent):
    """Codes as bytes: Triton 3.6 can corrupt transposed stores of its own FP8 type on Hopper (its issue 11111)."""
    return (x * _power_of_two(-exponent)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _fp8_scale(exponent, broken):
    return tl.where(broken, float("nan"), _power_of_two(exponent))


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
    broken = top >= _INFINITY
    exponent = _scale_exponent(tl.where(broken, 0, top), _E2M1_EXPONENT, _E2M1_MANTISSA)
    inverse = _power_of_two(-exponent)[:, None]
    codes = _e2m1(low, inverse) | (_e2m1(high, inverse) << 4)
    tl.store(blocks + first * 16 + place, codes.to(tl.uint8), mask=inside[:, None])
    tl.store(scales + first + block, tl.where(broken, 255, exponent + 127).to(tl.uint8), mask=inside)


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
    top = tl.where((seen_top & 0x44444444) != 0, 2, top) + byte - 127
    # NaN and what overflows fp32 break the tile; a group of zeros has no say.
    top = tl.where((seen & 0x77777777) != 0, top, -1000)
    largest = tl.max(tl.where(byte == 255, 1000, top), 0)
    broken = largest >= 128
    exponent = tl.maximum(tl.where(broken, 0, largest) - _E4M3_EXPONENT, -126)
    relative = _power_of_two(tl.minimum(tl.maximum(byte - 127 - exponent, -126), 127))
    one, one_off = _table_entry(0.5 * relative)
    two, two_off = _table_entry(1.0 * relative)
    three, three_off = _table_entry(1.5 * relative)
    four, four_off = _table_entry(2.0 * relative)
    five, five_off = _table_entry(3.0 * relative)
    six, six_off = _table_entry(4.0 * relative)
    seven, seven_off = _table_entry(6.0 * relative)
    low = (one << 8) | (two << 16) | (three << 24)
    high = four | (five << 8) | (six << 16) | (seven << 24)
    # Joined so that whole sectors are stored: [512, 2, 2] counts the words of a group as 0, 1, 2, 3.
    even = tl.join(_eight_codes(word0, low, high), _eight_codes(word2, low, high))
    odd = tl.join(_eight_codes(word1, low, high), _eight_codes(word3, low, high))
    group_codes = tl.where(broken, 0, tl.reshape(tl.join(even, odd), (512, 4)))
    tl.store(codes + place[:, None] + tl.arange(0, 4)[None, :], group_codes, mask=inside[:, None])
    low = (one_off << 8) | (two_off << 16) | (three_off << 24)
    high = four_off | (five_off << 8) | (six_off << 16) | (seven_off << 24)
    off = _any_byte(word0, low, high) | _any_byte(word1, low, high)
    off |= _any_byte(word2, low, high) | _any_byte(word3, low, high)
    any_off = tl.max((off != 0).to(tl.int32), 0)
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(tile_scales + tile, _fp8_scale(exponent, broken))
    tl.store(exact + tile, tl.where(broken, 0, 1 - any_off).to(tl.uint8))


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
def _table_entry(value):
    """(E4M3 code of a magnitude, whether it is off)."""
    fp8 = tl.minimum(value, 448.0).to(tl.float8e4nv)
    # Two significant bits always fit; what can be lost is what lies below 2^-9.
    steps = value * 512.0
    return fp8.to(tl.uint8, bitcast=True).to(tl.int32), (tl.floor(steps) != steps).to(tl.int32)


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
    row = (tl.program_id(0) * 128 + tl.arange(0, 128)).to(tl.int64)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (row[:, None] < N) & (column[None, :] < K)
    values = tl.load(x + row[:, None] * K + column[None, :], mask=inside, other=0.0).to(tl.float32)
    top = tl.max(tl.max(_magnitude_bits(values), 1), 0)
    broken = top >= _INFINITY
    exponent = _scale_exponent(tl.where(broken, 0, top), _E4M3_EXPONENT, _E4M3_MANTISSA)
    tl.store(codes + row[:, None] * K + column[None, :], _e4m3(values, exponent), mask=inside)
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), _fp8_scale(exponent, broken))


@triton.jit
def _fp8_rows(x, codes, scales, M, K, ROWS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (row[:, None] < M) & (column[None, :] < K)
    values = tl.load(x + row[:, None] * K + column[None, :], mask=inside, other=0.0).to(tl.float32)
    top = tl.max(_magnitude_bits(values), 1)
    broken = top >= _INFINITY
    exponent = _scale_exponent(tl.where(broken, 0, top), _E4M3_EXPONENT, _E4M3_MANTISSA)
    fp8 = _e4m3(values, exponent[:, None])
    tl.store(codes + row[:, None] * K + column[None, :], fp8, mask=inside)
    tl.store(scales + row * tl.num_programs(1) + tl.program_id(1), _fp8_scale(exponent, broken), mask=row < M)


@triton.jit
def _fp8_both(x, codes, scales, words_t, scales_t, M, K, stride_t):
    """A tile of 128 x 128 as four quarters: quarter i holds rows i, i + 4, i + 8 .., so that the four codes of a word
    of the transpose lie in one thread and are packed before the tile is turned."""
    first_row, first_column = tl.program_id(0) * 128, tl.program_id(1) * 128
    corner = first_row.to(tl.int64) * K + first_column
    scale = scales + first_row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    x, codes, rows, columns = x + corner, codes + corner, M - first_row, K - first_column
    quarter0, top0 = _quarter(x, codes, scale, rows, columns, K, 0)
    quarter1, top1 = _quarter(x, codes, scale, rows, columns, K, 1)
    quarter2, top2 = _quarter(x, codes, scale, rows, columns, K, 2)
    quarter3, top3 = _quarter(x, codes, scale, rows, columns, K, 3)
    top = tl.max(tl.maximum(tl.maximum(top0, top1), tl.maximum(top2, top3)), 0)
    broken = top >= _INFINITY
    exponent = _scale_exponent(tl.where(broken, 0, top), _E4M3_EXPONENT, _E4M3_MANTISSA)
    inverse = _power_of_two(-exponent)[None, :]
    word = tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [quarter0 * inverse, quarter1 * inverse, quarter2 * inverse, quarter3 * inverse],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    step, column = tl.arange(0, 32), tl.arange(0, 128)
    first_word = first_row // 4
    inside = (step[:, None] < stride_t - first_word) & (column[None, :] < columns)
    corner_t = first_column.to(tl.int64) * stride_t + first_word
    tl.store(words_t + corner_t + column[None, :] * stride_t + step[:, None], word, mask=inside)
    scale_t = scales_t + first_column.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(scale_t + column * tl.num_programs(0), _fp8_scale(exponent, broken), mask=column < columns)


@triton.jit
def _quarter(x, codes, scale, rows, columns, K, INDEX: tl.constexpr):
    """Quantise rows INDEX, INDEX + 4, .. of a tile; returns their values and magnitude bits."""
    row, column = tl.arange(0, 32) * 4 + INDEX, tl.arange(0, 128)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    place = row[:, None] * K + column[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    bits = _magnitude_bits(values)
    top = tl.max(bits, 1)
    broken = top >= _INFINITY
    exponent = _scale_exponent(tl.where(broken, 0, top), _E4M3_EXPONENT, _E4M3_MANTISSA)
    tl.store(codes + place, _e4m3(values, exponent[:, None]), mask=inside)
    tl.store(scale + row * tl.num_programs(1), _fp8_scale(exponent, broken), mask=row < rows)
    return values, bits
