"""The train rank as a real process: objects and manifest, SIGKILL and restart, two ranks, damage."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.leases import finished
from infra.stores import open_store
from ml.model_files import model_digest
from ml.train.state import load_state
from schemas.errors import StoreError
from schemas.rows import CHECKPOINTS, METRICS
from schemas.typed_json import to_json
from tasks.ranks.checkpoints import put_file
from tests.support.tiny import tiny_model
from tests.support.train_site import (
    OWNED,
    STEPS,
    Group,
    content,
    events,
    fetch,
    manifest_of,
    own_head,
    rows_of,
    settings,
    write_base,
    write_work,
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def straight(base) -> tuple[Path, list[dict[str, Any]]]:
    work = write_work(base, "straight")
    return work, events(work)


def heldout_kl(work: Path, when: str) -> list[tuple[int | None, float]]:
    return [(row["teacher_index"], row["value"]) for row in rows_of(work) if row["name"] == f"heldout_kl_{when}"]


def test_a_student_in_mxfp4_exports_its_master_and_names_the_linears_that_fp8_would_change(base, straight):
    assert manifest_of(straight[0])["fp8_inexact"] == []
    assert not [row for row in rows_of(straight[0]) if row["name"] == "fp8_inexact_linears"]
    tiny_model(base / "wide", width=64)
    weights = load_file(base / "wide" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][:, :32] *= 2.0**-24
    save_file(weights, base / "wide" / "model.safetensors", metadata={"format": "pt"})
    slow = settings(save_every_steps=0, learning_rate=1e-12)
    options = {"folder": str(base / "wide"), "precision": "mxfp4", "settings": slow}
    work = write_work(base, "mxfp4", **options)
    events(work)
    assert manifest_of(work)["fp8_inexact"] == [name]
    counts = [(row["step"], row["value"]) for row in rows_of(work) if row["name"] == "fp8_inexact_linears"]
    assert counts == [(STEPS, 1.0)]
    plain = write_work(base, "plain", **options | {"precision": "bf16"})
    events(plain)
    assert heldout_kl(work, "unquantised") == heldout_kl(plain, "before") != heldout_kl(work, "before")
    assert heldout_kl(plain, "unquantised") == []
    exported = load_file(fetch(work, "export", base / "wide-export") / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(tensor.dtype == torch.float32 for tensor in exported.values())


def test_training_in_fp8_lowers_the_loss_and_counts_at_each_step_what_it_leaves_in_bf16(base):
    tiny_model(base / "fp8", width=64)
    weights = load_file(base / "fp8" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name][:, :32] *= 2.0**-24
    save_file(weights, base / "fp8" / "model.safetensors", metadata={"format": "pt"})
    options = {"folder": str(base / "fp8"), "precision": "mxfp4", "compute": "fp8"}
    work = write_work(base, "in-fp8", **options)
    events(work)
    losses = [row["value"] for row in rows_of(work) if row["name"] == "loss"]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == STEPS
    # An update of 1e-3 brings the small block within reach.
    counts = [(row["step"], row["value"]) for row in rows_of(work) if row["name"] == "fp8_inexact_linears"]
    assert counts == [(0, 1.0), *((step, 0.0) for step in range(1, STEPS + 1))]
    assert manifest_of(work)["fp8_inexact"] == []
    before, after = (dict(heldout_kl(work, when))[None] for when in ("before", "after"))
    assert after < before


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
    assert (checkpoint["parent"], checkpoint["steps"]) == (model_digest(base / "student"), STEPS)
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
    group = Group(work)
    scratch = work.parent / "scratch"
    deadline = time.monotonic() + 120
    while not list(scratch.glob("*/e*/step-*/state.json")):
        assert group.processes[0].is_alive(), "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    group.kill()
    assert group.statuses() == [-signal.SIGKILL]
    torn = next(scratch.glob("*/e*/step-*/state.json")).parent
    (torn.parent / "step-000099").mkdir()  # a checkpoint whose marker was never written
    told = events(work)
    resumed = [e for e in told if e["event"] == "resumed_at"]
    assert len(resumed) == 1
    assert 1 <= resumed[0]["steps"] < STEPS
    assert content(work) == content(straight[0])
    assert rows_of(work) == rows_of(straight[0])
    assert list(scratch.glob("*")) == []


def test_two_ranks_of_the_next_iteration_go_on_with_the_optimizer(base, straight):
    student = fetch(straight[0], "export", base / "next-student")
    optimizer = fetch(straight[0], "optimizer", base / "next-optimizer")
    work = write_work(base, "two-ranks", folder=str(student), optimizer_from=str(optimizer))
    assert events(work, ranks=2)[-1]["event"] == "finished"
    state = load_state(fetch(work, "optimizer", base / "after-next"))
    earlier = load_state(optimizer)
    assert state is not None
    assert earlier is not None
    assert (earlier.facts["optimizer_steps"], state.facts["optimizer_steps"]) == (STEPS, 2 * STEPS)
    alone = write_work(base, "one-rank", folder=str(student), optimizer_from=str(optimizer))
    events(alone)
    for one, two in zip(rows_of(alone), rows_of(work), strict=True):
        assert {**one, "value": None} == {**two, "value": None}
        assert two["value"] == pytest.approx(one["value"], rel=1e-3), two["name"]
    losses = [r["value"] for r in rows_of(work) if r["name"] == "loss"]
    assert losses[0] < [r["value"] for r in rows_of(straight[0]) if r["name"] == "loss"][1]


def test_an_upload_that_the_store_refuses_keeps_its_own_error(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    whole = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, whole[1]))  # as a disk that is full
    try:
        with pytest.raises(StoreError) as caught:
            put_file(open_store(str(tmp_path / "data")), "export/model.safetensors", tmp_path / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, whole)
    assert caught.value.expected == "room for the object"


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
    assert finished(open_store(str(root)), OWNED) is None


def test_a_head_or_student_that_was_replaced_is_not_trained_on(base):
    heads = [to_json(own_head(i, base / "teacher-1", digest_of=base / f"teacher-{i}")) for i in (0, 1)]
    other = model_digest(base / "teacher-0")
    for name, options in (("head", {"teachers": heads}), ("student", {"digest": other})):
        work = write_work(base, f"replaced-{name}", **options)
        told = events(work, status=5)
        assert told[-1]["kind"] == "contract error"
        assert str(base / ("teacher-1" if name == "head" else "student")) in told[-1]["text"]
