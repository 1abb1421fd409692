"""Layouts under which a tile of 128 x 128 and its transpose are stored from the same registers, and the cast of both.

A thread holds 16 rows of 4 columns. Sixteen codes of a column are 16 bytes of a row of the transpose, and two
neighbouring lanes complete a sector, so turning a tile is a matter of which register is stored where: nothing passes
through shared memory but the maxima.

Legend: M rows and K columns of a matrix.
"""

# Kernels are written in Gluon's own types, which pyright takes for Python's.
# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.quant.bits import E4M3_CARRY, E4M3_EXPONENT, e4m3, fp8_scale, scale_byte, top_bits

WARPS = 8
#: A tile [rows, columns], and its transpose [columns, rows] in the same threads.
LAYOUT = gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0], [8, 0]],
    lane_bases=[[0, 4], [0, 8], [0, 16], [0, 32], [16, 0]],
    warp_bases=[[0, 64], [32, 0], [64, 0]],
    block_bases=[],
    shape=[128, 128],
)
TURNED = gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0]],
    lane_bases=[[4, 0], [8, 0], [16, 0], [32, 0], [0, 16]],
    warp_bases=[[64, 0], [0, 32], [0, 64]],
    block_bases=[],
    shape=[128, 128],
)


def fp8_quantize_both(x_MK):
    M, K = x_MK.shape
    codes = torch.empty(M, K, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales = torch.empty(M, -(-K // 128), dtype=torch.float32, device=x_MK.device)
    # Rows of the transpose are padded to 16 bytes, which a thread stores at once.
    padded = -(-M // 16) * 16
    codes_t = torch.empty(K, padded, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales_t = torch.empty(K, -(-M // 128), dtype=torch.float32, device=x_MK.device)
    if codes.numel():
        bytes_, bytes_t = codes.view(torch.uint8), codes_t.view(torch.uint8)
        grid = (scales.shape[1], scales_t.shape[1])
        _both[grid](x_MK, bytes_, scales, bytes_t, scales_t, M, K, padded, LAYOUT, TURNED, num_warps=WARPS)
    return codes, scales, codes_t[:, :M], scales_t


@gluon.jit
def _both(x, codes, scales, codes_t, scales_t, M, K, stride_t, LAYOUT: gl.constexpr, TURNED: gl.constexpr):
    first_row, first_column = gl.program_id(1) * 128, gl.program_id(0) * 128
    rows, columns = M - first_row, K - first_column
    row, column = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)), gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    corner = first_row.to(gl.int64) * K + first_column
    place = row[:, None] * K + column[None, :]
    values = gl.load(x + corner + place, mask=inside, other=0.0).to(gl.float32)
    bits, bits_t = top_bits(values, 1), top_bits(values, 0)

    byte = scale_byte(bits, E4M3_EXPONENT, E4M3_CARRY)
    gl.store(codes + corner + place, e4m3(values, byte[:, None]), mask=inside)
    tiles = gl.num_programs(0)
    scale = scales + first_row.to(gl.int64) * tiles + gl.program_id(0)
    gl.store(scale + row * tiles, fp8_scale(bits, byte), mask=row < rows)

    byte_t = scale_byte(bits_t, E4M3_EXPONENT, E4M3_CARRY)
    tiles_t = gl.num_programs(1)
    scale_t = scales_t + first_column.to(gl.int64) * tiles_t + gl.program_id(1)
    gl.store(scale_t + column * tiles_t, fp8_scale(bits_t, byte_t), mask=column < columns)
    turned = gl.convert_layout(values.trans(), TURNED)
    codes_turned = e4m3(turned, gl.convert_layout(byte_t, gl.SliceLayout(1, TURNED))[:, None])
    row_t, column_t = gl.arange(0, 128, gl.SliceLayout(0, TURNED)), gl.arange(0, 128, gl.SliceLayout(1, TURNED))
    inside_t = (column_t[:, None] < columns) & (row_t[None, :] < stride_t - first_row)
    corner_t = first_column.to(gl.int64) * stride_t + first_row
    gl.store(codes_t + corner_t + column_t[:, None] * stride_t + row_t[None, :], codes_turned, mask=inside_t)
