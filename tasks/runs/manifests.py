"""Reading the JSON objects that a run's truth rests on: its record, its stages' manifests, its partitions' manifests.

They are read by their types. So an object that is damaged but still JSON raises a FormatError that names it and the
field, and not another error later. Fields that a later version has added are passed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from infra import leases
from infra.store import ObjectStore
from schemas import keys
from schemas.errors import FormatError
from schemas.typed_json import from_json, parse
from schemas.work.manifest import PARTITION_MANIFESTS, Lost, PartitionManifest, RolloutManifest, StageManifest
from schemas.work.record import FlowRun, RunRecord, StageIdentity

T = TypeVar("T")


@dataclass(frozen=True)
class FinishedPartition:
    """epoch: of the manifest."""

    epoch: int
    manifest: PartitionManifest


def read_record(store: ObjectStore, key: str) -> RunRecord:
    """A run record. Raises FormatError for another object, StoreError for a missing one; so do the others here."""
    return _read(store, key, RunRecord)


def read_stage(store: ObjectStore, key: str) -> StageManifest:
    """The manifest of a finished stage."""
    manifest, where = _read(store, key, StageManifest), f"{store.root}/{key}"
    for name in manifest.partitions:
        if not name.isdecimal():
            raise FormatError(f"{where}, partitions", expected="numbers of partitions", found=repr(name))
    if manifest.stage == "train":
        student = manifest.student(where)
        for file in (*student.export, *student.optimizer):
            _check_name(file.name, f"{where}, stats, checkpoint")
    return manifest


def _check_name(name: str, where: str) -> None:
    """Whoever may write to the store must not write files of whoever reads it: a name is one part of a path."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise FormatError(where, expected="names of files in one folder", found=repr(name)[:100])


def read_partition(store: ObjectStore, stage_prefix: str, partition: int) -> FinishedPartition | None:
    """A finished partition with its manifest; None for one that is not finished."""
    owned = keys.partition_prefix(stage_prefix, partition)
    found = leases.finished(store, owned)
    if found is None:
        return None
    kind = PARTITION_MANIFESTS.get(stage_prefix.split("/")[-2], PartitionManifest)
    where = f"{store.root}/{keys.epoch(owned, found.epoch)}, manifest"
    manifest = from_json(kind, found.manifest, where, pass_over_unknown=True)
    if isinstance(manifest, RolloutManifest):
        from_json(int, manifest.stats.get("verifier_failures"), f"{where}, stats, verifier_failures")
    return FinishedPartition(found.epoch, manifest)


def read_revoked(store: ObjectStore, stage_prefix: str) -> dict[str, Lost]:
    """By partition, what `opd repair` has found lost; empty for a whole stage."""
    key = keys.revoked(stage_prefix)
    return _read(store, key, dict[str, Lost]) if store.head(key) is not None else {}


def read_identity(store: ObjectStore, key: str) -> StageIdentity:
    """What a stage of an iteration is under a run record."""
    return _read(store, key, StageIdentity)


def read_flow_run(store: ObjectStore, key: str) -> str:
    """The run that a scheduled flow run drives."""
    return _read(store, key, FlowRun).run_id


def _read(store: ObjectStore, key: str, kind: type[T]) -> T:
    data, where = store.get(key), f"{store.root}/{key}"
    try:
        value = parse(data, where)
    except FormatError as error:
        raise FormatError(
            where, expected="a JSON object", found=error.found, safe="every other object",
            next_command="take the object from a backup; or another run_id",
        ) from error  # fmt: skip
    return from_json(kind, value, where, pass_over_unknown=True)
