"""One teacher worker: `python -m tasks.ranks.teach WORK.json`, a TeachWork.

    take an epoch -> read the responses -> hidden states, in order of trajectory_id -> shards, rows, manifest

Bytes depend on the model and the items alone, so an heir writes the same again. SIGTERM releases the partition in
work and exits with status 75; partitions before it are finished.
"""

from __future__ import annotations

import functools
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from infra import leases
from infra.store import ObjectStore
from infra.stores import open_store
from ml.device import observed, rank_device
from ml.teacher import Reading, Teacher
from schemas import keys, shards
from schemas.errors import EXIT_PREEMPTED, ContractError, FormatError
from schemas.rows import json_lines
from schemas.typed_json import to_json
from schemas.work import messages
from schemas.work.manifest import PartitionManifest, StoredObject
from schemas.work.model import ModelSource
from schemas.work.teach import TeachItem, TeachPartition, TeachWork
from tasks.ranks.process import Say, own, run_rank, say
from tasks.teachers import kinds

OBJECT_BYTES = 32 << 20


class HiddenWriter:
    """Rows of hidden states into whole objects of about object_bytes, and the table rows that find them.

    A trajectory's rows stay in one object unless they alone exceed object_bytes.
    """

    def __init__(
        self, store: ObjectStore, lease: leases.Lease, columns: dict[str, Any], width: int, object_bytes: int
    ) -> None:
        self._store, self._lease, self._columns, self._width = store, lease, columns, width
        self._capacity_rows = max(1, object_bytes // (2 * width))
        self._parts: list[np.ndarray] = []
        self._placed: list[dict[str, Any]] = []
        self._num_rows = 0
        self.objects: list[StoredObject] = []
        self.rows: list[dict[str, Any]] = []

    def add(self, trajectory_id: str, hidden_TE: np.ndarray) -> None:
        """hidden_TE: bf16 as uint16, one row a response token."""
        if self._num_rows + len(hidden_TE) > self._capacity_rows:
            self._flush()
        for first in range(0, len(hidden_TE), self._capacity_rows):
            self._place(trajectory_id, first, hidden_TE[first : first + self._capacity_rows])

    def _place(self, trajectory_id: str, first_token_row: int, part_TE: np.ndarray) -> None:
        self._placed.append(
            self._columns
            | {
                "trajectory_id": trajectory_id,
                "first_token_row": first_token_row,
                "first_object_row": self._num_rows,
                "rows": len(part_TE),
                "dtype": "BF16",
                "width": self._width,
                "block_crcs": shards.block_crcs(part_TE),
            }
        )
        self._parts.append(part_TE)
        self._num_rows += len(part_TE)
        if self._num_rows >= self._capacity_rows:
            self._flush()

    def _flush(self) -> None:
        if not self._parts:
            return
        data = shards.encode({"hidden": ("BF16", np.concatenate(self._parts))})
        key = keys.owned_object(self._lease.owned, self._lease.epoch, f"hidden-{len(self.objects):05d}.safetensors")
        self._lease.check()
        self._store.put(key, data)
        found = {"object_digest": keys.digest_bytes(data), "object_key": key}
        self.objects.append(StoredObject(key, found["object_digest"], len(data)))
        self.rows.extend(row | found for row in self._placed)
        self._parts, self._placed, self._num_rows = [], [], 0

    def finish(self) -> PartitionManifest:
        """Writes what is left and the rows; gives the partition manifest, without stats."""
        self._flush()
        data = json_lines(self.rows)
        key = keys.owned_object(self._lease.owned, self._lease.epoch, "rows.jsonl")
        self._store.put(key, data)
        return PartitionManifest(tuple(self.objects), key, keys.digest_bytes(data), len(self.rows), stats={})


class Responses:
    """Response ids of trajectories, out of the rollout's token shards; each shard is fetched and checked once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._ids: dict[tuple[str, str], np.ndarray] = {}

    def read(self, item: TeachItem) -> list[int]:
        shard = (item.shard_key, item.shard_digest)
        if shard not in self._ids:
            self._ids[shard] = self._fetch(*shard)
        first, num_tokens = item.first_row, item.response_tokens
        ids = self._ids[shard][first : first + num_tokens]
        if len(ids) != num_tokens:
            raise ContractError(
                f"{item.shard_key}, trajectory {item.trajectory_id}",
                expected=f"{num_tokens} tokens from row {first}", found=f"{len(self._ids[shard])} rows in all",
            )  # fmt: skip
        return ids.tolist()

    def _fetch(self, key: str, digest: str) -> np.ndarray:
        data = self._store.get(key)
        if keys.digest_bytes(data) != digest:
            raise FormatError(
                key, expected=f"SHA-256 {digest}", found=keys.digest_bytes(data), safe="every other object",
                next_command="opd repair RUN",
            )  # fmt: skip
        tensors = shards.decode(data, key)
        if "response_ids" not in tensors:
            raise FormatError(key, expected="a tensor response_ids", found=str(sorted(tensors)))
        return tensors["response_ids"]


class Worker:
    """Runs the partitions of one work file, one after another, holding one teacher at a time."""

    def __init__(self, work: TeachWork, say: Say) -> None:
        self.work, self.say = work, say
        self.store = open_store(work.root)
        self._loaded: tuple[ModelSource, Teacher] | None = None

    def run(self) -> None:
        """Raises OpdError for the partition that cannot go on; those before it are finished."""
        torch.set_num_threads(self.work.threads)
        for entry in self.work.partitions:
            owned = keys.partition_prefix(self.work.stage_prefix, entry.partition)
            owner = {"stage": "teach", "partition": entry.partition}
            lease = own(self.store, owned, self.work, owner, self.say)
            leases.finish_with(lease, functools.partial(self._partition, entry))
            self.say(messages.Finished(lease.epoch, entry.partition))

    def _teacher(self, entry: TeachPartition) -> Teacher:
        if self._loaded is None or self._loaded[0] != entry.model:
            self._loaded = None  # two teachers need not fit side by side
            self._loaded = (entry.model, kinds.of(entry.kind).load(entry.model, rank_device()))
        return self._loaded[1]

    def _partition(self, entry: TeachPartition, lease: leases.Lease) -> dict[str, Any]:
        started = time.monotonic()
        with lease.patience(leases.LONG_SECONDS):
            teacher = self._teacher(entry)
        items = sorted(entry.items, key=lambda item: item.trajectory_id)
        columns = {"run_id": self.work.run_id, "iteration": self.work.iteration,
                   "teacher_index": entry.teacher_index, "teacher_id": entry.teacher_id}  # fmt: skip
        writer = HiddenWriter(self.store, lease, columns, teacher.facts.stored_width, OBJECT_BYTES)
        total = sum(item.tokens for item in items)
        done = 0
        states = teacher.hidden_states(self._readings(items), batch_tokens=self.work.batch_tokens)
        for item, hidden_TE in zip(items, states, strict=True):
            lease.progress()
            writer.add(item.trajectory_id, hidden_TE.view(torch.uint16).numpy())
            done += item.tokens
            self.say(messages.Progress(done, total, "tokens", entry.partition))
        stats = {"tokens": total, "seconds": time.monotonic() - started}
        return to_json(replace(writer.finish(), stats=stats | observed(teacher.device)))

    def _readings(self, items: list[TeachItem]) -> Iterator[Reading]:
        responses = Responses(self.store)
        for item in items:
            yield Reading(item.context_ids, responses.read(item))


def main(arguments: list[str]) -> int:
    # Leaving through SystemExit lets the lease release itself, so that an heir need not wait.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_PREEMPTED))
    return run_rank(arguments, TeachWork, lambda work: Worker(work, say).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
