"""Causal attention over whole packed sequences, differentiable: the contract, and the choice by device.

Invariant: no sequence sees another's tokens.

Shape letters: N packed tokens, H query heads, G KV heads (H % G == 0), C channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from schemas.errors import ContractError


def packed_attention(
    q_NHC: torch.Tensor, k_NGC: torch.Tensor, v_NGC: torch.Tensor, cu_tokens: Sequence[int]
) -> torch.Tensor:
    """Attend each token to its own sequence up to and including itself; o_NHC, differentiable in q, k and v.

    cu_tokens: ascending token offsets of the sequences, from 0 to N, on the host. Scores are scaled by C ** -0.5.
    bf16 on CUDA; bf16 or fp32 on the CPU, where torch's own attention runs sequence by sequence. Raises
    ContractError where the offsets do not cover the pack.
    """
    spans = list(pairwise(cu_tokens))
    if not spans or cu_tokens[0] != 0 or cu_tokens[-1] != len(q_NHC) or any(last <= first for first, last in spans):
        raise ContractError("cu_tokens", expected=f"ascending, 0 to {len(q_NHC)}", found=str(list(cu_tokens))[:200])
    if q_NHC.is_cuda:
        from kernels.packed_attention.kernel import attend
    else:
        from kernels.packed_attention.reference import attend
    return attend(q_NHC, k_NGC, v_NGC, spans)
