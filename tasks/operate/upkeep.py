"""`opd upkeep`: delete what only an interrupted run could have needed, once it is finished.

    token log and spilled KV of a partition,  when its manifest and its stage's manifest stand; all of its epochs
    checkpoints in the middle of its plan
    other objects of a partition              then too: those of superseded owners, which its manifest does not name
    a partition's folders on this node        then too, and nothing in them was written for a day
    folders of a run's other lives            of another root, or of this one before it was deleted; the same
    unfinished writes of killed processes     files or multipart uploads a day old, by the store's own clock
    epochs of a table's lease                 all but the newest _KEPT_EPOCHS

Nothing that a stage, `opd verify` or `opd show` reads is touched: rows, shards and manifests stay. It may run at any
time, beside live runs and beside itself, and be killed at any point: what is left of a log is a log, and the next
call goes on. A superseded owner that is still alive loses nothing but what nobody will read; what it writes later the
next call finds. Logs are what explains a strange trajectory, so nothing is deleted unless asked for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.store import ObjectStore, UnfinishedWrite
from infra.stores import open_store
from schemas import keys
from schemas.errors import ContractError
from schemas.keys import is_ours
from schemas.rows import TABLES
from tasks.runs.manifests import FinishedPartition, read_partition, read_stage
from tasks.runs.session import IN_USE, LOGS, TRAINING, life_of

STALE_SECONDS = 86_400.0
# A committer that was paused for as long as this many commits finds its lease gone, and Delta refuses it as well:
# the epoch is the version of its transaction (infra.tables).
_KEPT_EPOCHS = 64

_PARTITION_OBJECT = re.compile(
    r"(?P<prefix>runs/[^/]+/\d{5}/[^/]+/[^/]+)/p(?P<partition>\d{5})/e(?P<epoch>\d{6})/(?P<name>.+)"
)


@dataclass(frozen=True)
class Collected:
    """What was deleted, or would be: of `run_id`, or of the whole store where it is None."""

    what: str
    run_id: str | None
    num_objects: int
    num_bytes: int


def upkeep(
    root: str, run_ids: Sequence[str] | None = None, *, scratch: Path | None = None, dry_run: bool = False
) -> list[Collected]:
    """One line a run and kind. run_ids: None for all. scratch: this node's local folder of runs; None leaves it alone.

    Raises ContractError for a run that does not exist.
    """
    store = open_store(root)
    known = sorted({key.split("/")[1] for key in store.list("runs/")})
    for run_id in run_ids or ():
        if run_id not in known:
            raise ContractError(f"run {run_id} in {root}", expected="a run", found=f"none; runs are {known}",
                                safe="everything", next_command="opd show")  # fmt: skip
    collected = [line for run_id in known if run_ids is None or run_id in run_ids
                 for line in _partitions(store, run_id, scratch, dry_run)]  # fmt: skip
    leases_of_tables = [key for table in TABLES for key in _old_epochs(store, keys.table_lease(table))]
    collected.append(_delete(store, "epochs of table leases", None, leases_of_tables, dry_run))
    collected.append(_discard(store, dry_run))
    return collected


class _FinishedPartitions:
    """Partitions that both manifests, the stage's and their own, call finished at the same epoch; read once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._epochs: dict[str, dict[str, int]] = {}
        self._found: dict[tuple[str, int], FinishedPartition | None] = {}

    def get(self, prefix: str, partition: int) -> FinishedPartition | None:
        if prefix not in self._epochs:
            key = keys.stage_manifest(prefix)
            self._epochs[prefix] = read_stage(self._store, key).partitions if self._store.head(key) else {}
        epoch = self._epochs[prefix].get(str(partition))
        if epoch is None:
            return None
        if (prefix, partition) not in self._found:
            self._found[prefix, partition] = read_partition(self._store, prefix, partition)
        found = self._found[prefix, partition]
        return found if found is not None and found.epoch == epoch else None


