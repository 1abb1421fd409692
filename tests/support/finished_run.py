"""A run of one iteration as its four stages leave it, made without a model or a JVM: rows, shards, manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pyarrow as pa

from infra import leases, tables
from infra.store import ObjectStore
from infra.stores import open_store
from schemas import keys, shards
from schemas.rows import TABLES, json_lines
from schemas.typed_json import encode
from tasks.runs.finished import STAGES
from tasks.runs.stage import table_entry

RUN_ID = "made"
#: As version 0.1 wrote it, which had no identities of stages.
RECORD = {"config": {}, "models": {}, "prompt_files": [], "student_path": "s"}
_PRIMARY = {"rollout": "trajectories", "teach": "hidden_shards", "dispatch": "plan", "train": "metrics"}
_PROMPT = {
    "source": "a.jsonl", "domain": "d", "teachers": [{"teacher_id": "a", "weight": 1.0}], "messages": "[]",
    "answer": None, "verifier": None, "context": "{}",
}  # fmt: skip
PROMPT = {"prompt_id": keys.prompt_id(_PROMPT), **_PROMPT}
TOKENS = (4, 5)


def put_table(root: str | Path, table: str, rows: list[dict[str, Any]]) -> None:
    """Make these the rows of the whole table, by a writer that is not the product's."""
    spec = TABLES[table]
    deltalake.write_deltalake(
        tables.table_uri(str(root), table), pa.Table.from_pylist(rows, schema=tables.arrow_schema(spec)),
        mode="overwrite", partition_by=list(spec.slice_key),
    )  # fmt: skip


def make(root: Path, *, until: str = "train") -> dict[str, list[dict[str, Any]]]:
    """Stages up to `until`, two partitions of rollout. Rows by table, which stand in the tables too."""
    store = open_store(str(root))
    store.put(keys.run_record(RUN_ID, 1), keys.canonical_json(RECORD))
    store.put(f"prompts/a.{keys.digest([PROMPT['prompt_id']])[:16]}.jsonl", json_lines([PROMPT]))
    rows: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES} | {"prompts": [PROMPT]}
    for stage in STAGES[: STAGES.index(until) + 1]:
        _finish(store, stage, rows)
    for table in TABLES:
        put_table(root, table, rows[table])
    return rows


def prefix_of(stage: str) -> str:
    return keys.stage_prefix(RUN_ID, 0, stage, keys.digest(stage))


