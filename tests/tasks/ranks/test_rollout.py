"""A rollout worker's partitions share its engine, and nothing else."""

from __future__ import annotations

import json
import random
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from ml.model_files import model_digest
from ml.rollout.engine import RolloutEngine
from ml.rollout.requests import EngineConfig
from schemas import keys
from schemas.rows import TRAJECTORIES, content_digest
from schemas.typed_json import from_json
from schemas.work.rollout import RolloutWork
from tasks.ranks import rollout
from tests.support.rollout_site import DEAD_AFTER_SECONDS
from tests.support.tiny import tiny_model

PREFIX = keys.stage_prefix("r", 0, "rollout", "e" * 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), seed=4)


def partition(index: int, count: int, prompt_tokens: int, response_tokens: int) -> dict[str, Any]:
    """Trajectories of one partition; each pair has the prompt of a pair in every other partition of its sizes."""
    r = random.Random(prompt_tokens)
    requests = []
    for i in range(count):
        prompt_id = f"prompt{i // 2}"
        trajectory_id = keys.trajectory_id("r", index, prompt_id, i % 2)
        if i % 2 == 0:
            prompt_ids = [r.randrange(3, 259) for _ in range(prompt_tokens)]
        requests.append({
            "trajectory_id": trajectory_id, "prompt_id": prompt_id, "sample_index": i % 2, "split": "train",
            "prompt_ids": prompt_ids, "sampling_key": keys.sampling_key(index, trajectory_id),
            "max_response_tokens": response_tokens, "prompt": {"prompt_id": prompt_id, "verifier": None},
        })  # fmt: skip
    return {"partition": index, "requests": requests}


PARTITIONS = [partition(0, 4, 20, 30), partition(1, 8, 40, 60), partition(2, 6, 40, 50)]


def outcome(folder: Path, model: Path, partitions: list[dict[str, Any]]) -> dict[str, bytes]:
    """Shards, and digests of the rows' content, that one worker leaves, by their keys."""
    folder.mkdir()
    work = {
        "root": str(folder / "data"), "scratch": str(folder / "scratch"), "run_id": "r", "iteration": 0,
        "stage_prefix": PREFIX, "run_epoch": 1,
        "student": {"folder": str(model), "precision": "bf16", "digest": model_digest(model), "compute": "bf16"},
        "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0}, "stop_ids": [2],
        "vocab_size": 259, "engine": {"max_sequences": 5, "page_tokens": 16, "kv_bytes": 1 << 22}, "ranks": 1,
        "threads": 1, "seal_seconds": 0.1, "grace_seconds": 20.0, "dead_after_seconds": DEAD_AFTER_SECONDS,
        "verifier": {"timeout_seconds": 30.0, "memory_bytes": 4 << 30}, "max_verifier_failures": 0,
        "scoring": {}, "partitions": partitions,
    }  # fmt: skip
    path = folder / "work.json"
    path.write_text(json.dumps(work))
    handler = signal.getsignal(signal.SIGTERM)
    worker = rollout.Worker(from_json(RolloutWork, work, "work"), path, lambda message: None, rollout.StopSignal())
    signal.signal(signal.SIGTERM, handler)
    worker.run()
    left = {}
    for key in worker.store.list(PREFIX):
        if key.endswith("/tokens.safetensors"):
            left[key] = worker.store.get(key)
        elif key.endswith("/rows.jsonl"):
            rows = [json.loads(line) for line in worker.store.get(key).splitlines()]
            left[key] = content_digest(TRAJECTORIES, rows).encode()
    return left


def check_crcs(shard: bytes) -> None:
    """The metadata say the CRC-32 of each 256 rows of each of the five columns."""
    metadata = json.loads(shard[8 : 8 + int.from_bytes(shard[:8], "little")])["__metadata__"]
    columns = load(shard)
    assert len(columns) == 5
    assert metadata == {"format": "opd-tokens-2"} | {
        f"crcs.{name}": "".join(f"{zlib.crc32(rows[i : i + 256].tobytes()):08x}" for i in range(0, len(rows), 256))
        for name, rows in columns.items()
    }


def test_partitions_share_an_engine_as_large_as_the_largest_needs(tmp_path, model, monkeypatch):
    made: list[EngineConfig] = []

    class Counted(RolloutEngine):
        def __init__(self, model, config, *rest):
            made.append(config)
            super().__init__(model, config, *rest)

    monkeypatch.setattr(rollout, "RolloutEngine", Counted)
    together = outcome(tmp_path / "together", model, PARTITIONS)
    # Five sequences of 100 tokens in pages of 16.
    assert [config.num_pages for config in made] == [5 * 7]
    apart: dict[str, bytes] = {}
    for entry in PARTITIONS:
        apart |= outcome(tmp_path / str(entry["partition"]), model, [entry])
    assert [config.num_pages for config in made[1:]] == [4 * 4, 5 * 7, 5 * 6]
    assert len(together) == 6
    for key in (key for key in together if key.endswith("/tokens.safetensors")):
        check_crcs(together[key])
    assert together == apart
