"""The training loop of one iteration: measure held-out packs, walk the plan step by step, measure again.

Every rank runs the same number of micro-batches (empty ones carry no loss), so that collectives meet. Metrics are
reduced over ranks, in float64, in one order. Figures of objectives are means a sampled token, unweighted. In FP8,
fp8_inexact_linears of a step counts the linears that it computed in bf16, since FP8 does not hold their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ml.train.batches import Frame, Phase
from ml.train.engine import TrainEngine
from ml.train.heads import TeacherHeads
from ml.train.loader import RankBatches
from ml.train.loss import computing_in, unquantised
from ml.train.micro_batch import MicroBatch
from ml.train.objectives.objective import Objective

#: Takes (step, name, teacher_index or None, value).
Metric = Callable[[int, str, int | None, float], None]


@dataclass(frozen=True)
class Report:
    """What the caller hears: metric on every rank alike, micro_batch(frame) after each, step_end(steps done) after
    each update, and before_next() on every rank between two micro-batches. The last two may raise to end the loop: no
    update is in work, and a step in flight has changed no parameter."""

    metric: Metric
    micro_batch: Callable[[Frame], None]
    step_end: Callable[[int], None]
    before_next: Callable[[], None]


@dataclass
class Tally:
    """float64 sums over one mini-batch of this rank: of the loss, of each metric of each objective, and of sampled
    tokens by objective; by teacher, T of them, and in a last place over segments without one. loads_T: of heads.

    They are kept where the losses lie, and read once a step: the device is never waited for in between.
    """

    objectives: Mapping[str, Objective]
    num_teachers: int
    device: torch.device
    loss_1: torch.Tensor = field(init=False)
    tokens: dict[str, torch.Tensor] = field(init=False)
    sums: dict[str, torch.Tensor] = field(init=False)
    loads_T: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        def zeros(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.float64, device=self.device)

        self.loss_1 = zeros(1)
        self.tokens = {name: zeros(self.num_teachers + 1) for name in self.objectives}
        self.sums = {metric: zeros(self.num_teachers + 1) for o in self.objectives.values() for metric in o.metrics}
        self.loads_T = torch.zeros(self.num_teachers, dtype=torch.float64)

    def add(self, batch: MicroBatch, loss: torch.Tensor, values: list[dict[str, torch.Tensor]]) -> None:
        self.loss_1 += loss.detach()
        for segment, by_metric in zip(batch.segments, values, strict=True):
            place = self.num_teachers if segment.teacher_index is None else segment.teacher_index
            sampled_R = segment.weight_R != 0
            self.tokens[segment.objective][place] += sampled_R.sum()
            for metric, value_R in by_metric.items():
                # What an objective says of a token that was not sampled counts nowhere.
                self.sums[metric][place] += torch.where(sampled_R, value_R, 0).double().sum()

    def report(self, metric: Metric, step: int, name: str = "{}", *, of_step: bool = False) -> None:
        """Means a sampled token over all ranks: over all teachers (teacher_index None), then by teacher.

        name: of a figure, around its metric's. of_step: loss, its tokens and loads of heads too.
        """
        parts = [*self.tokens.values(), *self.sums.values(), self.loss_1]
        reduced = reduce(torch.cat(parts).cpu(), "sum").split([len(part) for part in parts])
        tokens = dict(zip(self.tokens, reduced, strict=False))
        sums = dict(zip(self.sums, reduced[len(tokens) :], strict=False))
        for objective, counts in tokens.items():
            for figure in self.objectives[objective].metrics if float(_total(counts)) else ():
                metric(step, name.format(figure), None, float(_total(sums[figure]) / _total(counts)))
                for teacher in counts[:-1].nonzero().flatten().tolist():
                    metric(step, name.format(figure), teacher, float(sums[figure][teacher] / counts[teacher]))
        if of_step:
            loads = float(reduce(self.loads_T, "max").max()) if self.num_teachers else 0.0
            metric(step, "loss", None, float(reduced[-1]))
            metric(step, "loss_tokens", None, sum(float(_total(counts)) for counts in tokens.values()))
            metric(step, "head_loads", None, loads)


def _total(by_teacher: torch.Tensor) -> torch.Tensor:
    """Over teachers, then what has none: so that this place changes no rounding of their sum."""
    return by_teacher[:-1].sum() + by_teacher[-1]


def train(
    engine: TrainEngine, batches: RankBatches, heads: TeacherHeads, report: Report, *,
    num_teachers: int, first_step: int, num_steps: int, sampler_compute: torch.dtype,
) -> None:  # fmt: skip
    """Run steps first_step..num_steps-1 of the plan that `batches` walks; held-out packs around all of them."""
    if first_step == 0:
        evaluate(engine, batches, heads, report, num_teachers, "before", 0)
    for step in range(first_step, num_steps):
        tally = Tally(engine.module.head.objectives, num_teachers, engine.device)
        for number, batch in enumerate(batches.mini_batch("train", step)):
            if number:
                report.before_next()
            measured = step == 0 and number == 0  # nothing was updated yet: the weights are the sampler's
            sampled = sampler_logprobs(engine, batch, sampler_compute) if measured else []
            loss, values, trained = engine(batch, heads, want_logprobs=measured)
            engine.backward(loss)
            tally.add(batch, loss, values)
            if measured:
                report_mismatch(batch, sampled, "mismatch_sampler", report)
                report_mismatch(batch, trained, "mismatch_trained", report)
            report.micro_batch(batch.frame)
        inexact = engine.fp8_inexact()
        norm = engine.step()
        for teacher, loads in heads.take_loads().items():
            tally.loads_T[teacher] += loads
        tally.report(report.metric, step, of_step=True)
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
    """Figures of the held-out packs; `step` is the number of updates that the measured student has seen.

    Before the first update an MXFP4 student is measured on bf16 values too, on the same tokens: four bits cost the
    difference, which training is to win back.
    """
    tally, plain = (Tally(engine.module.head.objectives, num_teachers, engine.device) for _ in range(2))
    transformer = engine.module.transformer
    compared = phase == "before" and transformer.precision == "mxfp4"
    seen = False
    for batch in batches.mini_batch(phase, 0):
        report.before_next()
        loss, values, _ = engine(batch, heads)
        tally.add(batch, loss, values)
        if compared:
            with unquantised(transformer):
                loss, values, _ = engine(batch, heads)
            plain.add(batch, loss, values)
        report.micro_batch(batch.frame)
        seen = True
    heads.take_loads()
    if seen:
        tally.report(report.metric, step, f"heldout_{{}}_{phase}")
    if seen and compared:
        plain.report(report.metric, step, "heldout_{}_unquantised")


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
