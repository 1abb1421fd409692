"""What a section of the configuration is made of: fields of content, operational fields, and numbers of fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def operational(default: Any, **constraints: Any) -> Any:
    """A field that does not change what a stage produces."""
    return Field(default, json_schema_extra={"operational": True}, **constraints)


def location(description: str) -> Any:
    """A required path. What is found there enters fingerprints by its digest, the path itself does not."""
    return Field(min_length=1, description=description, json_schema_extra={"operational": True})


#: Normal numbers of fp32, which sampling, loss and optimizer compute in: below, kernels may take a number for 0.
FP32_SMALLEST, FP32_LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def is_positive_fp32(value: float) -> bool:
    return FP32_SMALLEST <= value <= FP32_LARGEST


def _positive_fp32(value: float) -> float:
    if not is_positive_fp32(value):
        raise ValueError(f"a number above 0 that fp32 holds, {FP32_SMALLEST:.3g} to {FP32_LARGEST:.3g}")
    return value


def _fp32(value: float) -> float:
    return value if value == 0 else _positive_fp32(value)


def _share(value: float) -> float:
    # What is nearer to 1 than fp32 can say becomes 1, and an average that never moves.
    if value > 1 - 2.0**-24:
        raise ValueError("a number below 1 in fp32")
    return _fp32(value)


def _temperature(value: float) -> float:
    # Logits of up to 1e8, divided by it or multiplied with its inverse, stay numbers of fp32.
    if not 1e-30 <= value <= 1e30:
        raise ValueError("a temperature from 1e-30 to 1e30, so that fp32 holds logits divided by it")
    return value


Positive = Annotated[float, AfterValidator(_positive_fp32)]
NotNegative = Annotated[float, AfterValidator(_fp32)]
Decay = Annotated[float, AfterValidator(_share)]
Temperature = Annotated[float, AfterValidator(_temperature)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    def content(self, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The values that change what is produced, JSON-ready, nested sections included.

        known: content of an older record. A setting that it lacks and that is at its default is left out, so that a
        version of the software that adds a setting does not change what older runs are. None: everything.
        """
        out: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("operational"):
                continue
            value = getattr(self, name)
            if known is not None and name not in known and value == field.get_default(call_default_factory=True):
                continue
            out[name] = _content(value, None if known is None else known.get(name))
        return out


def _content(value: Any, known: Any) -> Any:
    """known: None where everything counts as known."""
    if isinstance(value, Section):
        return value.content(known if isinstance(known, Mapping) else None)
    if isinstance(value, tuple):
        items = known if isinstance(known, list) else []
        return [_content(v, items[i] if i < len(items) else None) for i, v in enumerate(value)]
    return value
