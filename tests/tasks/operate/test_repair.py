"""`opd repair` on real tables: what two runs have made is damaged in many ways, and comes back as it was."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from infra import leases, tables
from infra.stores import open_store
from schemas import keys, shards
from schemas.errors import ContractError
from schemas.rows import HIDDEN_SHARDS, METRICS, PROMPTS, json_lines
from schemas.typed_json import to_json
from tasks.operate.repair import Finding, repair
from tasks.runs.manifests import read_partition, read_revoked
from tasks.runs.stage import table_entry
from tests.support import finished_run
from tests.support.fake_spark import FakeSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REPOSITORY = Path(__file__).parents[3]
RUNS = ("one", "two")
USED = ("prompts", "hidden_shards", "metrics")


class InProcess:
    """The test's own Spark session as the child of a flow."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.calls: list[str] = []

    def call(self, function: Callable[..., Any], **kwargs: Any) -> Any:
        self.calls.append(function.__name__)
        return json.loads(json.dumps(function(self._spark, **kwargs)))

    def close(self) -> None:
        """A new session would know of no table; this one must forget."""
        java: Any = self._spark._jvm
        java.org.apache.spark.sql.delta.DeltaLog.clearCache()


def finish_teach(root: str, run_id: str) -> dict[str, Any]:
    """What a finished teach stage of two partitions leaves in the store; its manifest."""
    store = open_store(root)
    prefix = keys.stage_prefix(run_id, 0, "teach", keys.digest(run_id))
    rows: list[dict[str, Any]] = []
    row_keys, epochs = [], {}
    for partition in (0, 1):
        owned = keys.partition_prefix(prefix, partition)
        lease = leases.acquire(store, owned, owner={"worker": "w"}, dead_after_seconds=5)
        assert isinstance(lease, leases.Lease)
        key = keys.owned_object(owned, lease.epoch, "hidden-00000.safetensors")
        block = np.full((4, 2), partition, np.uint16)
        data = shards.encode({"hidden": ("BF16", block)})
        store.put(key, data)
        own = [
            {
                "run_id": run_id, "iteration": 0, "trajectory_id": f"{run_id}-{partition}", "teacher_index": 0,
                "teacher_id": "a", "first_token_row": 0, "first_object_row": 0, "rows": 4, "dtype": "BF16", "width": 2,
                "block_crcs": shards.block_crcs(block.view(np.uint8)), "object_digest": keys.digest_bytes(data),
                "object_key": key,
            }
        ]  # fmt: skip
        rows += own
        rows_key = keys.owned_object(owned, lease.epoch, "rows.jsonl")
        store.put(rows_key, json_lines(own))
        row_keys.append(rows_key)
        epochs[str(partition)] = lease.epoch + 1
        lease.finish(
            {
                "objects": [{"key": key, "digest": keys.digest_bytes(data), "bytes": len(data)}],
                "rows_key": rows_key, "rows_digest": keys.digest_bytes(json_lines(own)), "num_rows": 1, "stats": {},
            }
        )  # fmt: skip
    metrics = [{"run_id": run_id, "iteration": 0, "stage": "teach", "step": 0, "name": "hidden_rows",
                "teacher_index": 0, "value": 8.0}]  # fmt: skip
    derived = f"{prefix}/tables/metrics.jsonl"
    store.put(derived, json_lines(metrics))
    place = {"run_id": run_id, "iteration": 0, "stage": "teach"}
    manifest = {
        "stage": "teach", "iteration": 0, "fingerprint": keys.digest(run_id), "inputs": {}, "partitions": epochs,
        "tables": {
            "hidden_shards": table_entry("hidden_shards", place, row_keys, rows),
            "metrics": table_entry("metrics", place, [derived], metrics),
        },
        "stats": {}, "output_digest": keys.digest(["output", run_id]),
    }  # fmt: skip
    store.put(keys.stage_manifest(prefix), keys.canonical_json(to_json(manifest)))
    lease = leases.acquire(store, keys.run_lease(run_id), owner={"run": run_id}, dead_after_seconds=5)
    assert isinstance(lease, leases.Lease)
    leases.release(lease)
    return to_json(manifest)


