"""What a transformer does to a row between two products: norms, rotation, gate. The contract and the choice.

Everything is computed in fp32 and rounded once to the dtype of the input; where the formula has two results in that
dtype (the residual stream before its norm, a head's norm before its rotation), each is rounded. Matrices may be
columns of a wider one (any row stride; a row is contiguous), so that one product can serve several.

Invariant: a row's bits depend on that row alone, not on the others or on how many there are. Kernel and reference
agree within one rounding of the dtype.

Everything is differentiable but `rotate_into_pages`. impl, everywhere: None takes the kernel on CUDA, and the
reference elsewhere; a name forces one ("kernel" then records no gradient).

Shape letters: N rows, D width, I feed-forward width, H query heads, G KV heads, C channels of a head, M positions,
P pages of T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch

from schemas.errors import ContractError

Implementation = Literal["kernel", "reference"]


@dataclass(frozen=True)
class HeadNorms:
    """RMS norm of each query and key head before its rotation: weights [C] of both, and epsilon."""

    q_weight_C: torch.Tensor
    k_weight_C: torch.Tensor
    epsilon: float


@dataclass(frozen=True)
class Rotary:
    """Tables of the rotary angles, fp32 [M, C/2], and the positions of the rows, int64 [N] below M."""

    cos_MC: torch.Tensor
    sin_MC: torch.Tensor
    positions_N: torch.Tensor


def rms_norm(
    x_ND: torch.Tensor, weight_D: torch.Tensor, epsilon: float, *, impl: Implementation | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over each row, [N, D] in x's dtype."""
    _check_matrices(x_ND)
    _check_weight(x_ND, weight_D)
    return _implementation(impl, x_ND, weight_D).rms_norm(x_ND, weight_D, epsilon)


def add_rms_norm(
    h_ND: torch.Tensor,
    delta_ND: torch.Tensor,
    weight_D: torch.Tensor,
    epsilon: float,
    *,
    impl: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h + delta, rms_norm of it), both [N, D] in h's dtype."""
    _check_matrices(h_ND, delta_ND)
    _check_weight(h_ND, weight_D)
    return _implementation(impl, h_ND, delta_ND, weight_D).add_rms_norm(h_ND, delta_ND, weight_D, epsilon)


def silu_gate(gate_NI: torch.Tensor, up_NI: torch.Tensor, *, impl: Implementation | None = None) -> torch.Tensor:
    """gate / (1 + exp(-gate)) * up, [N, I] in gate's dtype."""
    _check_matrices(gate_NI, up_NI)
    return _implementation(impl, gate_NI, up_NI).silu_gate(gate_NI, up_NI)


def rotate(
    q_NHC: torch.Tensor,
    k_NGC: torch.Tensor,
    rotary: Rotary,
    norms: HeadNorms | None = None,
    *,
    impl: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, normed if the model norms heads, and rotated: channel c pairs with c + C/2."""
    _check_heads(q_NHC, k_NGC, rotary)
    return _implementation(impl, q_NHC, k_NGC).rotate(q_NHC, k_NGC, rotary, norms)


def rotate_into_pages(
    q_NHC: torch.Tensor,
    k_NGC: torch.Tensor,
    v_NGC: torch.Tensor,
    rotary: Rotary,
    norms: HeadNorms | None,
    k_PTGC: torch.Tensor,
    v_PTGC: torch.Tensor,
    slots_N: torch.Tensor,
    *,
    impl: Implementation | None = None,
) -> torch.Tensor:
    """`rotate`, whose keys go, with the values, to token slots of a paged cache; returns the queries.

    k_PTGC, v_PTGC: contiguous, of q's dtype, written in place. slots_N: int64, page * T + offset in the page,
    distinct. Slots that are not named keep their contents.
    """
    _check_heads(q_NHC, k_NGC, rotary)
    _check_heads(q_NHC, v_NGC, rotary)
    for cache_PTGC in (k_PTGC, v_PTGC):
        if cache_PTGC.shape[2:] != k_NGC.shape[1:] or cache_PTGC.dtype != q_NHC.dtype or not cache_PTGC.is_contiguous():
            raise ContractError(
                "rotate_into_pages",
                expected=f"contiguous caches [P, T, {k_NGC.shape[1]}, {k_NGC.shape[2]}] of {q_NHC.dtype}",
                found=f"{tuple(cache_PTGC.shape)} of {cache_PTGC.dtype}, strides {cache_PTGC.stride()}",
            )
    chosen = _implementation(impl, q_NHC, k_NGC, v_NGC)
    return chosen.rotate_into_pages(q_NHC, k_NGC, v_NGC, rotary, norms, k_PTGC, v_PTGC, slots_N)


def _implementation(impl: Implementation | None, *inputs: torch.Tensor) -> ModuleType:
    # Triton is not installed, or has no driver, on machines that only run the reference.
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if impl is None and inputs[0].is_cuda and recorded:
        from kernels.rows import training as chosen
    elif impl == "kernel" or (impl is None and inputs[0].is_cuda):
        from kernels.rows import kernel as chosen
    else:
        from kernels.rows import reference as chosen
    return chosen


def _check_matrices(*matrices: torch.Tensor) -> None:
    for x in matrices:
        if x.dim() != 2 or x.shape != matrices[0].shape or x.dtype != matrices[0].dtype or x.stride(1) != 1:
            raise ContractError(
                "kernels.rows",
                expected=f"matrices {tuple(matrices[0].shape)} of {matrices[0].dtype} with contiguous columns",
                found=f"{tuple(x.shape)} of {x.dtype}, strides {x.stride()}",
            )


def _check_weight(x_ND: torch.Tensor, weight_D: torch.Tensor) -> None:
    if weight_D.shape != x_ND.shape[1:] or not weight_D.is_contiguous():
        raise ContractError(
            "kernels.rows",
            expected=f"a contiguous weight of {x_ND.shape[1]} columns",
            found=f"{tuple(weight_D.shape)}, strides {weight_D.stride()}",
        )


def _check_heads(q_NHC: torch.Tensor, k_NGC: torch.Tensor, rotary: Rotary) -> None:
    rows, _, channels = q_NHC.shape
    for x in (q_NHC, k_NGC):
        if x.shape[0] != rows or x.shape[2] != channels or x.stride()[1:] != (channels, 1) or x.dtype != q_NHC.dtype:
            raise ContractError(
                "kernels.rows",
                expected=f"{rows} rows of contiguous heads of {channels} channels, all {q_NHC.dtype}",
                found=f"{tuple(x.shape)} of {x.dtype}, strides {x.stride()}",
            )
    if rotary.cos_MC.shape[1] * 2 != channels or rotary.positions_N.shape != (rows,):
        raise ContractError(
            "kernels.rows",
            expected=f"angles of {channels} channels for {rows} rows",
            found=f"tables {tuple(rotary.cos_MC.shape)}, positions {tuple(rotary.positions_N.shape)}",
        )
