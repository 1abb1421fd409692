"""`opd sql` answers queries, and runs nothing else that Spark can parse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from schemas.errors import ConfigError
from tasks.operate.sql_in_spark import query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
RUN = "sql"
ROWS = 3


@pytest.fixture(scope="module")
def sql(spark: SparkSession) -> Callable[..., Any]:
    spark.sql(f"INSERT INTO opd.checkpoints (run_id, iteration) SELECT '{RUN}', CAST(id AS INT) FROM range({ROWS})")
    return lambda text, limit=10: query(spark, text=text, limit=limit)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> dict[str, str]:
    """Places outside of the tables that Spark itself can read or write."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("secret\n")
    spark.range(2).write.parquet(str(folder / "parquet"))
    spark.range(2).write.format("delta").save(str(folder / "delta"))
    return {"folder": str(folder)}


def test_answers_are_json(sql: Any) -> None:
    answer = sql(f"SELECT run_id, count(*) AS n FROM opd.checkpoints WHERE run_id = '{RUN}' GROUP BY run_id")
    assert answer == {"columns": ["run_id", "n"], "rows": [[RUN, ROWS]], "more": False}
    values = sql(
        "SELECT double('nan'), DATE'2026-01-02', TIMESTAMP'2026-01-02 03:04:05', 1.50BD, X'00ff', map('k', array(1)), "
        "named_struct('a', null), true"
    )["rows"][0]
    assert json.loads(json.dumps(values, allow_nan=False)) == [
        "nan", "2026-01-02", "2026-01-02T03:04:05", "1.50", "AP8=", {"k": [1]}, {"a": None}, True,
    ]  # fmt: skip
    assert sql("SELECT id FROM range(5)", limit=2) == {"columns": ["id"], "rows": [[0], [1]], "more": True}


@pytest.mark.parametrize("text", ["", "SELEC 1", "SELECT nothing FROM opd.plan", "SELECT 1/0", "SELECT * FROM opd.no"])
def test_what_is_wrong_is_refused(text: str, sql: Any) -> None:
    with pytest.raises(ConfigError, match="SQL"):
        sql(text)


@pytest.mark.parametrize(
    "text",
    [
        "WITH x AS (SELECT 1 AS a), y AS (SELECT a + 1 AS b FROM x) SELECT b FROM y WHERE b IN (SELECT 2)",
        "FROM opd.checkpoints SELECT count(*) HAVING count(*) > (SELECT max(id) FROM range(1))",
        "SELECT iteration, row_number() OVER w FROM opd.checkpoints WINDOW w AS (ORDER BY iteration)",
        "SELECT c.iteration FROM opd.checkpoints c ANTI JOIN opd.plan p USING (run_id) CROSS JOIN range(2) AS r(i)",
        "SELECT 1 UNION ALL SELECT 2 EXCEPT SELECT 3 INTERSECT SELECT 4",
        "SELECT col FROM VALUES (array(1, 2)) AS t(a) LATERAL VIEW explode(a) e AS col",
        "SELECT * FROM opd.checkpoints PIVOT (count(*) FOR iteration IN (0, 1))",
        "SELECT k, v FROM (SELECT 1 AS a, 2 AS b) UNPIVOT (v FOR k IN (a, b))",
        "SELECT /*+ BROADCAST(c) */ * FROM opd.checkpoints c, LATERAL (SELECT c.iteration + 1) ORDER BY ALL OFFSET 1",
        "SELECT run_id, count(*) FILTER (WHERE iteration > 0) FROM opd.checkpoints GROUP BY CUBE(run_id, version)",
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 3) SELECT * FROM r",
        "FROM opd.checkpoints |> WHERE iteration > 0 |> AGGREGATE count(*) AS n GROUP BY run_id |> LIMIT 3",
        "SELECT * FROM spark_catalog.opd.checkpoints VERSION AS OF 0 TABLESAMPLE (10 PERCENT)",
        "VALUES (1, 2), (3, 4)", "TABLE opd.checkpoints", "SELECT input_file_name() FROM opd.plan DISTRIBUTE BY 1",
        "SHOW TABLES IN opd", "SHOW COLUMNS IN opd.plan", "SHOW DATABASES",
        "SHOW FUNCTIONS LIKE 'abs'", "SHOW TBLPROPERTIES opd.plan", "DESCRIBE opd.plan", "DESCRIBE opd.plan run_id",
        "DESCRIBE EXTENDED opd.plan", "DESCRIBE QUERY SELECT 1", "DESCRIBE FUNCTION abs", "DESCRIBE DATABASE opd",
        "DESCRIBE HISTORY opd.plan", "DESCRIBE DETAIL opd.plan", "EXPLAIN FORMATTED SELECT * FROM opd.plan",
    ],
)  # fmt: skip
def test_a_query_is_answered(text: str, sql: Any) -> None:
    assert sql(text)["columns"]


