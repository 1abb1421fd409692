"""Exact full-vocabulary KL between two language-model heads, from hidden states, with its gradient.

    loss, kl_N = linear_kl(h_ND, w_VD, t_NE, u_VE, weight_N)        loss = sum_n weight_N[n] * kl_N[n]

Student logits are h_ND w_VD', teacher logits t_NE u_VE', both fp32 and neither ever whole: rows are taken in
chunks whose size `chunk_bytes` bounds, whatever N is. Both gradients are formed in the forward pass, where
the logits are at hand, with the weights folded in; backward only multiplies them by the upstream scalar.

Legend: N packed tokens, D student width, E teacher width, V vocabulary, C tokens of a chunk.
Invariant: rows of weight 0 are never read, so they may hold anything; results repeat bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from schemas.errors import ContractError

Divergence = Literal["reverse", "forward"]
Precision = Literal["exact", "fp8_gradients", "fp8"]


@dataclass(frozen=True)
class Plan:
    """What an implementation is asked for besides the tensors.

    divergence: "reverse" is KL(student || teacher), "forward" KL(teacher || student). temperature divides both
    logits. vocab_size: rows of both heads that count. chunk_bytes: see linear_kl. precision: which
    products are FP8. want_h, want_w: which gradients to form.
    """

    divergence: Divergence
    temperature: float
    vocab_size: int
    chunk_bytes: int
    want_h: bool
    want_w: bool
    precision: Precision = "exact"

    @property
    def fp8_logits(self) -> bool:
        return self.precision == "fp8"

    @property
    def fp8_gradients(self) -> bool:
        return self.precision != "exact"


def linear_kl(
    h_ND: torch.Tensor,
    w_VD: torch.Tensor,
    t_NE: torch.Tensor,
    u_VE: torch.Tensor,
    weight_N: torch.Tensor,
    *,
    divergence: Divergence = "reverse",
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk_bytes: int = 256 << 20,
    precision: Precision = "exact",
    impl: Literal["kernel", "reference"] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, kl_N): the fp32 scalar sum(weight_N * kl_N), differentiable in h_ND and w_VD, and the fp32
    unweighted KL of every token in nats, which carries no gradient (0 where the weight is 0).

    h_ND, t_NE: bf16 or fp32 states after the final norm. w_VD, u_VE: heads with at least `vocab_size` rows
    (default: all rows, which must then agree); further rows neither count nor receive gradient. Each product
    takes its operands in the dtype of its hidden state, so an fp32 master head meets bf16 states as its bf16
    values while its gradient stays fp32. Logits are fp32 and never rounded on the way.
    weight_N: fp32; mask, plan weight and 1/denominator are the caller's to fold in.

    chunk_bytes: what logits and their gradient may take beside w_VD's gradient. On a card that gradient's own memory
    holds most of them while N <= 2 D (D for fp32 states), if one byte for each element of w_VD is given; for more
    tokens the more the faster, up to about 2.5 GB (kernels/BENCH.md, which has FP8's rule too).

    Gradients: h_ND's in its dtype; w_VD's is accumulated and handed to autograd in fp32 (which casts it to bf16
    for a bf16 head, unless that leaf's `grad_dtype` is torch.float32). One backward pass a call: a second raises
    RuntimeError, since the first scales the gradients in place. No double backward.

    precision: "exact" rounds nothing but operands to the states' dtype. "fp8_gradients" keeps the loss exact and forms
    both gradients of FP8 operands; "fp8" makes both logits of FP8 operands too, so that the KL itself is off: an
    approximation, whose bias kernels/BENCH.md states. FP8 means E4M3 with power-of-two scales, fp32 sums: blocks of
    1 x 128 along the sum for the gradient of the logits and for states in logits, tiles of 128 x 128 for heads and
    for states in w_VD's gradient, where a tile is 128 tokens. D and E must be multiples of 16 then.

    impl: "kernel" on CUDA and "reference" elsewhere unless named. The result does not depend on N's chunking
    beyond rounding. Raises ContractError for heads without a shared vocabulary, ValueError for shapes, devices
    or options that cannot be meant.
    """
    vocab_size = _check(h_ND, w_VD, t_NE, u_VE, weight_N, vocab_size)
    if divergence not in ("reverse", "forward"):
        raise ValueError(f"divergence {divergence!r} is neither 'reverse' nor 'forward'")
    if precision not in ("exact", "fp8_gradients", "fp8"):
        raise ValueError(f"precision {precision!r} is none of 'exact', 'fp8_gradients' and 'fp8'")
    if precision != "exact" and (h_ND.shape[1] % 16 or t_NE.shape[1] % 16):
        raise ValueError(f"widths {h_ND.shape[1]} and {t_NE.shape[1]} must be multiples of 16 for FP8 products")
    if not temperature > 0 or chunk_bytes <= 0:
        raise ValueError(f"temperature {temperature} and chunk_bytes {chunk_bytes} must be positive")
    # Inside an autograd function grad mode is always off, so what is wanted is settled here.
    recording = torch.is_grad_enabled()
    plan = Plan(
        divergence,
        temperature,
        vocab_size,
        chunk_bytes,
        recording and h_ND.requires_grad,
        recording and w_VD.requires_grad,
        precision,
    )
    impl = impl or ("kernel" if h_ND.is_cuda else "reference")
    loss, kl_N = _LinearKL.apply(h_ND, w_VD, t_NE, u_VE, weight_N.float(), plan, impl)
    return loss, kl_N


