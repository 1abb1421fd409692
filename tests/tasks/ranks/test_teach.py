"""The teacher worker as a real process over a local store: shards, rows, reruns, damage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors
from transformers import AutoModelForCausalLM

from infra import leases
from infra.store_local import LocalStore
from infra.stores import open_store
from ml.teacher_head import read_teacher_head
from schemas import keys, shards
from schemas.errors import ContractError, FormatError
from schemas.rows import HIDDEN_SHARDS
from schemas.typed_json import from_json
from schemas.work.messages import Message
from schemas.work.teach import TeachWork
from tasks.ranks.teach import HiddenWriter, Worker
from tasks.teachers import kinds
from tests.support.families import family_model
from tests.support.tiny import tiny_model

PREFIX = keys.stage_prefix("r", 0, "teach", "a" * 64)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    base = tmp_path_factory.mktemp("teachers")
    return [tiny_model(base / "a", seed=1), tiny_model(base / "b", seed=2, width=32, tied=False)]


def token_shard(store, key: str, seed: int) -> tuple[str, list[list[int]]]:
    rng = np.random.default_rng(seed)
    responses = [rng.integers(0, 259, n).astype(np.int32) for n in (1, 20, 7, 300)]
    data = shards.encode({"response_ids": ("I32", np.concatenate(responses))})
    store.put(key, data)
    return keys.digest_bytes(data), [r.tolist() for r in responses]


def make_work(
    root: Path, models: list[Path], kind: str = "opd"
) -> tuple[dict[str, Any], dict[str, tuple[list[int], list[int]]]]:
    """Work of two partitions, and trajectory_id -> (context, response)."""
    store = open_store(str(root))
    items, sequences = [], {}
    for number in range(2):
        digest, responses = token_shard(store, f"tokens/{number}", number)
        first = 0
        for index, response in enumerate(responses):
            trajectory_id = keys.trajectory_id("r", 0, f"prompt {number}", index)
            context = [(7 * index + number + i) % 259 for i in range(3 + 10 * index)]
            items.append(
                {"trajectory_id": trajectory_id, "context_ids": context, "shard_key": f"tokens/{number}",
                 "shard_digest": digest, "first_row": first, "response_tokens": len(response)}
            )  # fmt: skip
            sequences[trajectory_id] = (context, response)
            first += len(response)
    partitions = [
        {"partition": index, "teacher_index": index, "teacher_id": f"teacher {index}", "kind": kind,
         "items": items,
         "model": {"folder": str(model), "digest": kinds.of(kind).digests(model).model, "precision": "bf16",
                   "compute": "bf16"}}
        for index, model in enumerate(models)
    ]  # fmt: skip
    work = {"root": str(root), "run_id": "r", "iteration": 0, "stage_prefix": PREFIX, "run_epoch": 1,
            "batch_tokens": 100, "threads": 1, "dead_after_seconds": 5.0, "partitions": partitions}  # fmt: skip
    return work, sequences


def owned(entry: dict[str, Any]) -> str:
    return keys.partition_prefix(PREFIX, entry["partition"])


def worker(work: dict[str, Any], say: Any) -> Worker:
    return Worker(from_json(TeachWork, work, "work"), say)


def run_worker(work: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "work.json"
    path.write_text(json.dumps(work))
    return subprocess.run(
        [sys.executable, "-m", "tasks.ranks.teach", str(path)], capture_output=True, text=True, timeout=300, check=False
    )


def manifests(work: dict[str, Any]) -> list[dict[str, Any]]:
    store = open_store(work["root"])
    found = [leases.finished(store, owned(entry)) for entry in work["partitions"]]
    return [f.manifest for f in found if f is not None]


def test_states_land_where_the_rows_say(models, tmp_path):
    work, sequences = make_work(tmp_path / "data", models)
    for entry in work["partitions"]:
        entry["model"].update(precision="fp32", compute="fp32")
    done = run_worker(work, tmp_path)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [e["partition"] for e in events if e["event"] == "finished"] == [0, 1]
    last = [e for e in events if e["event"] == "progress"][-1]
    total = sum(len(context) + len(response) for context, response in sequences.values())
    assert (last["done"], last["total"], last["unit"]) == (total, total, "tokens")
    store = open_store(work["root"])
    for index, (manifest, model) in enumerate(zip(manifests(work), models, strict=True)):
        theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        data = store.get(manifest["rows_key"])
        assert keys.digest_bytes(data) == manifest["rows_digest"]
        rows = [json.loads(line) for line in data.splitlines()]
        assert manifest["num_rows"] == len(rows) == len(sequences)
        assert [r["trajectory_id"] for r in rows] == sorted(sequences)
        for entry in manifest["objects"]:
            assert keys.digest_bytes(store.get(entry["key"])) == entry["digest"]
        for row in rows:
            assert set(row) == set(HIDDEN_SHARDS.column_names())
            assert (row["teacher_index"], row["teacher_id"]) == (index, f"teacher {index}")
            context, response = sequences[row["trajectory_id"]]
            # Any tool of the ecosystem opens the object.
            hidden = load_safetensors(store.get(row["object_key"]))["hidden"]
            assert (hidden.dtype, hidden.shape[1]) == (torch.bfloat16, row["width"])
            part = hidden[row["first_object_row"] :][: row["rows"]]
            with torch.no_grad():
                states = theirs.model(torch.tensor([context + response])).last_hidden_state[0]
            want = states[len(context) - 1 : -1]
            assert part.shape == want.shape
            torch.testing.assert_close(part.float(), want, rtol=2**-8, atol=1e-5)
            shards.check_block_crcs(part.view(torch.uint16).numpy(), row["block_crcs"], "rows")


def test_models_of_transformers_leave_states_that_give_their_own_logits(models, tmp_path):
    families = ("GPT2", "Phi", "Cohere")
    folders = [family_model(tmp_path / f, f, tokenizer=models[0], dtype="bfloat16") for f in families]
    work, sequences = make_work(tmp_path / "data", folders, kind="transformers")
    done = run_worker(work, tmp_path)
    assert done.returncode == 0, done.stderr
    store = open_store(work["root"])
    for manifest, folder in zip(manifests(work), folders, strict=True):
        facts = kinds.of("transformers").facts(folder)
        head_VW = read_teacher_head(facts.head).double()
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        rows = [json.loads(line) for line in store.get(manifest["rows_key"]).splitlines()]
        assert [r["trajectory_id"] for r in rows] == sorted(sequences)
        for row in rows:
            assert row["width"] == facts.stored_width
            context, response = sequences[row["trajectory_id"]]
            hidden = load_safetensors(store.get(row["object_key"]))["hidden"]
            part = hidden[row["first_object_row"] :][: row["rows"]]
            with torch.no_grad():
                own_TV = theirs(torch.tensor([context + response])).logits[0, len(context) - 1 : -1].double()
            # Their logits are rounded to bf16, and another length of the sequence rounds other sums.
            atol = 2**-6 * float(own_TV.abs().max())
            torch.testing.assert_close(part.double() @ head_VW.T, own_TV, rtol=2**-7, atol=atol)


def test_a_rerun_is_a_no_op_and_another_batching_gives_the_same_bytes(models, tmp_path):
    events: list[str] = []

    def say(message: Message) -> None:
        events.append(message.event)

    work, _ = make_work(tmp_path / "data", models[:1])
    worker(work, say).run()
    assert set(events) == {"progress", "finished"}
    events.clear()
    worker(work, say).run()
    assert events == ["finished"]
    other, _ = make_work(tmp_path / "other", models[:1])
    worker(other | {"batch_tokens": 3000}, say).run()
    assert manifests(work)[0]["rows_digest"] == manifests(other)[0]["rows_digest"]
    assert manifests(work)[0]["objects"] == manifests(other)[0]["objects"]


def test_damage_is_named_on_stdout_and_in_the_status(models, tmp_path):
    work, _ = make_work(tmp_path / "data", models[:1])
    store = open_store(work["root"])
    data = bytearray(store.get("tokens/1"))
    data[-1] ^= 1
    store.put("tokens/1", bytes(data))
    done = run_worker(work, tmp_path)
    assert done.returncode == FormatError.exit_status
    error = json.loads(done.stdout.splitlines()[-1])
    assert (error["event"], error["kind"]) == ("error", "format error")
    assert "tokens/1" in error["text"]
    assert manifests(work) == []


def test_a_teacher_that_was_replaced_does_not_teach(models, tmp_path):
    work, _ = make_work(tmp_path / "data", models[:1])
    work["partitions"][0]["model"]["folder"] = str(shutil.copytree(models[0], tmp_path / "teacher"))
    config = tmp_path / "teacher" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.5}))
    with pytest.raises(ContractError, match=r"config\.json"):
        worker(work, lambda message: None).run()
    assert manifests(work) == []


def test_a_range_beyond_the_shard_is_refused(models, tmp_path):
    work, _ = make_work(tmp_path / "data", models[:1])
    work["partitions"][0]["items"][3]["response_tokens"] += 1
    with pytest.raises(ContractError, match="tokens/0"):
        worker(work, lambda message: None).run()


def test_sigterm_releases_the_partition(models, tmp_path):
    work, _ = make_work(tmp_path / "data", models[:1])
    entry = work["partitions"][0]
    for copy in range(1, 30):
        entry["items"] = entry["items"] + [
            i | {"trajectory_id": f"{copy}-{i['trajectory_id']}"} for i in entry["items"][:8]
        ]
    (tmp_path / "work.json").write_text(json.dumps(work | {"batch_tokens": 1}))
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.ranks.teach", str(tmp_path / "work.json")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["event"] == "progress"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    store = open_store(work["root"])
    assert leases.finished(store, owned(entry)) is None
    beat = json.loads(store.get(keys.heartbeat(owned(entry), 1)))
    assert beat["released"]
    heir = leases.acquire(store, owned(entry), owner={}, dead_after_seconds=600.0)
    assert isinstance(heir, leases.Lease)
    assert heir.epoch == 2


def test_objects_roll_and_a_long_trajectory_is_split(tmp_path):
    store = LocalStore(tmp_path)
    lease = leases.acquire(store, "owned", owner={}, dead_after_seconds=5.0)
    assert isinstance(lease, leases.Lease)
    writer = HiddenWriter(store, lease, {"teacher_index": 0}, width=4, object_bytes=10 * 8)
    rng = np.random.default_rng(0)
    states = {
        f"t{n}": rng.integers(0, 1 << 16, (rows, 4), dtype=np.uint16) for n, rows in enumerate((3, 7, 6, 25, 1, 10))
    }
    for trajectory_id, hidden_TE in states.items():
        writer.add(trajectory_id, hidden_TE)
    manifest = writer.finish()
    rows = [json.loads(line) for line in store.get(manifest.rows_key).splitlines()]
    assert [(r["trajectory_id"], r["first_token_row"], r["rows"]) for r in rows] == [
        ("t0", 0, 3), ("t1", 0, 7), ("t2", 0, 6), ("t3", 0, 10), ("t3", 10, 10), ("t3", 20, 5), ("t4", 0, 1),
        ("t5", 0, 10),
    ]  # fmt: skip
    for row in rows:
        data = store.get(row["object_key"])
        part = shards.decode(data, "x")["hidden"][row["first_object_row"] :][: row["rows"]]
        first = row["first_token_row"]
        np.testing.assert_array_equal(part, states[row["trajectory_id"]][first : first + row["rows"]])
        assert row["object_digest"] == keys.digest_bytes(data)
    assert len(manifest.objects) == len({r["object_key"] for r in rows}) == 6
    assert HiddenWriter(store, lease, {}, 4, 80).finish().objects == ()
