"""`opd upkeep`: delete what only an interrupted run could have needed, once it is finished.

    token log and spilled KV of a partition   when its manifest and its stage's manifest stand; all of its epochs
    unfinished writes of killed processes     in a local store, older than a day by the file system's own clock
    epochs of a table's lease                 all but the newest _KEPT_EPOCHS

Nothing that a stage, `opd verify` or `opd show` reads is touched: rows, shards and manifests stay. It may run at any
time, beside live runs and beside itself, and be killed at any point: what is left of a log is a log, and the next
call goes on. Logs are what explains a strange trajectory, so nothing is deleted unless asked for.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.store import ObjectStore, abandoned_writes, open_store
from schemas import keys
from schemas.errors import ContractError
from schemas.rows import TABLES
from tasks.manifests import read_partition, read_stage

STALE_SECONDS = 86_400.0
# A committer that was paused for as long as this many commits finds its lease gone, and Delta refuses it as well:
# the epoch is the version of its transaction (infra.tables).
_KEPT_EPOCHS = 64

_ROLLOUT_OBJECT = re.compile(r"(?P<prefix>runs/[^/]+/\d{5}/rollout/[^/]+)/(?P<rest>.+)")
_PARTITION_OBJECT = re.compile(r"p(?P<partition>\d{5})/e\d{6}/(?P<kind>wal|spill)/[^/]+")


@dataclass(frozen=True)
class Collected:
    """What was deleted, or would be: of `run_id`, or of the whole store where it is None."""

    what: str
    run_id: str | None
    num_objects: int
    num_bytes: int


def upkeep(root: str, run_ids: Sequence[str] | None = None, *, dry_run: bool = False) -> list[Collected]:
    """One line a run and kind. run_ids: None for all. Raises ContractError for a run that does not exist."""
    store = open_store(root)
    known = sorted({key.split("/")[1] for key in store.list("runs/")})
    for run_id in run_ids or ():
        if run_id not in known:
            raise ContractError(f"run {run_id} in {root}", expected="a run", found=f"none; runs are {known}",
                                safe="everything", next_command="opd show")  # fmt: skip
    collected = [line for run_id in known if run_ids is None or run_id in run_ids
                 for line in _logs(store, run_id, dry_run)]  # fmt: skip
    leases_of_tables = [key for table in TABLES for key in _old_epochs(store, keys.table_lease(table))]
    collected.append(_delete(store, "epochs of table leases", None, leases_of_tables, dry_run))
    collected.append(_unlink(abandoned_writes(store, STALE_SECONDS), dry_run))
    return collected


def _logs(store: ObjectStore, run_id: str, dry_run: bool) -> list[Collected]:
    stages: dict[str, dict[tuple[int, str], list[str]]] = {}
    for key in store.list(keys.run_prefix(run_id) + "/"):
        place = _ROLLOUT_OBJECT.fullmatch(key)
        found = place and _PARTITION_OBJECT.fullmatch(place["rest"])
        if place and found:
            partitions = stages.setdefault(place["prefix"], {})
            partitions.setdefault((int(found["partition"]), found["kind"]), []).append(key)
    segments: list[str] = []
    spills: list[str] = []
    for prefix, partitions in stages.items():
        finished = _finished(store, prefix, {partition for partition, _ in partitions})
        for (partition, kind), found in partitions.items():
            if partition in finished:
                # The newest segment first: what a crash leaves is the beginning of a log, and so a whole one.
                (segments if kind == "wal" else spills).extend(sorted(found, reverse=True))
    return [
        _delete(store, "segments of token logs", run_id, segments, dry_run),
        _delete(store, "spilled KV", run_id, spills, dry_run),
    ]


def _finished(store: ObjectStore, prefix: str, partitions: Iterable[int]) -> set[int]:
    """Partitions that both manifests, the stage's and their own, call finished at the same epoch."""
    key = keys.stage_manifest(prefix)
    if store.head(key) is None:
        return set()
    epochs = read_stage(store, key)["partitions"]
    done = {partition: read_partition(store, prefix, partition) for partition in partitions}
    return {p for p, finished in done.items() if finished is not None and epochs.get(str(p)) == finished.epoch}


def _old_epochs(store: ObjectStore, owned: str) -> list[str]:
    """Epochs and heartbeats, oldest first, so that what a crash leaves has no gap."""
    old = store.list(keys.epochs(owned))[:-_KEPT_EPOCHS]
    beats = [keys.heartbeat(owned, int(key.rpartition("/")[2].removesuffix(".json"))) for key in old]
    return [key for pair in zip(beats, old, strict=True) for key in pair]


def _delete(store: ObjectStore, what: str, run_id: str | None, found: Iterable[str], dry_run: bool) -> Collected:
    sizes = []
    for key in found:
        info = store.head(key)
        if info is None:
            continue  # another call was faster; or a lease that never beat
        if not dry_run:
            store.delete(key)
        sizes.append(info.size_bytes)
    return Collected(what, run_id, len(sizes), sum(sizes))


def _unlink(paths: Iterable[Path], dry_run: bool) -> Collected:
    sizes = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another call was faster
            size = path.stat().st_size
            if not dry_run:
                path.unlink()
            sizes.append(size)
    return Collected("unfinished writes", None, len(sizes), sum(sizes))
