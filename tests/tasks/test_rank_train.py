"""The train rank as a real process: objects and manifest, SIGKILL and restart, two ranks, damage."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.leases import Finished, finished
from infra.store import open_store
from ml.model_files import model_digest
from ml.train.state import load_state
from schemas import keys
from schemas.config import Train
from schemas.rows import CHECKPOINTS, METRICS
from tests.tiny import tiny_model
from tests.training_world import make_world, plan_rows, write_store

ROOT = Path(__file__).parents[2]
STEPS = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Models, objects and rows of an iteration of STEPS steps; the slowest part, made once."""
    base = tmp_path_factory.mktemp("train")
    tiny_model(base / "student")
    tiny_model(base / "teacher-0", seed=1, width=32, tied=False)
    tiny_model(base / "teacher-1", seed=2)
    world = make_world([(5, 9), (3, 20), (8, 4), (4, 12), (6, 6), (7, 15)], {0: 32, 1: 48}, vocab=259)
    write_store(world, base / "objects")
    items = [(f"t{i:03d}", i % 2, 1.0) for i in (0, 2, 4, 1, 3)]
    steps = [[[items[0], items[1]], [items[2], items[3]], [items[4]]] for _ in range(STEPS)]
    plan = plan_rows(world, steps, slots=2) + plan_rows(world, [[[("t005", 1, 1.0)]]], slots=2, split="heldout")
    for name, rows in (("plan", plan), ("trajectories", world.trajectory_rows), ("hidden", world.hidden_rows)):
        (base / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return base


def write_work(base: Path, name: str, **options: Any) -> Path:
    """A work file with a store and a partition of its own."""
    root = base / name
    (root / "store").mkdir(parents=True)
    for folder in ("rollout", "teach"):
        (root / "store" / folder).symlink_to(base / "objects" / folder)
    settings = Train.model_validate({"save_every_steps": 1, "learning_rate": 1e-3})
    work = {
        "root": str(root / "store"), "run_id": "tiny", "iteration": 0, "owned": "runs/tiny/00000/train/f/p00000",
        "seed": 0, "student_folder": str(base / "student"), "student_version": "v0", "precision": "bf16",
        "compute": "bf16", "optimizer_from": None, "plan_rows_path": str(base / "plan.jsonl"),
        "trajectory_rows_path": str(base / "trajectories.jsonl"), "hidden_rows_path": str(base / "hidden.jsonl"),
        "teachers": [{"teacher_index": i, "folder": str(base / f"teacher-{i}")} for i in (0, 1)],
        "vocab_size": 259, "slots": 2, "train": settings.model_dump(),
        "threads": 1, "scratch": str(root / "scratch"), "out_folder": str(root / "out"), "dead_after_seconds": 5.0,
    }  # fmt: skip
    path = root / "work.json"
    path.write_text(json.dumps(work | options))
    return path


def start(work: Path, ranks: int = 1) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tasks.ranks.train", str(work)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=os.environ | group | {"RANK": str(r), "LOCAL_RANK": str(r)},
        )
        for r in range(ranks)
    ]  # fmt: skip


def events(work: Path, ranks: int = 1, status: int = 0) -> list[dict[str, Any]]:
    """Messages of rank 0 of a whole run; every line on its stdout must be one."""
    processes = start(work, ranks)
    outputs = [p.communicate(timeout=240) for p in processes]
    assert [p.returncode for p in processes] == [status] * ranks, outputs[0][1][-3000:]
    return [json.loads(line) for line in outputs[0][0].splitlines()]


def manifest_of(work: Path) -> dict[str, Any]:
    found = finished(open_store(json.loads(work.read_text())["root"]), "runs/tiny/00000/train/f/p00000")
    assert isinstance(found, Finished)
    return found.manifest


def rows_of(work: Path) -> list[dict[str, Any]]:
    store, manifest = open_store(json.loads(work.read_text())["root"]), manifest_of(work)
    data = store.get(manifest["rows_key"])
    assert keys.digest_bytes(data) == manifest["rows_digest"]
    rows = [json.loads(line) for line in data.splitlines()]
    assert len(rows) == manifest["num_rows"]
    return rows


def content(manifest: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(o["group"], o["name"], o["digest"]) for o in manifest["objects"]]


def fetch(work: Path, group: str, folder: Path) -> Path:
    """Objects of one group as a folder, as the next iteration copies them."""
    folder.mkdir(parents=True)
    store = open_store(json.loads(work.read_text())["root"])
    for entry in manifest_of(work)["objects"]:
        if entry["group"] == group:
            data = store.get(entry["key"])
            assert (len(data), keys.digest_bytes(data)) == (entry["bytes"], entry["digest"])
            (folder / entry["name"]).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def straight(base) -> tuple[Path, list[dict[str, Any]]]:
    work = write_work(base, "straight")
    return work, events(work)


