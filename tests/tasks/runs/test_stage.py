"""The contract of a stage, walked by a toy one: no JVM, no ranks, a real store and real tables through delta-rs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from infra import leases, tables
from infra.store_local import LocalStore
from schemas import config, keys
from schemas.errors import ContractError, FormatError, StageError
from schemas.rows import TABLES, content_digest, json_lines
from schemas.work.record import RunRecord
from tasks.runs import stage as stages
from tasks.runs.finished import StageResult, past_stage
from tasks.runs.manifests import read_partition
from tasks.runs.records import History
from tasks.runs.session import Session
from tasks.runs.stage import Stage, input_rows, run_stage, version_of
from tests.support.fake_spark import FakeSpark

RECORD = RunRecord(config={}, models={}, prompt_files=(), student_path="s", format=2)


def open_toy(folder: Path, **changes: Any) -> Session:
    run = config.parse({
        "run_id": "toy", "data": str(folder / "data"), "scratch": str(folder / "scratch"),
        "student": {"path": "s"}, "teachers": [{"id": "t", "path": "t"}],
        "prompts": {"datasets": [{"name": "d", "size": 1, "teachers": ["t"]}]},
    })  # fmt: skip
    session = Session(run, LocalStore(folder / "data"), FakeSpark())  # type: ignore[arg-type]
    return dataclasses.replace(session, **{"history": History(((1, RECORD),)), **changes})


class Toy:
    """A stage of two partitions, each a metric whose value is what it is given."""

    def __init__(self, session: Session, iteration: int = 0, given: tuple[float, ...] = (1.0, 2.0), **facts: Any):
        self.session, self.iteration, self.given = session, iteration, given
        self.executed: list[int] = []
        self.stage = Stage(
            name="teach", iteration=iteration, table="metrics", config={"a": 1}, inputs={"rollout": "r"},
            partitions=self.partitions, execute=self.execute, derive=lambda manifests, _: ({}, {"n": len(manifests)}),
        )  # fmt: skip
        self.stage = dataclasses.replace(self.stage, **facts)
        self.fails_after = len(given)

    def partitions(self) -> dict[int, Any]:
        return dict(enumerate(self.given))

    def execute(self, prefix: str, todo: dict[int, Any]) -> None:
        for index, value in todo.items():
            if len(self.executed) >= self.fails_after:
                raise StageError("toy", expected="to go on", found="a crash")
            self.executed.append(index)
            owned = keys.partition_prefix(prefix, index)
            lease = leases.acquire(self.session.store, owned, owner={}, dead_after_seconds=1)
            assert isinstance(lease, leases.Lease)
            row = {"run_id": "toy", "iteration": self.iteration, "stage": self.stage.name, "step": index, "name": "x",
                   "teacher_index": None, "value": value}  # fmt: skip
            data = keys.canonical_json(row) + b"\n"
            key = keys.owned_object(owned, lease.epoch, "rows.jsonl")
            self.session.store.put(key, data)
            with lease:
                lease.finish({
                    "objects": [], "rows_key": key, "rows_digest": keys.digest_bytes(data), "num_rows": 1,
                    "given_up": {}, "stats": {"verifier_failures": 0}, "scoring": self.stage.scoring,
                })  # fmt: skip

    def run(self):
        return run_stage(self.session, self.stage)


def values(folder: Path, iteration: int = 0) -> list[float]:
    rows = tables.read_rows(str(folder / "data"), "metrics", {"run_id": "toy", "iteration": iteration})
    return [row["value"] for row in rows]


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted((folder / "data").rglob("*")) if p.is_file()}


def test_a_finished_stage_is_a_no_op_with_the_same_result(tmp_path):
    first = Toy(open_toy(tmp_path)).run()
    before = everything(tmp_path)
    again = Toy(open_toy(tmp_path))
    assert again.run() == first
    assert again.executed == []
    assert again.session.spark.calls == []  # type: ignore[attr-defined]
    assert everything(tmp_path) == before
    assert values(tmp_path) == [1.0, 2.0]


def test_an_unfinished_stage_continues_with_what_is_left(tmp_path):
    broken = Toy(open_toy(tmp_path))
    broken.fails_after = 1
    with pytest.raises(StageError):
        broken.run()
    again = Toy(open_toy(tmp_path))
    again.run()
    assert again.executed == [1]
    assert values(tmp_path) == [1.0, 2.0]


@pytest.mark.parametrize("touch", ["deleted", "a value", "a row"])
def test_a_touched_slice_is_committed_anew(tmp_path, touch):
    result = Toy(open_toy(tmp_path)).run()
    session = open_toy(tmp_path)
    if touch == "deleted":
        shutil.rmtree(tmp_path / "data/tables/metrics")
    else:
        rows = [row | {"value": row["value"] + 1} for row in input_rows(session, result, "metrics")]
        other = "touched.jsonl"
        session.store.put(other, json_lines(rows[: 1 if touch == "a row" else 2]))
        entry = result.manifest.tables["metrics"]
        session.spark.call(tables.commit_slice, root=session.config.data, table="metrics", slice=entry.slice,
                           row_keys=[other], num_rows=2, content_digest="")  # fmt: skip
        assert values(tmp_path) != [1.0, 2.0]
    again = open_toy(tmp_path)
    assert [row["value"] for row in input_rows(again, result, "metrics")] == [1.0, 2.0]
    assert again.spark.calls == ["commit_slice"]  # type: ignore[attr-defined]
    assert version_of(again, "metrics", [result.manifest.tables["metrics"]]) is not None


def test_what_will_not_hold_still_is_refused(tmp_path, monkeypatch):
    result = Toy(open_toy(tmp_path)).run()
    shutil.rmtree(tmp_path / "data/tables/metrics")
    monkeypatch.setattr(FakeSpark, "commit_slice", lambda *_, **__: None)
    with pytest.raises(ContractError, match=r"opd\.metrics"):
        input_rows(open_toy(tmp_path), result, "metrics")
    with pytest.raises(ContractError, match=r"opd\.metrics"):
        version_of(open_toy(tmp_path), "metrics", [result.manifest.tables["metrics"]])


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"config": {"a": 2}}, "config.a: 1 -> 2"),
        ({"inputs": {"rollout": "other"}}, "inputs.rollout: 'r' -> 'other'"),
        ({"scoring": {"v:f": "new"}}, "scoring.v:f: None -> 'new'"),
    ],
)
def test_a_finished_stage_under_other_facts_is_an_error_that_names_them(tmp_path, facts, words):
    Toy(open_toy(tmp_path)).run()
    before = everything(tmp_path)
    with pytest.raises(ContractError) as raised:
        Toy(open_toy(tmp_path), **facts).run()
    assert words in raised.value.found
    assert "--from-iteration 0" in raised.value.next_command
    assert everything(tmp_path) == before


def test_an_unfinished_stage_is_not_continued_with_other_work(tmp_path):
    broken = Toy(open_toy(tmp_path))
    broken.fails_after = 1
    with pytest.raises(StageError):
        broken.run()
    other = Toy(open_toy(tmp_path), given=(1.0, 3.0))
    with pytest.raises(ContractError, match="given"):
        other.run()
    assert other.executed == []


def test_a_newer_format_leaves_finished_stages_alone_and_refuses_unfinished_ones(tmp_path, monkeypatch):
    Toy(open_toy(tmp_path)).run()
    broken = Toy(open_toy(tmp_path), 1)
    broken.fails_after = 1
    with pytest.raises(StageError):
        broken.run()
    monkeypatch.setitem(stages.FORMAT_VERSIONS, "teach", 99)
    assert Toy(open_toy(tmp_path)).run().stats == {"n": 2}
    with pytest.raises(ContractError, match="format: 2 -> 99"):
        Toy(open_toy(tmp_path), 1).run()


def test_a_cured_verifier_scores_finished_partitions_again(tmp_path):
    broken = Toy(open_toy(tmp_path), name="rollout", scoring={"v:f": "old"})
    broken.fails_after = 1
    with pytest.raises(StageError):
        broken.run()
    cured = Toy(open_toy(tmp_path), name="rollout", scoring={"v:f": "new"})
    result = cured.run()
    assert cured.executed == [0, 1], "what the old source has scored is made again, under the same prefix"
    assert "'old' -> 'new'" in str(cured.session.notes)
    assert result.manifest.scoring == {"v:f": "new"}
    assert Toy(open_toy(tmp_path), name="rollout", scoring={"v:f": "new"}).run() == result
    with pytest.raises(ContractError, match="scoring"):
        Toy(open_toy(tmp_path), name="rollout", scoring={"v:f": "newer"}).run()


class Superseded:
    """A lease that its owner has lost after some checks."""

    owned, epoch = "runs/toy/lease", 1

    def __init__(self, checks: int) -> None:
        self.left = checks

    def check(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ContractError("runs/toy/lease", expected="to be the newest epoch", found="epoch 2")


def test_a_driver_that_lost_its_run_changes_nothing_that_counts(tmp_path):
    """At every place where the owner acts: identity, ranks, each commit, manifest."""
    for checks in range(20):
        folder = tmp_path / str(checks)
        toy = Toy(open_toy(folder, lease=Superseded(checks)))
        try:
            toy.run()
        except ContractError:
            assert not list(folder.glob("data/runs/toy/00000/teach/*/manifest.json"))
            assert checks > 0 or not list(folder.glob("data/runs/**/records/*"))
            assert checks > 1 or toy.executed == []
            assert checks > 2 or not (folder / "data/tables").exists()
            continue
        break
    assert checks == 5


def test_another_record_reads_the_past_and_recommits_what_did_not_change(tmp_path):
    first = Toy(open_toy(tmp_path), 0).run()
    second = Toy(open_toy(tmp_path), 1).run()
    history = History(((1, RECORD), (2, dataclasses.replace(RECORD, from_iteration=1))))
    assert [history.in_force(i) for i in (0, 1, 2)] == [1, 2, 2]
    assert [history.is_past(i) for i in (0, 1, 2)] == [True, False, False]
    session = open_toy(tmp_path, history=history)
    assert past_stage(session.store, history, "toy", 0, "teach") == first
    assert past_stage(session.store, history, "toy", 1, "teach") is None
    shutil.rmtree(tmp_path / "data/tables/metrics")
    same = Toy(session, 1)
    assert same.run() == second
    assert same.executed == []
    assert values(tmp_path, 0) == [], "what lies below is read, never committed anew"
    assert values(tmp_path, 1) == [1.0, 2.0]
    assert past_stage(session.store, history, "toy", 1, "teach") == second
    third = History((*history.records, (3, dataclasses.replace(RECORD, from_iteration=1))))
    changed = Toy(open_toy(tmp_path, history=third), 1, given=(5.0, 6.0))
    assert changed.run() != second
    assert values(tmp_path, 1) == [5.0, 6.0]


def test_stages_that_version_0_1_finished_are_found(tmp_path):
    result = Toy(open_toy(tmp_path), 0).run()
    shutil.rmtree(next((tmp_path / "data").glob("runs/toy/00000/teach/records")))
    old = dataclasses.replace(RECORD, format=None)
    history = History(((1, old), (2, dataclasses.replace(RECORD, from_iteration=1))))
    store = LocalStore(tmp_path / "data")
    assert past_stage(store, history, "toy", 0, "teach") == result
    manifest = next((tmp_path / "data").glob("runs/toy/00000/teach/*/manifest.json"))
    (manifest.parents[1] / "other").mkdir()
    shutil.copy(manifest, manifest.parents[1] / "other/manifest.json")
    with pytest.raises(ContractError, match="2 of them"):
        past_stage(store, history, "toy", 0, "teach")


def test_another_digest_under_the_same_fingerprint_is_refused(tmp_path):
    result = Toy(open_toy(tmp_path)).run()
    path = next((tmp_path / "data").glob("runs/toy/00000/teach/*/manifest.json"))
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"output_digest": "other"}))
    assert Toy(open_toy(tmp_path)).run().output_digest == "other", "what stands is what counts"
    path.unlink()
    assert Toy(open_toy(tmp_path)).run() == result
    path.write_text("{}")
    with pytest.raises(FormatError, match=r"manifest\.json"):
        Toy(open_toy(tmp_path)).run()


def test_only_the_asked_stage_is_executed(tmp_path):
    with pytest.raises(StageError, match="a finished stage"):
        Toy(open_toy(tmp_path, target=(0, "train"))).run()
    assert not list((tmp_path / "data").glob("runs/**/*.json"))
    assert Toy(open_toy(tmp_path, target=(0, "teach"))).run()
    assert Toy(open_toy(tmp_path, target=(0, "train"))).run()


def test_rows_that_a_parent_derives_are_named_by_all_of_their_columns(tmp_path):
    result = Toy(open_toy(tmp_path)).run()
    (key,) = result.manifest.tables["stage_runs"].row_keys
    rows = tables.read_jsonl(LocalStore(tmp_path / "data"), TABLES["stage_runs"], key)
    assert content_digest(TABLES["stage_runs"], rows, observed=True)[:16] in key


def lose(folder: Path, result: StageResult, partition: int) -> str:
    """As `opd repair` leaves a partition whose objects are lost; the stage's prefix."""
    prefix = keys.stage_prefix("toy", 0, "teach", result.fingerprint)
    store = LocalStore(folder / "data")
    lost = {str(partition): {"epoch": result.manifest.partitions[str(partition)], "reason": "lost"}}
    store.put(keys.revoked(prefix), keys.canonical_json(lost))
    return prefix


