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
    """Whole trajectories of one teacher."""

    partition: int
    teacher_index: int
    teacher_id: str
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
