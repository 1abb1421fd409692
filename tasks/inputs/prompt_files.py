"""Prompts from a user's own files: JSONL (one object a line, UTF-8) and Parquet, each row checked before it counts.

    messages | text    a list of {role, content}, or one user message; exactly one of the two
    answer domain teachers verifier context    optional; null is the same as absent, inside objects too

A row is taken whole or refused with file and line. An answer that is a number keeps its text, 42.0 or 1e22 as they
are written, and so do the numbers of a context.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from schemas import keys
from schemas.config import PromptFile, nearest
from schemas.errors import ConfigError, FormatError
from schemas.section import FP32_LARGEST, FP32_SMALLEST, is_positive_fp32
from tasks.rewards.verifiers import SHIPPED

COLUMNS = ("messages", "text", "answer", "domain", "teachers", "verifier", "context")
ROLES = ("system", "user", "assistant", "tool")
_BOM = b"\xef\xbb\xbf"
#: What UTF-8 cannot carry, and what tables and tokenizers cut strings at.
_HOSTILE = re.compile("[\0\ud800-\udfff]")


def file_source(file: PromptFile) -> str:
    """Name of what a file says, for a run's record: its lines, however they end, and the settings that fill in.

    Raises ConfigError for a file that cannot be read.
    """
    data = _read(file)
    if Path(file.path).suffix.lower() == ".jsonl":
        data = data.removeprefix(_BOM).replace(b"\r\n", b"\n")
    return f"file:{keys.digest([keys.digest_bytes(data), file.content()])[:16]}"


def file_rows(
    file: PromptFile, teacher_ids: Sequence[str], verifiers: Collection[str] = SHIPPED
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of the prompts table, without prompt_id, in the file's order; equal rows are still several.

    Each one's source is file and line. verifiers: names that rows may have. Raises ConfigError (no such file, unknown
    or missing teacher, verifier that is not among them) and FormatError (bytes or a row that are not what this
    module's docstring says), naming file and line.
    """
    rows = [_row(file, teacher_ids, verifiers, value, where) for where, value in _values(file)]
    if not rows:
        raise FormatError(file.path, expected="at least one prompt", found="none")
    return rows


def _read(file: PromptFile) -> bytes:
    try:
        return Path(file.path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"prompts.files, {file.path}", expected="a file of prompts", found=error.strerror or str(error)
        ) from error


def _values(file: PromptFile) -> Iterator[tuple[str, Any]]:
    """(where, row as JSON value)."""
    suffix = Path(file.path).suffix.lower()
    if suffix == ".jsonl":
        return _json_lines(file.path, _read(file))
    if suffix == ".parquet":
        return _parquet_rows(file.path, _read(file))
    raise ConfigError(f"prompts.files, {file.path}", expected="a name that ends in .jsonl or .parquet", found=suffix)


def _json_lines(path: str, data: bytes) -> Iterator[tuple[str, Any]]:
    # Only \n ends a line: U+2028 and the like are text. \r before it is white space to JSON.
    for number, line in enumerate(data.removeprefix(_BOM).split(b"\n"), 1):
        where = f"{path}, line {number}"
        if line.strip():
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise FormatError(
                    f"{where}, byte {error.start + 1}",
                    expected="UTF-8",
                    found=repr(line[error.start : error.start + 4]),
                ) from error
            try:
                yield where, load_json(text)
            except (ValueError, RecursionError) as error:
                raise FormatError(where, expected="one JSON object", found=f"{error}: {text[:80]!r}") from error


class WrittenFloat(float):
    """A number that is printed as it was written."""

    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        value = super().__new__(cls, text)
        value.text = text
        return value

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else self.text

    def __reduce__(self):
        return WrittenFloat, (self.text,)


def load_json(text: str) -> Any:
    """A JSON value whose numbers keep their text. Raises ValueError, for a name that stands twice in an object too."""
    return json.loads(
        text, parse_constant=_no_constant, object_pairs_hook=_each_name_once, parse_float=WrittenFloat,
        parse_int=lambda digits: WrittenFloat(digits) if digits == "-0" else int(digits),
    )  # fmt: skip