def _finish(store: ObjectStore, stage: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    table, prefix, place = _PRIMARY[stage], prefix_of(stage), {"run_id": RUN_ID, "iteration": 0, "stage": stage}
    epochs, row_keys, own, stats = {}, [], [], {}
    for partition in range(2 if stage == "rollout" else 1):
        owned = keys.partition_prefix(prefix, partition)
        lease = leases.acquire(store, owned, owner={"worker": "w"}, dead_after_seconds=5)
        assert isinstance(lease, leases.Lease)
        named, new_rows = _results(store, stage, keys.owned_object(owned, lease.epoch, ""), partition, rows)
        rows_key = keys.owned_object(owned, lease.epoch, "rows.jsonl")
        store.put(rows_key, json_lines(new_rows))
        stats = {"checkpoint": {"version": "v1", "export": named, "optimizer": []}} if stage == "train" else {}
        lease.finish(
            {
                "objects": named, "rows_key": rows_key, "rows_digest": keys.digest_bytes(json_lines(new_rows)),
                "num_rows": len(new_rows), "given_up": {}, "stats": {"verifier_failures": 0},
                "checkpoint": {"version": "v1"}, "fp8_inexact": [], "scoring": {},
            }
        )  # fmt: skip
        epochs[str(partition)] = lease.epoch + 1
        row_keys.append(rows_key)
        own += new_rows
    entries = {table: table_entry(table, place, row_keys, own)}
    rows[table] += own
    if stage == "train":
        steps = 1 + max(row["step"] for row in rows["plan"])
        further = [{"run_id": RUN_ID, "iteration": 0, "version": "v1", "parent": "v0", "format": "huggingface",
                    "config_digest": "c", "steps": steps, "keys": "{}"}]  # fmt: skip
        key = f"{prefix}/tables/checkpoints.jsonl"
        store.put(key, json_lines(further))
        entries["checkpoints"] = table_entry("checkpoints", place, [key], further)
        rows["checkpoints"] += further
    if stage == "dispatch":
        further = [{"run_id": RUN_ID, "iteration": 0, "stage": stage, "step": 0, "name": "packs",
                    "teacher_index": None, "value": 2.0}]  # fmt: skip
        key = f"{prefix}/tables/metrics.jsonl"
        store.put(key, json_lines(further))
        entries["metrics"] = table_entry("metrics", place, [key], further)
        rows["metrics"] += further
    manifest = {
        "stage": stage, "iteration": 0, "fingerprint": keys.digest(stage), "inputs": {}, "scoring": {},
        "partitions": epochs, "tables": entries, "stats": stats, "output_digest": keys.digest(["output", stage]),
    }  # fmt: skip
    store.put(keys.stage_manifest(prefix), encode(manifest))


def _results(
    store: ObjectStore, stage: str, folder: str, partition: int, rows: dict[str, list[dict[str, Any]]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(objects, rows) of one partition."""
    run = {"run_id": RUN_ID, "iteration": 0}

    def put(name: str, data: bytes) -> dict[str, Any]:
        store.put(folder + name, data)
        return {"key": folder + name, "digest": keys.digest_bytes(data), "bytes": len(data), "group": "export",
                "name": name}  # fmt: skip

    if stage == "rollout":
        n = TOKENS[partition]
        shard = put("tokens.safetensors", shards.encode({
            "prompt_ids": ("I32", np.arange(3, dtype=np.int32)), "response_ids": ("I32", np.arange(n, dtype=np.int32)),
            "logprobs_raw": ("F32", np.zeros(n, np.float32)), "logprobs_sampled": ("F32", np.zeros(n, np.float32)),
            "sampled_mask": ("U8", np.ones(n, np.uint8)),
        }))  # fmt: skip
        return [shard], [
            run | {
                "trajectory_id": f"t{partition}", "prompt_id": PROMPT["prompt_id"], "sample_index": partition,
                "split": "train", "status": "finished", "finish_reason": "stop", "prompt_tokens": 3,
                "response_tokens": n, "sampled_tokens": n, "reward": 0.5, "student_version": "v0",
                "partition": partition, "first_prompt_row": 0, "first_row": 0, "shard_digest": shard["digest"],
                "shard_key": shard["key"], "worker": "w", "num_preemptions": 0, "num_prefill_rebuilds": 0,
                "num_kv_restores": 0,
            }
        ]  # fmt: skip
    if stage == "teach":
        block = np.arange(sum(TOKENS) * 2, dtype=np.uint16).reshape(-1, 2)
        hidden = put("hidden-00000.safetensors", shards.encode({"hidden": ("BF16", block)}))
        out, first = [], 0
        for index, n in enumerate(TOKENS):
            out.append(run | {
                "trajectory_id": f"t{index}", "teacher_index": 0, "teacher_id": "a", "first_token_row": 0,
                "first_object_row": first, "rows": n, "dtype": "BF16", "width": 2,
                "block_crcs": shards.block_crcs(block[first : first + n].view(np.uint8)),
                "object_digest": hidden["digest"], "object_key": hidden["key"],
            })  # fmt: skip
            first += n
        return [hidden], out
    if stage == "dispatch":  # a step a trajectory
        return [], [
            run | {
                "split": "train", "step": index, "rank_slot": 0, "micro_batch": 0, "pack_id": 0, "offset": 0,
                "length": 3 + n, "trajectory_id": f"t{index}", "teacher_index": 0, "weight": 1.0,
                "denominator_tokens": n,
            }
            for index, n in enumerate(TOKENS)
        ]  # fmt: skip
    files = [put("config.json", b"{}"), put("model.safetensors", b"weights")]
    return files, [run | {"stage": "train", "step": 0, "name": "kl", "teacher_index": None, "value": 0.5}]
