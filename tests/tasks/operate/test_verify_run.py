"""`opd verify` over a whole root: each thing that is not as the stages left it is a breach, and nothing else is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import cli
from infra.stores import open_store
from schemas import keys
from tasks.operate.invariants import Check
from tasks.operate.verify import verify
from tasks.runs.finished import STAGES
from tests.support import finished_run
from tests.support.finished_run import RUN_ID, prefix_of

Rows = dict[str, list[dict]]


def checks_of(root: Path) -> dict[str, Check]:
    return {check.name: check for check in verify(str(root), RUN_ID)}


def breaches_of(root: Path) -> dict[str, tuple[str, ...]]:
    return {name: check.breaches for name, check in checks_of(root).items() if check.breaches}


@pytest.mark.parametrize("until", STAGES)
def test_what_is_not_there_yet_is_no_breach(tmp_path: Path, until: str) -> None:
    """Between any two stages; and the report says what is to come."""
    finished_run.make(tmp_path, until=until)
    checks = checks_of(tmp_path)
    assert {name: c.breaches for name, c in checks.items() if c.breaches} == {}
    to_come = STAGES[STAGES.index(until) + 1 :]
    notes = checks["stages finished"].notes
    assert len(notes) == bool(to_come)
    assert all(note.endswith(f"to come: {', '.join(to_come)}") for note in notes)


def test_a_run_that_has_finished_nothing_is_one(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put(keys.run_record(RUN_ID, 1), keys.canonical_json(finished_run.RECORD))
    assert checks_of(tmp_path)["stages finished"].notes == ("no stage has begun",)
    store.put(f"{prefix_of('rollout')}/p00000/e000001/wal/000000.seg", b"log")
    checks = checks_of(tmp_path)
    assert checks["stages finished"].notes[0].startswith("iteration 0: finished nothing")
    assert not any(check.breaches for check in checks.values())
    assert checks["unreferenced: objects of partitions that are not finished"].count == 1


EQUAL = "tables equal their stage manifests"


@pytest.mark.parametrize("table", ["trajectories", "hidden_shards", "plan", "metrics", "checkpoints"])
def test_a_missing_row_a_changed_value_and_a_missing_table_are_found(tmp_path: Path, table: str) -> None:
    rows = finished_run.make(tmp_path)
    finished_run.put_table(tmp_path, table, rows[table][:-1])
    (found,) = breaches_of(tmp_path)[EQUAL]
    of_slice = 1 if table == "metrics" else len(rows[table])  # dispatch and train have one each
    assert f"opd.{table} has {of_slice - 1} rows where its manifest has {of_slice}" in found

    column = {"trajectories": "num_kv_restores", "hidden_shards": "first_token_row", "plan": "weight",
              "metrics": "value", "checkpoints": "keys"}[table]  # fmt: skip
    last = rows[table][-1]
    other = "[]" if column == "keys" else last[column] + 1
    finished_run.put_table(tmp_path, table, [*rows[table][:-1], last | {column: other}])
    (found,) = breaches_of(tmp_path)[EQUAL]
    assert f"opd.{table} has other values" in found

    shutil.rmtree(tmp_path / "tables" / table)
    checks = checks_of(tmp_path)
    assert checks["tables can be read"].breaches == (
        f"opd.{table}: no such table, and checks of its rows are left out",
    )
    assert sum(len(check.breaches) for check in checks.values()) == 1, "it is listed once"
    assert table == "metrics" or any(f"without opd.{table}" in check.skipped for check in checks.values())


def test_a_student_with_fewer_steps_than_its_plan_is_found(tmp_path: Path) -> None:
    """Also when its manifest agrees with the table: the plan was empty when it was trained."""
    rows = finished_run.make(tmp_path, until="dispatch")
    whole, rows["plan"] = rows["plan"], rows["plan"][:1]
    finished_run._finish(open_store(str(tmp_path)), "train", rows)
    for table in ("metrics", "checkpoints"):
        finished_run.put_table(tmp_path, table, rows[table])
    assert len(whole) == 2
    assert breaches_of(tmp_path) == {
        "each student made every step of its plan": ("iteration 0, student v1: 1 steps of 2 in the plan",)
    }


def test_objects_that_no_manifest_names_are_counted_apart(tmp_path: Path) -> None:
    finished_run.make(tmp_path)
    store = open_store(str(tmp_path))
    prefix = prefix_of("rollout")
    for key in (
        f"{prefix}/p00000/e000000/tokens.safetensors", f"{prefix}/p00001/e000001/wal/000000.seg",
        f"{prefix}/p00000/e000001/spill/x",
    ):  # fmt: skip
        store.put(key, b"left")
    store.put(f"{prefix}/p00000/e000001/stray.bin", b"?")
    store.put("runs/made/notes.txt", b"?")
    checks = checks_of(tmp_path)
    assert not any(check.breaches for check in checks.values())
    stray = checks["unreferenced: objects that no manifest names"]
    assert (stray.count, len(stray.notes)) == (2, 2)
    assert checks["unreferenced: logs, and what superseded epochs left (opd upkeep deletes them)"].count == 3


def flip(root: Path, key: str) -> None:
    path = root / key
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


OBJECTS: dict[str, Callable[[Path], object]] = {
    "lost token shard": lambda r: (r / prefix_of("rollout") / "p00001/e000001/tokens.safetensors").unlink(),
    "bit of hidden states": lambda r: flip(r, f"{prefix_of('teach')}/p00000/e000001/hidden-00000.safetensors"),
    "file of the student": lambda r: (r / prefix_of("train") / "p00000/e000001/config.json").unlink(),
    "rows": lambda r: flip(r, f"{prefix_of('dispatch')}/p00000/e000001/rows.jsonl"),
}  # fmt: skip


@pytest.mark.parametrize("damage", OBJECTS)
def test_damaged_objects_are_found_and_repair_is_named(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finished_run.make(tmp_path)
    OBJECTS[damage](tmp_path)
    assert len(breaches_of(tmp_path)["objects hash to their manifest's digest"]) == 1
    assert cli.main(["verify", RUN_ID, "--data", str(tmp_path)]) == 1
    assert f"next: opd repair {RUN_ID}" in capsys.readouterr().out
