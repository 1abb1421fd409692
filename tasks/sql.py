"""Read-only SQL over the tables, for `opd sql`.

Commits belong to the stages, one at a time under a lease; a statement that would write is refused before it runs.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
from typing import TYPE_CHECKING, Any

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_READS = ("SELECT", "WITH", "FROM", "VALUES", "TABLE", "SHOW", "DESCRIBE", "DESC", "EXPLAIN")


def query(spark: SparkSession, *, text: str, limit: int) -> dict[str, Any]:
    """First `limit` rows of a statement: {"columns": names, "rows": lists of JSON values, "more": rows were left}.

    Dates and times are ISO 8601 text in UTC, decimals text, binary base64, numbers that JSON lacks text. Raises
    ConfigError for what Spark cannot parse or resolve, and for a statement that writes.
    """
    from pyspark.errors import PySparkException

    try:
        _refuse_writes(spark, text)
        frame = spark.sql(text)
        found = frame.limit(limit + 1).collect()
    except PySparkException as error:
        raise ConfigError(
            f"SQL: {text}", expected="a statement that Spark can run", found=_first_line(str(error)),
            next_command='opd sql "SHOW TABLES IN opd"',
        ) from error  # fmt: skip
    return {
        "columns": list(frame.columns),
        "rows": [[_json_value(value) for value in row] for row in found[:limit]],
        "more": len(found) > limit,
    }


def _refuse_writes(spark: SparkSession, text: str) -> None:
    # spark.sql() runs a command while it is being analysed, so the check has to come from the parser.
    plan = spark._jsparkSession.sessionState().sqlParser().parsePlan(text)  # pyright: ignore[reportOptionalCall]
    words = text.lstrip(" \t\r\n(").split(None, 1)
    writes = not words or words[0].upper() not in _READS
    pending = [plan]
    while pending and not writes:
        node = pending.pop()
        writes = node.getClass().getSimpleName().startswith("InsertInto")
        children = node.children()
        pending += [children.apply(i) for i in range(children.size())]
    if writes:
        raise ConfigError(
            f"SQL: {text}", expected=f"a statement that reads: {', '.join(_READS)}", found="another one",
            safe="the tables: nothing was run", next_command='opd sql "SHOW TABLES IN opd"',
        )  # fmt: skip


def _json_value(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    if hasattr(value, "asDict"):
        value = value.asDict()
    if isinstance(value, dict):
        return {str(k): _json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(v) for v in value]
    return value


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]
