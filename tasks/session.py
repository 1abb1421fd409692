"""A run being driven: its record, its lease, its store, and the one Spark child of the flow.

The numbered run record holds what the run is (configuration content and model digests). Every start compares
with the newest record; a difference is an error that names `--from-iteration`, which writes the next record and
deletes the table slices from that iteration on. Stages whose fingerprints did not change recommit by themselves. A
run that has made nothing yet takes a changed configuration as it comes.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra import leases, tables
from infra.spark import SparkChild
from infra.store import ObjectStore, open_store
from schemas import keys
from schemas.config import RunConfig
from schemas.errors import ContractError, StoreError
from tasks.manifests import read_record
from tasks.models import model_digest, resolve_model
from tasks.prompt_files import file_source
from tasks.prompts import read_prompts

#: on_progress(stage, done, total, unit); total may grow.
Progress = Callable[[str, int, int, str], None]
RUN_LEASE_DEAD_AFTER_SECONDS = 20.0
#: Folders of a run's scratch: local token logs; checkpoints in the middle of a plan.
LOGS, TRAINING = "wal", "train"


def silent(_stage: str, _done: int, _total: int, _unit: str) -> None:
    """Progress of nobody's interest."""


@dataclass(eq=False)
class Session:
    """What every stage is given. `spark` starts with a new run, else at its first call: a finished run needs none.

    target: (iteration, stage) that may be executed, all others must be finished; None: any may. trained: result of
    the newest train stage, from which the next iteration's student comes; None before the first. prompts_checked:
    every prompt was read once as student and teachers read it.
    """

    config: RunConfig
    store: ObjectStore
    spark: SparkChild
    progress: Progress = silent
    target: tuple[int, str] | None = None
    trained: Any = None
    notes: dict[str, Any] = field(default_factory=dict)
    prompts_checked: bool = False

    @property
    def run_id(self) -> str:
        return self.config.run_id

    @property
    def scratch(self) -> Path:
        """Local folder of this run for logs, work files and model copies."""
        return Path(self.config.scratch).absolute() / self.config.run_id

    @functools.cached_property
    def model_digests(self) -> dict[str, str]:
        """Content digests of the configured models: `student`, and `teacher:ID` for each teacher."""
        digests = {"student": model_digest(resolve_model(self.config.student.path))}
        for teacher in self.config.teachers:
            digests[f"teacher:{teacher.id}"] = model_digest(resolve_model(teacher.path))
        return digests

    @functools.cached_property
    def prompts(self) -> tuple[list[dict[str, Any]], int]:
        """What `read_prompts` gives, read once: every iteration takes its slice of the same rows."""
        return read_prompts(self.config)


_current: ContextVar[Session] = ContextVar("session")


def current_session() -> Session:
    """The session that `open_session` opened around the caller: flows and tasks pass names and numbers, not this."""
    return _current.get()


def run_record(session: Session) -> dict[str, Any]:
    """What a run is; student_path is where a reader finds the tokenizer, and is not compared."""
    return {
        "config": session.config.content(),
        "models": session.model_digests,
        "prompt_files": [file_source(file) for file in session.config.prompts.files],
        "student_path": session.config.student.path,
    }


def newest_record(store: ObjectStore, run_id: str) -> tuple[int, dict[str, Any]] | None:
    """(number, record) of the newest run record, or None for a run that never started."""
    records = store.list(keys.run_records(run_id))
    if not records:
        return None
    return int(Path(records[-1]).stem), read_record(store, records[-1])


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in sorted({*old, *new})
            for line in _differences(old.get(name), new.get(name), f"{path}.{name}" if path else name)
        ]
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"[:300]]


def _has_made_anything(session: Session) -> bool:
    """Has any stage of the run written more than who owned what?"""
    prefix = keys.run_prefix(session.run_id) + "/"
    bookkeeping = ("record", "lease", "epochs", "heartbeats")
    return any(
        not {*key.removeprefix(prefix).split("/")[:-1]}.intersection(bookkeeping) for key in session.store.list(prefix)
    )


def _check_record(session: Session, from_iteration: int | None) -> None:
    record = json.loads(keys.canonical_json(run_record(session)))
    newest = newest_record(session.store, session.run_id)
    if newest is None:
        session.store.put_if_absent(keys.run_record(session.run_id, 1), keys.canonical_json(record))
        session.spark.start()  # everything is still to be made: its JVM starts beside Prefect's server
        return
    number, old = newest
    compared = ("config", "models", "prompt_files")
    differences = _differences({n: old[n] for n in compared}, {n: record[n] for n in compared})
    if from_iteration is None:
        if differences and not _has_made_anything(session):
            # Nothing stands on the old record: what failed was the first start, and its cure is no change.
            session.store.put_if_absent(keys.run_record(session.run_id, number + 1), keys.canonical_json(record))
        elif differences:
            raise ContractError(
                f"run {session.run_id}, record {number}", expected="the configuration that the run began with",
                found="; ".join(differences[:5]), safe="everything that the run has made",
                next_command="opd run CONFIG --from-iteration K, or another run_id",
            )  # fmt: skip
        return
    tables_deleted = session.spark.call(
        "infra.tables:delete_slices_from", root=session.config.data, run_id=session.run_id, iteration=from_iteration
    )
    session.notes["deleted"] = tables_deleted
    session.store.put_if_absent(keys.run_record(session.run_id, number + 1), keys.canonical_json(record))


def _make_scratch(config: RunConfig) -> None:
    try:
        (Path(config.scratch).absolute() / config.run_id).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"scratch = {config.scratch!r}", expected="a local folder that can be written", found=str(error),
            safe="everything under the data root",
        ) from error  # fmt: skip


def spark_child(config: RunConfig) -> SparkChild:
    return SparkChild(
        root=config.data,
        settings=config.spark.model_dump(),
        log_path=Path(config.scratch).absolute() / config.run_id / "logs" / "spark.log",
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
    store = open_store(config.data)
    _make_scratch(config)
    owned = keys.run_lease(config.run_id)
    lease = leases.acquire(
        store, owned, owner={"run": config.run_id}, dead_after_seconds=RUN_LEASE_DEAD_AFTER_SECONDS, wait=False
    )
    if isinstance(lease, leases.Finished):
        raise ContractError(f"run {config.run_id}", expected="a run", found="a run lease that holds a manifest")
    with lease, spark_child(config) as spark:
        session = Session(config, store, spark, progress, target)
        _check_record(session, from_iteration)
        token = _current.set(session)
        try:
            yield session
        finally:
            _current.reset(token)


def read_table(session: Session, table: str, **where: Any) -> list[dict[str, Any]]:
    """Rows of this run's slice, without a JVM."""
    return tables.read_rows(session.config.data, table, {"run_id": session.run_id, **where})
