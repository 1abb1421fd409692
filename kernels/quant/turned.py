"""Layouts under which a tile of 128 x 128 and its transpose are stored from the same registers.

A thread holds 16 rows of 4 columns. Sixteen codes of a column are 16 bytes of a row of the transpose, and two
neighbouring lanes complete a sector, so turning a tile is a matter of which register is stored where: nothing passes
through shared memory but the maxima.

Legend: M rows and K columns of a matrix.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

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