def dump_json(value: Any) -> str:
    """JSON with sorted names and the text of numbers as `load_json` read it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {dump_json(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dump_json, value)) + "]"
    return value.text if isinstance(value, WrittenFloat) else json.dumps(value)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands twice in one object")
    return value


def _parquet_rows(path: str, data: bytes) -> Iterator[tuple[str, Any]]:
    try:
        table = pq.read_table(pa.BufferReader(data))
        rows = table.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise FormatError(path, expected="a Parquet file", found=str(error)[:300]) from error
    narrow = [f.name for f in table.schema if f.type in (pa.float16(), pa.float32())]
    for number, row in enumerate(rows, 1):
        # As the file's type writes the number: 0.1 is not 0.10000000149011612.
        texts = {n: WrittenFloat(str(np.float32(row[n]))) for n in narrow if row[n] is not None}
        yield f"{path}, row {number}", _decimals_as_written(row | texts)


def _decimals_as_written(value: Any) -> Any:
    if isinstance(value, Decimal):
        return WrittenFloat(f"{value:f}")
    if isinstance(value, dict):
        return {name: _decimals_as_written(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_decimals_as_written(inner) for inner in value]
    return value


def _row(
    file: PromptFile, teacher_ids: Sequence[str], verifiers: Collection[str], value: Any, where: str
) -> dict[str, Any]:  # fmt: skip
    if not isinstance(value, dict):
        raise FormatError(where, expected="a JSON object", found=repr(value)[:100])
    for name in value:
        if name not in COLUMNS:
            raise FormatError(
                f"{where}, column {name!r}", expected=f"one of {', '.join(COLUMNS)}",
                found=repr(name) + nearest(name, COLUMNS),
            )  # fmt: skip
    row = _without_nulls(value)
    _check_text(row, where)
    return {
        "source": where,
        "domain": _string(row, "domain", where) or file.domain,
        "teachers": _teachers(file, teacher_ids, row, where),
        "messages": json.dumps(_messages(row, where)),
        "answer": _answer(row, where),
        "verifier": _verifier(row, verifiers, where) or file.verifier or None,
        "context": dump_json(_context(row, where)),
    }


def _without_nulls(value: Any) -> Any:
    """A null of an object says what its absence says, at any depth: Parquet, whose rows share one set of names, writes
    one for each name that only other rows have. A null of a list stays: without it the others would move."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _check_text(value: Any, where: str) -> None:
    """Every string of a row, names included, is text that all later parts can carry; every value is JSON's."""
    if isinstance(value, str):
        found = _HOSTILE.search(value)
        if found is not None:
            kind = "a NUL" if found.group() == "\0" else f"the lone surrogate U+{ord(found.group()):04X}"
            raise FormatError(where, expected="text without NUL and lone surrogates", found=f"{kind} in {value[:60]!r}")
    elif isinstance(value, dict):
        for name, inner in value.items():
            _check_text(name, where)
            _check_text(inner, f"{where}, {name}" if isinstance(name, str) else where)
    elif isinstance(value, list):
        for inner in value:
            _check_text(inner, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise FormatError(where, expected="a finite number", found=str(value))
    elif value is not None and not isinstance(value, bool | int | float):
        raise FormatError(where, expected="a JSON value", found=f"{type(value).__name__} {str(value)[:60]!r}")


def _string(row: dict[str, Any], name: str, where: str) -> str | None:
    value = row.get(name)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise FormatError(f"{where}, {name}", expected="text that is not empty", found=repr(value)[:100])
    return value


def _verifier(row: dict[str, Any], verifiers: Collection[str], where: str) -> str | None:
    name = _string(row, "verifier", where)
    if name is not None and name not in verifiers:
        # Whoever publishes prompts must not choose what runs here on the text that a model answers them with.
        raise ConfigError(
            f"{where}, verifier", expected=f"a verifier that the configuration lists: one of {sorted(verifiers)}",
            found=repr(name) + nearest(name, sorted(verifiers)),
            next_command=f"if you trust it: [prompts] verifiers = [{json.dumps(name)}]",
        )  # fmt: skip
    return name


def _messages(row: dict[str, Any], where: str) -> list[dict[str, str]]:
    if ("messages" in row) == ("text" in row):
        found = "both" if "text" in row else "neither"
        raise FormatError(where, expected="either messages or text", found=found)
    text = _string(row, "text", where)
    if text is not None:
        return [{"role": "user", "content": text}]
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise FormatError(f"{where}, messages", expected="a list of {role, content}", found=repr(messages)[:100])
    for index, message in enumerate(messages):
        place = f"{where}, messages[{index}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise FormatError(place, expected="an object of role and content", found=repr(message)[:100])
        role = message["role"]
        if role not in ROLES:
            hint = nearest(role, ROLES) if isinstance(role, str) else ""
            raise FormatError(f"{place}.role", expected=f"one of {', '.join(ROLES)}", found=repr(role) + hint)
        _string(message, "content", place)
    if messages[-1]["role"] == "assistant":
        raise FormatError(f"{where}, messages", expected="a last message that the student answers", found="assistant's")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _answer(row: dict[str, Any], where: str) -> str | None:
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise FormatError(f"{where}, answer", expected="text or a number", found=repr(answer)[:100])
    return None if answer is None else str(answer)


def _context(row: dict[str, Any], where: str) -> dict[str, Any]:
    context = row.get("context", {})
    if not isinstance(context, dict):
        raise FormatError(f"{where}, context", expected="an object", found=repr(context)[:100])
    return context


def _teachers(
    file: PromptFile, teacher_ids: Sequence[str], row: dict[str, Any], where: str
) -> list[dict[str, Any]]:  # fmt: skip
    """Sorted by teacher_id, each once."""
    place, weights = f"{where}, teachers", {}
    entries = row.get("teachers", list(file.teachers))
    if not isinstance(entries, list):
        raise FormatError(place, expected="a list of ids or of {teacher_id, weight}", found=repr(entries)[:100])
    for entry in entries:
        share = {"teacher_id": entry} if isinstance(entry, str) else entry
        if not isinstance(share, dict) or not {"teacher_id"} <= set(share) <= {"teacher_id", "weight"}:
            raise FormatError(place, expected="an id or an object of teacher_id and weight", found=repr(entry)[:100])
        teacher_id, weight = share["teacher_id"], share.get("weight")
        weight = 1.0 if weight is None else weight
        if teacher_id not in teacher_ids:
            hint = nearest(teacher_id, teacher_ids) if isinstance(teacher_id, str) else ""
            raise ConfigError(place, expected=f"one of {sorted(teacher_ids)}", found=repr(teacher_id) + hint)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not is_positive_fp32(weight):
            expected = f"a weight above 0 that fp32 holds, {FP32_SMALLEST:.3g} to {FP32_LARGEST:.3g}"
            raise FormatError(f"{place}, {teacher_id}", expected=expected, found=repr(weight)[:100])
        if teacher_id in weights:
            raise FormatError(place, expected="each teacher once", found=f"{teacher_id!r} again")
        weights[teacher_id] = float(weight)
    if not weights:
        raise ConfigError(place, expected="at least one, in the row or in prompts.files", found="none")
    return [{"teacher_id": i, "weight": weights[i]} for i in sorted(weights)]