def put_prompts(root: str) -> None:
    """One object as today, one as version 0.1 wrote it: its ids hold the source, and its name does not hold the ids."""
    row = {
        "source": "a.jsonl", "domain": "d", "teachers": [{"teacher_id": "a", "weight": 1.0}], "messages": "[]",
        "answer": None, "verifier": None, "context": "{}",
    }  # fmt: skip
    prompt_id = keys.prompt_id(row)
    store = open_store(root)
    store.put(f"prompts/a.{keys.digest([prompt_id])[:16]}.jsonl", json_lines([{"prompt_id": prompt_id, **row}]))
    row |= {"source": "file:a"}
    store.put(f"prompts/{keys.digest('file:a')[:16]}.jsonl", json_lines([{"prompt_id": keys.digest(row)[:32], **row}]))


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two finished runs, whose tables `repair` itself has filled from their manifests alone."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "tables").mkdir()
    for table in (PROMPTS, HIDDEN_SHARDS, METRICS):
        tables._create(spark, str(folder), table)
    put_prompts(str(folder))
    for run_id in RUNS:
        finish_teach(str(folder), run_id)
    found = repair(str(folder), "one", InProcess(spark))  # type: ignore[arg-type]
    assert len(found) == 6
    assert not any(f.broken for f in found)
    return folder


@pytest.fixture
def root(made: Path, tmp_path: Path, spark: SparkSession) -> Path:
    """A copy of it; Spark's paths in a table's log are relative to the table."""
    shutil.copytree(made, tmp_path / "data")
    return tmp_path / "data"


def contents(root: Path) -> dict[str, list[dict[str, Any]]]:
    return {table: tables.read_rows(str(root), table, {}) for table in USED}


def mended(root: Path, spark: SparkSession, **options: Any) -> list[Finding]:
    return repair(str(root), "one", InProcess(spark), **options)  # type: ignore[arg-type]


def test_a_whole_run_needs_nothing(root: Path, spark: SparkSession) -> None:
    child = InProcess(spark)
    versions = {table: tables.table_version(str(root), table) for table in USED}
    assert repair(str(root), "one", child) == []  # type: ignore[arg-type]
    assert child.calls == ["probe"]
    assert versions == {table: tables.table_version(str(root), table) for table in USED}


def only(root: Path, pattern: str) -> Path:
    (path,) = root.glob(pattern)
    return path


def newest_entry(root: Path) -> Path:
    return sorted((root / "tables/metrics/_delta_log").glob("*.json"))[-1]


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def lost_and_unreadable(root: Path) -> None:
    shutil.rmtree(root / "tables/prompts")
    zero(only(root, "tables/hidden_shards/run_id=two/*/part-*.parquet"))
    newest_entry(root).write_bytes(newest_entry(root).read_bytes()[:200])


def seen_by_one_reader_alone(root: Path) -> None:
    """Delta's Rust reader passes over an empty entry, and knows no checksums of Hadoop's."""
    newest_entry(root).write_bytes(b"")
    only(root, "tables/hidden_shards/run_id=one/*/.part-*.crc").write_bytes(b"crc?")
    shutil.rmtree(root / "table-leases/prompts")


#: What is done to a root -> how many tables are set aside.
DAMAGES: dict[Callable[[Path], object], int] = {
    lost_and_unreadable: 2,
    seen_by_one_reader_alone: 3,
    (lambda root: shutil.rmtree(root / "tables")): 0,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_tables_of_every_run_come_back(root: Path, spark: SparkSession, damage: Callable[[Path], object]) -> None:
    before = contents(root)
    damage(root)
    dry = mended(root, spark, dry_run=True)
    assert dry
    assert all("would be" in f.done for f in dry)
    found = mended(root, spark)
    assert [f.what for f in found] == [f.what for f in dry]
    assert not any(f.broken for f in found)
    assert contents(root) == before
    assert len(list(root.glob("tables/.broken/*"))) == DAMAGES[damage]


def test_a_live_run_is_left_alone_and_named(root: Path, spark: SparkSession) -> None:
    """Of the run itself, that is an error; of another, its slices wait, and so does a table to be set aside."""
    store = open_store(str(root))
    lease = leases.acquire(store, keys.run_lease("one"), owner={"run": "one"}, dead_after_seconds=5)
    assert isinstance(lease, leases.Lease)
    with lease, pytest.raises(ContractError, match=r"run one|this very process"):
        mended(root, spark)
    lease = leases.acquire(store, keys.run_lease("two"), owner={"run": "two"}, dead_after_seconds=5)
    assert isinstance(lease, leases.Lease)
    newest_entry(root).write_bytes(b"")
    with lease:
        found = mended(root, spark)
    assert found
    assert not (root / "tables/.broken").exists()
    assert all(f.broken for f in found)
    assert "run two is live" in found[0].found


def test_damaged_objects_are_named_and_their_slices_stay_broken(root: Path, spark: SparkSession) -> None:
    before = contents(root)
    shutil.rmtree(root / "tables/hidden_shards")
    only(root, "runs/two/00000/teach/*/p00001/e000001/rows.jsonl").write_bytes(b"{}\n")
    found = mended(root, spark)
    broken = [f for f in found if f.broken]
    assert [f.what for f in broken] == ["opd.hidden_shards, iteration 0, run_id two"]
    assert "rows.jsonl, line 1" in broken[0].found or "columns" in broken[0].found
    after = contents(root)
    assert after["hidden_shards"] == [row for row in before["hidden_shards"] if row["run_id"] == "one"]


@pytest.mark.slow
def test_a_repair_that_is_killed_goes_on(root: Path, spark: SparkSession) -> None:
    """SIGKILL once the first table is set aside; the command line says in the end that all is whole."""
    before = contents(root)
    lost_and_unreadable(root)
    command = [sys.executable, "-m", "flows.cli", "repair", "one", "--data", str(root)]
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, start_new_session=True) as process:
        deadline = time.monotonic() + 300
        while not (root / "tables/.broken").exists():
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    found = mended(root, spark)
    assert found
    assert not any(f.broken for f in found)
    assert contents(root) == before
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "one: 0 repaired, 0 broken\n"), done.stderr


