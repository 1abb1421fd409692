"""Row-invariant products on the CPU, whose libraries choose kernels, and so the order of sums, by the number of rows.

Every call there has exactly ROWS of them. ROWS = 32: SmolLM2's layers in bf16 cost 2.5 us a row at 32, 3.4 at 16 and
2.2 at 64 (two cores, AVX512-bf16), and a decode batch is seldom a multiple of 64. The promise holds for one kind of
CPU, one build of torch and one number of threads.

Shape letters: M rows of x, N rows of the weight, K columns of both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.scaled_mm.wide import wide

ROWS = 32
_ALIGN_BYTES = 64


def fixed_rows_mm(x_MK: torch.Tensor, w_NK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x @ w.T in dtype: x's own, or fp32, which takes bf16 operands in either dtype without rounding their sums."""
    if dtype == torch.bfloat16 and wide():
        return _products(x_MK.float(), w_NK.float()).to(dtype)
    if dtype == x_MK.dtype or wide():
        return _products(x_MK.to(dtype), w_NK.to(dtype))
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = matmul.fp32_precision
    # oneDNN may round both operands to bf16, which changes nothing here, and keeps fp32 sums: twice the fp32 speed.
    matmul.fp32_precision = "bf16"
    try:
        return _products(x_MK.to(dtype), w_NK.to(dtype))
    finally:
        matmul.fp32_precision = before


def _products(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    num_rows, num_calls = x_MK.shape[0], -(-x_MK.shape[0] // ROWS)
    x_MK, w_KN = _aligned(x_MK), _aligned(w_NK).t()
    y_MN = x_MK.new_empty(num_calls * ROWS, w_NK.shape[0])
    for first in range(0, num_rows - num_rows % ROWS, ROWS):
        torch.mm(_aligned(x_MK[first : first + ROWS]), w_KN, out=y_MN[first : first + ROWS])
    if num_rows % ROWS:
        first = num_rows - num_rows % ROWS
        torch.mm(F.pad(x_MK[first:], (0, 0, 0, ROWS - num_rows % ROWS)), w_KN, out=y_MN[first:])
    return y_MN[:num_rows]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    # Views into flat buffers start anywhere, and BLAS may pick another kernel for another alignment.
    if x.is_contiguous() and x.data_ptr() % _ALIGN_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
