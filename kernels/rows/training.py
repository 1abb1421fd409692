"""The operations between the products on the GPU where gradients are recorded: each one pass forward, one backward.

Forward is kernel.py's. Backward reads what forward read, computes in fp32 and rounds each gradient once; the gradient
of a norm's weight is fp32, summed over rows in one order.

Shape letters: N rows, D width, I feed-forward width, P programs, B columns of a program.
"""

# Triton adds launch options to a kernel's own parameters; the type checker does not see them.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels.rows import kernel
from schemas.errors import ContractError

_GATE_COLUMNS = 1024
#: Programs that share the rows of a norm, each with sums of its own for the weight's gradient.
_NORM_PROGRAMS = 528


def rms_norm(x_ND, weight_D, epsilon):
    return _RmsNorm.apply(x_ND, weight_D, epsilon)


def add_rms_norm(h_ND, delta_ND, weight_D, epsilon):
    return _AddRmsNorm.apply(h_ND, delta_ND, weight_D, epsilon)


def silu_gate(gate_NI, up_NI):
    return _SiluGate.apply(gate_NI, up_NI)


def rotate(q_NHC, k_NGC, rotary, norms):
    if norms is not None:
        raise ContractError(
            "kernels.rows.rotate", expected="heads that were normed apart, where gradients are recorded", found="norms"
        )
    return _Rotate.apply(q_NHC, k_NGC, rotary)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, weight_D, epsilon):
        ctx.save_for_backward(x_ND, weight_D)
        ctx.epsilon = epsilon
        return kernel.rms_norm(x_ND, weight_D, epsilon)

    @staticmethod
    def backward(ctx, *grads):
        x_ND, weight_D = ctx.saved_tensors
        dx_ND, dweight_D = _norm_gradients(x_ND, weight_D, ctx.epsilon, grads[0], None)
        return dx_ND, dweight_D, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_ND, delta_ND, weight_D, epsilon):
        sum_ND, y_ND = kernel.add_rms_norm(h_ND, delta_ND, weight_D, epsilon)
        ctx.save_for_backward(sum_ND, weight_D)
        ctx.epsilon = epsilon
        return sum_ND, y_ND

    @staticmethod
    def backward(ctx, *grads):
        sum_ND, weight_D = ctx.saved_tensors
        dsum_ND, dy_ND = grads
        dx_ND, dweight_D = _norm_gradients(sum_ND, weight_D, ctx.epsilon, dy_ND, dsum_ND)
        return dx_ND, dx_ND, dweight_D, None


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_NI, up_NI):
        ctx.save_for_backward(gate_NI, up_NI)
        return kernel.silu_gate(gate_NI, up_NI)

    @staticmethod
    def backward(ctx, *grads):
        gate_NI, up_NI = ctx.saved_tensors
        dy_NI = grads[0].contiguous()
        rows, width = gate_NI.shape
        dgate_NI, dup_NI = (torch.empty(rows, width, dtype=gate_NI.dtype, device=gate_NI.device) for _ in range(2))
        if dy_NI.numel():
            tiles = triton.cdiv(width, _GATE_COLUMNS)
            _silu_gate_backward[(rows * tiles,)](
                dy_NI, gate_NI, up_NI, dgate_NI, dup_NI, gate_NI.stride(0), up_NI.stride(0), width, tiles,
                BLOCK=_GATE_COLUMNS, num_warps=4,
            )  # fmt: skip
        return dgate_NI, dup_NI


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_NHC, k_NGC, rotary):
        ctx.rotary = rotary
        return kernel.rotate(q_NHC, k_NGC, rotary, None)

    @staticmethod
    def backward(ctx, *grads):
        # A rotation's transpose turns the other way.
        dq_NHC, dk_NGC = (grad.contiguous() for grad in grads)
        back = replace(ctx.rotary, sin_MC=-ctx.rotary.sin_MC)
        return *kernel.rotate(dq_NHC, dk_NGC, back, None), None


def _norm_gradients(x_ND, weight_D, epsilon, dy_ND, dsum_ND):
    """(gradient of the normed rows, plus dsum where it is given; fp32 gradient of the weight)."""
    rows, width = x_ND.shape
    dx_ND = torch.empty(rows, width, dtype=x_ND.dtype, device=x_ND.device)
    programs = min(rows, _NORM_PROGRAMS)
    partial_PD = torch.empty(programs, width, dtype=torch.float32, device=x_ND.device)
    if rows:
        dy_ND = dy_ND.contiguous()
        block = triton.next_power_of_2(width)
        _rms_norm_backward[(programs,)](
            x_ND, weight_D, dy_ND, dy_ND if dsum_ND is None else dsum_ND.contiguous(), dx_ND, partial_PD,
            x_ND.stride(0), rows, width, epsilon,
            ADD=dsum_ND is not None, BLOCK=block, num_warps=min(8, max(1, block // 256)),
        )  # fmt: skip
    return dx_ND, partial_PD.sum(0).to(weight_D.dtype)


@triton.jit
def _silu_gate_backward(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, gate_stride, up_stride, width, tiles, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column_B = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    inside_B = column_B < width
    dy_B = tl.load(dy_ptr + row * width + column_B, mask=inside_B, other=0.0).to(tl.float32)
    gate_B = tl.load(gate_ptr + row * gate_stride + column_B, mask=inside_B, other=0.0).to(tl.float32)
    up_B = tl.load(up_ptr + row * up_stride + column_B, mask=inside_B, other=0.0).to(tl.float32)
    sigmoid_B = 1.0 / (1.0 + tl.exp(-gate_B))
    dgate_B = dy_B * up_B * sigmoid_B * (1.0 + gate_B * (1.0 - sigmoid_B))
    dup_B = dy_B * gate_B * sigmoid_B
    tl.store(dgate_ptr + row * width + column_B, dgate_B.to(dgate_ptr.dtype.element_ty), mask=inside_B)
    tl.store(dup_ptr + row * width + column_B, dup_B.to(dup_ptr.dtype.element_ty), mask=inside_B)


@triton.jit
def _rms_norm_backward(
    x_ptr,
    weight_ptr,
    dy_ptr,
    dsum_ptr,
    dx_ptr,
    partial_ptr,
    x_stride,
    rows,
    width,
    epsilon,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    column_B = tl.arange(0, BLOCK)
    inside_B = column_B < width
    weight_B = tl.load(weight_ptr + column_B, mask=inside_B, other=0.0).to(tl.float32)
    dweight_B = tl.zeros([BLOCK], tl.float32)
    for row_index in range(program, rows, tl.num_programs(0)):
        row = tl.cast(row_index, tl.int64)
        x_B = tl.load(x_ptr + row * x_stride + column_B, mask=inside_B, other=0.0).to(tl.float32)
        dy_B = tl.load(dy_ptr + row * width + column_B, mask=inside_B, other=0.0).to(tl.float32)
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x_B * x_B, 0) / width + epsilon))
        dweight_B += dy_B * (x_B * scale)
        g_B = dy_B * weight_B
        dx_B = scale * (g_B - x_B * (scale * scale * (tl.sum(g_B * x_B, 0) / width)))
        if ADD:
            dx_B += tl.load(dsum_ptr + row * width + column_B, mask=inside_B, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * width + column_B, dx_B.to(dx_ptr.dtype.element_ty), mask=inside_B)
    tl.store(partial_ptr + program.to(tl.int64) * width + column_B, dweight_B, mask=inside_B)