class NoSession(FakeSpark):
    """Commits through delta-rs, and reads as well as that does."""

    def probe(self, root: str, tables: list[str]) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass


def mended_objects(root: Path, **options: Any) -> list[Finding]:
    return repair(str(root), finished_run.RUN_ID, NoSession(), **options)  # type: ignore[arg-type]


def objects(root: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    return {key: data for key, data in found.items() if "/lease/" not in key and "table-leases" not in key}


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("rollout", "p00001/e000001/rows.jsonl"), ("teach", "p00000/e000001/rows.jsonl"),
        ("dispatch", "p00000/e000001/rows.jsonl"), ("dispatch", "tables/metrics.jsonl"),
        ("train", "tables/checkpoints.jsonl"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("spoil", ["lost", "a bit"])
def test_rows_come_back_from_the_table(tmp_path: Path, stage: str, name: str, spoil: str) -> None:
    finished_run.make(tmp_path)
    before = objects(tmp_path)
    path = tmp_path / finished_run.prefix_of(stage) / name
    if spoil == "lost":
        path.unlink()
    else:
        path.write_bytes(re.sub(rb"0(?=[^0-9]*$)|1(?=[^01]*$)", b"3", path.read_bytes()))
    (dry,) = mended_objects(tmp_path, dry_run=True)
    assert "would be written from" in dry.done
    (found,) = mended_objects(tmp_path)
    assert not found.broken
    assert objects(tmp_path) == before
    assert mended_objects(tmp_path) == []


LOST = {
    "rollout": "p00001/e000001/tokens.safetensors", "teach": "p00000/e000001/hidden-00000.safetensors",
    "train": "p00000/e000001/config.json",
}  # fmt: skip


@pytest.mark.parametrize("stage", LOST)
def test_a_partition_with_a_damaged_object_is_revoked_once(tmp_path: Path, stage: str) -> None:
    finished_run.make(tmp_path)
    prefix = finished_run.prefix_of(stage)
    path = tmp_path / prefix / LOST[stage]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = objects(tmp_path)
    (dry,) = mended_objects(tmp_path, dry_run=True)
    assert objects(tmp_path) == before
    (found,) = mended_objects(tmp_path)
    assert found.broken
    assert (found.what, found.found) == (dry.what, dry.found)
    assert str(path.relative_to(tmp_path)) in found.found
    partition = int(LOST[stage][1:6])
    store = open_store(str(tmp_path))
    assert read_partition(store, prefix, partition) is None
    assert list(read_revoked(store, prefix)) == [str(partition)]
    (again,) = mended_objects(tmp_path)
    assert again.broken
    assert "revoked before" in again.found


def test_a_damaged_manifest_of_a_partition_is_named(tmp_path: Path) -> None:
    finished_run.make(tmp_path)
    (tmp_path / finished_run.prefix_of("teach") / "p00000/epochs/000002.json").write_bytes(b"{")
    (found,) = mended_objects(tmp_path)
    assert found.broken
    assert "000002.json" in found.found
