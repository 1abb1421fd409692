"""Objectives by the name that `train.objective.type` and the plan's rows give them: one file an objective."""

from __future__ import annotations

from ml.train.objectives.kl import KL
from ml.train.objectives.objective import Objective

OBJECTIVES: dict[str, type[Objective]] = {"kl": KL}
