"""What the training loop asks of an objective: what its tokens carry, their loss, and the figures that it reports.

A micro-batch's loss rows come in segments: runs of tokens of one objective and one teacher (or of none). An objective
gets all of its segments of a micro-batch in one call, so that the student's head has one gradient however many they
are. The loop, the tally, the loader and the plan ask what stands here, and know no objective by name.

Letters: R loss rows of all segments, one after another, D student width, E teacher width, V rows of the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from ml.train.heads import TeacherHeads
from ml.train.micro_batch import Segment
from schemas.needs import Need


@dataclass(frozen=True)
class StudentRows:
    """The student at the loss rows of some segments, in their order.

    h_RD: states after the final norm, bf16 or fp32. w_VD: its head, fp32, or bf16 values of it that meet bf16 states.
    Both carry gradients. weight_R float32: plan weight over the mini-batch's denominator, 0 for tokens that were not
    sampled, which must be left out and not only multiplied by 0. vocab_size: rows of every head that count.
    chunk_bytes: bound on the logits of one chunk of rows.
    """

    h_RD: torch.Tensor
    w_VD: torch.Tensor
    weight_R: torch.Tensor
    vocab_size: int
    chunk_bytes: int


@dataclass(frozen=True)
class Loss:
    """total: fp32 scalar, sum over the rows of weight x loss, differentiable in h_RD and w_VD. values: float32 [R] by
    the name of each metric, without gradient; the loop reports their means over the sampled tokens."""

    total: torch.Tensor
    values: Mapping[str, torch.Tensor]


class Objective(Protocol):
    """One kind of training. Implementations are frozen dataclasses, whose fields are their settings.

    needs: what every segment carries for it. metrics: names of what `loss` measures; no two objectives share one.
    """

    needs: ClassVar[frozenset[Need]]
    metrics: ClassVar[tuple[str, ...]]

    def loss(self, student: StudentRows, segments: Sequence[Segment], heads: TeacherHeads) -> Loss:
        """Of all rows of at least one segment. heads: of the teachers; one at a time, in the order of the segments.

        Called without gradients too, to measure held-out packs.
        """
        ...
