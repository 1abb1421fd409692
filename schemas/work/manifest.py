"""Manifests in the store: proof that a partition, and a stage, have finished, and what they left.

A manifest is written whole and never changed. Fields with a default are those that older versions did not write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from schemas import typed_json

#: Figures for people: counts, seconds, the device.
Stats = dict[str, str | int | float]


@dataclass(frozen=True)
class StoredObject:
    """digest: SHA-256 of its bytes."""

    key: str
    digest: str
    bytes: int


@dataclass(frozen=True)
class ModelObject(StoredObject):
    """A file of a folder. group: "export" or "optimizer"; name: of the file."""

    group: str
    name: str


@dataclass(frozen=True)
class PartitionManifest:
    """What a partition of a stage left. rows_key: JSON lines of its rows of the stage's table."""

    objects: tuple[StoredObject, ...]
    rows_key: str
    rows_digest: str
    num_rows: int
    stats: Stats

    @property
    def seconds(self) -> float:
        seconds = self.stats.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else 0.0

    @property
    def error(self) -> str | None:
        """What went wrong although it finished."""
        return None

    @property
    def scored_by(self) -> dict[str, str]:
        """verifier -> digest of its source, of the rewards that it holds."""
        return {}


@dataclass(frozen=True)
class RolloutManifest(PartitionManifest):
    """given_up: trajectory_id -> why. scoring: verifier -> digest of its source."""

    given_up: dict[str, str]
    scoring: dict[str, str] = field(default_factory=dict)

    @property
    def error(self) -> str | None:
        return "; ".join(f"{trajectory_id}: {text}" for trajectory_id, text in self.given_up.items()) or None

    @property
    def scored_by(self) -> dict[str, str]:
        return self.scoring

    @property
    def verifier_failures(self) -> int:
        return typed_json.from_json(int, self.stats.get("verifier_failures"), "stats, verifier_failures")


@dataclass(frozen=True)
class CheckpointRow:
    """The row of opd.checkpoints of the student that was trained."""

    version: str
    run_id: str | None = None
    iteration: int | None = None
    parent: str | None = None
    format: str | None = None
    config_digest: str | None = None
    steps: int | None = None
    keys: str | None = None


@dataclass(frozen=True)
class TrainManifest(PartitionManifest):
    """objects: of the student and its optimizer. fp8_inexact: linears whose MXFP4 values FP8 would change. notices:
    what went wrong and did not end the training."""

    objects: tuple[ModelObject, ...]
    checkpoint: CheckpointRow
    fp8_inexact: tuple[str, ...]
    notices: tuple[str, ...] = ()

    @property
    def error(self) -> str | None:
        return "; ".join(self.notices) or None


#: Of the stages that say more than others.
PARTITION_MANIFESTS: dict[str, type[PartitionManifest]] = {"rollout": RolloutManifest, "train": TrainManifest}


@dataclass(frozen=True)
class TableSlice:
    """Rows that a stage has put into one table. slice: column -> value of all of them. row_keys: their objects.

    digest: of their content columns; whole_digest: of the observed ones too.
    """

    slice: dict[str, str | int]
    row_keys: tuple[str, ...]
    num_rows: int
    digest: str
    whole_digest: str


@dataclass(frozen=True)
class StoredFile:
    """A file of a trained student's folder, as an object."""

    name: str
    key: str
    digest: str


@dataclass(frozen=True)
class TrainedStudent:
    """version: digest of the model. export: its Hugging Face folder; optimizer: its moments."""

    version: str
    export: tuple[StoredFile, ...]
    optimizer: tuple[StoredFile, ...]


@dataclass(frozen=True)
class StageManifest:
    """partitions: number, in decimal digits -> epoch of its manifest. stats: figures for people, and of training what
    `student` gives. output_digest: of all that the stage made. scoring: None as version 0.1 wrote it."""

    stage: str
    iteration: int
    fingerprint: str
    inputs: dict[str, str]
    partitions: dict[str, int]
    tables: dict[str, TableSlice]
    stats: dict[str, Any]
    output_digest: str
    scoring: dict[str, str] | None = None

    def student(self, where: str = "stage manifest") -> TrainedStudent:
        """Of training. Raises FormatError, with `where`."""
        checkpoint = self.stats.get("checkpoint")
        return typed_json.from_json(TrainedStudent, checkpoint, f"{where}, stats, checkpoint", pass_over_unknown=True)


@dataclass(frozen=True)
class Lost:
    """A partition whose objects `opd repair` found lost. epoch: of its manifest."""

    epoch: int
    reason: str
