"""Frozen dataclasses as JSON objects: what crosses a process boundary, or lies in the store, read by its type.

    decode(TrainWork, bytes, "work.json") -> TrainWork      encode(work) -> canonical JSON

A field's type is one of: str, int, float, bool, None, a Literal, a dataclass, list[T], tuple[T, ...], dict[str, T], a
union of these, or Any for a value that is not ours to describe (a row of a table). A union of dataclasses is not known
here: whoever has one reads the field that tells them apart.
Reading refuses a field that is missing, unknown or of another type, with its path. A field with a default may be
missing. Numbers are finite, and no name stands twice in an object.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from schemas.errors import FormatError
from schemas.keys import canonical_json

T = TypeVar("T")
_FOUND_CHARACTERS = 100
#: Of one type: (JSON value, its path, whether unknown fields are passed over) -> the value.
_Reader = Callable[[Any, str, bool], Any]


def encode(value: Any) -> bytes:
    """Canonical JSON of a dataclass. Raises ValueError for a number that is not finite."""
    return canonical_json(to_json(value))


def decode(kind: type[T], data: bytes | bytearray | memoryview | str, where: str) -> T:
    """The value of JSON text; `from_json` has the refusals. FormatError, too, for what is no JSON."""
    return from_json(kind, parse(data, where), where)


def parse(data: bytes | bytearray | memoryview | str, where: str) -> Any:
    """A JSON value. FormatError for other text, a name that stands twice, and for NaN and Infinity."""
    try:
        text = data if isinstance(data, str) else bytes(data).decode("utf-8", "surrogatepass")
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(where, expected="JSON", found=str(error)[:_FOUND_CHARACTERS]) from error


def from_json(kind: type[T], value: Any, where: str, *, pass_over_unknown: bool = False) -> T:
    """A value of the type from a JSON value. Raises FormatError that names `where` and the path of the field.

    pass_over_unknown: of objects in the store, which a later version may have given further fields.
    """
    return _reader(kind)(value, where, pass_over_unknown)


def to_json(value: Any) -> Any:
    """Dictionaries, lists and numbers of a dataclass, or of a list, tuple or mapping of them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= {str, int}:  # token ids: a million at once
            return list(value)
        return [to_json(item) for item in value]
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)!r} twice in one object")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name}, which is no JSON number")


def _refuse(where: str, expected: str, value: Any) -> typing.NoReturn:
    raise FormatError(where, expected=expected, found=repr(value)[:_FOUND_CHARACTERS])


@functools.cache
def _reader(kind: Any) -> _Reader:
    """Raises TypeError for a type that is none of those above: a mistake of ours, met at the first use."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value, where, lenient: value
    if kind in _PLAIN:
        return _PLAIN[kind]
    if dataclasses.is_dataclass(kind):
        return _of_dataclass(kind)
    if origin is typing.Literal:
        return _of_literal(arguments)
    if origin in (typing.Union, types.UnionType):
        return _of_union(arguments)
    if origin is list or (origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis):
        return _of_sequence(origin, arguments[0])
    if origin is dict and arguments[0] is str:
        return _of_dict(arguments[1])
    raise TypeError(f"no JSON form of {kind!r}")


def _read_str(value: Any, where: str, lenient: bool) -> str:
    return value if type(value) is str else _refuse(where, "a string", value)


def _read_int(value: Any, where: str, lenient: bool) -> int:
    return value if type(value) is int else _refuse(where, "an integer", value)


def _read_float(value: Any, where: str, lenient: bool) -> float:
    if type(value) is int and abs(value) <= 1 << 53:
        return float(value)
    return value if type(value) is float and math.isfinite(value) else _refuse(where, "a finite number", value)


def _read_bool(value: Any, where: str, lenient: bool) -> bool:
    return value if type(value) is bool else _refuse(where, "true or false", value)


def _read_none(value: Any, where: str, lenient: bool) -> None:
    return None if value is None else _refuse(where, "null", value)


_PLAIN: dict[Any, _Reader] = {
    str: _read_str, int: _read_int, float: _read_float, bool: _read_bool, type(None): _read_none,
}  # fmt: skip


_NAMES = {
    str: "a string", int: "an integer", float: "a finite number", bool: "true or false", type(None): "null",
    list: "a list", dict: "an object",
}  # fmt: skip


def _of_literal(values: tuple[Any, ...]) -> _Reader:
    known = {(type(v), v): v for v in values}

    def read(value: Any, where: str, lenient: bool) -> Any:
        if isinstance(value, str | int) and (type(value), value) in known:
            return value
        return _refuse(where, f"one of {', '.join(map(repr, values))}", value)

    return read


def _of_union(kinds: tuple[Any, ...]) -> _Reader:
    """By the JSON type of the value, so that a refusal inside an object or list names its path."""
    readers: dict[type, _Reader] = {}
    for kind in sorted(kinds, key=lambda kind: kind is float):  # an integer stays one where the union has both
        for json_type in _json_types(kind):
            if kind is not float and json_type in readers:
                raise TypeError(f"no JSON form of {kinds!r}: a {json_type.__name__} would be one of two")
            readers.setdefault(json_type, _reader(kind))
    names = " or ".join(sorted(_NAMES.get(json_type, json_type.__name__) for json_type in readers))

    def read(value: Any, where: str, lenient: bool) -> Any:
        reader = readers.get(type(value))
        return reader(value, where, lenient) if reader is not None else _refuse(where, names, value)

    return read


def _json_types(kind: Any) -> set[type]:
    """Types of what the JSON parser makes of values of a type."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return {type(value) for value in typing.get_args(kind)}
    if kind is float:
        return {float, int}
    if dataclasses.is_dataclass(kind) or origin is dict:
        return {dict}
    if origin in (list, tuple):
        return {list}
    return {kind} if kind in _PLAIN else set()


def _of_sequence(build: type, kind: Any) -> _Reader:
    reader = _reader(kind)

    def read(value: Any, where: str, lenient: bool) -> Any:
        if type(value) is not list:
            _refuse(where, "a list", value)
        if kind in (str, int) and set(map(type, value)) <= {kind}:  # as in to_json
            return build(value)
        return build([reader(item, f"{where}, item {index}", lenient) for index, item in enumerate(value)])

    return read


def _of_dict(kind: Any) -> _Reader:
    reader = _reader(kind)

    def read(value: Any, where: str, lenient: bool) -> Any:
        if type(value) is not dict:
            _refuse(where, "an object", value)
        return {name: reader(item, f"{where}, {name}", lenient) for name, item in value.items()}

    return read


def _of_dataclass(kind: Any) -> _Reader:
    hints = typing.get_type_hints(kind)
    fields = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}
    needed = [
        field.name for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]  # fmt: skip

    def read(value: Any, where: str, lenient: bool) -> Any:
        if type(value) is not dict:
            _refuse(where, "an object", value)
        for name in needed:
            if name not in value:
                raise FormatError(where, expected=f"a field {name!r}", found=f"fields {sorted(value)}"[:300])
        found = {}
        for name, item in value.items():
            if name in fields:
                found[name] = fields[name](item, f"{where}, {name}", lenient)
            elif not lenient:
                raise FormatError(f"{where}, {name}", expected=f"no field but {sorted(fields)}"[:300], found=repr(name))
        return kind(**found)

    return read
