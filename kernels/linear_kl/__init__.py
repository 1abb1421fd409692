"""Exact full-vocabulary KL between two language-model heads, from hidden states, with its gradient.

    loss, kl_N = linear_kl(h_ND, w_VD, t_NE, u_VE, weight_N)        loss = sum_n weight_N[n] * kl_N[n]

Student logits are h_ND w_VD', teacher logits t_NE u_VE', both fp32 and neither ever whole: rows are taken in
chunks whose size `chunk_bytes` bounds, whatever N is. Both gradients are formed in the forward pass, where
the logits are at hand, with the weights folded in; backward only multiplies them by the upstream scalar.
`linear_kl_by_teacher` takes tokens of several teachers at once: one gradient of the student's head, and one
teacher's head at a time.

Legend: N packed tokens, R tokens of one teacher, D student width, E teacher width, V vocabulary, C tokens of a chunk.
Invariant: rows of weight 0 are never read, so they may hold anything; results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Teacher:
    """What one teacher says of R tokens: its states t_RE, bf16 or fp32, and head() -> u_VE.

    The head is asked for once in a call, if R is not 0, after all references to the teacher's before it are gone.
    """

    t_RE: torch.Tensor
    head: Callable[[], torch.Tensor]


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
    _check_states(h_ND, w_VD, [t_NE], weight_N)
    _check_head(u_VE, t_NE)
    rows = (w_VD.shape[0], u_VE.shape[0])
    if vocab_size is None and rows[0] != rows[1]:
        raise _no_shared_vocabulary("equal rows, or a vocab_size", *rows)
    return linear_kl_by_teacher(
        h_ND,
        w_VD,
        [Teacher(t_NE, lambda: u_VE)],
        weight_N,
        divergence=divergence,
        temperature=temperature,
        vocab_size=rows[0] if vocab_size is None else vocab_size,
        chunk_bytes=chunk_bytes,
        precision=precision,
        impl=impl,
    )


def linear_kl_by_teacher(
    h_ND: torch.Tensor,
    w_VD: torch.Tensor,
    teachers: Sequence[Teacher],
    weight_N: torch.Tensor,
    *,
    vocab_size: int,
    divergence: Divergence = "reverse",
    temperature: float = 1.0,
    chunk_bytes: int = 256 << 20,
    precision: Precision = "exact",
    impl: Literal["kernel", "reference"] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_kl` of tokens that follow each other teacher by teacher: the first R of N are the first teacher's.

    Teachers' widths may differ, their states' dtype may not. However many they are, there is one gradient of w_VD and
    one head of a teacher at a time. In "exact" precision a token's KL and gradient have the bits that a call for its
    teacher alone gives; w_VD's gradient is the sum of those calls' up to rounding. For FP8 no 128 tokens that share a
    scale have two teachers. Raises as linear_kl does, for a head when it has come.
    """
    _check_states(h_ND, w_VD, [teacher.t_RE for teacher in teachers], weight_N)
    if not 0 < vocab_size <= w_VD.shape[0]:
        raise _no_shared_vocabulary(f"at least {vocab_size} rows in both heads", w_VD.shape[0], None)
    if divergence not in ("reverse", "forward"):
        raise ValueError(f"divergence {divergence!r} is neither 'reverse' nor 'forward'")
    if precision not in ("exact", "fp8_gradients", "fp8"):
        raise ValueError(f"precision {precision!r} is none of 'exact', 'fp8_gradients' and 'fp8'")
    widths = h_ND.shape[1], *(teacher.t_RE.shape[1] for teacher in teachers)
    if precision != "exact" and any(width % 16 for width in widths):
        raise ValueError(f"widths {widths} must be multiples of 16 for FP8 products")
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
    checked = tuple(replace(teacher, head=_checked(teacher, w_VD, vocab_size)) for teacher in teachers)
    loss, kl_N = _LinearKL.apply(h_ND, w_VD, checked, weight_N.float(), plan, impl)
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
    def forward(ctx, h_ND, w_VD, teachers, weight_N, plan, impl):
        module = _implementation(impl)
        kl_N, grad_h_ND, grad_w_VD = module.forward(h_ND, w_VD, teachers, weight_N, plan)
        ctx.gradients, ctx.scale = (grad_h_ND, grad_w_VD), module.scale
        ctx.mark_non_differentiable(kl_N)
        # A masked row's KL is 0, but its weight times NaN would not be.
        terms_N = torch.where(weight_N != 0, weight_N * kl_N, 0.0)
        return torch.stack([terms_R.sum() for terms_R in terms_N.split([len(t.t_RE) for t in teachers])]).sum(), kl_N

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
        return grad_h_ND, grad_w_VD, None, None, None, None


def _check_states(h_ND, w_VD, states: Sequence[torch.Tensor], weight_N) -> None:
    """Shapes, dtypes and devices of all but the teachers' heads."""
    if not states:
        raise ValueError("linear_kl of no teacher")
    for name, tensor in (("h_ND", h_ND), ("w_VD", w_VD), *(("t_NE", t_RE) for t_RE in states)):
        _check_matrix(name, tensor)
    if h_ND.shape[1] != w_VD.shape[1]:
        raise ValueError(f"widths differ: h_ND {list(h_ND.shape)}, w_VD {list(w_VD.shape)}")
    taught = sum(t_RE.shape[0] for t_RE in states)
    if not h_ND.shape[0] == taught == weight_N.numel() or weight_N.dim() != 1:
        raise ValueError(f"rows differ: h_ND {h_ND.shape[0]}, t_NE {taught}, weight_N {list(weight_N.shape)}")
    if len({x.device for x in (h_ND, w_VD, *states, weight_N)}) != 1:
        raise ValueError("h_ND, w_VD, t_NE and weight_N lie on different devices")
    if len({t_RE.dtype for t_RE in states}) > 1:
        raise ValueError(f"teachers' states are of {len({t_RE.dtype for t_RE in states})} dtypes")


def _check_head(u_VE: torch.Tensor, t_RE: torch.Tensor) -> None:
    _check_matrix("u_VE", u_VE)
    if u_VE.shape[1] != t_RE.shape[1]:
        raise ValueError(f"widths differ: t_NE {list(t_RE.shape)}, u_VE {list(u_VE.shape)}")
    if u_VE.device != t_RE.device:
        raise ValueError("t_NE and u_VE lie on different devices")


def _check_matrix(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 2 or tensor.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not a bf16 or fp32 matrix")


def _checked(teacher: Teacher, w_VD: torch.Tensor, vocab_size: int) -> Callable[[], torch.Tensor]:
    def head() -> torch.Tensor:
        u_VE = teacher.head()
        _check_head(u_VE, teacher.t_RE)
        if u_VE.shape[0] < vocab_size:
            raise _no_shared_vocabulary(f"at least {vocab_size} rows in both heads", w_VD.shape[0], u_VE.shape[0])
        return u_VE

    return head


def _no_shared_vocabulary(expected: str, student_rows: int, teacher_rows: int | None) -> ContractError:
    found = f"student head {student_rows} rows"
    return ContractError(
        "linear_kl: the heads share no vocabulary",
        expected=expected,
        found=found if teacher_rows is None else f"{found}, teacher head {teacher_rows} rows",
    )
