"""FP8 operands of linear_kl: heads in tiles of 128 x 128, states and the gradient of the logits in blocks of 1 x 128.

The library takes both operands with the summed dimension along rows only, so what is summed two ways is written two
ways: the gradient along the vocabulary for dX and along tokens for dW, the head along its width for logits and along
the vocabulary for dX. The second form lives for one part of the vocabulary at a time. The second gradient is made of
the first one's codes: scales are powers of two, so nothing is rounded twice but values more than 15 binades below the
largest of their 128 tokens. States are summed over tokens in tiles, since the library multiplies blocks of 1 x 128 by
tiles 1.6 times as fast as by other such blocks; a tile keeps the relative precision of all but what is 15 binades
below its largest.

Legend: G tokens (a multiple of 128), D width, V vocabulary.
Invariant: a head's rows past its vocabulary and tokens past the batch have the value zero.
"""

# Kernels are written in Triton's and Gluon's own types, which pyright takes for Python's.
# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.linear_kl.products import Fp8
from kernels.quant import fp8_quantize_rows
from kernels.quant.bits import E4M3_CARRY, E4M3_EXPONENT, e4m3, fp8_scale, scale_byte, top_bits

BLOCK = 128
# Columns of the vocabulary whose second forms are held at a time, at most: enough for a product.
_MAX_PART_COLUMNS = 16384
_WARPS = 8
# A tile of 128 x 128 [rows, columns], and its transpose [columns, rows] in the same threads. A thread holds 16 rows of
# 4 columns: sixteen codes of a column are 16 bytes of a row of the transpose, and two neighbouring lanes complete a
# sector. So a tile is turned by storing each register elsewhere; only the maxima pass through shared memory.
_LAYOUT = gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0], [8, 0]],
    lane_bases=[[0, 4], [0, 8], [0, 16], [0, 32], [16, 0]],
    warp_bases=[[0, 64], [32, 0], [64, 0]],
    block_bases=[],
    shape=[128, 128],
)
_TURNED = gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0]],
    lane_bases=[[4, 0], [8, 0], [16, 0], [32, 0], [0, 16]],
    warp_bases=[[64, 0], [0, 32], [0, 64]],
    block_bases=[],
    shape=[128, 128],
)


def part_columns(columns: int) -> int:
    """Columns of every part but the last, which is nearly as large: a small one would be a slow product."""
    parts = -(-columns // _MAX_PART_COLUMNS)
    return -(-columns // (parts * BLOCK)) * BLOCK


def rows(x_MD: torch.Tensor) -> Fp8:
    """x in blocks of 1 x 128 along D."""
    codes, scales = fp8_quantize_rows(x_MD)
    return Fp8(codes, scales.t())


def tile_scales(num_rows: int, num_columns: int) -> tuple[int, int]:
    """Shape of the scales of the tiles of a matrix."""
    return -(-num_rows // BLOCK), -(-num_columns // (4 * BLOCK)) * 4


def tiles(x_MD: torch.Tensor, codes_MD: torch.Tensor, dtype: torch.dtype) -> Fp8:
    """The values of x in dtype in tiles, summed over D; written to codes, which end in zeros past x's rows."""
    scales = torch.empty(tile_scales(*codes_MD.shape), dtype=torch.float32, device=x_MD.device)
    out = Fp8(codes_MD, scales, tiles=True)
    _write_tiles(x_MD, len(codes_MD), out, dtype, turned=False)
    return out


def turned_tiles(x_MD: torch.Tensor, out_DM: Fp8, dtype: torch.dtype) -> None:
    """The values of x in dtype in tiles, summed over its rows: [D, M], zeros past x's rows."""
    _write_tiles(x_MD, out_DM.shape[1], out_DM, dtype, turned=True)


def turned_gradient(dz_GV: Fp8, out_VG: Fp8) -> None:
    """dz in blocks of 1 x 128 along tokens, from those along the vocabulary."""
    V, G = out_VG.shape
    _turn[(V // BLOCK, G // BLOCK)](
        dz_GV.codes.view(torch.uint8),
        dz_GV.scales,
        out_VG.codes.view(torch.uint8),
        out_VG.scales,
        G,
        V,
        dz_GV.codes.stride(0),
        _LAYOUT,
        _TURNED,
        num_warps=_WARPS,
    )


def _write_tiles(x_MD, padded_rows, out, dtype, turned):
    M, D = x_MD.shape
    # Scales are written in fours, as the library takes them.
    grid = out.scales.shape if turned else out.scales.shape[::-1]
    _tiles[grid](
        x_MD,
        out.codes.view(torch.uint8),
        out.scales,
        M,
        padded_rows,
        D,
        *x_MD.stride(),
        out.scales.stride(0),
        TURN=turned,
        NARROW=dtype == torch.bfloat16,
        num_warps=8,
    )


@triton.jit
def _tiles(x, codes, scales, M, padded, D, stride_m, stride_d, stride_scales, TURN: tl.constexpr, NARROW: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    column = tl.program_id(0) * 128 + tl.arange(0, 128)
    inside = (row[:, None] < M) & (column[None, :] < D)
    values = tl.load(x + row[:, None] * stride_m + column[None, :] * stride_d, mask=inside, other=0.0)
    if NARROW:
        values = values.to(tl.bfloat16)
    values = values.to(tl.float32)
    bits = tl.max(top_bits(values, 1), 0)
    byte = scale_byte(bits, E4M3_EXPONENT, E4M3_CARRY)
    written = (row[:, None] < padded) & (column[None, :] < D)
    if TURN:
        place = codes + column[:, None].to(tl.int64) * padded + row[None, :]
        tl.store(place, tl.trans(e4m3(values, byte)), mask=tl.trans(written))
        scale = scales + tl.program_id(0) * stride_scales + tl.program_id(1)
    else:
        tl.store(codes + row[:, None] * D + column[None, :], e4m3(values, byte), mask=written)
        scale = scales + tl.program_id(1) * stride_scales + tl.program_id(0)
    tl.store(scale, fp8_scale(bits, byte))


@gluon.jit
def _turn(codes, scales, codes_t, scales_t, G, V, stride_g, LAYOUT: gl.constexpr, TURNED: gl.constexpr):
    first_row, first_column = gl.program_id(1) * 128, gl.program_id(0) * 128
    row, column = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)), gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    corner = codes + first_row.to(gl.int64) * stride_g + first_column
    fp8 = gl.load(corner + row[:, None] * stride_g + column[None, :]).to(gl.float8e4nv, bitcast=True)
    scale = gl.load(scales + gl.program_id(0).to(gl.int64) * G + first_row + row)
    values = fp8.to(gl.float32) * scale[:, None]
    bits = top_bits(values, 0)
    byte = scale_byte(bits, E4M3_EXPONENT, E4M3_CARRY)
    turned = gl.convert_layout(values.trans(), TURNED)
    codes_turned = e4m3(turned, gl.convert_layout(byte, gl.SliceLayout(1, TURNED))[:, None])
    row_t, column_t = gl.arange(0, 128, gl.SliceLayout(0, TURNED)), gl.arange(0, 128, gl.SliceLayout(1, TURNED))
    corner_t = codes_t + first_column.to(gl.int64) * G + first_row
    gl.store(corner_t + column_t[:, None] * G + row_t[None, :], codes_turned)
    gl.store(scales_t + gl.program_id(1) * V + first_column + column, fp8_scale(bits, byte))
