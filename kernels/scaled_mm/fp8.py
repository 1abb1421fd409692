"""FP8 products of training: cuBLASLt's block-scaled product on kernels.quant's layouts, and the autograd linear.

Three products a linear: forward x @ w.T and dgrad dy @ w take 1 x 128 blocks against the weight's 128 x 128 blocks,
whose transpose is exact; wgrad dy.T @ x sums over tokens and takes 1 x 128 blocks along tokens on both sides, from
the read that also makes the row blocks. Gradients are quantised as they come: powers of two lose nothing to a loss
scale, so no 1/N needs to be kept out.

The library sums over multiples of 16, so tokens are padded with rows of zeros, whose products are zero.

Invariant: the weight's codes are the same in both directions.

Shape letters: M tokens, N outputs, K inputs.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.functional import ScalingType, scaled_mm

from kernels.quant import fp8_quantize_both, fp8_quantize_rows
from schemas.errors import ContractError


def library_fp8_mm(
    x_codes: torch.Tensor, x_scales: torch.Tensor, w_codes: torch.Tensor, w_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See `fp8_mm`. Raises ContractError where N or K is no multiple of 16, which the library refuses.

    K runs along the rows of both operands; a row may start anywhere that is a multiple of 16.
    """
    outputs, columns = w_codes.shape
    rows = len(x_codes)
    if 0 < rows < 16:
        # The library has no product of one row.
        wider = F.pad(x_codes.view(torch.uint8), (0, 0, 0, 16 - rows)).view(x_codes.dtype)
        return library_fp8_mm(wider, F.pad(x_scales, (0, 0, 0, 16 - rows)), w_codes, w_scales, dtype)[:rows]
    if outputs % 16 or columns % 16:
        raise ContractError("fp8_mm", expected="a weight of multiples of 16", found=f"{outputs} x {columns}")
    by_row = len(w_scales) == outputs and outputs != 1
    recipe = ScalingType.BlockWise1x128 if by_row else ScalingType.BlockWise128x128
    if by_row:
        w_scales = _columns_first(w_scales)
    else:
        # Given as [K / 128, N / 128] with K running fastest.
        w_scales = in_fours(w_scales).t()
    return scaled_mm(
        x_codes,
        w_codes.t(),
        _columns_first(x_scales),
        ScalingType.BlockWise1x128,
        w_scales,
        recipe,
        output_dtype=dtype,
    )


def in_fours(scales: torch.Tensor) -> torch.Tensor:
    """128 x 128 scales as the library takes them: row by row, columns of zeros up to a multiple of four."""
    missing = -scales.shape[1] % 4
    return F.pad(scales, (0, missing)) if missing else scales.contiguous()


def _columns_first(scales: torch.Tensor) -> torch.Tensor:
    """1 x 128 scales lie column by column."""
    return scales if scales.stride() == (1, len(scales)) else scales.t().contiguous().t()


class Fp8Linear(torch.autograd.Function):
    """y = x @ w.T of their codes; x and w themselves are where gradients go. Keeps FP8 copies of x (along tokens) and
    w for the backward pass, no wide ones."""

    @staticmethod
    def forward(ctx, x_MK, w_NK, w_fp8, x_fp8):
        # What is saved, a layer that is recomputed drops and makes again; a held transpose only stays where it is.
        ctx.transposed = w_fp8.transposed
        made_again = (w_fp8.codes, w_fp8.scales) if w_fp8.transposed is None else ()
        ctx.save_for_backward(x_fp8.codes_t, x_fp8.scales_t, *made_again)
        ctx.dtypes = x_MK.dtype, w_NK.dtype
        y_MN = _product(x_fp8.codes, x_fp8.scales, w_fp8.codes, w_fp8.scales, torch.bfloat16)
        return _first_rows(y_MN, len(x_MK))

    @staticmethod
    def backward(ctx, *grads):
        xt_codes, xt_scales, *made_again = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        dx_MK = dw_NK = None
        tokens = len(grads[0])
        dy_MN = whole_sixteens(grads[0])
        if ctx.needs_input_grad[1]:
            dy_codes, dy_scales, dyt_codes, dyt_scales = fp8_quantize_both(dy_MN)
            dw_NK = _product(dyt_codes, dyt_scales, xt_codes, xt_scales, w_dtype)
        else:
            dy_codes, dy_scales = fp8_quantize_rows(dy_MN)
        if ctx.needs_input_grad[0]:
            wt_codes, wt_scales = ctx.transposed or transposed_tiles(*made_again)
            dx_MK = _product(dy_codes, dy_scales, wt_codes, wt_scales, torch.bfloat16)
            dx_MK = _first_rows(dx_MK, tokens).to(x_dtype)
        return dx_MK, dw_NK, None, None


def transposed_tiles(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [K, N] and scales `in_fours` of the transpose of a weight in 128 x 128 tiles; scales may be in fours."""
    return _transposed(codes), in_fours(scales[:, : -(-codes.shape[1] // 128)].t())


def _first_rows(y_MN: torch.Tensor, rows: int) -> torch.Tensor:
    return y_MN if len(y_MN) == rows else y_MN[:rows]


@triton.jit
def _transpose(source_ptr, target_ptr, rows, columns, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    tile = tl.load(source_ptr + r[:, None].to(tl.int64) * columns + c[None, :], mask=inside)
    # Bytes, not E4M3: Triton miscompiles transposed FP8 stores on this card.
    tl.store(target_ptr + c[:, None].to(tl.int64) * rows + r[None, :], tl.trans(tile), mask=tl.trans(inside))


def _transposed(codes: torch.Tensor) -> torch.Tensor:
    """A contiguous transpose; the library takes both operands along K only."""
    if not codes.is_cuda:
        return codes.t().contiguous()
    rows, columns = codes.shape
    target = torch.empty(columns, rows, dtype=torch.uint8, device=codes.device)
    grid = (triton.cdiv(rows, 128), triton.cdiv(columns, 128))
    _transpose[grid](codes.view(torch.uint8), target, rows, columns, BLOCK=128, num_warps=8)
    return target.view(codes.dtype)


def whole_sixteens(x_MK: torch.Tensor) -> torch.Tensor:
    """x with rows of zeros up to a multiple of 16, 16 at least."""
    missing = max(16, -(-len(x_MK) // 16) * 16) - len(x_MK)
    return F.pad(x_MK, (0, 0, 0, missing)) if missing else x_MK


def _product(a_codes, a_scales, b_codes, b_scales, dtype):
    if a_codes.is_cuda:
        return library_fp8_mm(a_codes, a_scales, b_codes, b_scales, dtype)
    from kernels.scaled_mm.reference import fp8_mm

    return fp8_mm(a_codes, a_scales, b_codes, b_scales, dtype)
