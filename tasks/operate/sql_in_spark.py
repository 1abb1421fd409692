"""Read-only SQL over the tables, for `opd sql`.

Only stages commit, one at a time under a lease, and a person who may query tables need not be allowed to read the
machine's files or the process's environment. So a statement runs only if Spark's parser makes nothing of it but the
nodes that are listed here, over tables of this catalog alone, in a session without the functions that reach the JVM or
files.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from infra import tables
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Plan nodes of queries, as Spark's parser makes them. What a newer parser adds is refused until it is listed.
_QUERIES = {
    "Aggregate", "Distinct", "Except", "Filter", "Generate", "GlobalLimit", "Intersect", "Join", "LateralJoin",
    "LocalLimit", "LocalRelation", "Offset", "OneRowRelation", "PipeOperator", "Pivot", "Project",
    "RelationTimeTravel", "RepartitionByExpression", "Sample", "Sort", "SubqueryAlias", "Union", "Unpivot",
    "UnresolvedHaving", "UnresolvedHint", "UnresolvedInlineTable", "UnresolvedRelation",
    "UnresolvedSubqueryColumnAliases", "UnresolvedTVFAliases", "UnresolvedTableValuedFunction", "UnresolvedWith",
    "WithWindowDefinition",
}  # fmt: skip
#: Commands that only tell, and the nodes in which they name things.
_COMMANDS = {
    "DescribeColumn", "DescribeDeltaDetailCommand", "DescribeDeltaHistory", "DescribeFunction",
    "DescribeNamespace", "DescribeQueryCommand", "DescribeRelation", "DescribeTablePartition", "ExplainCommand",
    "ShowCatalogsCommand", "ShowColumns", "ShowCreateTable", "ShowFunctions", "ShowNamespaces",
    "ShowNamespacesCommand", "ShowPartitions", "ShowTableProperties", "ShowTables", "ShowTablesExtended",
    "ShowViews", "CurrentNamespace$", "UnresolvedFunctionName", "UnresolvedNamespace", "UnresolvedTable",
    "UnresolvedTableOrView",
}  # fmt: skip
_NAMED = ("UnresolvedRelation", "UnresolvedTable", "UnresolvedTableOrView")
#: They call Java by name, or take options that name files.
_FUNCTIONS = ("reflect", "try_reflect", "java_method", "from_avro", "to_avro", "schema_of_avro", "from_protobuf",
              "to_protobuf", "from_xml", "schema_of_xml")  # fmt: skip
_TABLE_FUNCTIONS = ("table_changes", "table_changes_by_path", "python_worker_logs")
_SCALA = "scala.collection.Iterable"
_TREES = {
    "plan": "org.apache.spark.sql.catalyst.plans.logical.LogicalPlan",
    "values": _SCALA,
    "product": "scala.Product",
}


def query(spark: SparkSession, *, text: str, limit: int) -> dict[str, Any]:
    """First `limit` rows of a statement: {"columns": names, "rows": lists of JSON values, "more": rows were left}.

    Dates and times are ISO 8601 text in UTC, decimals text, binary base64, numbers that JSON lacks text. Raises
    ConfigError for what Spark cannot parse or resolve, and for a statement that is more than a query.
    """
    from pyspark.errors import PySparkException

    try:
        _refuse_other_than_queries(spark, text)
        frame = _reading_session(spark).sql(text)
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


def _reading_session(spark: SparkSession) -> SparkSession:
    """Another session over the same tables, without functions and names that lead to anything else."""
    reading = spark.newSession()
    reading.conf.set("spark.sql.runSQLOnFiles", "false")
    java: Any = spark._jvm
    state: Any = reading._jsparkSession.sessionState()  # pyright: ignore[reportOptionalCall]
    identifier = java.org.apache.spark.sql.catalyst.FunctionIdentifier
    some = java.scala.Option.apply
    for registry, names in (
        (state.functionRegistry(), _FUNCTIONS),
        (state.tableFunctionRegistry(), _TABLE_FUNCTIONS),
    ):
        for name in names:
            dropped = registry.dropFunction(identifier(name, some("builtin"), some("system")))
            assert dropped, f"{name} is not where Spark keeps its functions"
    return reading


def _refuse_other_than_queries(spark: SparkSession, text: str) -> None:
    # spark.sql() runs a command while it is being analysed, so the check has to come from the parser.
    state: Any = spark._jsparkSession.sessionState()  # pyright: ignore[reportOptionalCall]
    for kind, node in _plans(spark, state.sqlParser().parsePlan(text)):
        if kind not in _QUERIES | _COMMANDS:
            _refuse(text, f"{kind}: another kind of statement")
        if kind in _NAMED:
            name = [part.lower() for part in _strings(node.multipartIdentifier())]
            if len(name) > 1 and name[:-1] not in ([tables.DATABASE], ["spark_catalog", tables.DATABASE]):
                _refuse(text, f"a table outside of {tables.DATABASE}: {'.'.join(name)}")
        if kind == "UnresolvedRelation" and not node.options().isEmpty():
            _refuse(text, "options of a table")


def _plans(spark: SparkSession, plan: Any) -> Iterator[tuple[str, Any]]:
    """(class, node) of every plan node that a parsed statement holds, those inside of expressions and names included.

    Plans, expressions and all that they consist of are case classes: nothing hides from a walk over their fields.
    """
    from py4j.java_gateway import JavaObject, is_instance_of

    gateway: Any = spark.sparkContext._gateway
    kinds: dict[str, str] = {}
    pending: list[Any] = [plan]
    while pending:
        node = pending.pop()
        if not isinstance(node, JavaObject):
            continue
        found: Any = node
        name = found.getClass().getName()
        if name not in kinds:
            kinds[name] = next((k for k, tree in _TREES.items() if is_instance_of(gateway, node, tree)), "leaf")
        kind = kinds[name]
        if kind == "plan":
            yield name.rpartition(".")[2], found
        if kind == "values":
            pending += _values(found)
        elif kind in ("plan", "product"):
            pending += [found.productElement(i) for i in range(found.productArity())]


def _values(found: Any) -> list[Any]:
    """Elements of a Scala collection."""
    out, elements = [], found.iterator()
    while elements.hasNext():
        out.append(elements.next())
    return out


def _strings(found: Any) -> list[str]:
    return [str(value) for value in _values(found)]


def _refuse(text: str, found: str) -> None:
    raise ConfigError(
        f"SQL: {text}", expected=f"SELECT, SHOW, DESCRIBE or EXPLAIN, over tables of {tables.DATABASE}", found=found,
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
