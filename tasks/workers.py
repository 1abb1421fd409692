"""Worker processes of a stage, as its parent sees them: partitions handed out, deaths noticed, progress added up.

A worker that dies is started again on what it had left: its successor takes the next epoch and continues. One that
reports an error of the family is not: the same input would fail again. A partition that fails `max_attempts` times
fails the stage, with everything finished so far kept.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infra import launch
from infra.launch import RankCommand, RankProcess
from schemas import keys
from schemas.errors import EXIT_PREEMPTED, StageError, error_from_json
from tasks.drill import Drill
from tasks.session import Session

_POLL_SECONDS = 0.02


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """A local JSONL file for a rank to read; its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(keys.canonical_json(row) + b"\n" for row in rows))
    return str(path)


class _Worker:
    """One slot: its remaining partitions and its current process."""

    def __init__(self, index: int, partitions: list[int]) -> None:
        self.index, self.left = index, partitions
        self.process: RankProcess | None = None


class Pool:
    """The workers of one stage; `run` returns when every partition has finished."""

    def __init__(
        self, session: Session, stage: str, iteration: int, work: dict[str, Any], todo: Mapping[int, Any], workers: int
    ) -> None:
        self.session, self.stage, self.iteration = session, stage, iteration
        self.folder = session.scratch / "work" / f"{iteration:05d}-{stage}"
        self.work = work | {"scratch": str(session.scratch / "wal")}
        self.todo = dict(todo)
        order = sorted(todo)
        # Neighbours to one worker: partitions of one teacher follow one another.
        share = -(-len(order) // workers)
        self.workers = [_Worker(i, order[i * share : (i + 1) * share]) for i in range(workers)]
        self.acknowledged: dict[int, dict[str, Any]] = {}
        self.resumed: dict[int, dict[str, Any]] = {}
        self.progress: dict[int, tuple[int, int, str]] = {}
        self.attempts: Counter[int] = Counter()

    def run(self, *, max_attempts: int, grace_seconds: float, drill: Drill | None) -> None:
        """Raises StageError when a partition keeps failing, or the error that a worker reported."""
        try:
            for worker in self.workers:
                self._start(worker)
            while any(worker.left for worker in self.workers):
                time.sleep(_POLL_SECONDS)
                for worker in self.workers:
                    if worker.process is not None and worker.process.status is not None:
                        self._ended(worker, worker.process, max_attempts)
                if drill is not None:
                    drill.look(self)
        finally:
            launch.stop([w.process for w in self.workers if w.process is not None], grace_seconds)

    def owner_of(self, partition: int) -> RankProcess | None:
        """The live process that works on a partition now."""
        for worker in self.workers:
            if worker.left[:1] == [partition] and worker.process is not None and worker.process.status is None:
                return worker.process
        return None

    def _start(self, worker: _Worker) -> None:
        if not worker.left:
            worker.process = None
            return
        entries = []
        for partition in worker.left:
            entry = dict(self.todo[partition])
            if partition in self.acknowledged:
                entry["acknowledged"] = self.acknowledged[partition]
            entries.append(entry)
        path = self.folder / f"worker-{worker.index}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.work | {"partitions": entries}))
        command = RankCommand(
            f"tasks.ranks.{self.stage}",
            path,
            worker.index,
            {"OMP_NUM_THREADS": str(self.work["threads"]), "LOCAL_RANK": str(worker.index)},
        )
        log = self.session.scratch / "logs" / f"{self.stage}-{worker.index}.log"
        worker.process = RankProcess(command, log, lambda _, message: self._heard(worker, message))

    def _heard(self, worker: _Worker, message: dict[str, Any]) -> None:
        event: str = message["event"]
        partition: int = message.get("partition", -1)
        if event == "ack":
            self.acknowledged[partition] = {"epoch": message["epoch"], "tokens": message["tokens"]}
        elif event == "resumed":
            self.resumed[partition] = message
        elif event == "progress":
            self.progress[partition] = (message["done"], message["total"], message["unit"])
        elif event == "finished":
            if partition in worker.left:
                worker.left.remove(partition)
            done, total, unit = self.progress.get(partition, (1, 1, "partitions"))
            self.progress[partition] = (max(done, total), total, unit)
        if event in ("progress", "finished"):
            self._report()

    def _report(self) -> None:
        known = list(self.progress.values())
        if known:
            # Partitions that nobody has spoken of yet count like the mean of the others.
            expected = sum(total for _, total, _ in known) * len(self.todo) / len(known)
            self.session.progress(self.stage, sum(done for done, _, _ in known), round(expected), known[0][2])

    def _ended(self, worker: _Worker, process: RankProcess, max_attempts: int) -> None:
        if not worker.left:
            worker.process = None
            return
        if process.error is not None:
            raise error_from_json(process.error)
        if process.status != EXIT_PREEMPTED:
            partition = worker.left[0]
            self.attempts[partition] += 1
            if self.attempts[partition] >= max_attempts:
                raise StageError(
                    f"{self.stage} of iteration {self.iteration}, partition {partition}",
                    expected=f"to finish in {max_attempts} attempts", found=process.describe(),
                    safe="finished partitions, and every logged token of this one",
                    next_command=f"opd {self.stage} CONFIG --iteration {self.iteration}",
                )  # fmt: skip
        self._start(worker)


def run_workers(
    session: Session,
    stage: str,
    iteration: int,
    work: dict[str, Any],
    todo: Mapping[int, Any],
    *,
    workers: int,
    max_attempts: int,
    grace_seconds: float,
    kill_after_tokens: int,
) -> dict[str, Any]:
    """Execute partitions in worker processes. Returns {"drill": {...}} when a worker was killed for the drill."""
    pool = Pool(session, stage, iteration, work, todo, workers)
    drill = Drill(kill_after_tokens) if kill_after_tokens else None
    pool.run(max_attempts=max_attempts + (drill is not None), grace_seconds=grace_seconds, drill=drill)
    return {"drill": drill.result(session.store, work["stage_prefix"], pool.resumed)} if drill and drill.killed else {}


def run_group(
    session: Session, stage: str, iteration: int, work: dict[str, Any], *, ranks: int, max_attempts: int
) -> None:
    """Execute one partition in a group of ranks that falls and rises together. Raises like `Pool.run`."""
    path = session.scratch / "work" / f"{iteration:05d}-{stage}" / "group.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(work))

    def heard(_rank: int, message: dict[str, Any]) -> None:
        if message["event"] == "progress":
            session.progress(stage, message["done"], message["total"], message["unit"])

    attempt = 0
    while True:
        commands = launch.group_commands(f"tasks.ranks.{stage}", path, ranks, {"OMP_NUM_THREADS": str(work["threads"])})
        processes = launch.run_group(
            commands, log_folder=session.scratch / "logs", on_message=heard, grace_seconds=10.0
        )
        failed = [p for p in processes if p.status != 0]
        if not failed:
            return
        for process in failed:
            if process.error is not None:
                raise error_from_json(process.error)
        attempt += 1
        first = next(p for p in failed if not p.asked)
        if attempt >= max_attempts:
            raise StageError(
                f"{stage} of iteration {iteration}", expected=f"to finish in {max_attempts} attempts",
                found=first.describe(), safe="the newest complete checkpoint",
                next_command=f"opd {stage} CONFIG --iteration {iteration}",
            )  # fmt: skip
