"""Values as SQL spells them: for delta-rs (DataFusion) and for Spark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from schemas.rows import Column


def equals(column: str, value: Any) -> str:
    """column: as SQL spells it."""
    if value is None:
        return f"{column} IS NULL"
    text = "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)
    return f"{column} = {text}"


def literal(value: Any) -> str:
    """A Spark SQL literal."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(int(value))


def column_list(columns: Iterable[Column]) -> str:
    """Names, types and comments, as CREATE TABLE and ADD COLUMNS of Spark take them."""
    return ", ".join(f"`{c.name}` {c.type} COMMENT {literal(c.note)}" for c in columns)
