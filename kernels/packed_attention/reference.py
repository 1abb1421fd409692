"""Packed attention by torch's own attention, a sequence at a time: the CPU's path and the oracle of the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.scaled_mm.wide import wide


def attend(q_NHC: torch.Tensor, k_NGC: torch.Tensor, v_NGC: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """o_NHC for the sequences at rows first : last of each span."""
    if q_NHC.dtype == torch.bfloat16 and q_NHC.device.type == "cpu" and wide():
        return attend(q_NHC.float(), k_NGC.float(), v_NGC.float(), spans).to(q_NHC.dtype)
    group = q_NHC.shape[1] // k_NGC.shape[1]
    # Repeated, and with a batch axis: otherwise torch takes the path that forms the whole matrix of scores.
    whole = q_NHC, k_NGC.repeat_interleave(group, 1), v_NGC.repeat_interleave(group, 1)
    # Split, not sliced: autograd would pad each slice's gradient to the pack and add the pads up.
    lengths = [last - first for first, last in spans]
    parts = []
    for sequence in zip(*(x.split(lengths) for x in whole), strict=True):
        q_1HTC, k_1HTC, v_1HTC = (x_THC.transpose(0, 1)[None] for x_THC in sequence)
        o_1HTC = F.scaled_dot_product_attention(q_1HTC, k_1HTC, v_1HTC, is_causal=True)
        parts.append(o_1HTC[0].transpose(0, 1))
    return torch.cat(parts)
