"""The settings of `schemas.config` in print: a reference of all of them, and one configuration as TOML.

Both walk the models themselves, so a new setting, section or variant of a union appears without a change here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from schemas.config import RunConfig
from schemas.section import Section

_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "table", Any: "any value"}
#: Constraint of a field -> its text. annotated_types and pydantic keep each in an attribute of this name.
_LIMITS = {"gt": "> {}", "ge": ">= {}", "lt": "< {}", "le": "<= {}", "min_length": "at least {} of them"}

_INTRODUCTION = """\
# Settings

`opd config --reference` prints this page; `schemas/config.py` is its source. A configuration is a TOML file, and
`--set SECTION.KEY=VALUE` overrides a setting of it. Paths are relative to the folder in which opd is started.

A setting that is **content** changes what a run produces: a changed value is refused until `--from-iteration K` says
from which iteration on it holds. An **operational** setting changes how the run works, never its results, and may
differ at every start. (The files and models that a path names are content, by their digests.)
"""


@dataclass(frozen=True)
class Setting:
    name: str
    type: str
    #: As TOML writes it; None: the setting is required.
    default: str | None
    meaning: str
    content: bool


@dataclass(frozen=True)
class Part:
    """A section of the file, or one variant of a section that is a union."""

    #: As TOML writes it; empty: the settings before the first section.
    header: str
    #: What tells this variant of a union from the others; empty where there is one only.
    variant: str
    meaning: str
    settings: tuple[Setting, ...]


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _sections(annotation: Any) -> tuple[list[type[Section]], bool]:
    """The sections that a field may hold (several: the variants of a union), and whether it is a list of them."""
    annotation = _bare(annotation)
    arguments = get_args(annotation)
    if _is_section(annotation):
        return [annotation], False
    if get_origin(annotation) is tuple:
        return _sections(arguments[0])[0], True
    if get_origin(annotation) in (Union, UnionType):
        return [found for argument in arguments for found in _sections(argument)[0]], False
    return [], False


def _type(annotation: Any) -> str:
    annotation = _bare(annotation)
    arguments = [a for a in get_args(annotation) if a not in (Ellipsis, type(None))]
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(literal(value) for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(map(_type, arguments))
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    return _NAMES.get(origin or annotation) or repr(annotation)


def _limits(field: FieldInfo) -> str:
    found = [
        text.format(value)
        for constraint in field.metadata
        for name, text in _LIMITS.items()
        if (value := getattr(constraint, name, None)) is not None
    ]
    texts = ["not empty" if text == "at least 1 of them" else text for text in found]
    return "".join(f", {text}" for text in texts)


def literal(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {literal(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    # JSON writes text, numbers and truth values as TOML does, but for the character DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else literal(name)


def _setting(name: str, field: FieldInfo) -> Setting:
    extra = field.json_schema_extra
    value = None if field.is_required() else field.get_default(call_default_factory=True)
    default = None if field.is_required() else "none" if value is None else literal(value)
    return Setting(
        name, _type(field.annotation) + _limits(field), default, field.description or "",
        content=not (isinstance(extra, dict) and extra.get("operational")),
    )  # fmt: skip


def _variant(model: type[Section]) -> str:
    """A variant has a setting that can hold one value only."""
    fixed = {
        name: get_args(field.annotation)[0]
        for name, field in model.model_fields.items()
        if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
    }
    return ", ".join(f"{name} = {literal(value)}" for name, value in fixed.items())


def parts(model: type[Section] = RunConfig, path: str = "", *, is_list: bool = False) -> Iterator[Part]:
    """Every section of the file, in the order of the models; a section's own settings stand before its sections."""
    nested: list[tuple[str, type[Section], bool]] = []
    own: list[Setting] = []
    for name, field in model.model_fields.items():
        found, listed = _sections(field.annotation)
        nested += [(f"{path}.{name}".lstrip("."), section, listed) for section in found]
        if not found:
            own.append(_setting(name, field))
    header = f"[[{path}]]" if is_list else f"[{path}]" if path else ""
    if own:
        yield Part(header, _variant(model), model.__doc__ or "", tuple(own))
    for deeper, section, listed in nested:
        yield from parts(section, deeper, is_list=listed)


def markdown() -> str:
    """The page `docs/settings.md`."""
    lines = [_INTRODUCTION]
    for part in parts():
        header = f"`{part.header}`" if part.header else "Top of the file"
        header += f", `{part.variant}`" if part.variant else ""
        lines += [f"## {header}\n", f"{' '.join(part.meaning.split())}\n"]
        lines += ["| setting | type | default | meaning | kind |", "|---|---|---|---|---|"]
        for setting in part.settings:
            default = "required" if setting.default is None else f"`{setting.default}`"
            kind = "content" if setting.content else "operational"
            cells = [f"`{setting.name}`", setting.type, default, setting.meaning, kind]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _tables(values: dict[str, Any], path: str) -> Iterator[str]:
    tables: list[tuple[str, str, dict[str, Any]]] = []
    for name, value in values.items():
        deeper = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict):
            tables.append((deeper, f"[{deeper}]", value))
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            tables += [(deeper, f"[[{deeper}]]", item) for item in value]
        elif value is not None:
            yield f"{_key(name)} = {literal(value)}"
    for deeper, header, table in tables:
        yield f"\n{header}"
        yield from _tables(table, deeper)


def toml(config: RunConfig) -> str:
    """A configuration with every setting, defaults included; read again, it is the same configuration."""
    return "\n".join(_tables(config.model_dump(mode="json"), "")) + "\n"
