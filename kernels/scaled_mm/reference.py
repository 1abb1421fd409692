"""Products in plain torch on dequantised operands: the oracle of the kernels, and what a CPU runs.

Shape letters as in the contract.
"""

from __future__ import annotations

import torch

from kernels.quant import fp8_dequantize
from kernels.rows import silu_gate
from kernels.scaled_mm.packing import Mxfp4Weight, unpack_mxfp4


def dense_mm(x_MK: torch.Tensor, w_NK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x @ w.T summed in float64 and rounded once to dtype."""
    return (x_MK.double() @ w_NK.double().T).to(dtype)


def mxfp4_mm(x_MK: torch.Tensor, weight: Mxfp4Weight) -> torch.Tensor:
    """x @ W.T on the unpacked values, summed in float64."""
    return dense_mm(x_MK, unpack_mxfp4(weight), x_MK.dtype)


def mxfp4_gate_mm(x_MK: torch.Tensor, weight: Mxfp4Weight) -> torch.Tensor:
    """silu(gate) * up of `mxfp4_mm`'s two halves."""
    return silu_gate(*mxfp4_mm(x_MK, weight).split(weight.num_rows // 2, 1), impl="reference")


def fp8_mm(
    x_codes: torch.Tensor, x_scales: torch.Tensor, w_codes: torch.Tensor, w_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The product of the dequantised operands in fp32: E4M3 times a power of two is exact there."""
    x_MK = fp8_dequantize(x_codes, x_scales, torch.float32)
    w_NK = fp8_dequantize(w_codes, w_scales, torch.float32)
    return (x_MK @ w_NK.T).to(dtype)
