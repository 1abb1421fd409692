"""What lies below a table's folder: damage that readers meet, files made durable, schemas of other versions."""

from __future__ import annotations

import dataclasses
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from infra import epochs, leases, table_files, tables
from infra.stores import open_store
from schemas import keys, rows
from schemas.errors import ContractError, FormatError
from schemas.rows import METRICS, TABLES, Column
from tests.infra.test_tables import commit, metric, metrics_slice

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

GOLDEN = Path(__file__).parents[1] / "golden" / "metrics_table_v1.zip"
LOG = "_delta_log"


def make_metrics(spark: SparkSession, root: Path) -> None:
    """One table instead of seven, and a checkpoint at its version 3 already."""
    (root / "tables").mkdir()
    uri = tables.table_uri(str(root), "metrics")
    spark.conf.set("spark.databricks.delta.properties.defaults.checkpointInterval", "3")
    try:
        tables._create(spark, str(root), METRICS)
    finally:
        spark.conf.unset("spark.databricks.delta.properties.defaults.checkpointInterval")
    assert spark.sql(f"SHOW TBLPROPERTIES delta.`{uri}` ('delta.checkpointInterval')").collect()[0].value == "3"


@pytest.fixture(scope="module")
def filled(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root whose table opd.metrics has a checkpoint at version 3, entries 4 and 5, and holds m0 to m4."""
    root = tmp_path_factory.mktemp("filled")
    make_metrics(spark, root)
    for number in range(5):
        commit(spark, str(root), "metrics", metrics_slice(f"m{number}"), [metric(f"m{number}", i, 0.5) for i in (0, 1)])
    return root


@pytest.fixture
def copied(filled: Path, tmp_path: Path) -> Path:
    shutil.copytree(filled / "tables" / "metrics", tmp_path / "tables" / "metrics")
    return tmp_path


def empty(data: bytes) -> bytes:
    return b""


def zeroed(data: bytes) -> bytes:
    return bytes(len(data))


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def without_last_line(data: bytes) -> bytes:
    return b"".join(data.splitlines(keepends=True)[:-1])


DATA = "run_id=m4/*/*/part-*.parquet"
NEWEST, BEFORE, CHECKPOINT = (f"{LOG}/{name}" for name in (f"{5:020d}.json", f"{4:020d}.json", f"{3:020d}.ch*.parquet"))
DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes] | None]] = {
    **{f"{f.__name__} data": (DATA, f) for f in (empty, zeroed, cut)},
    **{f"{f.__name__} newest entry": (NEWEST, f) for f in (empty, zeroed, cut, without_last_line)},
    **{f"{f.__name__} entry before": (BEFORE, f) for f in (empty, zeroed, cut, without_last_line)},
    **{f"{f.__name__} checkpoint": (CHECKPOINT, f) for f in (empty, zeroed, cut)},
    "missing data": (DATA, None), "missing newest entry": (NEWEST, None), "missing entry before": (BEFORE, None),
    "missing checkpoint": (CHECKPOINT, None),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_with_its_cure(copied: Path, damage: str) -> None:
    pattern, spoil = DAMAGES[damage]
    (path,) = (copied / "tables" / "metrics").glob(pattern)
    if spoil is None:
        path.unlink()
    else:
        path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(FormatError) as caught:
        tables.read_rows(str(copied), "metrics", {"run_id": "m4"})
    error = caught.value
    assert "metrics" in error.where
    assert "opd repair RUN" in error.next_command
    if damage not in ("missing newest entry", "missing checkpoint"):  # what is not listed has no name
        assert path.name[:20] in error.where or damage == "without_last_line entry before"


def test_an_emptied_entry_is_found_without_the_summary_of_its_version(copied: Path) -> None:
    """A power cut leaves both empty, and Delta's reader passes over both."""
    for name in (f"{5:020d}.crc", f"{4:020d}.json"):
        (copied / "tables" / "metrics" / LOG / name).write_bytes(b"")
    with pytest.raises(FormatError, match=f"{4:020d}.json"):
        tables.read_rows(str(copied), "metrics", {})


class PanicException(BaseException):
    """As pyo3 names it: no subclass of Exception."""


@pytest.mark.parametrize("raised", [Exception("a bare one"), PanicException("index out of bounds"), ValueError("?")])
def test_whatever_the_reader_raises_is_of_the_family(
    copied: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(tables.deltalake.QueryBuilder, "execute", fail)
    with pytest.raises(FormatError, match=r"tables/metrics(.|\n)*opd repair RUN"):
        tables.read_rows(str(copied), "metrics", {})
    monkeypatch.setattr(tables.deltalake, "DeltaTable", fail)
    with pytest.raises(FormatError, match=r"tables/metrics"):
        tables.read_rows(str(copied), "metrics", {"run_id": "m1"})


def test_an_interrupt_of_the_reader_stays_one(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tables.deltalake.QueryBuilder, "execute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tables.read_rows(str(copied), "metrics", {})


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that this process has synced, and "read" for each read of rows, in order."""
    events: list[str] = []
    fsync, read_rows = os.fsync, tables.read_rows

    def recorded(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def reading(*arguments: Any, **named: Any) -> list[dict[str, Any]]:
        events.append("read")
        return read_rows(*arguments, **named)

    monkeypatch.setattr(table_files.os, "fsync", recorded)
    monkeypatch.setattr(tables, "read_rows", reading)
    return events


def files_below(folder: Path) -> set[str]:
    """Files and folders, but for those that Delta makes and never fills."""
    return {str(p) for p in folder.rglob("*") if p.name != "_staged_commits"} if folder.exists() else set()


def test_what_a_commit_adds_is_durable_before_it_is_read_back(
    spark: SparkSession, tmp_path: Path, synced: list[str]
) -> None:
    """From an empty root over a checkpoint: every new file, its folders, and no file twice."""
    make_metrics(spark, tmp_path)
    table = tmp_path / "tables" / "metrics"
    before: set[str] = set()
    for number in range(5):
        synced.clear()
        commit(spark, str(tmp_path), "metrics", metrics_slice(f"m {number}%"), [metric(f"m {number}%", 0, 0.5)])
        now = files_below(table)
        below = [event for event in synced if event.startswith(str(table))]
        assert now - before - set(below) == set()
        assert len(set(below)) == len(below)
        old_files = {
            p for p in before if Path(p).is_file() and not p.endswith(("_last_checkpoint", "_last_checkpoint.crc"))
        }
        assert not old_files & set(below)
        assert {str(table), str(table.parent), str(tmp_path)} <= set(synced)
        assert synced.index(str(table)) < len(synced) - 1 - synced[::-1].index("read")
        before = now
    assert any(".checkpoint." in path for path in before)


def test_what_a_dead_committer_left_is_made_durable_by_its_heir(
    spark: SparkSession, tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, new_rows = str(tmp_path), [metric("heir", 0, 0.5)]
    make_metrics(spark, tmp_path)
    commit(spark, root, "metrics", metrics_slice("before"), [metric("before", 0, 0.5)])

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tables, "_make_durable", die)
        with pytest.raises(KeyboardInterrupt):
            commit(spark, root, "metrics", metrics_slice("heir"), new_rows)
    synced.clear()
    assert not commit(spark, root, "metrics", metrics_slice("heir"), new_rows)["written"]
    assert f"{tmp_path}/tables/metrics/{LOG}/{2:020d}.json" in synced
    assert any("run_id=heir" in path and path.endswith(".parquet") for path in synced)


def test_a_new_table_in_an_old_ones_place_is_made_durable_whole(
    spark: SparkSession, tmp_path: Path, synced: list[str]
) -> None:
    root = str(tmp_path)
    make_metrics(spark, tmp_path)
    for run_id in ("a", "b"):
        commit(spark, root, "metrics", metrics_slice(run_id), [metric(run_id, 0, 0.5)])
    shutil.rmtree(tmp_path / "tables" / "metrics")
    synced.clear()
    commit(spark, root, "metrics", metrics_slice("a"), [metric("a", 0, 0.5)])
    assert files_below(tmp_path / "tables" / "metrics") - set(synced) == set()


WIDER = dataclasses.replace(
    METRICS, columns=(*METRICS.columns, Column("unit", "string", "what value counts", nullable=True, since=2))
)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The software of the next version, whose opd.metrics has one more column."""
    monkeypatch.setitem(TABLES, "metrics", WIDER)


@pytest.fixture
def old_root(tmp_path: Path) -> str:
    """A table as the software wrote it before tables had versions."""
    with zipfile.ZipFile(GOLDEN) as archive:
        archive.extractall(tmp_path / "tables")
    for epoch in (1, 2):  # of the creation and of the one commit
        lease = leases.acquire(open_store(str(tmp_path)), keys.table_lease("metrics"), owner={}, dead_after_seconds=0.1)
        assert isinstance(lease, leases.Lease)
        assert lease.epoch == epoch
        leases.release(lease)
    return str(tmp_path)


OLD_ROWS = [metric("r0", step, step * 0.5) for step in range(3)]


def test_a_table_of_before_versions_is_read_and_committed_to(spark: SparkSession, old_root: str) -> None:
    assert tables.read_rows(old_root, "metrics", {}) == OLD_ROWS
    commit(spark, old_root, "metrics", metrics_slice("more"), [metric("more", 0, 1.0)])
    assert tables.read_rows(old_root, "metrics", {"run_id": "r0"}) == OLD_ROWS
    assert tables._schema(tables._delta_table(old_root, "metrics")) == (1, set(METRICS.column_names()))


@pytest.mark.usefixtures("newer")
def test_a_column_is_added_at_the_first_commit(spark: SparkSession, old_root: str) -> None:
    null = [row | {"unit": None} for row in OLD_ROWS]
    assert tables.read_rows(old_root, "metrics", {}) == null
    assert tables.read_rows(old_root, "metrics", {"unit": None}, columns=["step", "unit"])[2] == {
        "step": 2,
        "unit": None,
    }
    assert tables.read_rows(old_root, "metrics", {"unit": "nats"}) == []
    # Rows of old objects equal the table's: no commit. Nor does their digest know of the column.
    done = commit(spark, old_root, "metrics", metrics_slice("r0"), OLD_ROWS)
    assert not done["written"]
    assert done["digest"] == rows.content_digest(METRICS, OLD_ROWS)
    new_rows = [metric("new", 0, 1.0) | {"unit": "nats"}, metric("new", 1, 2.0) | {"unit": None}]
    commit(spark, old_root, "metrics", metrics_slice("new"), new_rows)
    assert tables.read_rows(old_root, "metrics", {}) == [*new_rows, *null]
    assert tables.read_rows(old_root, "metrics", {"unit": "nats"}) == new_rows[:1]
    assert tables._schema(tables._delta_table(old_root, "metrics")) == (2, set(WIDER.column_names()))
    version = tables._delta_table(old_root, "metrics").version()
    assert (
        commit(spark, old_root, "metrics", metrics_slice("again"), [metric("again", 0, 1.0)])["version"] == version + 1
    )
    assert tables.read_rows(old_root, "metrics", {"run_id": "again"})[0]["unit"] is None
    frame = spark.read.format("delta").load(tables.table_uri(old_root, "metrics"))
    assert sorted(r.unit or "" for r in frame.collect()) == ["", "", "", "", "", "nats"]


@pytest.mark.usefixtures("newer")
def test_a_crash_between_column_and_version_is_made_up_for(spark: SparkSession, old_root: str) -> None:
    uri = tables.table_uri(old_root, "metrics")
    spark.sql(f"ALTER TABLE delta.`{uri}` ADD COLUMNS (unit string)")
    assert len(tables.read_rows(old_root, "metrics", {})) == 3
    commit(spark, old_root, "metrics", metrics_slice("new"), [metric("new", 0, 1.0)])
    assert tables._schema(tables._delta_table(old_root, "metrics")) == (2, set(WIDER.column_names()))


def test_a_table_of_a_newer_version_is_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path)
    make_metrics(spark, tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(TABLES, "metrics", WIDER)
        commit(spark, root, "metrics", metrics_slice("new"), [metric("new", 0, 1.0) | {"unit": "nats"}])
    for attempt in (
        lambda: tables.read_rows(root, "metrics", {}),
        lambda: commit(spark, root, "metrics", metrics_slice("new"), [metric("new", 0, 2.0)]),
    ):
        with pytest.raises(ContractError, match=r"found: version 2, unknown columns \['unit'\]"):
            attempt()
    spark.sql(
        f"ALTER TABLE delta.`{tables.table_uri(root, 'metrics')}` SET TBLPROPERTIES ('{tables.VERSION_PROPERTY}' = '7')"
    )
    monkeypatch.setitem(TABLES, "metrics", WIDER)
    with pytest.raises(ContractError, match="version 7"):
        tables.read_rows(root, "metrics", {})


def test_a_row_object_with_a_column_of_a_newer_version_is_refused(spark: SparkSession, spark_root: str) -> None:
    with pytest.raises(FormatError, match=r"version 1(.|\n)*unknown \['unit'\]"):
        commit(spark, spark_root, "metrics", metrics_slice("newer"), [metric("newer", 0, 1.0) | {"unit": "nats"}])


def test_a_committer_that_slept_for_long_is_told_to_try_again(
    spark: SparkSession, spark_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it slept others committed, and upkeep has deleted the epoch after its own."""
    root, owned = spark_root, keys.table_lease("metrics")
    fenced = tables._fenced

    def sleeping(*arguments: Any):
        lease = arguments[-1]
        store = open_store(root)
        for number in (lease.epoch + 1, lease.epoch + 2):
            body = {"kind": "lease", "epoch": number, "nonce": "heir", "owner": {"name": "heir"}}
            assert store.put_if_absent(keys.epoch(owned, number), keys.canonical_json(body))
        released = {"counter": 1, "nonce": "heir", "released": True}
        store.put(keys.heartbeat(owned, lease.epoch + 2), keys.canonical_json(released))
        store.delete(keys.epoch(owned, lease.epoch + 1))
        monkeypatch.setattr(tables.deltalake.DeltaTable, "transaction_version", lambda _self, _app: lease.epoch + 2)
        return fenced(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(tables, "_fenced", sleeping)
        with pytest.raises(ContractError, match="the same command again"):
            commit(spark, root, "metrics", metrics_slice("slept"), [metric("slept", 0, 1.0)])
    monkeypatch.undo()
    newest = epochs.newest(open_store(root), owned)
    assert newest is not None
    assert commit(spark, root, "metrics", metrics_slice("slept"), [metric("slept", 0, 1.0)])["written"]
