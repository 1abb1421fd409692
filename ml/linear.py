"""Linear products whose weight values, and on request whose bits per row, are the same in sampling and training.

Owns two promises. Values: rollout, teacher and training forward all take weights from `weight_values`, so they see
equal numbers whatever dtype holds them. Rows: without gradients, a row of a product has the same bits whatever else
is in the batch. The CPU libraries choose kernels, and with them the order of summation, by the number of rows, so
every call there has exactly ROWS of them. ROWS = 32: SmolLM2's layers in bf16 cost 2.5 us a row at 32, 3.4 at 16 and
2.2 at 64 (two cores, AVX512-bf16), and a decode batch is seldom a multiple of 64.

The promise holds for one kind of CPU, one build of torch and one number of threads.

Letters: N rows, I inputs, O outputs, D student width, V vocabulary rows.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from kernels.quant import mxfp4_dequantize, mxfp4_quantize

Precision = Literal["fp32", "bf16", "mxfp4"]
Compute = Literal["fp32", "bf16"]

COMPUTE_DTYPES: dict[Compute, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

ROWS = 32
_MIN_CUDA_ROWS = 16
_ALIGN_BYTES = 64


def weight_values(w: torch.Tensor, precision: Precision) -> torch.Tensor:
    """The numbers that a weight stands for on a value grid, in w's own dtype and shape.

    "fp32": w itself. "bf16": each element rounded to the nearest bf16, ties to even. "mxfp4": w's MXFP4 code, for a
    matrix whose columns are a multiple of 32; quantise the fp32 master, since rounding to bf16 first can
    give other codes. The gradient of both passes straight through to w.
    """
    if precision == "fp32":
        return w
    if precision == "bf16":
        return w if w.dtype == torch.bfloat16 else _RoundToBf16.apply(w)
    if precision == "mxfp4":
        return _RoundToMxfp4.apply(w)
    raise ValueError(f"precision {precision!r}")


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def backward(ctx, grad):
        return grad


class _RoundToBf16(_StraightThrough):
    # A cast there and back would also round the gradient to bf16.
    @staticmethod
    def forward(ctx, w):
        return w.to(torch.bfloat16).to(w.dtype)


class _RoundToMxfp4(_StraightThrough):
    @staticmethod
    def forward(ctx, w):
        return mxfp4_dequantize(*mxfp4_quantize(w), w.dtype)


def row_invariant_linear(x_NI: torch.Tensor, w_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w.T + bias -> [N, O] in x's dtype, without gradient; a row's bits do not depend on the other rows.

    x and w share one dtype (fp32 or bf16, accumulated in fp32). The bias is added after the product was rounded to
    x's dtype.
    """
    if x_NI.device.type == "cpu":
        out_NO = _fixed_row_products(x_NI, w_OI)
    else:
        # Two rows are the least that measured invariant on cuBLASLt with split-K off; 16 leaves a margin.
        missing = max(0, _MIN_CUDA_ROWS - x_NI.shape[0])
        out_NO = (F.pad(x_NI, (0, 0, 0, missing)) @ w_OI.t())[: x_NI.shape[0]]
    return out_NO if bias_O is None else out_NO.add_(bias_O)


def row_invariant_logits(h_ND: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
    """fp32 logits [N, V] of final states h (fp32 or bf16) and a head w of h's dtype or fp32; rows as above.

    With bf16 states w must be on the bf16 grid (`weight_values`), in either dtype; the sum, and the result, are fp32:
    logits rounded to bf16 would be wrong by up to 0.06 near 16. On the CPU such a head is best kept in fp32, which
    saves a conversion a call.
    """
    if h_ND.dtype == torch.float32:
        return row_invariant_linear(h_ND, w_VD.float())
    if h_ND.device.type == "cpu":
        matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
        before = matmul.fp32_precision
        # oneDNN may round both operands to bf16, which changes nothing here, and keeps fp32 sums: twice the fp32 speed.
        matmul.fp32_precision = "bf16"
        try:
            return _fixed_row_products(h_ND.float(), w_VD.float())
        finally:
            matmul.fp32_precision = before
    missing = max(0, _MIN_CUDA_ROWS - h_ND.shape[0])
    padded_ND = F.pad(h_ND, (0, 0, 0, missing))
    return torch.mm(padded_ND, w_VD.to(h_ND.dtype).t(), out_dtype=torch.float32)[: h_ND.shape[0]]


def _fixed_row_products(x_NI: torch.Tensor, w_OI: torch.Tensor) -> torch.Tensor:
    num_rows, num_calls = x_NI.shape[0], -(-x_NI.shape[0] // ROWS)
    x_NI, w_IO = _aligned(x_NI), _aligned(w_OI).t()
    out_NO = x_NI.new_empty(num_calls * ROWS, w_OI.shape[0])
    for first in range(0, num_rows - num_rows % ROWS, ROWS):
        torch.mm(_aligned(x_NI[first : first + ROWS]), w_IO, out=out_NO[first : first + ROWS])
    if num_rows % ROWS:
        first = num_rows - num_rows % ROWS
        torch.mm(F.pad(x_NI[first:], (0, 0, 0, ROWS - num_rows % ROWS)), w_IO, out=out_NO[first:])
    return out_NO[:num_rows]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    # Views into flat buffers start anywhere, and BLAS may pick another kernel for another alignment.
    if x.is_contiguous() and x.data_ptr() % _ALIGN_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class Linear(nn.Module):
    """y = x W^T + b, with W's values on the grid `precision` and the product in `compute`.

    weight [O, I] and bias [O] may be an fp32 master (training) or already hold values in `compute` (inference): the
    values are equal. Not a subclass of nn.Linear, whose exact class DeepSpeed's autocast gathers in bf16. With
    gradients enabled the product is the library's plain one; without, it is row-invariant.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        bias: bool,
        precision: Precision,
        compute: torch.dtype,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.precision: Precision = precision
        self.compute = compute
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_outputs, dtype=dtype)) if bias else None

    def forward(self, x_NI: torch.Tensor) -> torch.Tensor:
        """[N, I] of any float dtype -> [N, O] in `compute`."""
        x_NI = x_NI.to(self.compute)
        w_OI = weight_values(self.weight, self.precision).to(self.compute)
        bias_O = None
        if self.bias is not None:
            bias_O = weight_values(self.bias, dense_precision(self.precision)).to(self.compute)
        if not torch.is_grad_enabled():
            return row_invariant_linear(x_NI, w_OI, bias_O)
        out_NO = x_NI @ w_OI.t()
        return out_NO if bias_O is None else out_NO + bias_O


def dense_precision(precision: Precision) -> Precision:
    """Grid of what is never quantised (embedding, head, norms, biases) in a model of this precision."""
    return "fp32" if precision == "fp32" else "bf16"
