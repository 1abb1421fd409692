"""The student with its loss: that of each segment's objective, over one denominator a mini-batch.

    loss of a micro-batch = sum over its sampled tokens of plan weight x loss of the token / denominator_tokens

Summed over the micro-batches of all ranks this is the loss of the mini-batch, however it was split. Prompt,
observation and padding tokens are no loss rows or have weight 0, of which no objective reads anything.

Letters: N packed tokens, R loss rows, D student width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from kernels.scaled_mm import row_invariant_mm
from ml.linear import Linear, Precision, dense_precision, weight_values
from ml.model import PackedCausal, SampledCausal, Transformer
from ml.train.heads import TeacherHeads
from ml.train.micro_batch import MicroBatch
from ml.train.objectives.objective import Objective, StudentRows

_BYTES_PER_LOGPROB = 12  # an fp32 logit, its share of the log-softmax and the row-invariant product's padding


@dataclass(frozen=True)
class LossSettings:
    """vocab_size: rows of every head that count. chunk_bytes: bound on the logits of one chunk. page_tokens: of the
    sampler's KV pages, which its log-probabilities are recomputed with."""

    vocab_size: int
    chunk_bytes: int = 256 << 20
    page_tokens: int = 64


class StudentHead(nn.Module):
    """Owns the use of the head's weight, so that ZeRO-3 gathers it by this module's hooks; dW goes through autograd.

    weight: the transformer's own parameter, the embedding when tied. objectives: by the name that segments give them.
    """

    def __init__(self, transformer: Transformer, settings: LossSettings, objectives: Mapping[str, Objective]) -> None:
        super().__init__()
        self.weight = transformer.head_weight
        self.precision: Precision = dense_precision(transformer.precision)
        self.settings, self.objectives = settings, objectives

    def forward(
        self, h_ND: torch.Tensor, batch: MicroBatch, heads: TeacherHeads | None, want_logprobs: bool
    ) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]], list[torch.Tensor]]:
        """(loss, metrics of each segment's rows by name, raw log-probability of each segment's response tokens).

        Without heads the loss is 0 and the metrics are missing; without want_logprobs the log-probabilities are.
        """
        # bf16 states meet a head as its bf16 values inside the products; the master's gradient then stays fp32.
        w_VD = self.weight if h_ND.dtype == torch.bfloat16 else weight_values(self.weight, self.precision)
        logprobs = [self._logprobs(h_ND, w_VD, s.rows_R, s.response_R) for s in batch.segments] if want_logprobs else []
        if heads is None:
            return torch.zeros((), device=h_ND.device), [], logprobs
        # Of no row: zero, with a gradient of zeros for every parameter, so that an empty micro-batch joins the
        # others' reductions.
        losses = [] if batch.segments else [h_ND[:0].float().sum() + w_VD[:0].float().sum()]
        values: dict[int, dict[str, torch.Tensor]] = {}
        for name, objective in self.objectives.items():
            indices = [i for i, segment in enumerate(batch.segments) if segment.objective == name]
            if not indices:
                continue
            segments = [batch.segments[i] for i in indices]
            rows = StudentRows(
                h_ND[torch.cat([segment.rows_R for segment in segments])],
                w_VD,
                torch.cat([segment.weight_R for segment in segments]) / batch.frame.denominator_tokens,
                self.settings.vocab_size,
                self.settings.chunk_bytes,
            )
            loss = objective.loss(rows, segments, heads)
            losses.append(loss.total)
            by_metric = [loss.values[metric].split([len(s.rows_R) for s in segments]) for metric in objective.metrics]
            for index, *parts in zip(indices, *by_metric, strict=True):
                values[index] = dict(zip(objective.metrics, parts, strict=True))
        return torch.stack(losses).sum(), [values[i] for i in range(len(batch.segments))], logprobs

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


class Student(nn.Module):
    """Transformer and head as the one module that the engine trains; called with a micro-batch."""

    def __init__(self, transformer: Transformer, settings: LossSettings, objectives: Mapping[str, Objective]) -> None:
        super().__init__()
        self.transformer = transformer
        self.head = StudentHead(transformer, settings, objectives)

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
