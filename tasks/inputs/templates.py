"""Jinja templates that a user or a model folder brings: rendered in a sandbox, bounded, every failure one error.

Two kinds. A chat template renders as transformers renders it. A teacher's template is stricter: a name that is not
there and a value that is null are refused where they would be printed, since "The correct answer is None." teaches
just that. A null is undefined to it, as if the row had left the column out: `is defined`, `default`, `or` and `if`
see that nothing is there.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import Environment, StrictUndefined, Template, TemplateError, Undefined, nodes
from jinja2.exceptions import UndefinedError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from schemas.errors import ConfigError

#: Far beyond any context: what is longer, or takes more turns of a loop, is a mistake that would take the machine.
MAX_CHARACTERS = 1 << 24
MAX_LOOP_STEPS = 1_000_000
_MAX_POWER_BITS = 1 << 16
#: Variable of a rendering: how many turns its loops have taken.
_STEPS = "__steps"


class _TooMuchError(Exception):
    pass


class _Null(StrictUndefined):
    """A null of a prompt's row. Whatever would read it as text or number raises UndefinedError."""

    def __init__(self, name: str) -> None:
        super().__init__(hint=f"{name} is null in this prompt", name=name)

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _Null)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return str(self)


class _Fields(dict[str, Any]):
    """A JSON object of a row: `get` of a name that is not there finds a null, not Python's None."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        super().__init__({name: _fields(value, f"{place}.{name}") for name, value in values.items()})
        self._place = place

    def get(self, name: Any, default: Any = None) -> Any:
        return super().get(name, _Null(f"{self._place}.{name}") if default is None else default)


class _Absent(StrictUndefined):
    """A name that a row has not."""

    @property
    def _undefined_message(self) -> str:
        if isinstance(self._undefined_obj, _Fields):
            names = ", ".join(sorted(self._undefined_obj)) or "nothing"
            return f"{self._undefined_obj._place} has no {self._undefined_name!r} in this prompt, but {names}"
        return super()._undefined_message


def _fields(value: Any, name: str) -> Any:
    """The row's value as a teacher's template sees it."""
    if value is None:
        return _Null(name)
    if isinstance(value, Mapping):
        return _Fields(value, name)
    if isinstance(value, list):
        return [_fields(v, f"{name}[{i}]") for i, v in enumerate(value)]
    return value


class _Bounded(ImmutableSandboxedEnvironment):
    """The sandbox, with an end to loops and numbers. Jinja bounds `range` and, here, we what is made of it."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > _MAX_POWER_BITS:
                raise _TooMuchError(f"a power of more than {_MAX_POWER_BITS} bits")
        elif operator == "*":
            if isinstance(left, int):
                left, right = right, left
            if isinstance(left, str | list | tuple) and isinstance(right, int) and len(left) * right > MAX_CHARACTERS:
                raise _TooMuchError(f"a product of more than {MAX_CHARACTERS} characters")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            steps = nodes.Name(_STEPS, "load", lineno=loop.lineno)
            loop.iter = nodes.Filter(loop.iter, "__counted", [steps], [], None, None, lineno=loop.lineno)
        return template


class _TeacherEnvironment(_Bounded):
    def getattr(self, obj: Any, attribute: str) -> Any:
        # Jinja looks at attributes first, and would print Python's method for a field that is called items.
        return obj[attribute] if isinstance(obj, _Fields) and attribute in obj else super().getattr(obj, attribute)


def _counted(values: Any, steps: list[int]) -> Iterator[Any]:
    for value in values:
        steps[0] += 1
        if steps[0] > MAX_LOOP_STEPS:
            raise _TooMuchError(f"more than {MAX_LOOP_STEPS} turns of its loops")
        yield value


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks what an assistant wrote; here, only its contents."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    # Jinja's own filter escapes for HTML, which nobody means here. A null inside a list or an object is JSON's.
    if isinstance(value, _Null):
        return str(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_json_null
    )


def _json_null(value: Any) -> None:
    if not isinstance(value, _Null):
        raise TypeError(f"{type(value).__name__} is no JSON value")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _printable(value: Any) -> Any:
    """Of the rest, Python would print an address: of a method, or of a generator that `map` makes."""
    if value is None:
        raise UndefinedError("it prints a null, which would read None")
    if not isinstance(value, str | int | float | list | tuple | dict | Undefined):
        raise UndefinedError(f"it prints a {type(value).__name__}, which is neither text, number, list nor object")
    return value


def _prepared(environment: Environment) -> Environment:
    environment.filters["tojson"] = _to_json
    environment.filters["__counted"] = _counted
    # What a prompt reads depends on files and rows alone.
    del environment.globals["lipsum"], environment.filters["random"]
    return environment


def chat_template(source: str, where: str) -> Template:
    """where: whose template it is, for errors. Raises ConfigError for what is no template."""
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    environment = _prepared(_Bounded(**options, extensions=[LoopControlExtension, _Generation]))
    environment.globals["raise_exception"] = _raise
    return _compile(environment, source, where)


def teacher_template(source: str, where: str) -> Template:
    """As `chat_template`, of a teacher's private system message."""
    environment = _prepared(_TeacherEnvironment(undefined=_Absent, finalize=_printable))
    environment.tests["none"] = lambda value: value is None or isinstance(value, _Null)
    return _compile(environment, source, where)


def _compile(environment: Environment, source: str, where: str) -> Template:
    try:
        return environment.from_string(source)
    except Exception as error:  # of a template nested too deep: Python's own
        raise ConfigError(where, expected="a Jinja template", found=_cause(error)) from error


def render_row(template: Template, row: Mapping[str, Any], where: str) -> str:
    """A teacher's template over a row's columns. Raises ConfigError as `render` does, and for a null that it prints."""
    return render(template, {name: _fields(value, name) for name, value in row.items()}, where)


def render(template: Template, values: Mapping[str, Any], where: str) -> str:
    """Raises ConfigError, naming `where` and the template's line, when the template fails in any way or has no end."""
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate({**values, _STEPS: [0]}):
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise _TooMuchError(f"more than {MAX_CHARACTERS} characters")
            pieces.append(piece)
        text = "".join(pieces)
        text.encode()  # a template can spell half a surrogate pair, which no tokenizer takes
    except Exception as error:  # the template is the user's code: it can raise what Python can
        raise ConfigError(
            where, expected="a template that can be rendered for this prompt", found=_cause(error)
        ) from error
    return text


def _cause(error: Exception) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    text = str(error) if isinstance(error, TemplateError | _TooMuchError) else f"{type(error).__name__}: {error}"
    return f"{text[:300]} (line {line} of the template)" if line else text[:300]
