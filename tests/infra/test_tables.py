"""Slice commits on a real Delta table: what is refused, what is replaced, and that both readers agree."""

from __future__ import annotations

import fcntl
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa
import pytest

from infra import epochs, leases, tables
from infra.stores import open_store
from schemas import keys, rows
from schemas.errors import ContractError, FormatError, OpdError, StoreError
from schemas.rows import METRICS, PROMPTS, TABLES, TRAJECTORIES, Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def metric(run_id: str, step: int, value: float, **changes: Any) -> dict[str, Any]:
    return {
        "run_id": run_id, "iteration": 0, "stage": "train", "step": step, "name": "kl", "teacher_index": None,
        "value": value, **changes,
    }  # fmt: skip


def prompt(number: int, source: str, **changes: Any) -> dict[str, Any]:
    columns = {
        "source": source, "domain": "d", "teachers": [{"teacher_id": "a", "weight": 1.0}], "messages": "[]",
        "answer": None, "verifier": None, "context": json.dumps({"n": number}), **changes,
    }  # fmt: skip
    return {"prompt_id": keys.prompt_id(columns), **columns}


def put(root: str, key: str, new_rows: list[dict[str, Any]]) -> str:
    open_store(root).put(key, b"".join(keys.canonical_json(row) + b"\n" for row in new_rows))
    return key


