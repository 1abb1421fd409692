"""One rollout worker: `python -m tasks.ranks.rollout WORK.json`, a RolloutWork.

    take an epoch -> replay the newest log -> base segment -> sample, log, acknowledge -> shard, rows, manifest

It may die at any moment. Its heir takes the next epoch, continues every trajectory at the token after the last
logged one, and writes the same bytes. SIGTERM: the step in flight ends, its log and then the KV of what is not
finished go to the store, exit status 75. Nothing of an owner whose epoch is over is ever read.
"""

from __future__ import annotations

import functools
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from infra import leases
from infra.stores import open_store
from ml.device import observed, rank_device
from ml.model import Transformer
from ml.rollout.engine import RolloutEngine
from ml.rollout.pages import pages_for
from ml.rollout.requests import EngineConfig
from ml.rollout.sampling import SamplingParams
from ml.rollout.spill import KvLayout
from ml.rollout.together import dismiss
from ml.rollout.wal import TokenLog
from schemas import keys
from schemas.errors import EXIT_PREEMPTED, ConfigError, ContractError
from schemas.typed_json import to_json
from schemas.work import messages
from schemas.work.manifest import RolloutManifest
from schemas.work.rollout import RolloutPartition, RolloutRequest, RolloutWork
from tasks.ranks.process import Preempted, Say, StopSignal, own, run_rank, say
from tasks.ranks.rollout_partition import Partition
from tasks.ranks.rollout_results import publish
from tasks.ranks.shared_student import load_student
from tasks.rewards.child import Rewarder
from tasks.rewards.verifiers import source_digest


def _check_scoring(scoring: dict[str, str]) -> None:
    """Raises ContractError for a verifier that is not the one that the stage was started with."""
    for name, digest in scoring.items():
        if source_digest(name) != digest:
            raise ContractError(
                f"verifier {name!r}", expected=f"the source that the stage was started with, {digest[:16]}",
                found=source_digest(name)[:16], safe="every response is in the log and is scored again",
                next_command="the same command again",
            )  # fmt: skip


class Worker:
    """Runs the partitions of one work file, one after another."""

    def __init__(self, work: RolloutWork, work_path: Path, say: Say, stop: StopSignal) -> None:
        self.work, self.work_path, self.say, self.stop = work, work_path, say, stop
        self.store, self.scratch = open_store(work.root), Path(work.scratch)
        self._engine: RolloutEngine | None = None

    @functools.cached_property
    def model(self) -> Transformer:
        return load_student(self.work, self.work_path)

    def engine(self, log: TokenLog) -> RolloutEngine:
        """One for all partitions, since a GPU takes seconds to capture its graphs; it begins anew with each log."""
        if self._engine is None:
            sampling = self.work.sampling
            self._engine = RolloutEngine(
                self.model, self._engine_config(),
                SamplingParams(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p),
                self.work.stop_ids, self.work.vocab_size, log,
            )  # fmt: skip
        else:
            self._engine.begin(log)
        return self._engine

    def _engine_config(self) -> EngineConfig:
        """With pages for the largest partition, as far as the configuration grants them."""
        sizes, digest = self.work.engine, self.work.student.digest
        page_bytes = KvLayout.of(self.model, digest).cache_bytes * sizes.page_tokens
        partitions = [
            sorted(pages_for(len(r.prompt_ids) + r.max_response_tokens, sizes.page_tokens) for r in entry.requests)
            for entry in self.work.partitions
        ]
        longest = max(pages[-1] for pages in partitions)
        wanted = max(sum(pages[-sizes.max_sequences :]) for pages in partitions)
        num_pages = min(sizes.kv_bytes // page_bytes, wanted)
        if num_pages < longest:
            raise ConfigError(
                "rollout.kv_bytes", expected=f"{longest * page_bytes} for the longest sequence",
                found=str(sizes.kv_bytes),
            )  # fmt: skip
        return EngineConfig.on(
            self.model.head_weight.device, max_sequences=sizes.max_sequences, page_tokens=sizes.page_tokens,
            num_pages=num_pages, student_digest=digest,
        )  # fmt: skip

    def run(self) -> None:
        """Raises Preempted, or OpdError for the partition that cannot go on; those before it are finished."""
        work = self.work
        torch.set_num_threads(work.threads)
        with Rewarder(Path(work.student.folder), work.verifier, work.max_verifier_failures) as rewarder:
            for entry in work.partitions:
                self._own(entry, rewarder)
        if "model" in vars(self):
            self._engine = None
            dismiss(self.model.group)

    def _own(self, entry: RolloutPartition, rewarder: Rewarder) -> None:
        owned = keys.partition_prefix(self.work.stage_prefix, entry.partition)
        owner = {"stage": "rollout", "partition": entry.partition}
        with self.stop.at_once():
            lease = own(self.store, owned, self.work, owner, self.say)
        leases.finish_with(lease, lambda lease: to_json(self._partition(lease, entry, rewarder)))
        # The store has every segment; on this node nobody will look for them again.
        shutil.rmtree(self.scratch / owned, ignore_errors=True)
        self.say(messages.Finished(lease.epoch, entry.partition))

    def _partition(self, lease: leases.Lease, entry: RolloutPartition, rewarder: Rewarder) -> RolloutManifest:
        started = time.monotonic()
        partition = Partition(self, lease, entry)
        responses = partition.sample()
        common = {"run_id": self.work.run_id, "iteration": self.work.iteration, "partition": partition.index,
                  "student_version": self.work.student.digest}  # fmt: skip

        def reward(request: RolloutRequest, response_ids: list[int]) -> float | None:
            lease.progress()
            return rewarder(request.prompt, response_ids)

        rewarder.start_partition()
        _check_scoring(self.work.scoring)
        with self.stop.at_once():  # every response is in the store: a later worker scores them again
            manifest = publish(
                self.store,
                functools.partial(keys.owned_object, lease.owned, lease.epoch),
                partition.requests,
                [responses[r.trajectory_id] for r in partition.requests],
                reward,
                common,
            )
        stats = {"verifier_failures": rewarder.failures, "seconds": time.monotonic() - started}
        stats |= observed(rank_device())
        return replace(manifest, stats=manifest.stats | stats, scoring=self.work.scoring)


def main(arguments: list[str]) -> int:
    stop = StopSignal()
    try:
        return run_rank(arguments, RolloutWork, lambda work: Worker(work, Path(arguments[0]), say, stop).run())
    except Preempted:
        return EXIT_PREEMPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
