"""The student with its loss: exact KL to each segment's teacher, over one denominator a mini-batch.

    loss of a micro-batch = sum over its sampled tokens of plan weight x KL / denominator_tokens

Summed over the micro-batches of all ranks this is the loss of the mini-batch, however it was split. Prompt,
observation and padding tokens are no loss rows or have weight 0, which linear_kl never reads.

Letters: N packed tokens, R loss rows, D student width, E teacher width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from kernels.linear_kl import Divergence, Teacher, linear_kl, linear_kl_by_teacher
from kernels.linear_kl import Precision as KLPrecision
from kernels.scaled_mm import row_invariant_mm
from ml.linear import Linear, Precision, dense_precision, weight_values
from ml.model import PackedCausal, SampledCausal, Transformer
from ml.train.heads import TeacherHeads
from ml.train.loader import MicroBatch, Segment
from schemas.errors import ContractError

_BYTES_PER_LOGPROB = 12  # an fp32 logit, its share of the log-softmax and the row-invariant product's padding


@dataclass(frozen=True)
class LossSettings:
    """vocab_size: rows of every head that count. chunk_bytes: bound on the logits of one chunk. page_tokens: of the
    sampler's KV pages, which its log-probabilities are recomputed with. precision: of the KL's own products."""

    vocab_size: int
    divergence: Divergence = "reverse"
    temperature: float = 1.0
    chunk_bytes: int = 256 << 20
    page_tokens: int = 64
    precision: KLPrecision = "exact"


class StudentHead(nn.Module):
    """Owns the use of the head's weight, so that ZeRO-3 gathers it by this module's hooks; dW goes through autograd.

    weight: the transformer's own parameter, the embedding when tied.
    """

    def __init__(self, transformer: Transformer, settings: LossSettings) -> None:
        super().__init__()
        self.weight = transformer.head_weight
        self.precision: Precision = dense_precision(transformer.precision)
        self.settings = settings

    def forward(
        self, h_ND: torch.Tensor, batch: MicroBatch, heads: TeacherHeads | None, want_logprobs: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """(loss, KL of each segment's rows, raw log-probability of each segment's response tokens).

        Without heads the loss is 0 and the KLs are missing; without want_logprobs the log-probabilities are.
        """
        # bf16 states meet a head as its bf16 values inside the products; the master's gradient then stays fp32.
        w_VD = self.weight if h_ND.dtype == torch.bfloat16 else weight_values(self.weight, self.precision)
        logprobs = [self._logprobs(h_ND, w_VD, s.rows_R, s.response_R) for s in batch.segments] if want_logprobs else []
        if heads is None:
            return torch.zeros((), device=h_ND.device), [], logprobs
        if not batch.segments:
            return self._no_loss(h_ND, w_VD), [], logprobs
        # All teachers in one call: their heads come and go in it, and the student's head has one gradient.
        counts = [len(segment.rows_R) for segment in batch.segments]
        loss, kl_R = linear_kl_by_teacher(
            h_ND[torch.cat([segment.rows_R for segment in batch.segments])],
            w_VD,
            [Teacher(segment.hidden_RE, functools.partial(_head, heads, segment)) for segment in batch.segments],
            torch.cat([segment.weight_R for segment in batch.segments]) / batch.frame.denominator_tokens,
            divergence=self.settings.divergence,
            temperature=self.settings.temperature,
            vocab_size=self.settings.vocab_size,
            chunk_bytes=self.settings.chunk_bytes,
            precision=self.settings.precision,
        )
        return loss, list(kl_R.split(counts)), logprobs

    def _no_loss(self, h_ND: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        # Zero, with a gradient of zeros for every parameter: an empty micro-batch joins the others' reductions.
        h_1D = h_ND[:1]
        return linear_kl(h_1D, w_VD, h_1D.detach(), w_VD.detach(), h_ND.new_zeros(1, dtype=torch.float32))[0]

    @torch.no_grad()
    def _logprobs(self, h_ND, w_VD, rows_R, ids_R) -> torch.Tensor:
        """fp32 [R]: log softmax over the shared vocabulary at temperature 1."""
        # The CPU's products may use more of a master than its bf16 values, so they are taken here.
        w_VD = weight_values(w_VD.detach(), self.precision)
        chunk = max(1, self.settings.chunk_bytes // (_BYTES_PER_LOGPROB * w_VD.shape[0]))
        out = []
        for rows, ids in zip(rows_R.split(chunk), ids_R.split(chunk), strict=True):
            # Of every row of the head, as in rollout: the bits of a product may depend on its shape.
            logits_RV = row_invariant_mm(h_ND[rows], w_VD, dtype=torch.float32)[:, : self.settings.vocab_size]
            out.append(torch.log_softmax(logits_RV, 1).gather(1, ids[:, None]).squeeze(1))
        return torch.cat(out)


def _head(heads: TeacherHeads, segment: Segment) -> torch.Tensor:
    """u_VE of the segment's teacher."""
    u_VE = heads.use(segment.teacher_index)
    if u_VE.shape[1] != segment.hidden_RE.shape[1]:
        raise ContractError(
            f"teacher {segment.teacher_index}",
            expected=f"hidden states as wide as its head, {u_VE.shape[1]}",
            found=str(segment.hidden_RE.shape[1]),
            next_command="opd repair RUN",
        )
    return u_VE


class Student(nn.Module):
    """Transformer and head as the one module that the engine trains; called with a micro-batch."""

    def __init__(self, transformer: Transformer, settings: LossSettings) -> None:
        super().__init__()
        self.transformer = transformer
        self.head = StudentHead(transformer, settings)

    def forward(self, batch: MicroBatch, heads: TeacherHeads | None = None, want_logprobs: bool = False):
        """As StudentHead.forward, from token ids.

        Without gradients every product is row-invariant, as in rollout; without heads (nothing to learn, only
        log-probabilities to recompute) attention is the sampler's too.
        """
        if heads is not None:
            attend = PackedCausal(batch.cu_tokens)
        else:
            attend = SampledCausal(batch.cu_tokens, page_tokens=self.head.settings.page_tokens)
        h_ND = self.transformer(batch.ids_N, batch.positions_N, attend)
        return self.head(h_ND, batch, heads, want_logprobs)


@contextmanager
def unquantised(transformer: Transformer) -> Iterator[None]:
    """Take the linears' weights on bf16's grid for a while, to learn what their own grid costs."""
    linears = [m for m in transformer.modules() if isinstance(m, Linear)]
    before: list[Precision] = [linear.precision for linear in linears]
    try:
        for linear in linears:
            linear.precision = "bf16"
        yield
    finally:
        for linear, precision in zip(linears, before, strict=True):
            linear.precision = precision


@contextmanager
def computing_in(transformer: Transformer, compute: torch.dtype) -> Iterator[None]:
    """Run products in another dtype for a while: the sampler's, to recompute what it logged."""
    modules = [m for m in transformer.modules() if isinstance(m, Linear | Transformer)]
    before = transformer.compute
    try:
        for module in modules:
            module.compute = compute
        yield
    finally:
        for module in modules:
            module.compute = before