@pytest.mark.parametrize("killed_before_revoking", [True, False])
def test_a_revoked_partition_alone_is_made_anew(tmp_path, killed_before_revoking):
    result = Toy(open_toy(tmp_path)).run()
    prefix = lose(tmp_path, result, 1)
    store = LocalStore(tmp_path / "data")
    if not killed_before_revoking:
        leases.revoke(store, keys.partition_prefix(prefix, 1), 2, "lost")
    again = Toy(open_toy(tmp_path))
    remade = again.run()
    assert again.executed == [1]
    assert remade.output_digest == result.output_digest
    assert remade.manifest.partitions == {"0": 2, "1": 5}
    assert all(store.head(key) for entry in remade.manifest.tables.values() for key in entry.row_keys)
    assert values(tmp_path) == [1.0, 2.0]
    before = everything(tmp_path)
    assert Toy(open_toy(tmp_path)).run() == remade
    assert everything(tmp_path) == before
    assert store.head(keys.revoked(prefix)) is None


def test_a_partition_that_comes_out_otherwise_stays_revoked(tmp_path):
    """Loud each time, and the stage's manifest and rows stay; the same content ends it."""
    result = Toy(open_toy(tmp_path)).run()
    prefix = lose(tmp_path, result, 1)
    for _ in range(2):
        other = Toy(open_toy(tmp_path), given=(1.0, 3.0))
        with pytest.raises(ContractError, match="the content that was lost"):
            other.run()
        assert other.executed == [1]
        assert values(tmp_path) == [1.0, 2.0]
        assert read_partition(LocalStore(tmp_path / "data"), prefix, 1) is None
    assert past_stage(LocalStore(tmp_path / "data"), History(((1, RECORD),)), "toy", 0, "teach") == result
    assert Toy(open_toy(tmp_path)).run().output_digest == result.output_digest


def test_another_stages_lost_objects_are_named_with_its_command(tmp_path):
    result = Toy(open_toy(tmp_path)).run()
    lose(tmp_path, result, 0)
    with pytest.raises(StageError, match="opd teach CONFIG --iteration 0"):
        Toy(open_toy(tmp_path, target=(0, "train"))).run()
