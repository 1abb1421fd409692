"""What one forward and backward pass reads: packed tokens, and the segments of them that have a loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ml.train.batches import Frame


@dataclass(frozen=True)
class Segment:
    """Loss rows of one objective, and of one teacher or none, in a micro-batch. R loss rows, E teacher width.

    rows_R int64: which packed tokens' states predict; response_R int64: the tokens that they predict;
    weight_R float32: plan weight, 0 for tokens that were not sampled; logged_R float32: raw log-probability logged
    by the sampler. None unless the objective needs it: hidden_RE bfloat16, the teacher's states; behaviour_R float32,
    log-probability under the distribution that was sampled from; advantage_R float32, the trajectory's.
    """

    objective: str
    teacher_index: int | None
    rows_R: torch.Tensor
    response_R: torch.Tensor
    weight_R: torch.Tensor
    logged_R: torch.Tensor
    hidden_RE: torch.Tensor | None = None
    behaviour_R: torch.Tensor | None = None
    advantage_R: torch.Tensor | None = None


@dataclass(frozen=True)
class MicroBatch:
    """One frame as tensors: N packed tokens of sequences cu_tokens[i]:cu_tokens[i+1], segments by objective
    and teacher.

    An empty frame has one token and no segment, so that its forward pass still meets the others' collectives.
    """

    frame: Frame
    ids_N: torch.Tensor
    positions_N: torch.Tensor
    cu_tokens: list[int]
    segments: tuple[Segment, ...]
