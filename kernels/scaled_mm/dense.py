"""Row-invariant bf16 products on CUDA: cuBLASLt held to one order of sums, and a Triton product in the same order.

Why it works (measured, BENCH.md): without split-K every cuBLASLt kernel adds products of 16 columns at a time, in
ascending order, into one fp32 sum, as a Triton dot over ascending K does, so tiles of any size agree bit for bit. The
library switches to another kind of kernel for one row, hence the padding.

Invariant: neither path takes more than one partial sum over K.

Shape letters: M rows of x, N rows of the weight, K columns of both.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

FEWEST_ROWS = 16
#: Other numbers of outputs, which no known linear has but some heads do, get kernels of other bits at some numbers of
#: rows: they are padded, at the price of copying the weight.
OUTPUT_STEP = 8


def library_mm(
    x_MK: torch.Tensor, w_NK: torch.Tensor, dtype: torch.dtype, least_rows: int = FEWEST_ROWS
) -> torch.Tensor:
    """x @ w.T in dtype (x's, or fp32) through cuBLASLt with split-K off, of at least so many rows."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    # The second value turns split-K off; with it on, some numbers of rows sum K in parts.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    rows, outputs = len(x_MK), len(w_NK)
    x_MK, w_NK = _aligned(x_MK), _aligned(w_NK)
    if 0 < rows < least_rows:
        x_MK = F.pad(x_MK, (0, 0, 0, least_rows - rows))
    if outputs % OUTPUT_STEP:
        w_NK = F.pad(w_NK, (0, 0, 0, -outputs % OUTPUT_STEP))
    if dtype == x_MK.dtype:
        return F.linear(x_MK, w_NK)[:rows, :outputs]
    return torch.mm(x_MK, w_NK.to(x_MK.dtype).t(), out_dtype=dtype)[:rows, :outputs]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    # What starts anywhere gets kernels of other bits.
    return x if x.data_ptr() % 16 == 0 else x.clone()


def triton_mm(x_MK: torch.Tensor, w_NK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x @ w.T in dtype (x's, or fp32), K a multiple of 8."""
    (rows, columns), outputs = x_MK.shape, len(w_NK)
    y_MN = torch.empty(rows, outputs, dtype=dtype, device=x_MK.device)
    if rows == 0:
        return y_MN
    block_m, block_n, warps = (128, 128, 8) if rows > 64 else (64, 128, 4)
    _mm[(triton.cdiv(rows, block_m) * triton.cdiv(outputs, block_n),)](
        TensorDescriptor.from_tensor(x_MK, [block_m, 64]),
        TensorDescriptor.from_tensor(w_NK.to(x_MK.dtype), [block_n, 64]),
        y_MN,
        rows,
        outputs,
        columns,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=64,
        num_warps=warps,
        num_stages=4,
    )
    return y_MN


@triton.jit
def _mm(
    x_desc, w_desc, y_ptr, rows, outputs, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    # Eight row tiles share the weight tiles that they read before the next eight start.
    program = tl.program_id(0)
    row_tiles, output_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    first = program // (8 * output_tiles) * 8
    height = tl.minimum(row_tiles - first, 8)
    tile_m = first + program % (8 * output_tiles) % height
    tile_n = program % (8 * output_tiles) // height
    sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, columns, BLOCK_K):
        x_MK = x_desc.load([tile_m * BLOCK_M, k])
        w_NK = w_desc.load([tile_n * BLOCK_N, k])
        sum_MN = tl.dot(x_MK, tl.trans(w_NK), sum_MN)
    m_M = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    y_ptrs = y_ptr + m_M[:, None].to(tl.int64) * outputs + n_N[None, :]
    tl.store(y_ptrs, sum_MN.to(y_ptr.dtype.element_ty), mask=(m_M[:, None] < rows) & (n_N[None, :] < outputs))
