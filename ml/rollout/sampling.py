"""The sampler's parameters, and tokens drawn with them by `kernels.sampling`.

Letters: S rows, one a sequence; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import sampling


@dataclass(frozen=True)
class SamplingParams:
    """top_k 0 and top_p 1 cut nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Sampled:
    """ids int64 [S]; log-probabilities fp32 [S] of the raw model and of the distribution sampled from."""

    ids_S: torch.Tensor
    raw_S: torch.Tensor
    sampled_S: torch.Tensor


def sample(
    logits_SV: torch.Tensor,
    keys: Sequence[int] | torch.Tensor,
    positions: Sequence[int] | torch.Tensor,
    params: SamplingParams,
) -> Sampled:
    """One token a row. logits fp32; keys: 64-bit, one a row; positions: of the tokens to be sampled.

    Tensors of keys (`key_tensor`) and positions (int64) on the logits' device save the copies, and let a CUDA graph
    hold the call. A row without a finite maximum gives raw and sampled log-probabilities of NaN; the caller has to
    refuse it.
    """
    device = logits_SV.device
    keys_S = keys if isinstance(keys, torch.Tensor) else key_tensor(keys, device)
    positions_S = torch.as_tensor(positions, dtype=torch.int64, device=device)
    return Sampled(
        *sampling.sample(
            logits_SV,
            keys_S,
            positions_S,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        )
    )


def key_tensor(keys: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [S] with the bits of unsigned 64-bit keys."""
    return torch.tensor([key - (key >> 63 << 64) for key in keys], dtype=torch.int64, device=device)
