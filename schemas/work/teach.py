"""What a teacher worker is given: one file a worker, written by tasks.stages.teach."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.work.model import ModelSource


@dataclass(frozen=True)
class TeachItem:
    """One trajectory to be read. context_ids: the teacher's own rendering of the prompt.

    The response lies in rows first_row to first_row + response_tokens of the token shard.
    """

    trajectory_id: str
    context_ids: tuple[int, ...]
    shard_key: str
    shard_digest: str
    first_row: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens that the teacher reads."""
        return len(self.context_ids) + self.response_tokens


@dataclass(frozen=True)
class TeachPartition:
    """Whole trajectories of one teacher. kind: of the teacher (`tasks.teachers.kinds`)."""

    partition: int
    teacher_index: int
    teacher_id: str
    kind: str
    model: ModelSource
    items: tuple[TeachItem, ...]


@dataclass(frozen=True)
class TeachWork:
    """Partitions that a worker takes one after another.

    root: of the data. stage_prefix: of the partitions' keys. run_epoch: of the run's lease, under which the partitions
    are wanted. batch_tokens: of one forward pass. threads: of this worker.
    """

    root: str
    run_id: str
    iteration: int
    stage_prefix: str
    run_epoch: int
    batch_tokens: int
    threads: int
    dead_after_seconds: float
    partitions: tuple[TeachPartition, ...]


@dataclass(frozen=True)
class TeacherToProve:
    """A teacher that is proved by being loaded. kind: see TeachPartition."""

    teacher_id: str
    kind: str
    model: ModelSource


@dataclass(frozen=True)
class ProofWork:
    """Teachers that are loaded one after another before anything is sampled. threads: of the process."""

    teachers: tuple[TeacherToProve, ...]
    threads: int