def _implementation(impl: str):
    # Triton is imported only where its kernel runs.
    if impl == "kernel":
        from kernels.linear_kl import kernel as module
    elif impl == "reference":
        from kernels.linear_kl import reference as module
    else:
        raise ValueError(f"impl {impl!r} is neither 'kernel' nor 'reference'")
    return module


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_ND, w_VD, t_NE, u_VE, weight_N, plan, impl):
        module = _implementation(impl)
        kl_N, grad_h_ND, grad_w_VD = module.forward(h_ND, w_VD, t_NE, u_VE, weight_N, plan)
        ctx.gradients, ctx.scale = (grad_h_ND, grad_w_VD), module.scale
        ctx.mark_non_differentiable(kl_N)
        # A masked row's KL is 0, but its weight times NaN would not be.
        return torch.where(weight_N != 0, weight_N * kl_N, 0.0).sum(), kl_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, _grad_kl):
        if ctx.gradients is None:
            raise RuntimeError("linear_kl: a second backward through one call; its gradients were handed out")
        # Dropping our references lets autograd keep the buffers as .grad instead of copying them.
        (grad_h_ND, grad_w_VD), ctx.gradients = ctx.gradients, None
        for gradient in (grad_h_ND, grad_w_VD):
            if gradient is not None:
                ctx.scale(gradient, grad_loss)
        return grad_h_ND, grad_w_VD, None, None, None, None, None


def _check(h_ND, w_VD, t_NE, u_VE, weight_N, vocab_size: int | None) -> int:
    """The shared vocabulary size, once shapes, dtypes and devices agree."""
    for name, tensor, dims in (("h_ND", h_ND, 2), ("w_VD", w_VD, 2), ("t_NE", t_NE, 2), ("u_VE", u_VE, 2)):
        if tensor.dim() != dims or tensor.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not a bf16 or fp32 matrix")
    if h_ND.shape[1] != w_VD.shape[1] or t_NE.shape[1] != u_VE.shape[1]:
        raise ValueError(
            f"widths differ: h_ND {list(h_ND.shape)}, w_VD {list(w_VD.shape)}; "
            f"t_NE {list(t_NE.shape)}, u_VE {list(u_VE.shape)}"
        )
    if not h_ND.shape[0] == t_NE.shape[0] == weight_N.numel() or weight_N.dim() != 1:
        raise ValueError(f"rows differ: h_ND {h_ND.shape[0]}, t_NE {t_NE.shape[0]}, weight_N {list(weight_N.shape)}")
    if len({x.device for x in (h_ND, w_VD, t_NE, u_VE, weight_N)}) != 1:
        raise ValueError("h_ND, w_VD, t_NE, u_VE and weight_N lie on different devices")
    rows = (w_VD.shape[0], u_VE.shape[0])
    if (vocab_size is None and rows[0] != rows[1]) or (vocab_size is not None and not 0 < vocab_size <= min(rows)):
        raise ContractError(
            "linear_kl: the heads share no vocabulary",
            expected=f"at least {vocab_size} rows in both heads" if vocab_size else "equal rows, or a vocab_size",
            found=f"student head {rows[0]} rows, teacher head {rows[1]} rows",
        )
    return rows[0] if vocab_size is None else vocab_size
