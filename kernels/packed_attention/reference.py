"""Packed attention by torch's own attention, a sequence at a time: the CPU's path and the oracle of the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend(q_NHC: torch.Tensor, k_NGC: torch.Tensor, v_NGC: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """o_NHC for the sequences at rows first : last of each span."""
    group = q_NHC.shape[1] // k_NGC.shape[1]
    # Repeated, and with a batch axis: otherwise torch takes the path that forms the whole matrix of scores.
    k_NHC, v_NHC = k_NGC.repeat_interleave(group, 1), v_NGC.repeat_interleave(group, 1)
    parts = []
    for first, last in spans:
        q_HTC, k_HTC, v_HTC = (x[first:last].transpose(0, 1) for x in (q_NHC, k_NHC, v_NHC))
        o_1HTC = F.scaled_dot_product_attention(q_HTC[None], k_HTC[None], v_HTC[None], is_causal=True)
        parts.append(o_1HTC[0].transpose(0, 1))
    return torch.cat(parts)
