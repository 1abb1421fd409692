"""MXFP4 to FP8 tiles of 128 x 128 and the verdict of each, in integers: a value is formed only to make a table.

A thread reads groups of 32 whole, four words of eight codes. The eight magnitudes of E2M1 under one scale are eight
E4M3 codes, a table of eight bytes that `prmt` looks up four codes at a time. What a group holds follows from the OR
of its words. Codes are stored from shared memory by the copy engine: a group of 32 bytes a thread would fill a sector
at a time, but no line, and to exchange them first takes registers. A program takes two tiles side by side, whose rows
are whole lines of words, and whose scales it reads together.

Legend: N rows and K columns of a weight, G groups of 32 columns of a row.
"""

# Kernels are written in Gluon's own types, which pyright takes for Python's.
# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.quant.bits import E4M3_EXPONENT, larger_pair

_WARPS = 8
#: Tiles of a program, side by side.
_TILES = 2
#: A tile's 512 groups of four words as they are read, and its codes, four a word, as they are stored.
_LOAD = gl.BlockedLayout([1, 4], [32, 1], [_WARPS, 1], [1, 0])
_CODES = gl.NVMMASharedLayout(128, 32)


def mxfp4_to_fp8(blocks, scales):
    N, G = scales.shape
    grid = (-(-N // 128), -(-G // 4))
    codes = torch.empty(N, G * 32, dtype=torch.float8_e4m3fn, device=blocks.device)
    tile_scales = torch.empty(grid, dtype=torch.float32, device=blocks.device)
    exact = torch.empty(grid, dtype=torch.bool, device=blocks.device)
    if codes.numel():
        words, fours = blocks.view(torch.int32), codes.view(torch.int32)
        outputs = TensorDescriptor.from_tensor(fours, [128, 32 * _TILES], _CODES), tile_scales, exact.view(torch.uint8)
        programs = -(-grid[1] // _TILES), grid[0]
        _mxfp4_to_fp8[programs](words, scales, *outputs, N, G, TILES=_TILES, LOAD=_LOAD, num_warps=_WARPS)
    return codes, tile_scales, exact


@gluon.jit
def _mxfp4_to_fp8(words, scales, codes, tile_scales, exact, N, G, TILES: gl.constexpr, LOAD: gl.constexpr):
    first_row, first_group = gl.program_id(1) * 128, gl.program_id(0) * (4 * TILES)
    corner = first_row.to(gl.int64) * G + first_group
    rows, groups = N - first_row, G - first_group
    place, inside = _groups(rows, groups, G, TILES, gl.SliceLayout(1, LOAD))
    each = gl.arange(0, 4, gl.SliceLayout(0, LOAD))
    word = gl.load(words + corner * 4 + (place * 4)[:, None] + each[None, :], mask=inside[:, None], other=0)
    even, odd = gl.split(gl.reshape(word, (512 * TILES, 2, 2)))
    word0, word2 = gl.split(even)
    word1, word3 = gl.split(odd)
    WHOLE: gl.constexpr = word0.type.layout
    place, inside = _groups(rows, groups, G, TILES, WHOLE)
    byte = gl.load(scales + corner + place, mask=inside, other=127).to(gl.int32)

    seen = word0 | word1 | word2 | word3
    seen_top = (word0 & (word0 << 1)) | (word1 & (word1 << 1)) | (word2 & (word2 << 1)) | (word3 & (word3 << 1))
    # floor(log2) of the largest magnitude of a group: codes 6-7, 4-5, 2-3, 1.
    top = gl.where((seen & 0x44444444) != 0, 1, gl.where((seen & 0x22222222) != 0, 0, -1))
    top = gl.maximum(gl.where((seen_top & 0x44444444) != 0, 2, top) + byte, 0)
    # NaN and what overflows fp32 break the tile; a group of zeros has no say.
    zero = (seen & 0x77777777) == 0
    top = gl.where(byte == 255, 1000, gl.where(zero, 0, top))
    # One maximum finds the largest top, in the high half, and the least byte of groups other than zeros.
    pair = (top << 16) | gl.where(zero, 0, 255 - byte)
    pair = gl.reduce(gl.reduce(gl.reshape(pair, (128, TILES, 4)), 2, larger_pair), 0, larger_pair)
    largest, least_byte = pair >> 16, 255 - (pair & 0xFFFF)
    broken = largest >= 255
    tile_byte = gl.maximum(gl.where(broken, 0, largest) - E4M3_EXPONENT, 1)

    by_group = gl.reshape(byte, (128, TILES, 4))
    of_tile = gl.convert_layout(tile_byte, gl.SliceLayout(0, gl.SliceLayout(2, by_group.type.layout)))
    shift = gl.convert_layout(gl.reshape(by_group - of_tile[None, :, None], (512 * TILES,)), WHOLE)
    low, high = _table(((gl.maximum(shift, -126) + 127) << 23).to(gl.float32, bitcast=True))
    # Joined so that a group's words count 0, 1, 2, 3, and their halves.
    even = gl.join(gl.join(*_eight_codes(word0, low, high)), gl.join(*_eight_codes(word2, low, high)))
    odd = gl.join(gl.join(*_eight_codes(word1, low, high)), gl.join(*_eight_codes(word3, low, high)))
    fours = gl.reshape(gl.permute(gl.join(even, odd), (0, 2, 3, 1)), (128, 32 * TILES))
    tile_codes = gl.allocate_shared_memory(gl.int32, (128, 32 * TILES), codes.layout, fours)
    fence_async_shared()
    tma.async_copy_shared_to_global(codes, [first_row, first_group * 8], tile_codes)

    columns = gl.cdiv(G, 4)
    column = gl.program_id(0) * TILES + gl.arange(0, TILES, largest.type.layout)
    tile = gl.program_id(1) * columns + column
    here = column < columns
    values = gl.where(broken, 0x7FC00000, tile_byte << 23).to(gl.float32, bitcast=True)
    gl.store(tile_scales + tile, values, mask=here)
    # What follows may take the tile's place in shared memory.
    tma.store_wait(0)
    # Every code times 2^-8 is a multiple of 2^-9, E4M3's smallest step; below that it depends on the codes.
    if gl.min(least_byte - tile_byte, 0) >= -8:
        gl.store(exact + tile, gl.where(broken, 0, 1).to(gl.uint8), mask=here)
    else:
        low, high = _lossy_table(shift)
        lossy = _any_byte(word0, low, high) | _any_byte(word1, low, high)
        lossy |= _any_byte(word2, low, high) | _any_byte(word3, low, high)
        lossy = gl.max(gl.max(gl.reshape((lossy != 0).to(gl.int32), (128, TILES, 4)), 2), 0)
        any_lossy = gl.convert_layout(lossy, largest.type.layout)
        gl.store(exact + tile, gl.where(broken, 0, 1 - any_lossy).to(gl.uint8), mask=here)


@gluon.jit
def _groups(rows, groups, G, TILES: gl.constexpr, LAYOUT: gl.constexpr):
    """Of the tiles' 512 groups each: the place from the first, and whether the matrix has it."""
    index = gl.arange(0, 512 * TILES, LAYOUT)
    row, group = index // (4 * TILES), index % (4 * TILES)
    return row * G + group, (row < rows) & (group < groups)


@gluon.jit
def _table(unit):
    """E4M3 codes of the eight magnitudes 0, .5, 1, 1.5 | 2, 3, 4, 6 times a unit, a byte each."""
    return gl.inline_asm_elementwise(
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
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _lossy_table(shift):
    """Of the eight magnitudes times 2^shift, a byte each: whether E4M3 drops a bit, all of which lie above 2^-9.

    The lowest bits of 0.5, 1, 1.5, 2, 3, 4 and 6 are 2^-1, 2^0, 2^-1, 2^1, 2^0, 2^2 and 2^1.
    """
    below8, below9 = (shift < -8).to(gl.int32), (shift < -9).to(gl.int32)
    below10, below11 = (shift < -10).to(gl.int32), (shift < -11).to(gl.int32)
    low = (below8 << 8) | (below9 << 16) | (below8 << 24)
    return low, below10 | (below9 << 8) | (below11 << 16) | (below10 << 24)


@gluon.jit
def _eight_codes(word, low_table, high_table):
    """A word's eight E4M3 codes, in two words. Even codes' signs lie in the top bits of bytes after a shift by four."""
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b32 magnitude, even, a, b;
        shl.b32 even, $2, 4;
        and.b32 magnitude, $2, 0x77777777;
        prmt.b32 a, even, $2, 0x5140;
        prmt.b32 b, even, $2, 0x7362;
        prmt.b32 $0, $3, $4, magnitude;
        shr.b32 magnitude, magnitude, 16;
        prmt.b32 $1, $3, $4, magnitude;
        lop3.b32 $0, a, 0x80808080, $0, 0xEA;
        lop3.b32 $1, b, 0x80808080, $1, 0xEA;
        }""",
        "=&r,=&r,r,r,r",
        [word, low_table, high_table],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return low, high


@gluon.jit
def _any_byte(word, low_table, high_table):
    magnitude = word & 0x77777777
    return _look_up(low_table, high_table, magnitude) | _look_up(low_table, high_table, magnitude >> 16)


@gluon.jit
def _look_up(low_table, high_table, selectors):
    """Four bytes of an eight-byte table, one for each of the low four nibbles of the selectors."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [low_table, high_table, selectors],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