def commit(
    spark: SparkSession, root: str, table: str, slice: dict[str, Any], new_rows: list[dict[str, Any]],
    run_lease: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    row_keys = [put(root, f"test/{keys.digest([table, slice])}.jsonl", new_rows)] if new_rows else []
    digest = rows.content_digest(TABLES[table], new_rows)
    return tables.commit_slice(spark, root, table, slice, row_keys, len(new_rows), digest, run_lease)


def metrics_slice(run_id: str, iteration: int = 0) -> dict[str, Any]:
    return {"run_id": run_id, "iteration": iteration, "stage": "train"}


def test_a_slice_is_replaced_and_its_neighbours_stay(spark: SparkSession, spark_root: str) -> None:
    for run_id in ("replace", "replace-neighbour"):
        commit(spark, spark_root, "metrics", metrics_slice(run_id), [metric(run_id, i, i / 3) for i in range(7)])
    new_rows = [metric("replace", i, -1.5 * i, teacher_index=i % 2) for i in range(3)]
    done = commit(spark, spark_root, "metrics", metrics_slice("replace"), new_rows)
    assert done["written"]
    assert done["num_rows"] == 3
    assert tables.read_rows(spark_root, "metrics", {"run_id": "replace"}) == new_rows
    neighbours = tables.read_rows(spark_root, "metrics", {"run_id": "replace-neighbour"})
    assert [row["value"] for row in neighbours] == [i / 3 for i in range(7)]


def test_both_readers_agree_on_every_table(spark: SparkSession, spark_root: str) -> None:
    new_rows = [
        prompt(1, "it's a \\source"),
        prompt(2, "it's a \\source", answer="", verifier="m:f", messages='[{"content":"\\u2028é\\u0000"}]'),
        prompt(3, "it's a \\source", teachers=[]),
        prompt(4, "it's a \\source", teachers=[{"teacher_id": "ü", "weight": 0.1}, {"teacher_id": "", "weight": 3.0}]),
    ]
    slice = {"source": "it's a \\source"}
    commit(spark, spark_root, "prompts", slice, new_rows)
    through_rust = tables.read_rows(spark_root, "prompts", slice)
    assert through_rust == rows.sort_rows(PROMPTS, new_rows)
    frame = spark.sql("SELECT * FROM opd.prompts WHERE source = 'it\\'s a \\\\source' ORDER BY prompt_id")
    assert [row.asDict(recursive=True) for row in frame.collect()] == through_rust


def test_the_same_rows_again_add_no_version(spark: SparkSession, spark_root: str) -> None:
    new_rows = [metric("again", i, i * 0.1) for i in range(5)]
    first = commit(spark, spark_root, "metrics", metrics_slice("again"), new_rows)
    second = commit(spark, spark_root, "metrics", metrics_slice("again"), new_rows[::-1])
    assert (first["written"], second["written"]) == (True, False)
    assert first["version"] == second["version"]
    third = commit(spark, spark_root, "metrics", metrics_slice("again"), [*new_rows[:4], metric("again", 4, 0.5)])
    assert third["version"] == first["version"] + 1 == tables.table_version(spark_root, "metrics")
    before = tables.read_rows(spark_root, "metrics", {"run_id": "again"}, version=first["version"])
    assert before == new_rows


def test_a_stale_observed_column_is_replaced(spark: SparkSession, spark_root: str) -> None:
    def trajectory(shard_key: str) -> dict[str, Any]:
        values = {c.name: {"string": "x", "double": 0.5}.get(c.type, 1) for c in TRAJECTORIES.columns}
        return {**values, "run_id": "observed", "iteration": 2, "shard_key": shard_key}

    slice = {"run_id": "observed", "iteration": 2}
    first = commit(spark, spark_root, "trajectories", slice, [trajectory("old")])
    second = commit(spark, spark_root, "trajectories", slice, [trajectory("new")])
    assert first["digest"] == second["digest"]
    assert second["written"]
    assert tables.read_rows(spark_root, "trajectories", slice, ["shard_key"]) == [{"shard_key": "new"}]


def test_an_empty_slice_deletes_its_rows(spark: SparkSession, spark_root: str) -> None:
    commit(spark, spark_root, "metrics", metrics_slice("empty"), [metric("empty", 0, 1.0)])
    done = commit(spark, spark_root, "metrics", metrics_slice("empty"), [])
    assert (done["num_rows"], done["written"]) == (0, True)
    assert tables.read_rows(spark_root, "metrics", {"run_id": "empty"}) == []
    assert not commit(spark, spark_root, "metrics", metrics_slice("empty"), [])["written"]


GOOD = metric("refused", 0, 1.0)
BAD_LINES = {
    "not JSON": b"{",
    "not an object": b"[1]",
    "not UTF-8": b'{"run_id":"\xff"}',
    "lone surrogate": json.dumps({**GOOD, "name": "\ud800"}).encode(),
    "missing column": keys.canonical_json({k: v for k, v in GOOD.items() if k != "value"}),
    "unknown column": keys.canonical_json({**GOOD, "colour": "red"}),
    "null key": keys.canonical_json({**GOOD, "name": None}),
    "null value": keys.canonical_json({**GOOD, "value": None}),
    "integer for a double": keys.canonical_json({**GOOD, "value": 1}),
    "text for a number": keys.canonical_json({**GOOD, "step": "1"}),
    "boolean for a number": keys.canonical_json({**GOOD, "step": True}),
    "beyond 32 bits": keys.canonical_json({**GOOD, "step": 1 << 31}),
    "NaN": json.dumps({**GOOD, "value": float("nan")}).encode(),
    "infinity": json.dumps({**GOOD, "value": float("-inf")}).encode(),
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_line_that_is_no_row_is_refused(line: bytes, spark: SparkSession, spark_root: str) -> None:
    open_store(spark_root).put("test/bad.jsonl", keys.canonical_json(GOOD) + b"\n" + line + b"\n")
    with pytest.raises(FormatError, match=r"test/bad.jsonl, line 2"):
        tables.commit_slice(spark, spark_root, "metrics", metrics_slice("refused"), ["test/bad.jsonl"], 2, "")
    assert tables.read_rows(spark_root, "metrics", {"run_id": "refused"}) == []


@pytest.mark.parametrize(
    ("new_rows", "changes", "words"),
    [
        ([GOOD, {**GOOD, "value": 2.0}], {}, "twice"),
        ([{**GOOD, "iteration": 1}], {}, "column iteration"),
        ([GOOD], {"num_rows": 2}, "2 rows"),
        ([GOOD], {"content_digest": "0" * 64}, "0000"),
        ([GOOD], {"slice": {"run_id": "refused"}}, "slice of metrics"),
    ],
)
def test_rows_that_break_their_announcement_are_refused(
    new_rows: list[dict[str, Any]], changes: dict[str, Any], words: str, spark: SparkSession, spark_root: str
) -> None:
    arguments = {
        "slice": metrics_slice("refused"), "row_keys": [put(spark_root, "test/bad.jsonl", new_rows)],
        "num_rows": len(new_rows), "content_digest": rows.content_digest(METRICS, new_rows), **changes,
    }  # fmt: skip
    with pytest.raises(ContractError, match=words):
        tables.commit_slice(spark, spark_root, "metrics", **arguments)
    assert tables.read_rows(spark_root, "metrics", {"run_id": "refused"}) == []


def test_a_difference_on_reading_back_is_an_error(
    spark: SparkSession, spark_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loses_a_row(spark: SparkSession, root: str, table: Table, slice: dict[str, Any], new_rows: list) -> None:
        replace(spark, root, table, slice, new_rows[1:])

    replace = tables._replace
    monkeypatch.setattr(tables, "_replace", loses_a_row)
    with pytest.raises(ContractError, match="1 rows of digest"):
        commit(spark, spark_root, "metrics", metrics_slice("lost"), [metric("lost", i, 1.0) for i in range(2)])
    monkeypatch.undo()
    assert commit(spark, spark_root, "metrics", metrics_slice("lost"), [metric("lost", 0, 1.0)])["num_rows"] == 1


@pytest.fixture
def overtaken(spark_root: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Commits to metrics lose their lease after they have looked at the table, as often as the only number says."""
    times = [1]
    same = tables._same

    def take_over(*arguments: Any) -> bool:
        if times[0]:
            times[0] -= 1
            store, owned = open_store(spark_root), keys.table_lease("metrics")
            newest = epochs.newest(store, owned)
            assert newest is not None
            epoch = newest["epoch"] + 1
            assert epochs.put(store, owned, epoch, epochs.body("lease", epoch, "heir", {"name": "heir"}))
            store.put(
                keys.heartbeat(owned, epoch),
                keys.canonical_json({"counter": 1, "nonce": "heir", "released": True}),
            )
        return same(*arguments)

    monkeypatch.setattr(tables, "_same", take_over)
    return times


def metrics_version(root: str) -> int:
    return deltalake.DeltaTable(tables.table_uri(root, "metrics")).version()


def test_a_superseded_committer_writes_nothing(spark: SparkSession, spark_root: str, overtaken: list[int]) -> None:
    version = metrics_version(spark_root)
    with pytest.raises(ContractError, match="heir"):
        commit(spark, spark_root, "metrics", metrics_slice("superseded"), [metric("superseded", 0, 1.0)])
    assert metrics_version(spark_root) == version


def test_a_superseded_committer_whose_run_is_its_own_tries_again(
    spark: SparkSession, spark_root: str, overtaken: list[int]
) -> None:
    run = leases.acquire(open_store(spark_root), keys.run_lease("again"), owner={}, dead_after_seconds=30.0)
    assert isinstance(run, leases.Lease)
    with run:
        run_lease = {"owned": run.owned, "epoch": run.epoch}
        arguments = (metrics_slice("again"), [metric("again", 0, 1.0)], run_lease)
        assert commit(spark, spark_root, "metrics", *arguments)["written"]
        overtaken[0] = 1
        assert not commit(spark, spark_root, "metrics", *arguments)["written"]

        overtaken[0], version = 99, metrics_version(spark_root)
        with pytest.raises(leases.Superseded):
            commit(
                spark, spark_root, "metrics", metrics_slice("again"), [metric("again", 0, 2.0)], run_lease,
            )  # fmt: skip
        assert (overtaken[0], metrics_version(spark_root)) == (99 - tables._TRIES, version)


def test_a_committer_whose_driver_lost_the_run_writes_nothing(spark: SparkSession, spark_root: str) -> None:
    store, owned = open_store(spark_root), keys.run_lease("lost-run")
    for epoch in (1, 2):
        assert epochs.put(store, owned, epoch, epochs.body("lease", epoch, "n", {"name": f"driver {epoch}"}))
    version = metrics_version(spark_root)
    slice, new_rows = metrics_slice("lost-run"), [metric("lost-run", 0, 1.0)]
    with pytest.raises(ContractError, match="epoch 2, of name driver 2"):
        commit(spark, spark_root, "metrics", slice, new_rows, {"owned": owned, "epoch": 1})
    assert metrics_version(spark_root) == version
    assert commit(spark, spark_root, "metrics", slice, new_rows, {"owned": owned, "epoch": 2})["written"]


def test_who_waits_for_a_table_says_for_whom(
    spark: SparkSession, spark_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(tables, "on_wait", said.append)
    monkeypatch.setattr(tables, "_LOCK_SECONDS", 1.0)
    monkeypatch.setattr(tables, "_WORD_SECONDS", 0.2)
    path = tables._lock_path(spark_root, "metrics")
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="another process holds it"):
            commit(spark, spark_root, "metrics", metrics_slice("locked"), [metric("locked", 0, 1.0)])
    assert len(said) >= 2
    assert str(path) in said[0]

    said.clear()
    monkeypatch.setattr(leases, "_FIRST_WORD_SECONDS", 0.1)
    body = epochs.body("lease", 1, "n", {"name": "another campaign"})
    assert epochs.put(open_store(spark_root), keys.table_lease("elsewhere"), 1, body)
    monkeypatch.setattr(tables, "_LEASE_SECONDS", 0.5)
    with tables._commit_lock(open_store(spark_root), spark_root, "elsewhere"):
        assert "table-leases/elsewhere, held by name another campaign" in said[0]


def test_a_table_whose_lease_objects_are_lost_says_so(spark: SparkSession, spark_root: str, tmp_path: Path) -> None:
    """Their epochs count on in the table: a lower one would be skipped without a word."""
    commit(spark, spark_root, "metrics", metrics_slice("lost-lease"), [metric("lost-lease", 0, 1.0)])
    objects = Path(spark_root) / keys.table_lease("metrics")
    objects.rename(tmp_path / "kept")
    try:
        with pytest.raises(ContractError, match="objects of table-leases/metrics are lost"):
            commit(spark, spark_root, "metrics", metrics_slice("lost-lease"), [metric("lost-lease", 0, 2.0)])
    finally:
        shutil.rmtree(objects)
        (tmp_path / "kept").rename(objects)
    commit(spark, spark_root, "metrics", metrics_slice("lost-lease"), [metric("lost-lease", 0, 2.0)])
    assert [row["value"] for row in tables.read_rows(spark_root, "metrics", {"run_id": "lost-lease"})] == [2.0]


def test_racing_commits_to_one_table_all_arrive(spark: SparkSession, spark_root: str) -> None:
    def write(run_id: str) -> bool:
        new_rows = [metric(run_id, i, 0.25) for i in range(4)]
        return commit(spark, spark_root, "metrics", metrics_slice(run_id), new_rows)["written"]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(write, [f"race-{i}" for i in range(3)])) == [True] * 3
    for i in range(3):
        assert len(tables.read_rows(spark_root, "metrics", {"run_id": f"race-{i}"})) == 4


def test_deleting_from_an_iteration_on(spark: SparkSession, spark_root: str) -> None:
    new_rows = [metric(run_id, 0, 1.0, iteration=k) for run_id in ("cut", "cut-not") for k in range(3)]
    frame = spark.createDataFrame(pa.Table.from_pylist(new_rows, schema=tables.arrow_schema(METRICS)))
    frame.write.format("delta").mode("append").save(tables.table_uri(spark_root, "metrics"))
    assert tables.delete_slices_from(spark, spark_root, "cut", 1) == {"metrics": 2}
    assert tables.delete_slices_from(spark, spark_root, "cut", 1) == {}
    left = {run_id: tables.read_rows(spark_root, "metrics", {"run_id": run_id}) for run_id in ("cut", "cut-not")}
    assert [row["iteration"] for row in left["cut"]] == [0]
    assert [row["iteration"] for row in left["cut-not"]] == [0, 1, 2]


def test_racing_creations_leave_each_table_once(spark: SparkSession, tmp_path: Path) -> None:
    root = str(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: tables.create_tables(spark, root), range(2)))
    assert done == [None, None]
    assert {deltalake.DeltaTable(tables.table_uri(root, name)).version() for name in TABLES} == {0}


def test_creating_again_changes_nothing(spark: SparkSession, spark_root: str) -> None:
    def versions() -> dict[str, int]:
        return {name: deltalake.DeltaTable(tables.table_uri(spark_root, name)).version() for name in TABLES}

    before = versions()
    tables.create_tables(spark, spark_root)
    assert versions() == before
    for name, table in TABLES.items():
        fields = spark.table(f"opd.{name}").schema.fields
        assert [(f.name, f.dataType.simpleString()) for f in fields] == [(c.name, c.type) for c in table.columns]
        features = deltalake.DeltaTable(tables.table_uri(spark_root, name)).protocol()
        assert "deletionVectors" not in (features.reader_features or [])


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    assert tables.read_rows(str(tmp_path), "metrics", {"run_id": "x"}) == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ContractError, match="colour"):
        tables.read_rows(str(tmp_path), "metrics", {"colour": "red"})


@pytest.mark.parametrize(
    ("root", "for_spark", "uri"),
    [
        ("s3://bucket/a/b/", False, "s3://bucket/a/b/tables/plan"),
        ("s3://bucket", True, "s3a://bucket/tables/plan"),
        ("/data", True, "/data/tables/plan"),
    ],
)
def test_table_uri(root: str, for_spark: bool, uri: str) -> None:
    assert tables.table_uri(root, "plan", for_spark=for_spark) == uri


def test_table_uri_of_another_scheme_is_refused() -> None:
    with pytest.raises(OpdError, match="gs://"):
        tables.table_uri("gs://bucket", "plan")
