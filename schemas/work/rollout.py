"""What a rollout worker is given: one file a worker and start, by tasks.stages.rollout and tasks.workers.pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from schemas.work.model import ModelSource


@dataclass(frozen=True)
class RolloutRequest:
    """One trajectory to be sampled. sampling_key: 64 bits. prompt: its row of opd.prompts, which verifiers see."""

    trajectory_id: str
    prompt_id: str
    sample_index: int
    split: str
    prompt_ids: tuple[int, ...]
    sampling_key: int
    max_response_tokens: int
    prompt: dict[str, Any]


@dataclass(frozen=True)
class Acknowledged:
    """What observers were told to be durable. tokens: trajectory_id -> response tokens in the log of the epoch."""

    epoch: int
    tokens: dict[str, int]


@dataclass(frozen=True)
class Strikes:
    """What crashes of a partition's workers have shown (`tasks.workers.suspects`), by trajectory_id.

    apart: groups that are run one after another. struck_at: response tokens at the last strike.
    """

    apart: tuple[tuple[str, ...], ...] = ()
    strikes: dict[str, int] = field(default_factory=dict)
    struck_at: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutPartition:
    """Whole groups of samples, and what earlier workers have shown.

    groups: trajectory_ids, run one group after another; None: all of them at once. given_up: trajectory_id -> why it
    is ended where it stands.
    """

    partition: int
    requests: tuple[RolloutRequest, ...]
    acknowledged: Acknowledged | None = None
    groups: tuple[tuple[str, ...], ...] | None = None
    given_up: dict[str, str] = field(default_factory=dict)
    suspects: Strikes | None = None


@dataclass(frozen=True)
class SamplingSettings:
    """top_k 0 and top_p 1 cut nothing."""

    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True)
class EngineSizes:
    """max_sequences: in flight at once. page_tokens: positions of a KV page. kv_bytes: bound on all pages."""

    max_sequences: int
    page_tokens: int
    kv_bytes: int


@dataclass(frozen=True)
class VerifierSettings:
    """How verifiers run: seconds of a call, address space of a process, names of variables that it gets beside
    `PATH`, `PYTHONPATH` and locale, and whether it reaches the network."""

    timeout_seconds: float
    memory_bytes: int
    env: tuple[str, ...] = ()
    network: bool = False


@dataclass(frozen=True)
class RolloutWork:
    """Partitions that a worker takes one after another.

    root: of the data. scratch: local folder of token logs. stage_prefix: of the partitions' keys. run_epoch: of the
    run's lease, under which the partitions are wanted. vocab_size: tokens that may be sampled. ranks: that share the
    student; threads: of each. seal_seconds: how long sampled tokens may lie on this node alone. grace_seconds: from
    SIGTERM to the end. max_verifier_failures: of a partition. scoring: verifier -> digest of its source.
    """

    root: str
    scratch: str
    run_id: str
    iteration: int
    stage_prefix: str
    run_epoch: int
    student: ModelSource
    sampling: SamplingSettings
    stop_ids: tuple[int, ...]
    vocab_size: int
    engine: EngineSizes
    ranks: int
    threads: int
    seal_seconds: float
    grace_seconds: float
    dead_after_seconds: float
    verifier: VerifierSettings
    max_verifier_failures: int
    scoring: dict[str, str]
    partitions: tuple[RolloutPartition, ...]


@dataclass(frozen=True)
class Life:
    """What a worker was about to run: an object in the store, put before the first step of each group.

    recovered: trajectory_id -> response tokens in the log that it went on from. group: unfinished trajectories in the
    order of the cache; size: how many the cache holds.
    """

    suspects: Strikes | None
    recovered: dict[str, int]
    group: tuple[str, ...]
    size: int
