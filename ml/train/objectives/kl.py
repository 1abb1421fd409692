"""Exact KL over the whole vocabulary between the student and each segment's teacher, in nats a token."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.linear_kl import Divergence, Precision, Teacher, linear_kl_by_teacher
from ml.train.heads import TeacherHeads
from ml.train.micro_batch import Segment
from ml.train.objectives.objective import Loss, StudentRows
from schemas.errors import ContractError
from schemas.needs import Need


@dataclass(frozen=True)
class KL:
    """divergence: "reverse" is KL(student || teacher), "forward" KL(teacher || student). temperature: divides both
    logits. precision: of the KL's own products, see kernels.linear_kl."""

    divergence: Divergence = "reverse"
    temperature: float = 1.0
    precision: Precision = "exact"

    needs: ClassVar[frozenset[Need]] = frozenset({"teacher_states"})
    metrics: ClassVar[tuple[str, ...]] = ("kl",)

    def loss(self, student: StudentRows, segments: Sequence[Segment], heads: TeacherHeads) -> Loss:
        """Raises ContractError for hidden states that do not fit their teacher's head."""
        # All teachers in one call: their heads come and go in it, and the student's head has one gradient.
        total, kl_R = linear_kl_by_teacher(
            student.h_RD,
            student.w_VD,
            [_teacher(segment, heads) for segment in segments],
            student.weight_R,
            divergence=self.divergence,
            temperature=self.temperature,
            vocab_size=student.vocab_size,
            chunk_bytes=student.chunk_bytes,
            precision=self.precision,
        )
        return Loss(total, {"kl": kl_R})


def _teacher(segment: Segment, heads: TeacherHeads) -> Teacher:
    teacher_index, hidden_RE = segment.teacher_index, segment.hidden_RE
    assert teacher_index is not None, "the schedule gives a teacher to every row whose objective needs one"
    assert hidden_RE is not None
    return Teacher(hidden_RE, functools.partial(_head, heads, teacher_index, hidden_RE.shape[1]))


def _head(heads: TeacherHeads, teacher_index: int, width: int) -> torch.Tensor:
    """u_VE of a teacher whose hidden states are of `width`."""
    u_VE = heads.use(teacher_index)
    if u_VE.shape[1] != width:
        raise ContractError(
            f"teacher {teacher_index}",
            expected=f"hidden states as wide as its head, {u_VE.shape[1]}",
            found=str(width),
            next_command="opd repair RUN",
        )
    return u_VE
