"""Variants of `[train.objective]`, told apart by `type`: the settings of each objective of ml.train.objectives.

A variant says what the stages before training must know of its objective, without torch; a test holds that the
objective itself says the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, TypeAdapter

from schemas.errors import ConfigError
from schemas.needs import UNNAMED_OBJECTIVE, Need
from schemas.section import Section, Temperature


class ObjectiveSettings(Section):
    """needs: what each trajectory carries for it. metrics: the figures that training reports of it."""

    needs: ClassVar[frozenset[Need]]
    metrics: ClassVar[tuple[str, ...]]
    type: str

    @property
    def needs_teacher(self) -> bool:
        return "teacher_states" in self.needs

    @property
    def name_in_plan(self) -> str | None:
        """What the rows of the plan say: None for the objective that had no name there."""
        return None if self.type == UNNAMED_OBJECTIVE else self.type

    @property
    def fp8_products(self) -> bool:
        """Whether the loss itself multiplies in FP8, for which widths must be multiples of 16."""
        return False

    @property
    def fp8_logits(self) -> bool:
        """Whether logits, and so the loss, are of FP8 operands."""
        return False

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """Of one group: the finished trajectories of a prompt, in order of sample_index. Only where needed."""
        raise NotImplementedError(f"objective {self.type} has no advantages")


class KLObjective(ObjectiveSettings):
    """KL over the whole vocabulary between student and each teacher, on the student's own tokens."""

    needs: ClassVar[frozenset[Need]] = frozenset({"teacher_states"})
    metrics: ClassVar[tuple[str, ...]] = ("kl",)
    type: Literal["kl"] = Field("kl", description="which objective this is")
    divergence: Literal["reverse", "forward"] = Field(
        "reverse", description="reverse: KL(student || teacher); forward: KL(teacher || student)"
    )
    temperature: Temperature = Field(
        1.0, gt=0, description="logits of student and teacher are divided by it, 1e-30 to 1e30"
    )
    precision: Literal["exact", "fp8_gradients", "fp8"] = Field(
        "exact", description="which products of the KL are FP8: fp8_gradients keeps the loss exact, fp8 does not"
    )

    @property
    def fp8_products(self) -> bool:
        return self.precision != "exact"

    @property
    def fp8_logits(self) -> bool:
        return self.precision == "fp8"


#: The union of all variants.
Objective = KLObjective


def read_objective(values: dict[str, Any]) -> ObjectiveSettings:
    """Settings that crossed a process boundary as `model_dump` made them."""
    return TypeAdapter(Objective).validate_python(values)


#: KL's settings that stood in [train] itself before there were objectives, and their names here.
_IN_TRAIN = {"divergence": "divergence", "temperature": "temperature", "kl_precision": "precision"}


def moved(train: dict[str, Any]) -> dict[str, Any]:
    """Values of [train] with KL's settings in its objective: files of before there were objectives keep their meaning.

    Raises ConfigError, with the new place, where an old name meets another objective or its new name.
    """
    old = {name: value for name, value in train.items() if name in _IN_TRAIN}
    if not old:
        return train
    objective = train.get("objective", {})
    for name, value in old.items():
        place = _IN_TRAIN[name]
        if not isinstance(objective, dict) or objective.get("type", "kl") != "kl" or place in objective:
            raise ConfigError(f"train.{name}", expected=f"train.objective.{place} in its place", found=repr(value))
    rest = {name: value for name, value in train.items() if name not in old}
    return rest | {"objective": objective | {_IN_TRAIN[name]: value for name, value in old.items()}}


def in_words_of(
    known: Mapping[str, Any] | None, content: dict[str, Any], objective: ObjectiveSettings
) -> dict[str, Any]:  # fmt: skip
    """Content of [train] as a record says it. known: the record's; None: a new one.

    A run whose record is older than objectives goes on in that record's words, so that nothing made under it changes.
    """
    if known is None or "objective" in known or not isinstance(objective, KLObjective):
        return content
    rest = {name: value for name, value in content.items() if name != "objective"}
    for name, place in _IN_TRAIN.items():
        value = getattr(objective, place)
        if name in known or value != KLObjective.model_fields[place].default:
            rest[name] = value
    return rest
