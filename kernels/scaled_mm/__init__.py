"""Matrix products y = x @ w.T whose operands may carry block scales: the contract, and the choice of implementation.

Exact mode (rollout, teachers): `row_invariant_mm` and `mxfp4_mm` sum K in one fixed order. A row of x gets the same
bits whatever the other rows are and however many, and both give the same bits when the weight is the same set of
values, so a decode step and a prefill chunk agree. Training: `fp8_linear` multiplies in FP8 with fp32 promotion every
128 of K, forward and backward.

Invariant: nothing falls back silently; an operand that a product cannot take exactly is refused.

Shape letters: M rows of x, N rows of the weight (outputs), K columns of both (the summed dimension).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.quant import fp8_quantize_both, fp8_quantize_rows, fp8_quantize_tiles, mxfp4_to_fp8
from kernels.rows import silu_gate
from kernels.scaled_mm.packing import LARGEST_SCALE, Mxfp4Weight, join_mxfp4, pack_mxfp4, split_mxfp4
from schemas.errors import ContractError

Implementation = Literal["library", "triton", "reference"]

__all__ = [
    "LARGEST_SCALE",
    "Fp8Input",
    "Fp8Weight",
    "Implementation",
    "Mxfp4Weight",
    "fp8_input",
    "fp8_linear",
    "fp8_mm",
    "fp8_weight",
    "join_mxfp4",
    "mxfp4_gate_mm",
    "mxfp4_mm",
    "pack_mxfp4",
    "plain_mm",
    "row_invariant_gate_mm",
    "row_invariant_mm",
    "row_invariant_mms",
    "self_test",
    "split_mxfp4",
    "w4a8_mm",
]


def plain_mm(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """y_MN = x_MK @ w_NK.T, both of one dtype, which is y's; differentiable, and not row-invariant: for training."""
    if x_MK.dtype == torch.bfloat16 and x_MK.device.type == "cpu":
        from kernels.scaled_mm.wide import WideProduct, wide

        if wide():
            return WideProduct.apply(x_MK, w_NK)  # pyright: ignore[reportReturnType]
    return x_MK @ w_NK.t()


def row_invariant_mm(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    impl: Implementation | None = None,
) -> torch.Tensor:
    """y_MN = x_MK @ w_NK.T (+ bias_N) with fp32 sums; row m depends on row m of x and on w alone. No gradient.

    x_MK and w_NK: bf16 (or fp32 on the CPU). dtype: of the result, x_MK's unless fp32 is asked for, whose sums are
    never rounded; w_NK may then be fp32 too, holding bf16 values. The bias is added to the rounded product.

    impl: None takes, on CUDA, the way that `self_test` has chosen for the shape, "library" without a choice: cuBLASLt
    with split-K off and never fewer than 16 rows (it sets torch's choice of BLAS library for the process); on the CPU
    both make calls of a fixed number of rows. "triton": our own product in the same order of sums; "reference": a
    float64 sum, row-invariant on no device. Run `self_test` over a model's shapes before relying on it.
    """
    dtype = dtype or x_MK.dtype
    if impl == "triton":
        from kernels.scaled_mm.dense import triton_mm as product
    elif impl == "reference":
        from kernels.scaled_mm.reference import dense_mm as product
    elif x_MK.is_cuda and impl == "library":
        from kernels.scaled_mm.dense import library_mm as product
    elif x_MK.is_cuda:
        from kernels.scaled_mm.choice import chosen_mm as product
    else:
        from kernels.scaled_mm.fixed_rows import fixed_rows_mm as product
    y_MN = product(x_MK, w_NK, dtype)
    return y_MN if bias_N is None else y_MN.add_(bias_N)


