"""Casts between floats and block-scaled MXFP4 and FP8: the contract, and the one place that picks an implementation.

MXFP4: a block is 32 columns of a row. `blocks` uint8 [N, K/2] holds two E2M1 codes a byte, the even column in the
low nibble; `scales` uint8 [N, K/32] holds E8M0 exponents: byte b is 2^(b - 127), 255 is NaN.
FP8: E4M3 codes with fp32 scales that are powers of two, a block being 1 x 128 (activations) or 128 x 128 (weights);
blocks at ragged edges are smaller. value = code * scale in both. Scales of 1 x 128 blocks lie column by column (they
are the transpose of a dense [ceil(K/128), M]), as the library's product takes them.

The scale is the smallest power of two that clips nothing: 2^ceil(log2(amax / 6)) or /448, no smaller than 2^-126.
Codes round to nearest, ties to even, and keep the sign of zero. A block that holds inf or NaN gets the scale NaN and
so decodes to NaN as a whole; its codes mean nothing. Invariant: all else is the same bits from kernel and reference.

Legend: M rows of activations, N rows and K columns of a weight.
"""

from __future__ import annotations

from typing import Literal

import torch

Implementation = Literal["kernel", "reference"]


def mxfp4_quantize(x_NK: torch.Tensor, *, impl: Implementation | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks uint8 [N, K/2], scales uint8 [N, K/32]) of an fp32 or bf16 matrix; K is a multiple of 32."""
    _check_matrix("x_NK", x_NK, (torch.float32, torch.bfloat16), columns=32)
    return _implementation(x_NK, impl).mxfp4_quantize(x_NK.contiguous())


def mxfp4_dequantize(
    blocks: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    impl: Implementation | None = None,
) -> torch.Tensor:
    """The [N, K] values in bf16 or fp32. Both hold every one, except those from 2^128 on, which become inf."""
    _check_mxfp4(blocks, scales)
    return _implementation(blocks, impl).mxfp4_dequantize(blocks.contiguous(), scales.contiguous(), dtype)


def mxfp4_round(
    x_NK: torch.Tensor, dtype: torch.dtype | None = None, *, impl: Implementation | None = None
) -> torch.Tensor:
    """mxfp4_dequantize(mxfp4_quantize(x_NK)) in dtype, x_NK's unless given: the values that a training forward on
    MXFP4 takes."""
    _check_matrix("x_NK", x_NK, (torch.float32, torch.bfloat16), columns=32)
    if impl is None and not x_NK.is_cuda:
        from kernels.quant import rounding

        return rounding.mxfp4_round(x_NK).to(dtype or x_NK.dtype)
    return mxfp4_dequantize(*mxfp4_quantize(x_NK, impl=impl), dtype or x_NK.dtype, impl=impl)


def mxfp4_to_fp8(
    blocks: torch.Tensor, scales: torch.Tensor, *, impl: Implementation | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes e4m3 [N, K], scales fp32 [ceil(N/128), ceil(K/128)], exact bool of the scales' shape).

    `exact` says of each 128 x 128 tile whether its FP8 values equal its MXFP4 values, all of them. They do wherever
    the scales of its blocks lie within 14 binades (blocks of zeros do not count), sometimes beyond. A tile that is
    not exact holds values rounded to nearest: the caller must not take it for the MXFP4 weight.
    """
    _check_mxfp4(blocks, scales)
    return _implementation(blocks, impl).mxfp4_to_fp8(blocks.contiguous(), scales.contiguous())


def fp8_quantize_tiles(w_NK: torch.Tensor, *, impl: Implementation | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes e4m3 [N, K], scales fp32 [ceil(N/128), ceil(K/128)]) of an fp32 or bf16 matrix."""
    _check_matrix("w_NK", w_NK, (torch.float32, torch.bfloat16))
    return _implementation(w_NK, impl).fp8_quantize_tiles(w_NK.contiguous())


def fp8_quantize_rows(x_MK: torch.Tensor, *, impl: Implementation | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes e4m3 [M, K], scales fp32 [M, ceil(K/128)], column by column) of an fp32 or bf16 matrix."""
    _check_matrix("x_MK", x_MK, (torch.float32, torch.bfloat16))
    return _implementation(x_MK, impl).fp8_quantize_rows(x_MK.contiguous())


def fp8_quantize_both(
    x_MK: torch.Tensor, *, impl: Implementation | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`fp8_quantize_rows` of x_MK and of its transpose, of bf16 from one read: (codes [M, K], scales
    [M, ceil(K/128)], codes [K, M], scales [K, ceil(M/128)]). The second pair is what a weight gradient sums over
    tokens; its codes may be a view whose rows lie a multiple of 16 bytes apart."""
    _check_matrix("x_MK", x_MK, (torch.float32, torch.bfloat16))
    return _implementation(x_MK, impl).fp8_quantize_both(x_MK.contiguous())


def fp8_dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The [M, K] values of either block shape, told by the scales' rows. Plain torch on any device."""
    rows_per_scale = 1 if scales.shape[0] == codes.shape[0] else 128
    by_element = scales.repeat_interleave(rows_per_scale, 0)[: codes.shape[0]]
    by_element = by_element.repeat_interleave(128, 1)[:, : codes.shape[1]]
    return (codes.float() * by_element).to(dtype)


def _implementation(tensor: torch.Tensor, impl: Implementation | None):
    # Triton is imported only where its kernels run.
    if impl == "kernel" or (impl is None and tensor.is_cuda):
        from kernels.quant import kernel as module
    else:
        from kernels.quant import reference as module
    return module


def _check_matrix(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], columns: int = 1) -> None:
    if x.dim() != 2 or x.dtype not in dtypes or x.shape[1] % columns:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)}: a {wanted} matrix, columns a multiple of {columns}")


def _check_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    _check_matrix("blocks", blocks, (torch.uint8,), columns=16)
    _check_matrix("scales", scales, (torch.uint8,))
    if scales.shape != (blocks.shape[0], blocks.shape[1] // 16):
        raise ValueError(f"scales are {list(scales.shape)} for blocks {list(blocks.shape)}: one a 32 columns")