REFUSED = (
    "WITH x AS (SELECT 1) DELETE FROM opd.checkpoints WHERE run_id = 'sql'",
    "WITH x AS (SELECT 1) UPDATE opd.checkpoints SET iteration = 9 WHERE run_id = 'sql'",
    "WITH x AS (SELECT 1) MERGE INTO opd.checkpoints USING opd.plan p ON true WHEN MATCHED THEN DELETE",
    "WITH c AS (SELECT * FROM opd.checkpoints) INSERT INTO opd.checkpoints FROM c",
    "FROM opd.checkpoints INSERT INTO opd.checkpoints SELECT *",
    "FROM opd.checkpoints INSERT INTO opd.checkpoints SELECT * INSERT INTO opd.plan SELECT *",
    "WITH x AS (SELECT 1) FROM x INSERT OVERWRITE DIRECTORY '{folder}/out' USING parquet SELECT *",
    "INSERT INTO opd.checkpoints SELECT * FROM opd.checkpoints",
    "DELETE FROM opd.checkpoints", "UPDATE opd.checkpoints SET iteration = 9", "TRUNCATE TABLE opd.checkpoints",
    "DROP TABLE opd.checkpoints", "ALTER TABLE opd.checkpoints ADD COLUMN x INT",
    "CREATE TABLE opd.copy USING delta AS SELECT 1 AS a", "CREATE OR REPLACE TABLE opd.checkpoints (a INT) USING delta",
    "CREATE VIEW opd.v AS SELECT 1", "CREATE TEMPORARY VIEW v AS SELECT 1", "CREATE DATABASE other",
    "CREATE FUNCTION opd.f AS 'x.Y'", "CREATE TEMPORARY FUNCTION f(x INT) RETURNS INT RETURN x",
    "CALL system.run(1)", "SET spark.sql.ansi.enabled=false", "SET", "RESET", "SET TIME ZONE 'UTC'", "USE opd",
    "ADD JAR '{folder}/x.jar'", "ADD FILE '{folder}/text/a.txt'", "LIST FILES", "CACHE TABLE opd.checkpoints",
    "REFRESH TABLE opd.checkpoints", "ANALYZE TABLE opd.checkpoints COMPUTE STATISTICS", "OPTIMIZE opd.checkpoints",
    "VACUUM opd.checkpoints RETAIN 0 HOURS", "RESTORE TABLE opd.checkpoints TO VERSION AS OF 0",
    "CONVERT TO DELTA parquet.`{folder}/parquet`", "LOAD DATA INPATH '{folder}/text' INTO TABLE opd.checkpoints",
    "EXECUTE IMMEDIATE 'DELETE FROM opd.checkpoints'", "BEGIN DELETE FROM opd.checkpoints; END", "DECLARE x INT",
    "EXPLAIN DELETE FROM opd.checkpoints", "DESCRIBE DETAIL '{folder}/delta'", "DESCRIBE HISTORY '{folder}/delta'",
    "DESCRIBE DETAIL delta.`{folder}/delta`", "DESCRIBE HISTORY delta.`{folder}/delta`",
    "SELECT TRANSFORM(run_id) USING 'cat {folder}/text/a.txt' AS (t STRING) FROM opd.checkpoints",
    "SELECT * FROM (SELECT TRANSFORM(run_id) USING 'env' AS (t STRING) FROM opd.checkpoints) WHERE t IS NOT NULL",
    "SELECT * FROM text.`{folder}/text/a.txt`", "SELECT * FROM parquet.`{folder}/parquet`",
    "SELECT * FROM delta.`{folder}/delta`", "SELECT * FROM binaryFile.`{folder}/text`",
    "SELECT 1 WHERE EXISTS (SELECT * FROM text.`{folder}/text/a.txt`)",
    "SELECT (SELECT max(value) FROM text.`{folder}/text`) AS v", "WITH x AS (TABLE csv.`{folder}/text`) TABLE x",
    "SELECT * FROM IDENTIFIER('text.`{folder}/text`')", "SELECT * FROM IDENTIFIER(concat('text.`', '{folder}/text`'))",
    "SELECT * FROM opd.checkpoints WITH ('path' = '{folder}/delta')", "SELECT * FROM STREAM opd.checkpoints",
    "DESCRIBE text.`{folder}/text`", "SHOW COLUMNS IN text.`{folder}/text`",
)  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_another_statement_is_refused_before_it_runs(
    text: str, sql: Any, secrets: dict[str, str], spark_root: str
) -> None:
    before = sorted(p.name for p in Path(spark_root, "tables").rglob("_delta_log/*.json"))
    with pytest.raises(ConfigError, match="SELECT, SHOW, DESCRIBE or EXPLAIN") as caught:
        sql(text.format(**secrets))
    assert caught.value.safe == "the tables: nothing was run"
    assert sorted(p.name for p in Path(spark_root, "tables").rglob("_delta_log/*.json")) == before


