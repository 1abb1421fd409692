"""Packed attention by torch's own attention, a sequence at a time: the CPU's path and the oracle of the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend(q_NHC: torch.Tensor, k_NGC: torch.Tensor, v_NGC: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """o_NHC for the sequences at rows first : last of each span."""
    parts = []
    for first, last in spans:
        q_HTC, k_GTC, v_GTC = (x[first:last].transpose(0, 1) for x in (q_NHC, k_NGC, v_NGC))
        o_HTC = F.scaled_dot_product_attention(q_HTC, k_GTC, v_GTC, is_causal=True, enable_gqa=True)
        parts.append(o_HTC.transpose(0, 1))
    return torch.cat(parts)
