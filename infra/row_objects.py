"""Rows as objects: JSON lines that a stage or a rank put in the store, read and checked before a table takes them."""

from __future__ import annotations

import json
from typing import Any

from infra.store import ObjectStore
from schemas import rows as rows_schema
from schemas.errors import ContractError, FormatError
from schemas.rows import Table

_PYTHON = {"string": str, "int": int, "bigint": int, "float": float, "double": float, "boolean": bool}


def read_jsonl(store: ObjectStore, table: Table, key: str) -> list[dict[str, Any]]:
    """Rows of one JSONL object, each checked: exactly the table's columns, of their types, null where allowed.

    An added column that rows of an older version lack is null. Raises FormatError naming object, line and column.
    """
    rows = []
    for number, line in enumerate(store.get(key).split(b"\n"), 1):
        if not line:
            continue
        where = f"{key}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        except ValueError as error:
            raise FormatError(where, expected="a JSON object in UTF-8", found=str(error)) from error
        rows.append(_checked(table, row, where))
    return rows


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _checked(table: Table, row: Any, where: str) -> dict[str, Any]:
    row = dict.fromkeys(table.added_columns) | row if isinstance(row, dict) else {}
    if set(row) != set(table.column_names()):
        missing, unknown = sorted(set(table.column_names()) - set(row)), sorted(set(row) - set(table.column_names()))
        raise FormatError(
            where, expected=f"the columns of {table.name}, version {table.version}",
            found=f"missing {missing}, unknown {unknown}",
        )  # fmt: skip
    for column in table.columns:
        value = row[column.name]
        if value is None:
            if not column.nullable:
                raise FormatError(f"{where}, {column.name}", expected=column.type, found="null")
        elif not _fits(column.type, value):
            raise FormatError(f"{where}, {column.name}", expected=column.type, found=repr(value)[:200])
    return row


def _fits(type_name: str, value: Any) -> bool:
    if type_name == "array<bigint>":
        return isinstance(value, list) and all(_fits("bigint", v) for v in value)
    if type_name.startswith("array<struct"):
        return isinstance(value, list) and all(
            isinstance(v, dict) and set(v) == {"teacher_id", "weight"}
            and _fits("string", v["teacher_id"]) and _fits("double", v["weight"]) for v in value
        )  # fmt: skip
    if type(value) is not _PYTHON[type_name]:
        return False
    if type_name == "string":
        # JSON can spell half a surrogate pair; UTF-8, and so a table, cannot hold it.
        return not any("\ud800" <= c <= "\udfff" for c in value)
    if type_name in ("int", "bigint"):
        bits = 31 if type_name == "int" else 63
        return -(1 << bits) <= value < 1 << bits
    return True


def check_announced(
    table: Table, rows: list[dict[str, Any]], slice: dict[str, Any], num_rows: int, content_digest: str
) -> None:
    for row in rows:
        outside = [c for c in table.slice_key if row[c] != slice[c]]
        if outside:
            raise ContractError(
                f"table {table.name}, column {outside[0]}", expected=f"slice {slice}", found=repr(row[outside[0]]),
                safe="the table as it was",
            )  # fmt: skip
    seen: set[tuple[Any, ...]] = set()
    for row in rows:
        key = tuple(row[c] for c in table.sort_key)
        if key in seen:
            raise ContractError(
                f"table {table.name}, {slice}", expected=f"each ({', '.join(table.sort_key)}) once",
                found=f"{key} twice", safe="the table as it was",
            )  # fmt: skip
        seen.add(key)
    found = rows_schema.content_digest(table, rows)
    if len(rows) != num_rows or found != content_digest:
        raise ContractError(
            f"rows for table {table.name}, {slice}", expected=f"{num_rows} rows of digest {content_digest}",
            found=f"{len(rows)} rows of digest {found}", safe="the table as it was",
            next_command="opd repair RUN",
        )  # fmt: skip