def row_invariant_mms(x_MK: torch.Tensor, w_NK: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """`row_invariant_mm` of x with each of several weights, which follow each other in w_NK with `sizes` rows each.

    On CUDA one product, whose columns the results are (a row's stride is N): a small weight alone leaves most of the
    card idle. On the CPU one product each, since the order of sums there may depend on the number of outputs.
    """
    if x_MK.is_cuda:
        return row_invariant_mm(x_MK, w_NK).split(list(sizes), 1)
    return tuple(row_invariant_mm(x_MK, part) for part in w_NK.split(list(sizes)))


def row_invariant_gate_mm(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [M, N/2], where [gate | up] = x_MK @ w_NK.T: the bits of `kernels.rows.silu_gate` on the halves
    of `row_invariant_mms`.

    w_NK: gate rows, then as many up rows; ContractError for an odd number of rows. On CUDA the way that `self_test`
    has chosen for a gate of the shape, two launches without a choice.
    """
    if len(w_NK) % 2:
        raise ContractError("row_invariant_gate_mm", expected="as many gate rows as up rows", found=f"{len(w_NK)} rows")
    if x_MK.is_cuda:
        from kernels.scaled_mm.choice import chosen_gate_mm

        return chosen_gate_mm(x_MK, w_NK)
    return silu_gate(*row_invariant_mms(x_MK, w_NK, [len(w_NK) // 2] * 2))


def self_test(
    shapes: Iterable[tuple[int, int]],
    *,
    gates: Iterable[tuple[int, int]] = (),
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> None:
    """Choose the fastest ways of `row_invariant_mm` for weights of the shapes (N, K) on this device, and prove them;
    for those of `gates` also the ways of `row_invariant_gate_mm`, of bf16.

    On CUDA products of up to 256 rows are timed, once a shape and process (about 0.1 s). Compares rows of one product
    of 2048 rows, bit for bit, with products of 1 to 2000 of them at other positions. dtype: of the result. On the CPU
    there is nothing to prove: every call has the same shape. Raises ContractError that names the first shape and number
    of rows that fail.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return
    from kernels.scaled_mm.choice import check_row_invariance

    gates = set(gates)
    for num_rows, num_columns in sorted({*shapes, *gates}):
        check_row_invariance(num_rows, num_columns, dtype, device, gate=(num_rows, num_columns) in gates)


def mxfp4_mm(x_MK: torch.Tensor, weight: Mxfp4Weight, *, impl: Implementation | None = None) -> torch.Tensor:
    """y_MN = x_MK @ W.T for a packed MXFP4 weight, bf16 in and out, with the bits of `row_invariant_mm` on W's values.

    impl: None decodes inside the product on CUDA, and takes the reference elsewhere.
    """
    if impl == "reference" or (impl is None and not x_MK.is_cuda):
        from kernels.scaled_mm.reference import mxfp4_mm as product
    else:
        from kernels.scaled_mm.mxfp4 import mxfp4_mm as product
    return product(x_MK, weight)


def mxfp4_gate_mm(x_MK: torch.Tensor, weight: Mxfp4Weight, *, impl: Implementation | None = None) -> torch.Tensor:
    """silu(gate) * up, bf16 [M, N/2], where [gate | up] = x_MK @ W.T: the bits of `kernels.rows.silu_gate` on the
    halves of `mxfp4_mm`.

    weight: gate rows, then as many up rows; ContractError for an odd number of rows. impl: as `mxfp4_mm`'s.
    """
    if weight.num_rows % 2:
        raise ContractError("mxfp4_gate_mm", expected="as many gate rows as up rows", found=f"{weight.num_rows} rows")
    if impl == "reference" or (impl is None and not x_MK.is_cuda):
        from kernels.scaled_mm.reference import mxfp4_gate_mm as product
    else:
        from kernels.scaled_mm.mxfp4 import mxfp4_gate_mm as product
    return product(x_MK, weight)


def fp8_mm(
    x_codes: torch.Tensor,
    x_scales: torch.Tensor,
    w_codes: torch.Tensor,
    w_scales: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    impl: Implementation | None = None,
) -> torch.Tensor:
    """y_MN of E4M3 operands in the layouts of `kernels.quant`: x in blocks of 1 x 128, w of 128 x 128 or 1 x 128.

    x_codes [M, K], x_scales fp32 [M, ceil(K/128)]; w_codes [N, K], w_scales fp32 [ceil(N/128) or N, ceil(K/128)], of
    128 x 128 blocks perhaps with further columns, which are not read.
    Each 128 of K is summed apart and scaled in fp32. dtype: bf16 or fp32. impl: None takes cuBLASLt's block-scaled
    product on CUDA (N and K multiples of 16) and the reference elsewhere.
    """
    if impl == "reference" or (impl is None and not x_codes.is_cuda):
        from kernels.scaled_mm.reference import fp8_mm as product
    else:
        from kernels.scaled_mm.fp8 import library_fp8_mm as product
    return product(x_codes, x_scales, w_codes, w_scales, dtype)


def w4a8_mm(
    x_MK: torch.Tensor,
    blocks: torch.Tensor,
    scales: torch.Tensor,
    *,
    name: str = "MXFP4 weight",
    dtype: torch.dtype = torch.bfloat16,
    impl: Implementation | None = None,
) -> torch.Tensor:
    """y_MN of x in FP8 (1 x 128) and an MXFP4 weight that FP8 holds exactly: the bits of `fp8_mm` on W's values.

    x_MK: bf16 or fp32. blocks uint8 [N, K/2], scales uint8 [N, K/32] of `kernels.quant`. Each call makes the FP8 copy
    of the weight, so memory keeps the four-bit codes alone, and reads its verdicts back, so no CUDA graph captures
    it. Raises ContractError that names the weight where a 128 x 128 tile is not exact in FP8 (its scales spread over
    more than 14 binades): such a weight goes through `mxfp4_mm`.
    """
    w_codes, w_scales, exact = mxfp4_to_fp8(blocks, scales)
    if not bool(exact.all()):
        raise ContractError(
            f"w4a8_mm, {name}", expected="MXFP4 values that FP8 holds in tiles of 128 x 128, all of them",
            found=f"{int((~exact).sum())} of {exact.numel()} tiles that it would round",
            next_command="multiply this weight by mxfp4_mm, or by row_invariant_mm on its bf16 values",
        )  # fmt: skip
    return fp8_mm(*fp8_quantize_rows(x_MK), w_codes, w_scales, dtype=dtype, impl=impl)


@dataclass(frozen=True)
class Fp8Input:
    """`kernels.quant.fp8_quantize_both` of a linear's x with rows of zeros up to a multiple of 16: codes and scales of
    its rows for the forward product, of its columns for the weight's gradient."""

    codes: torch.Tensor
    scales: torch.Tensor
    codes_t: torch.Tensor
    scales_t: torch.Tensor


def fp8_input(x_MK: torch.Tensor) -> Fp8Input:
    """x_MK, bf16 or fp32, as `fp8_linear` takes it, made once for several weights that multiply one x."""
    from kernels.scaled_mm.fp8 import whole_sixteens

    return Fp8Input(*fp8_quantize_both(whole_sixteens(x_MK.detach())))


@dataclass(frozen=True)
class Fp8Weight:
    """A linear's W in FP8 tiles of 128 x 128, as the forward product takes it: codes [N, K] and scales
    [ceil(N/128), ceil(K/128)] with columns of zeros up to a multiple of four. transposed: both of W.T, for the
    gradient of x; None: each backward makes them."""

    codes: torch.Tensor
    scales: torch.Tensor
    transposed: tuple[torch.Tensor, torch.Tensor] | None = None


def fp8_weight(codes: torch.Tensor, scales: torch.Tensor, *, transposed: bool) -> Fp8Weight:
    """What `kernels.quant` makes of a weight in tiles, as `fp8_linear` takes it.

    transposed: make its transpose too, a second byte an element: for a weight that several passes multiply by.
    """
    from kernels.scaled_mm.fp8 import in_fours, transposed_tiles

    return Fp8Weight(codes, in_fours(scales), transposed_tiles(codes, scales) if transposed else None)


def fp8_linear(
    x_MK: torch.Tensor, w_NK: torch.Tensor, w_fp8: Fp8Weight | None = None, x_fp8: Fp8Input | None = None
) -> torch.Tensor:
    """y_MN = x_MK @ w_NK.T in FP8, bf16 out, differentiable: forward, dgrad and wgrad are FP8 products.

    x_MK: bf16 or fp32. w_NK: bf16 or fp32 values, quantised by `kernels.quant.fp8_quantize_tiles`. w_fp8: what to
    multiply by instead, an FP8 copy of other values that w_NK stands for; w_NK then only gets the gradient. It comes in
    w_NK's dtype, summed over all M rows in fp32; x's in x_MK's dtype. x_fp8: `fp8_input` of x_MK, made here when not
    given.
    """
    from kernels.scaled_mm.fp8 import Fp8Linear

    w_fp8 = w_fp8 or fp8_weight(*fp8_quantize_tiles(w_NK.detach()), transposed=False)
    x_fp8 = x_fp8 or fp8_input(x_MK)
    return Fp8Linear.apply(x_MK, w_NK, w_fp8, x_fp8)  # pyright: ignore[reportReturnType]
