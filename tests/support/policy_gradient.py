"""An objective of the tests' own: policy gradient with group-centred advantages, one file and a configuration variant.

loss of a token = - advantage x exp(log-probability - log-probability when it was sampled)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ml.train.heads import TeacherHeads
from ml.train.micro_batch import Segment
from ml.train.objectives.objective import Loss, StudentRows
from schemas.needs import Need
from schemas.objectives import ObjectiveSettings

NEEDS: frozenset[Need] = frozenset({"behaviour_logprobs", "advantage"})


@dataclass(frozen=True)
class PolicyGradient:
    scale: float = 1.0

    needs: ClassVar[frozenset[Need]] = NEEDS
    metrics: ClassVar[tuple[str, ...]] = ("ratio",)

    def loss(self, student: StudentRows, segments: Sequence[Segment], heads: TeacherHeads) -> Loss:
        ids_R = torch.cat([s.response_R for s in segments])
        behaviour_R = torch.cat([s.behaviour_R for s in segments if s.behaviour_R is not None])
        advantage_R = torch.cat([s.advantage_R for s in segments if s.advantage_R is not None])
        logits_RV = student.h_RD.float() @ student.w_VD[: student.vocab_size].float().T
        logprob_R = torch.log_softmax(logits_RV, 1).gather(1, ids_R[:, None]).squeeze(1)
        ratio_R = torch.where(student.weight_R != 0, (logprob_R - behaviour_R).exp(), 0)
        return Loss(-self.scale * (student.weight_R * advantage_R * ratio_R).sum(), {"ratio": ratio_R.detach()})


class PolicyGradientSettings(ObjectiveSettings):
    needs: ClassVar[frozenset[Need]] = NEEDS
    metrics: ClassVar[tuple[str, ...]] = ("ratio",)
    type: Literal["policy_gradient"] = "policy_gradient"
    scale: float = 1.0

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        mean = sum(rewards) / len(rewards)
        return [reward - mean for reward in rewards]
