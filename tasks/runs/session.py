"""The session of a driver: the run's lease, its records, its store, and the one Spark child of the flow."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra import epochs, leases
from infra.doctor import rely_on
from infra.spark import SparkChild
from infra.store import ObjectStore, set_patience
from infra.stores import open_store
from infra.terminal import tell
from schemas import keys
from schemas.config import RunConfig
from schemas.errors import ContractError, StoreError
from tasks.inputs.models import ModelDigests, model_digests, resolve_model
from tasks.inputs.prompts import read_prompts
from tasks.inputs.text import Tokenizer
from tasks.runs.admission import admit
from tasks.runs.records import History
from tasks.teachers import kinds

#: on_progress(stage, done, total, unit); total may grow.
Progress = Callable[[str, int, int, str], None]
RUN_LEASE_DEAD_AFTER_SECONDS = 20.0
#: One step of a driver may take so long before it counts as hung: the digest of a model, the reading of all prompts, a
#: stage's rows. While it waits for workers or for Spark it moves.
_PATIENCE_SECONDS = 3600.0
#: Folders of a run's scratch: local token logs; checkpoints in the middle of a plan.
LOGS, TRAINING = "wal", "train"
#: Locked, shared, by every driver of a run while it lives.
IN_USE = ".in-use"


def silent(_stage: str, _done: int, _total: int, _unit: str) -> None:
    """Progress of nobody's interest."""


@dataclass(eq=False)
class Session:
    """What every stage is given. `spark` starts with a new run, else at its first call: a finished run needs none.

    target: (iteration, stage) that may be executed, all others must be finished; None: any may. trained: result of
    the newest train stage, from which the next iteration's student comes; None before the first. lease: of the run;
    None where nobody else can drive it. life: random name of this life of the run, the same for every driver of it.
    history: the run's records. prompts_checked: every prompt was read once as student and teachers read it.
    teachers_proved: those that must be loaded once before anything is sampled were.
    """

    config: RunConfig
    store: ObjectStore
    spark: SparkChild
    progress: Progress = silent
    target: tuple[int, str] | None = None
    trained: Any = None
    notes: dict[str, Any] = field(default_factory=dict)
    lease: leases.Lease | None = None
    life: str = "only"
    history: History = field(default_factory=History)
    prompts_checked: bool = False
    teachers_proved: bool = False

    @property
    def run_id(self) -> str:
        return self.config.run_id

    @property
    def scratch(self) -> Path:
        """Local folder of this life of the run for logs, work files and model copies: a run of the same name under
        another root, or after its root was deleted, has another one."""
        return Path(self.config.scratch).absolute() / self.config.run_id / self.life

    @property
    def run_epoch(self) -> int:
        """Which of the run's owners this one is: an owner of anything of the run under a lower one is superseded."""
        return self.lease.epoch if self.lease is not None else 0

    @property
    def run_lease(self) -> dict[str, Any] | None:
        """For a process that acts for the run: what it asks whether this driver still owns it."""
        return None if self.lease is None else {"owned": self.lease.owned, "epoch": self.lease.epoch}

    def check_owner(self) -> None:
        """Before whatever counts for others: ContractError when another process has taken the run."""
        if self.lease is not None:
            self.lease.check()

    def moves(self) -> None:
        """The driver's work goes on; ContractError once it is known that another process has taken the run."""
        if self.lease is not None:
            self.lease.progress()

    @functools.cached_property
    def content(self) -> dict[str, Any]:
        """The configuration's content as the run knows it: without settings that its record lacks, at their default."""
        return self.config.content(self.history.newest[1].config if self.history.records else None)

    @functools.cached_property
    def models(self) -> dict[str, ModelDigests]:
        """What the configured models were when the session began: `student`, and `teacher:ID` for each teacher."""
        found = {"student": model_digests(resolve_model(self.config.student.path))}
        for teacher in self.config.teachers:
            self.moves()
            found[f"teacher:{teacher.id}"] = kinds.of(teacher.kind).digests(resolve_model(teacher.path))
        return found

    @property
    def model_digests(self) -> dict[str, str]:
        """Identities of `models`."""
        return {name: digests.model for name, digests in self.models.items()}

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The student's, read once: every student of the run has it."""
        return Tokenizer.load(resolve_model(self.config.student.path))

    @functools.cached_property
    def teacher_tokenizers(self) -> list[Tokenizer]:
        """By teacher_index. Their ids agree; chat templates may differ."""
        return [Tokenizer.load(resolve_model(self.config.teacher(i).path)) for i in range(len(self.config.teachers))]

    @functools.cached_property
    def prompts(self) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """What `read_prompts` gives, read once: every iteration takes its slice of the same rows."""
        return read_prompts(self.config)


_current: ContextVar[Session] = ContextVar("session")


def current_session() -> Session:
    """The session that `open_session` opened around the caller: flows and tasks pass names and numbers, not this."""
    return _current.get()


@contextlib.contextmanager
def _scratch_in_use(session: Session) -> Iterator[None]:
    """The folder exists and is marked as in use: whoever deletes folders of runs asks the mark first."""
    folder = session.scratch
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StoreError(
            f"scratch = {session.config.scratch!r}", expected="a local folder that can be written", found=str(error),
            safe="everything under the data root",
        ) from error  # fmt: skip
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def life_of(store: ObjectStore, run_id: str) -> str:
    """Random name of a run's life, from its first lease: it tells a new root from an old one of the same place."""
    first = epochs.read(store, keys.run_lease(run_id), 1)
    return first["nonce"][:8] if first is not None else ""


def spark_child(config: RunConfig, life: str = "only") -> SparkChild:
    return SparkChild(
        root=config.data,
        settings=config.spark.model_dump(),
        log_path=Path(config.scratch).absolute() / config.run_id / life / "logs" / "spark.log",
    )


@contextlib.contextmanager
def open_session(
    config: RunConfig,
    *,
    progress: Progress = silent,
    from_iteration: int | None = None,
    target: tuple[int, str] | None = None,
) -> Iterator[Session]:
    """Own the run until the block ends.

    Raises ContractError for a live run or a changed configuration, StoreError for a folder that cannot be used.
    """
    set_patience(config.store_patience_seconds)
    store = open_store(config.data)
    rely_on(store)
    owned = keys.run_lease(config.run_id)
    lease = leases.acquire(
        store, owned, owner={"run": config.run_id}, dead_after_seconds=RUN_LEASE_DEAD_AFTER_SECONDS, wait=False,
        patience_seconds=_PATIENCE_SECONDS, on_wait=tell,
    )  # fmt: skip
    if isinstance(lease, leases.FinishedEpoch):
        raise ContractError(f"run {config.run_id}", expected="a run", found="a run lease that holds a manifest")
    life = life_of(store, config.run_id)
    with lease, spark_child(config, life) as spark:
        spark.tick, spark.tell = lease.progress, tell
        session = Session(config, store, spark, progress, target, lease=lease, life=life)
        with _scratch_in_use(session):
            session.history = admit(session, from_iteration)
            token = _current.set(session)
            try:
                yield session
            finally:
                _current.reset(token)