def _partitions(store: ObjectStore, run_id: str, scratch: Path | None, dry_run: bool) -> list[Collected]:
    owned: dict[tuple[str, int], list[tuple[int, str, str]]] = {}
    for key in store.list(keys.run_prefix(run_id) + "/"):
        if place := _PARTITION_OBJECT.fullmatch(key):
            partition = place["prefix"], int(place["partition"])
            owned.setdefault(partition, []).append((int(place["epoch"]), place["name"], key))
    finished = _FinishedPartitions(store)
    segments: list[str] = []
    spills: list[str] = []
    checkpoints: list[str] = []
    superseded: list[str] = []
    for (prefix, partition), objects in owned.items():
        only_results = not any(
            name.startswith(("wal/", "life.json", "spill/", "checkpoints/")) for _, name, _ in objects
        )
        if only_results and len({epoch for epoch, _, _ in objects}) == 1:
            continue
        found = finished.get(prefix, partition)
        if found is None:
            continue
        named = {found.manifest.rows_key, *(entry.key for entry in found.manifest.objects)}
        # The newest segment first: what a crash leaves is the beginning of a log, and so a whole one.
        for epoch, name, key in sorted(objects, reverse=True):
            if name.startswith(("wal/", "life.json")):
                segments.append(key)
            elif name.startswith("spill/"):
                spills.append(key)
            elif name.startswith("checkpoints/"):
                checkpoints.append(key)
            elif epoch != found.epoch - 1 and key not in named:
                superseded.append(key)
    collected = [
        _delete(store, "segments of token logs", run_id, segments, dry_run),
        _delete(store, "spilled KV", run_id, spills, dry_run),
        _delete(store, "checkpoints in the middle of plans", run_id, checkpoints, dry_run),
        _delete(store, "objects of superseded owners", run_id, superseded, dry_run),
    ]
    if scratch is not None:
        stages = sorted({prefix for prefix, _ in owned})
        runs, life = scratch / run_id, life_of(store, run_id)
        folders = [*_local_folders(runs / life, stages, finished), *_other_lives(runs, life)]
        collected.append(_remove(run_id, _stale(runs, folders), dry_run))
    return collected


def _local_folders(local: Path, stages: Iterable[str], finished: _FinishedPartitions) -> list[Path]:
    """What workers of finished partitions left on this node: local logs, checkpoints in the middle of a plan."""
    found = []
    for folder in sorted((local / LOGS).glob("runs/*/*/rollout/*/p*")):
        prefix, _, partition = folder.relative_to(local / LOGS).as_posix().rpartition("/p")
        if partition.isdecimal() and finished.get(prefix, int(partition)) is not None:
            found.append(folder)
    for prefix in stages:
        folder = local / TRAINING / keys.local_name(keys.partition_prefix(prefix, 0))
        if folder.is_dir() and finished.get(prefix, 0) is not None:
            found.append(folder)
    return found


def _other_lives(runs: Path, life: str) -> list[Path]:
    """What runs of the same name left on this node under other roots, or under this one before it was deleted; only
    those that no driver has in use."""
    marks = sorted(runs.glob(f"*/{IN_USE}")) if life else []
    return [mark.parent for mark in marks if mark.parent.name != life and not _in_use(mark)]


def _in_use(mark: Path) -> bool:
    with contextlib.suppress(OSError), open(mark, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    return True


def _stale(local: Path, folders: Sequence[Path]) -> list[Path]:
    """Those in which nothing was written for a day, by the file system's own clock."""
    if not folders:
        return []
    with tempfile.NamedTemporaryFile(dir=local) as probe:
        now = os.stat(probe.name).st_mtime
    stale = []
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):  # somebody is at work there
            if all(now - path.stat().st_mtime >= STALE_SECONDS for path in (folder, *folder.rglob("*"))):
                stale.append(folder)
    return stale


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


def _is_ours(write: UnfinishedWrite) -> bool:
    """A file of the store's own folder, or an upload (key, id) to a key of ours: a bucket has other users."""
    return len(write.name) == 1 or is_ours(write.name[0])


def _discard(store: ObjectStore, dry_run: bool) -> Collected:
    found = [write for write in store.unfinished_writes(STALE_SECONDS) if _is_ours(write)]
    for write in () if dry_run else found:
        store.discard(write)
    return Collected("unfinished writes", None, len(found), sum(write.size_bytes for write in found))


def _remove(run_id: str, folders: Iterable[Path], dry_run: bool) -> Collected:
    sizes = []
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):  # another call was faster
            sizes += [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
            if not dry_run:
                shutil.rmtree(folder)
    return Collected("local files of finished partitions", run_id, len(sizes), sum(sizes))
