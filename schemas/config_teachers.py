"""`[[teachers]]` of the configuration: a section for each kind, told apart by `kind`.

A new kind is one more section here, in `TEACHER_KINDS`, and one module in tasks/teachers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from schemas.errors import ConfigError
from schemas.section import Positive, Section, location
from schemas.work.model import WeightPrecision


class Teacher(Section):
    """What every kind has; the order of ids gives teacher_index."""

    id: str = Field(min_length=1, description="name of the teacher, by which prompt rows choose it")
    path: str = location("Hugging Face model folder")
    weight: Positive = Field(1.0, gt=0, description="weight of this teacher's KL, never normalised")
    template: str = Field(
        "",
        description="Jinja template of an extra system message that only this teacher reads; sees the prompt's "
        "columns (answer, domain, context). Empty: the teacher reads what the student reads",
    )


class OpdTeacher(Teacher):
    """A teacher that this project's own transformer computes; a `kind` that is left out means this one."""

    kind: Literal["opd"] = Field("opd", description="Llama, Qwen2 or Qwen3 (dense)")
    precision: WeightPrecision = Field("bf16", description="values of the linear weights")


class TransformersTeacher(Teacher):
    """A teacher that transformers computes, in its own dtype; it keeps no MXFP4 weights."""

    kind: Literal["transformers"] = Field(description="any causal language model that transformers knows")
    precision: Literal["fp32", "bf16"] = Field("bf16", description="dtype of all weights and of the forward pass")

    @field_validator("precision", mode="before")
    @classmethod
    def _no_codes(cls, value: Any) -> Any:
        if value == "mxfp4":
            raise ConfigError(
                "teachers.precision", expected='"bf16" or "fp32" with kind = "transformers"',
                found="'mxfp4'", next_command='precision = "bf16", or kind = "opd" for Llama, Qwen2 and Qwen3',
            )  # fmt: skip
        return value


def _kind(value: Any) -> Any:
    return value.get("kind", "opd") if isinstance(value, Mapping) else getattr(value, "kind", None)


#: Kind -> its section.
TEACHER_KINDS: dict[str, type[OpdTeacher] | type[TransformersTeacher]] = {
    "opd": OpdTeacher,
    "transformers": TransformersTeacher,
}
AnyTeacher = Annotated[
    Annotated[OpdTeacher, Tag("opd")] | Annotated[TransformersTeacher, Tag("transformers")], Discriminator(_kind)
]
