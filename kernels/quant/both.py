"""FP8 1 x 128 of a bf16 matrix and of its transpose, from one read.

A thread holds eight rows of eight columns, two neighbouring columns a word. What bounds the cast is the number of
instructions, and the number of lines that the L2 cache is asked for:

- maxima, exponents and inverse scales are found for two rows or two columns at once, and one `fma` both widens a
  value to fp32 and scales it;
- every store fills whole lines. Codes of the transpose are exchanged through shared memory first, and scales lie
  column by column, which is also what the library's product takes.

Legend: M rows and K columns of a matrix.
"""

# Kernels are written in Gluon's own types, which pyright takes for Python's.
# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.quant.bits import E4M3_CARRY, E4M3_EXPONENT, fp8_scale, larger_pair, scale_byte

_WARPS = 8
_ROW_BITS, _COLUMN_BITS = gl.constexpr(3), gl.constexpr(3)
#: A tile [rows, columns], its transpose [columns, rows] in the same threads, and the same as it is stored.
_TILE = gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
    lane_bases=[[0, 8], [0, 16], [0, 32], [0, 64], [8, 0]],
    warp_bases=[[16, 0], [32, 0], [64, 0]],
    block_bases=[],
    shape=[128, 128],
)
_TURNED = gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
    lane_bases=[[8, 0], [16, 0], [32, 0], [64, 0], [0, 8]],
    warp_bases=[[0, 16], [0, 32], [0, 64]],
    block_bases=[],
    shape=[128, 128],
)
_STORED = gl.BlockedLayout([1, 16], [4, 8], [_WARPS, 1], [1, 0])
#: 128 scales, two neighbours a thread.
_SCALES = gl.BlockedLayout([2], [32], [_WARPS], [0])