@pytest.mark.parametrize(
    "call",
    [
        *(f"{prefix}{name}('java.lang.System', 'getenv', 'PATH')"
          for name in ("reflect", "java_method", "try_reflect") for prefix in ("", "builtin.", "system.builtin.")),
        "REFLECT('java.lang.System', 'getenv', 'PATH')", "`reflect`('java.lang.System', 'getenv', 'PATH')",
        "IDENTIFIER('reflect')('java.lang.System', 'getenv', 'PATH')",
        "IDENTIFIER(concat('java_', 'method'))('java.lang.System', 'getenv', 'PATH')",
        "from_xml('<a>1</a>', 'a INT', map('rowValidationXSDPath', '{folder}/text/a.txt'))",
        "from_avro(X'00', '\"int\"', map('avroSchemaUrl', '{folder}/text/a.txt'))",
        "from_protobuf(X'00', 'x', '{folder}/text/a.txt')",
    ],
)  # fmt: skip
def test_no_function_reaches_java_or_files(call: str, sql: Any, secrets: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"UNRESOLVED_ROUTINE|REQUIRES_SINGLE_PART_NAMESPACE"):
        sql(f"SELECT {call}".format(**secrets))


@pytest.mark.parametrize(
    "text",
    ["SELECT * FROM table_changes('opd.checkpoints', 0)", "SELECT * FROM python_worker_logs()",
     "SELECT * FROM table_changes_by_path('{folder}/delta', 0)"],
)  # fmt: skip
def test_no_table_function_reads_files(text: str, sql: Any, secrets: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="UNRESOLVABLE_TABLE_VALUED_FUNCTION"):
        sql(text.format(**secrets))


def test_the_session_of_stages_keeps_what_queries_lack(sql: Any, spark: SparkSession) -> None:
    sql("SELECT 1")
    assert spark.sql("SELECT reflect('java.lang.Math', 'abs', -1)").collect()[0][0] == "1"


def test_a_long_list_takes_seconds_at_most(sql: Any) -> None:
    values = ", ".join(str(i) for i in range(2000))
    assert sql(f"SELECT count(*) FROM range(3000) WHERE id IN ({values})")["rows"] == [[2000]]
