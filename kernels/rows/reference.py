"""The same operations in plain torch: what training differentiates, and what runs on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.paged_attention import write_kv


def rms_norm(x_ND, weight_D, epsilon):
    """Any leading dimensions."""
    x32 = x_ND.float()
    # 1 / sqrt: both are exact in IEEE arithmetic, so that vector and scalar code agree.
    scale = 1.0 / torch.sqrt(x32.square().mean(-1, keepdim=True) + epsilon)
    return (x32 * scale * weight_D.float()).to(x_ND.dtype)


def add_rms_norm(h_ND, delta_ND, weight_D, epsilon):
    h_ND = h_ND + delta_ND
    return h_ND, rms_norm(h_ND, weight_D, epsilon)


def silu_gate(gate_NI, up_NI):
    gate32 = gate_NI.float()
    if torch.is_grad_enabled():
        return (F.silu(gate32) * up_NI).to(gate_NI.dtype)
    # F.silu ends each thread's share with scalar code whose exp differs in the last bit: a row's bits would depend
    # on where it lies in the batch. torch.exp has one code for all elements.
    return (gate32 / torch.exp(-gate32).add_(1.0) * up_NI).to(gate_NI.dtype)


def rotate(q_NHC, k_NGC, rotary, norms):
    cos_N1C = rotary.cos_MC[rotary.positions_N].unsqueeze(1)
    sin_N1C = rotary.sin_MC[rotary.positions_N].unsqueeze(1)
    if norms is not None:
        q_NHC = rms_norm(q_NHC, norms.q_weight_C, norms.epsilon)
        k_NGC = rms_norm(k_NGC, norms.k_weight_C, norms.epsilon)
    return _turn(q_NHC, cos_N1C, sin_N1C), _turn(k_NGC, cos_N1C, sin_N1C)


def rotate_into_pages(q_NHC, k_NGC, v_NGC, rotary, norms, k_PTGC, v_PTGC, slots_N):
    q_NHC, k_NGC = rotate(q_NHC, k_NGC, rotary, norms)
    write_kv(k_NGC, v_NGC, k_PTGC, v_PTGC, slots_N)
    return q_NHC


def _turn(x_NHC, cos_N1C, sin_N1C):
    low, high = x_NHC.float().chunk(2, dim=-1)
    return torch.cat((low * cos_N1C - high * sin_N1C, high * cos_N1C + low * sin_N1C), dim=-1).to(x_NHC.dtype)