def test_a_student_in_mxfp4_exports_its_master_and_names_the_linears_that_fp8_would_change(base, straight):
    assert manifest_of(straight[0])["fp8_inexact"] == []
    assert not [row for row in rows_of(straight[0]) if row["name"] == "fp8_inexact_linears"]
    tiny_model(base / "wide", width=64)
    weights = load_file(base / "wide" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][:, :32] *= 2.0**-24
    save_file(weights, base / "wide" / "model.safetensors", metadata={"format": "pt"})
    settings = Train.model_validate({"save_every_steps": 0, "learning_rate": 1e-12}).model_dump()
    options = {"student_folder": str(base / "wide"), "precision": "mxfp4", "train": settings}
    work = write_work(base, "mxfp4", **options)
    events(work)
    assert manifest_of(work)["fp8_inexact"] == [name]
    counts = [(row["step"], row["value"]) for row in rows_of(work) if row["name"] == "fp8_inexact_linears"]
    assert counts == [(STEPS, 1.0)]
    exported = load_file(fetch(work, "export", base / "wide-export") / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(tensor.dtype == torch.float32 for tensor in exported.values())


def test_the_export_is_a_model_that_transformers_loads_and_its_digest_the_version(base, straight):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    work, _ = straight
    folder = fetch(work, "export", base / "fetched")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder).encode("a")
    checkpoint = manifest_of(work)["checkpoint"]
    assert set(checkpoint) == set(CHECKPOINTS.column_names())
    assert checkpoint["version"] == model_digest(folder)
    assert (checkpoint["parent"], checkpoint["steps"]) == ("v0", STEPS)
    before = load_file(base / "student" / "model.safetensors")
    after = load_file(folder / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in after.items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, before[name]), f"{name} was not trained"
        assert torch.equal(tensor, model.state_dict()[name])


def test_metric_rows_are_whole_unique_and_finite(straight):
    rows = rows_of(straight[0])
    assert all(set(r) == set(METRICS.column_names()) for r in rows)
    marks = [(r["step"], r["name"], r["teacher_index"]) for r in rows]
    assert len(set(marks)) == len(marks)
    by_name = {name: [r for r in rows if r["name"] == name] for _, name, _ in marks}
    assert [r["step"] for r in by_name["loss"]] == list(range(STEPS))
    assert {r["value"] for r in by_name["head_loads"]} == {1.0}
    assert [(r["step"], r["teacher_index"]) for r in by_name["heldout_kl_before"]] == [(0, None), (0, 1)]
    assert [(r["step"], r["teacher_index"]) for r in by_name["heldout_kl_after"]] == [(STEPS, None), (STEPS, 1)]
    losses = [r["value"] for r in by_name["loss"]]
    assert losses[-1] < losses[0], "the same mini-batch six times, and the loss did not fall"


def test_progress_reaches_its_total_and_metrics_are_told_once(straight):
    work, told = straight
    progress = [e for e in told if e["event"] == "progress"]
    assert progress[-1]["done"] == progress[-1]["total"] == 2 * 1 + 3 * STEPS
    assert [row for e in told if e["event"] == "metrics" for row in e["rows"]] == rows_of(work)
    assert told[-1] == {"event": "finished", "epoch": 1}


def test_a_finished_partition_is_left_alone(straight):
    work, _ = straight
    before = manifest_of(work)
    assert [e["event"] for e in events(work)] == ["finished"]
    assert manifest_of(work) == before


def test_a_killed_rank_continues_from_its_checkpoint_with_the_same_bytes(base, straight):
    work = write_work(base, "killed")
    (process,) = start(work)
    scratch = work.parent / "scratch"
    deadline = time.monotonic() + 120
    while not list(scratch.glob("*/step-*/state.json")):
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (torn,) = [p.parent for p in scratch.glob("*/step-*/state.json")]
    (torn.parent / "step-000099").mkdir()  # a checkpoint whose marker was never written
    told = events(work)
    resumed = [e for e in told if e["event"] == "resumed"]
    assert len(resumed) == 1
    assert 1 <= resumed[0]["steps"] < STEPS
    assert content(manifest_of(work)) == content(manifest_of(straight[0]))
    assert rows_of(work) == rows_of(straight[0])
    assert list(scratch.glob("*")) == []


def test_two_ranks_of_the_next_iteration_go_on_with_the_optimizer(base, straight):
    student = fetch(straight[0], "export", base / "next-student")
    optimizer = fetch(straight[0], "optimizer", base / "next-optimizer")
    work = write_work(base, "two-ranks", student_folder=str(student), optimizer_from=str(optimizer))
    assert events(work, ranks=2)[-1]["event"] == "finished"
    state = load_state(fetch(work, "optimizer", base / "after-next"))
    earlier = load_state(optimizer)
    assert state is not None
    assert earlier is not None
    assert (earlier.facts["optimizer_steps"], state.facts["optimizer_steps"]) == (STEPS, 2 * STEPS)
    alone = write_work(base, "one-rank", student_folder=str(student), optimizer_from=str(optimizer))
    events(alone)
    for one, two in zip(rows_of(alone), rows_of(work), strict=True):
        assert {**one, "value": None} == {**two, "value": None}
        assert two["value"] == pytest.approx(one["value"], rel=1e-3), two["name"]
    losses = [r["value"] for r in rows_of(work) if r["name"] == "loss"]
    assert losses[0] < [r["value"] for r in rows_of(straight[0]) if r["name"] == "loss"][1]


def test_damage_ends_with_its_own_status_and_an_error_event(base):
    work = write_work(base, "damaged")
    root = work.parent / "store"
    (root / "teach").unlink()
    (root / "teach").mkdir()
    for path in (base / "objects" / "teach").iterdir():
        data = bytearray(path.read_bytes())
        data[4096 + 10] ^= 1
        (root / "teach" / path.name).write_bytes(bytes(data))
    told = events(work, status=3)
    assert told[-1]["event"] == "error"
    assert told[-1]["kind"] == "format error"
    assert "block 0" in told[-1]["text"]
    assert finished(open_store(str(root)), "runs/tiny/00000/train/f/p00000") is None
