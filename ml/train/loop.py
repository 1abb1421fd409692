"""The training loop of one iteration: measure held-out packs, walk the plan step by step, measure again.

Every rank runs the same number of micro-batches (empty ones carry no loss), so that collectives meet. Metrics are
reduced over ranks, in float64, in one order. KL figures are nats a sampled token, unweighted. In FP8,
fp8_inexact_linears of a step counts the linears that it computed in bf16, since FP8 does not hold their values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ml.train.batches import Frame, Phase
from ml.train.engine import TrainEngine
from ml.train.heads import TeacherHeads
from ml.train.loader import MicroBatch, RankBatches
from ml.train.loss import computing_in, unquantised


@dataclass(frozen=True)
class Report:
    """What the caller hears: metric(step, name, teacher_index or None, value) on every rank alike,
    micro_batch(frame) after each, step_end(steps done) after each update, and before_next() on every rank between two
    micro-batches. The last two may raise to end the loop: no update is in work, and a step in flight has changed no
    parameter."""

    metric: Callable[[int, str, int | None, float], None]
    micro_batch: Callable[[Frame], None]
    step_end: Callable[[int], None]
    before_next: Callable[[], None]


@dataclass
class Tally:
    """float64 sums over one mini-batch of this rank. kl_T, tokens_T (sampled ones), loads_T (of heads): by teacher.

    They are kept where the losses lie, and read once a step: the device is never waited for in between.
    """

    num_teachers: int
    device: torch.device
    loss_1: torch.Tensor = field(init=False)
    kl_T: torch.Tensor = field(init=False)
    tokens_T: torch.Tensor = field(init=False)
    loads_T: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.loss_1 = torch.zeros(1, dtype=torch.float64, device=self.device)
        self.kl_T, self.tokens_T = torch.zeros(2, self.num_teachers, dtype=torch.float64, device=self.device)
        self.loads_T = torch.zeros(self.num_teachers, dtype=torch.float64)

    def add(self, batch: MicroBatch, loss: torch.Tensor, kls: list[torch.Tensor]) -> None:
        self.loss_1 += loss.detach()
        for segment, kl_R in zip(batch.segments, kls, strict=True):
            self.kl_T[segment.teacher_index] += kl_R.double().sum()
            self.tokens_T[segment.teacher_index] += (segment.weight_R != 0).sum()

    def report(self, metric, step: int, kl_name: str) -> None:
        """Metrics over all ranks, by teacher and over all of them (teacher_index None)."""
        sums = reduce(torch.cat([self.kl_T, self.tokens_T, self.loss_1]).cpu(), "sum")
        kl_T, tokens_T, loss = sums[: self.num_teachers], sums[self.num_teachers : -1], float(sums[-1])
        loads_T = reduce(self.loads_T, "max")
        metric(step, kl_name, None, float(kl_T.sum() / tokens_T.sum()))
        for teacher in tokens_T.nonzero().flatten().tolist():
            metric(step, kl_name, teacher, float(kl_T[teacher] / tokens_T[teacher]))
        if kl_name == "kl":
            metric(step, "loss", None, loss)
            metric(step, "loss_tokens", None, float(tokens_T.sum()))
            metric(step, "head_loads", None, float(loads_T.max()))


def train(
    engine: TrainEngine, batches: RankBatches, heads: TeacherHeads, report: Report, *,
    num_teachers: int, first_step: int, num_steps: int, sampler_compute: torch.dtype,
) -> None:  # fmt: skip
    """Run steps first_step..num_steps-1 of the plan that `batches` walks; held-out packs around all of them."""
    if first_step == 0:
        evaluate(engine, batches, heads, report, num_teachers, "before", 0)
    for step in range(first_step, num_steps):
        tally = Tally(num_teachers, engine.device)
        for number, batch in enumerate(batches.mini_batch("train", step)):
            if number:
                report.before_next()
            measured = step == 0 and number == 0  # nothing was updated yet: the weights are the sampler's
            sampled = sampler_logprobs(engine, batch, sampler_compute) if measured else []
            loss, kls, trained = engine(batch, heads, want_logprobs=measured)
            engine.backward(loss)
            tally.add(batch, loss, kls)
            if measured:
                report_mismatch(batch, sampled, "mismatch_sampler", report)
                report_mismatch(batch, trained, "mismatch_trained", report)
            report.micro_batch(batch.frame)
        inexact = engine.fp8_inexact()
        norm = engine.step()
        for teacher, loads in heads.take_loads().items():
            tally.loads_T[teacher] += loads
        tally.report(report.metric, step, "kl")
        report.metric(step, "grad_norm", None, norm)
        if engine.module.transformer.fp8:
            report.metric(step, "fp8_inexact_linears", None, float(len(inexact)))
        report.step_end(step + 1)
    evaluate(engine, batches, heads, report, num_teachers, "after", num_steps)


@torch.no_grad()
def evaluate(
    engine: TrainEngine, batches: RankBatches, heads: TeacherHeads, report: Report,
    num_teachers: int, phase: Phase, step: int,
) -> None:  # fmt: skip
    """KL on the held-out packs; `step` is the number of updates that the measured student has seen.

    Before the first update an MXFP4 student is measured on bf16 values too, on the same tokens: four bits cost the
    difference, which training is to win back.
    """
    tally, plain = (Tally(num_teachers, engine.device) for _ in range(2))
    transformer = engine.module.transformer
    compared = phase == "before" and transformer.precision == "mxfp4"
    seen = False
    for batch in batches.mini_batch(phase, 0):
        report.before_next()
        loss, kls, _ = engine(batch, heads)
        tally.add(batch, loss, kls)
        if compared:
            with unquantised(transformer):
                loss, kls, _ = engine(batch, heads)
            plain.add(batch, loss, kls)
        report.micro_batch(batch.frame)
        seen = True
    heads.take_loads()
    if seen:
        tally.report(report.metric, step, f"heldout_kl_{phase}")
    if seen and compared:
        plain.report(report.metric, step, "heldout_kl_unquantised")


@torch.no_grad()
def sampler_logprobs(engine: TrainEngine, batch: MicroBatch, compute: torch.dtype) -> list[torch.Tensor]:
    """Raw log-probabilities of the response tokens by the inference path in the sampler's precision."""
    with computing_in(engine.module.transformer, compute):
        return engine(batch, None, want_logprobs=True)[2]


def report_mismatch(batch: MicroBatch, logprobs: list[torch.Tensor], name: str, report: Report) -> None:
    """Mean and maximum of |logged - recomputed| over the sampled tokens of the step's first pack, which is the same
    sample for any number of ranks."""
    total, largest, tokens = 0.0, 0.0, 0
    for segment, recomputed_R in zip(batch.segments, logprobs, strict=True) if batch.frame.slot == 0 else ():
        gap_R = (segment.logged_R - recomputed_R).abs()[segment.weight_R != 0].double()
        total, tokens = total + float(gap_R.sum()), tokens + len(gap_R)
        largest = max(largest, float(gap_R.max())) if len(gap_R) else largest
    total, tokens = reduce(torch.tensor([total, tokens], dtype=torch.float64), "sum").tolist()
    largest = float(reduce(torch.tensor([largest], dtype=torch.float64), "max"))
    report.metric(0, f"{name}_mean", None, total / max(tokens, 1))
    report.metric(0, f"{name}_max", None, largest)


def reduce(values: torch.Tensor, how: str) -> torch.Tensor:
    """Sum or maximum over ranks of a float64 vector on the host, in place."""
    dist.all_reduce(values, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
    return values