def fp8_quantize_both(x_MK):
    M, K = x_MK.shape
    codes = torch.empty(M, K, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales = torch.empty(-(-K // 128), M, dtype=torch.float32, device=x_MK.device)
    # Rows of the transpose are padded to 16 bytes, which a thread stores at once.
    padded = -(-M // 16) * 16
    codes_t = torch.empty(K, padded, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales_t = torch.empty(-(-M // 128), K, dtype=torch.float32, device=x_MK.device)
    if codes.numel():
        outputs = codes.view(torch.uint8), scales, codes_t.view(torch.uint8), scales_t
        layouts = {"TILE": _TILE, "TURNED": _TURNED, "STORED": _STORED, "SCALES": _SCALES}
        # Neighbouring programs write the same rows of the transpose. One dimension: the others end at 65,535.
        grid = (len(scales) * len(scales_t),)
        _both[grid](x_MK.view(torch.int16), *outputs, M, K, padded, **layouts, num_warps=_WARPS)
    return codes, scales.t(), codes_t[:, :M], scales_t.t()


@gluon.jit
def _both(
    x, codes, scales, codes_t, scales_t, M, K, stride_t,
    TILE: gl.constexpr, TURNED: gl.constexpr, STORED: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    tiles_t = gl.cdiv(M, 128)
    tile, tile_t = gl.program_id(0) // tiles_t, gl.program_id(0) % tiles_t
    first_row, first_column = tile_t * 128, tile * 128
    rows, columns = M - first_row, K - first_column
    row, column = gl.arange(0, 128, gl.SliceLayout(1, TILE)), gl.arange(0, 128, gl.SliceLayout(0, TILE))
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    corner = first_row.to(gl.int64) * K + first_column
    place = row[:, None] * K + column[None, :]
    values = gl.load(x + corner + place, mask=inside, other=0)
    tops, tops_t = _tops(_words(values) & 0x7FFF7FFF)
    # -0, which the assembler must not know: it would build a constant of unequal halves again for each use.
    minus_zero = (stride_t << 28) ^ -0x80000000

    inverse = _halves(_inverse_scales(tops), gl.SliceLayout(1, TILE))
    gl.store(codes + corner + place, _e4m3(values, inverse[:, None], minus_zero), mask=inside)
    _store_scales(scales + tile.to(gl.int64) * M + first_row, tops, rows, SCALES)
    _store_scales(scales_t + tile_t.to(gl.int64) * K + first_column, tops_t, columns, SCALES)

    turned = gl.convert_layout(values.trans(), TURNED)
    inverse_t = _halves(_inverse_scales(tops_t), gl.SliceLayout(1, TURNED))
    codes_turned = gl.convert_layout(_e4m3(turned, inverse_t[:, None], minus_zero), STORED)
    row, column = gl.arange(0, 128, gl.SliceLayout(0, STORED)), gl.arange(0, 128, gl.SliceLayout(1, STORED))
    inside_t = (column[:, None] < columns) & (row[None, :] < stride_t - first_row)
    corner_t = first_column.to(gl.int64) * stride_t + first_row
    gl.store(codes_t + corner_t + (column[:, None] * stride_t + row[None, :]), codes_turned, mask=inside_t)


@gluon.jit
def _words(values):
    """int32 [128, 64] of 16-bit [128, 128]: two neighbouring columns of a row, the even one in the low half."""
    # Both values of a pair become its word, of which one is kept. Registers stay as they are.
    twice = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $2;", "=r,=r,r", [values], dtype=gl.int32, is_pure=True, pack=2
    )
    words, _ = gl.split(gl.reshape(twice, (128, 64, 2)))
    return words


@gluon.jit
def _tops(magnitudes):
    """Bits of the largest magnitudes of each two rows and of each two columns, int32 [64] of pairs each."""
    part = magnitudes
    for _ in gl.static_range(_ROW_BITS):
        even, odd = gl.split(gl.permute(gl.reshape(part, (part.shape[0] // 2, 2, 64)), (0, 2, 1)))
        part = larger_pair(even, odd)
    tops_t = gl.reduce(part, 0, larger_pair)
    part = magnitudes
    for _ in gl.static_range(_COLUMN_BITS - 1):
        even, odd = gl.split(gl.reshape(part, (128, part.shape[1] // 2, 2)))
        part = larger_pair(even, odd)
    # Words of an even and an odd row: their low halves and their high halves.
    even, odd = gl.split(gl.permute(gl.reshape(part, (64, 2, part.shape[1])), (0, 2, 1)))
    part = larger_pair(_bytes(even, odd, "0x5410"), _bytes(even, odd, "0x7632"))
    return gl.reduce(part, 1, larger_pair), tops_t


@gluon.jit
def _bytes(a, b, SELECTORS: gl.constexpr):
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, " + SELECTORS + ";", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _inverse_scales(tops):
    """bf16 2^-(byte - 127) for pairs of amaxes; byte is that of `bits.scale_byte`, whose carry is the same in bf16."""
    byte_and_8 = larger_pair(((tops + 0x001F001F) >> 7) & 0x01FF01FF, gl.full_like(tops, 0x00090009))
    return (0x01060106 - byte_and_8) << 7


@gluon.jit
def _halves(pairs, LAYOUT: gl.constexpr):
    """[128] of [64] pairs: each half as the high half of a word, which makes bf16 fp32."""
    index = gl.reshape(gl.arange(0, 128, LAYOUT), (64, 2))
    pairs = gl.convert_layout(pairs, gl.SliceLayout(1, index.type.layout))[:, None]
    halves = gl.where(index % 2 == 0, pairs << 16, pairs & -0x10000)
    return gl.convert_layout(gl.reshape(halves, (128,)), LAYOUT)


@gluon.jit
def _store_scales(scales, tops, count, LAYOUT: gl.constexpr):
    index = gl.arange(0, 128, LAYOUT)
    top = _halves(tops, LAYOUT)
    gl.store(scales + index, fp8_scale(top, scale_byte(top, E4M3_EXPONENT, E4M3_CARRY)), mask=index < count)


@gluon.jit
def _e4m3(values, inverse, minus_zero):
    """uint8 codes of bf16 values times their inverse scale, which is the high half of a word whose low half is 0.

    value * inverse - 0 in the high half and 0 + 0 in the low one are the product in fp32, the sign of zero kept.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, code0, code1;
        .reg .b32 x0, x2, y0, y1, y2, y3;
        mov.b32 {low, high}, $1;
        mov.b32 x0, {low, low};
        mov.b32 {low, high}, $2;
        mov.b32 x2, {low, low};
        fma.rn.bf16x2 y0, x0, $3, $7;
        fma.rn.bf16x2 y1, $1, $4, $7;
        fma.rn.bf16x2 y2, x2, $5, $7;
        fma.rn.bf16x2 y3, $2, $6, $7;
        cvt.rn.satfinite.e4m3x2.f32 code0, y1, y0;
        cvt.rn.satfinite.e4m3x2.f32 code1, y3, y2;
        mov.b32 $0, {code0, code1};
        }""",
        "=r,r,r,r,r,r,r,r,r,r,r",
        [values, inverse, minus_zero],
        dtype=gl.uint8,
        is_pure=True,
        pack=4,
    )
