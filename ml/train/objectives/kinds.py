"""Objectives by the name that `train.objective.type` and the plan's rows give them: one file an objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml.train.objectives.kl import KL
from ml.train.objectives.objective import Objective
from schemas.errors import ConfigError
from schemas.typed_json import from_json

OBJECTIVES: dict[str, type[Objective]] = {"kl": KL}


def make_objective(type: str, settings: Mapping[str, Any]) -> Objective:
    """Raises ConfigError for an unknown type, FormatError for settings that are not its fields."""
    if type not in OBJECTIVES:
        raise ConfigError("train.objective.type", expected=f"one of {', '.join(OBJECTIVES)}", found=repr(type))
    return from_json(OBJECTIVES[type], dict(settings), f"train.objective of type {type}")
