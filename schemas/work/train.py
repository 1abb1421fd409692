"""What the ranks of training are given: one file for the whole group, written by tasks.stages.train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from schemas.work.model import HeadSource, ModelSource


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and ZeRO, as `ml.train.engine.EngineSettings` explains them."""

    learning_rate: float
    beta1: float
    beta2: float
    weight_decay: float
    gradient_clip: float
    warmup_steps: int
    zero_stage: Literal[1, 3]


@dataclass(frozen=True)
class ObjectiveChoice:
    """type: a name of ml.train.objectives. settings: the fields of that objective, which it reads itself."""

    type: str
    settings: dict[str, str | int | float | bool | None]


@dataclass(frozen=True)
class TrainSettings:
    """The part of the work that the section [train] of the configuration says.

    chunk_bytes: bound on the logits of one chunk of the loss; 0: by kind of device. loader_bytes: shared memory of a
    node's loader. save_every_steps, save_every_seconds: between checkpoints in the
    middle of a plan; 0: none for their number, none for time. grace_seconds: from SIGTERM to the end of the ranks.
    """

    optimizer: OptimizerSettings
    objective: ObjectiveChoice
    chunk_bytes: int
    recompute_layers: bool
    loader_bytes: int
    save_every_steps: int
    save_every_seconds: float
    grace_seconds: float


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's head, whatever the teacher's kind."""

    teacher_index: int
    source: HeadSource


@dataclass(frozen=True)
class TrainWork:
    """One pass over a plan.

    root: of the data. owned: prefix of the partition. run_epoch: of the run's lease, under which the partition is
    wanted. optimizer_from: local folder of the moments of the iteration before; None: they begin at zero.
    plan_rows_path, trajectory_rows_path, hidden_rows_path: local JSONL files of the tables' rows. vocab_size: rows of
    every head that count. page_tokens: of the sampler's KV pages, which its log-probabilities are recomputed with.
    threads: of each rank. scratch: local folder, for checkpoints of this run.
    """

    root: str
    run_id: str
    iteration: int
    owned: str
    run_epoch: int
    student: ModelSource
    optimizer_from: str | None
    plan_rows_path: str
    trajectory_rows_path: str
    hidden_rows_path: str
    teachers: tuple[TeacherHead, ...]
    vocab_size: int
    page_tokens: int
    threads: int
    dead_after_seconds: float
    scratch: str
    settings: TrainSettings


@dataclass(frozen=True)
class OptimizerFacts:
    """What stands beside the moments. optimizer_steps: that they have seen, of all iterations."""

    optimizer_steps: int


@dataclass(frozen=True)
class CheckpointFacts:
    """What stands beside a checkpoint in the middle of a plan. steps: of the plan. metrics: rows up to there."""

    steps: int
    optimizer_steps: int
    metrics: list[dict[str, Any]]
