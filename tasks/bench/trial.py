"""A rollout stage in miniature, for benches: a random model, partitions of trajectories, the real parent and workers.

Neither Spark nor Prefect, tables nor rewards: what a partition's workers leave in the store is the result.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.stores import open_store
from ml.rollout.wal_recovery import read_folder
from schemas import config, keys
from schemas.rows import TRAJECTORIES, content_digest
from schemas.work.rollout import RolloutPartition, RolloutRequest
from tasks.bench.random_model import STOP_ID, VOCAB_SIZE, write_random_model
from tasks.inputs.models import model_digest
from tasks.runs.manifests import read_partition
from tasks.runs.session import LOGS, Session, spark_child
from tasks.stages.rollout import rollout_work
from tasks.workers.logs import local_log, stored_log
from tasks.workers.pool import Limits, Pool, Watcher

_RUN_ID = "bench"
_PROMPT_TOKENS = 12


@dataclass(frozen=True)
class Outcome:
    """Of one partition. rows: of opd.trajectories, in order of trajectory_id; content: their digest."""

    shard: bytes
    rows: list[dict[str, Any]]
    content: str


class Trial:
    """Partitions under one folder. `stage` names the object keys of one iteration."""

    def __init__(
        self,
        folder: Path,
        *,
        partitions: int,
        trajectories: int,
        response_tokens: int,
        max_sequences: int,
        seed: int,
        model_seed: int = 0,
    ) -> None:
        """trajectories: of each partition; response_tokens: the limit of a response; seed: of prompts and samples."""
        self.folder, self.seed = folder, seed
        self.partitions, self.trajectories, self.response_tokens = partitions, trajectories, response_tokens
        self.max_sequences = max_sequences
        self.model = folder / "model"
        if not self.model.exists():
            write_random_model(self.model, seed=model_seed, max_positions=_PROMPT_TOKENS + response_tokens)

    def requests(self, iteration: int, partition: int) -> tuple[RolloutRequest, ...]:
        """Work of one partition, as tasks.stages.rollout makes it from prompts."""
        rng = random.Random(f"{self.seed}:{iteration}:{partition}")
        requests = []
        for index in range(self.trajectories):
            prompt_id = f"prompt-{partition}-{index}"
            trajectory_id = keys.trajectory_id(_RUN_ID, iteration, prompt_id, 0)
            requests.append(
                RolloutRequest(
                    trajectory_id=trajectory_id,
                    prompt_id=prompt_id,
                    sample_index=0,
                    split="train",
                    prompt_ids=(1, *(rng.randrange(3, VOCAB_SIZE) for _ in range(_PROMPT_TOKENS - 1))),
                    sampling_key=keys.sampling_key(self.seed, trajectory_id),
                    max_response_tokens=self.response_tokens,
                    prompt={"prompt_id": prompt_id, "verifier": None},
                )
            )
        return tuple(requests)

    def stage(self, iteration: int) -> str:
        return keys.stage_prefix(_RUN_ID, iteration, "rollout", keys.digest(self.seed))

    def log(self, name: str, iteration: int, partition: int, epoch: int) -> list[tuple[str, bytes]]:
        """Segments of one worker's log: from its disk, or from the store once the partition has finished."""
        session = self._session(name)
        owned = keys.partition_prefix(self.stage(iteration), partition)
        return read_folder(local_log(session.scratch / LOGS, owned, epoch)) or stored_log(session.store, owned, epoch)

    def run(self, name: str, iteration: int = 0, watcher: Watcher | None = None) -> dict[int, Outcome]:
        """Sample all partitions under a root of their own, a worker each, whatever `watcher` does to them."""
        session = self._session(name)
        work = rollout_work(
            session.config,
            student_folder=self.model,
            student_version=model_digest(self.model),
            stop_ids=[STOP_ID],
            vocab_size=VOCAB_SIZE,
            workers=self.partitions,
            scratch=session.scratch,
            iteration=iteration,
            stage_prefix=self.stage(iteration),
            run_epoch=0,
            scoring={},
        )
        todo = {p: RolloutPartition(p, self.requests(iteration, p)) for p in range(self.partitions)}
        pool = Pool(session, "rollout", iteration, work, todo, self.partitions)
        # The attempts of one spot are what a watcher uses up on purpose.
        pool.run(Limits(max_attempts=1_000_000, grace_seconds=session.config.rollout.grace_seconds), watcher)
        return {p: self._outcome(session, iteration, p) for p in todo}

    def _session(self, name: str) -> Session:
        rollout = {
            "max_sequences": self.max_sequences, "max_response_tokens": self.response_tokens, "kv_bytes": 1 << 28,
            "seal_seconds": 0.2, "threads": 1,
        }  # fmt: skip
        settings = config.parse({
            "run_id": _RUN_ID, "seed": self.seed,
            "data": str(self.folder / name / "data"), "scratch": str(self.folder / name / "scratch"),
            "student": {"path": str(self.model)}, "teachers": [{"id": "none", "path": str(self.model)}],
            "prompts": {"datasets": [{"name": "none", "size": 1, "teachers": ["none"]}]}, "rollout": rollout,
        })  # fmt: skip
        return Session(settings, open_store(settings.data), spark_child(settings))

    def _outcome(self, session: Session, iteration: int, partition: int) -> Outcome:
        found = read_partition(session.store, self.stage(iteration), partition)
        assert found is not None, f"partition {partition} has no manifest"
        rows = [json.loads(line) for line in session.store.get(found.manifest.rows_key).splitlines()]
        shard = session.store.get(found.manifest.objects[0].key)
        return Outcome(shard, rows, content_digest(TRAJECTORIES, rows))


def lengths(outcomes: Sequence[Outcome]) -> list[int]:
    """Response tokens of every trajectory, partition by partition."""
    return [row["response_tokens"] for outcome in outcomes for row in outcome.rows]
