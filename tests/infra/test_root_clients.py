"""Store, delta-rs and Spark on roots with odd characters: what schemas.root lets pass is one place for all three."""

from __future__ import annotations

from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

from infra import s3_settings, tables
from infra.stores import open_store
from schemas.root import DataRoot

#: One table for each is a second of Spark: so many strange characters in one name.
NAMES = [" my dé\u0301ta ☃ 50% ", "a+b=c&d,e;f:g'h(i)*!$@~_.-a..b"]
LOCAL_NAMES = ['#b?x=1[a]{a}|<>^"']
_ROW = pa.table({"a": [1]})


def place(spark, root: str) -> tuple[list[str], int, int]:
    """Keys that the store sees of a table that Spark makes, and the rows that delta-rs and Spark find in it."""
    spark.sql(f"CREATE TABLE delta.`{tables.table_uri(root, 'plan', for_spark=True)}` (a INT) USING DELTA")
    location = tables.table_uri(root, "plan", for_spark=True)
    spark.createDataFrame([(1,)], "a int").write.format("delta").mode("append").save(location)
    options = s3_settings.client_settings() if DataRoot.parse(root).on_s3 else None
    table = deltalake.DeltaTable(tables.table_uri(root, "plan"), storage_options=options)
    rows = deltalake.QueryBuilder().register("t", table).execute("SELECT a FROM t").read_all().num_rows
    keys = [key.rpartition("/")[2] for key in open_store(root).list("tables/plan/_delta_log/") if key.endswith(".json")]
    return keys, rows, spark.read.format("delta").load(location).count()


@pytest.mark.parametrize("name", [*NAMES, *LOCAL_NAMES])
def test_local_folders(spark, tmp_path: Path, name: str):
    root = str(DataRoot.parse(f"{tmp_path}/{name}/"))
    assert place(spark, root) == ([f"{0:020d}.json", f"{1:020d}.json"], 1, 1)


@pytest.mark.s3
def test_prefixes_on_s3(s3: str):
    """Objects that the store writes are found by delta-rs at its own spelling, and the other way round."""
    for name in NAMES:
        root = str(DataRoot.parse(f"{s3}//{name}/"))
        store, options = open_store(root), s3_settings.client_settings()
        deltalake.write_deltalake(tables.table_uri(root, "plan"), _ROW, storage_options=options)
        assert store.list("")[0] == f"tables/plan/_delta_log/{0:020d}.json"
        for key in store.list("tables/plan/"):
            store.put(f"copy/{key}", store.get(key))
        copy = deltalake.DeltaTable(f"{DataRoot.parse(root).for_delta('copy/tables')}/plan", storage_options=options)
        assert deltalake.QueryBuilder().register("t", copy).execute("SELECT a FROM t").read_all().num_rows == 1, name
        assert tables.table_exists(root, "plan")
