"""Worker processes of a stage, as its parent sees them: partitions handed out, deaths noticed, progress added up.

A worker that dies is started again on what it had left: its successor takes the next epoch and continues. One that
reports an error of the family is not: the same input would fail again. A partition that fails `max_attempts` times
without a new token in between fails the stage, with everything finished so far kept. A worker whose oldest trajectory
does not go on is killed; the trajectory that keeps killing workers is found and given up, if that is allowed.
"""

from __future__ import annotations

import math
import shutil
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from infra import launch
from infra.launch import RankCommand, RankProcess
from infra.terminal import tell
from infra.threads import at_once
from schemas import keys, typed_json
from schemas.errors import EXIT_PREEMPTED, StageError, error_from_json
from schemas.rows import json_lines
from schemas.work import messages
from schemas.work.rollout import Acknowledged, RolloutPartition, RolloutWork
from schemas.work.teach import TeachPartition, TeachWork
from tasks.runs.session import Session
from tasks.workers.drill import Drill
from tasks.workers.lives import last_life
from tasks.workers.suspects import GivenUp, Suspects, check_given_up

_POLL_SECONDS = 0.02
_READ_AT_ONCE = 8
#: How many times longer than a batch the start of a process may take, which reads a model, and at least how long.
_LOADING, _LOADING_SECONDS = 4, 120.0

#: What stages of several partitions give their workers.
PoolWork = RolloutWork | TeachWork
PoolPartition = RolloutPartition | TeachPartition


def loading_seconds(stuck_seconds: float) -> float:
    """How long a process may take to its first batch when it may take stuck_seconds between two."""
    return max(_LOADING * stuck_seconds, _LOADING_SECONDS)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """A local JSONL file for a rank to read; its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(json_lines(rows))
    return str(path)


def work_folder(session: Session, stage: str, iteration: int) -> Path:
    """A folder for the work files of one attempt: a driver that was superseded writes into none of its heir's.

    Those of earlier attempts go.
    """
    name = f"{iteration:05d}-{stage}-"
    for old in (session.scratch / "work").glob(f"{name}*"):
        shutil.rmtree(old, ignore_errors=True)
    folder = session.scratch / "work" / f"{name}{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    return folder


def stopping(name: str) -> Callable[[int, float], None]:
    """For `launch.stop`: says what is waited for."""

    def on_wait(num_ranks: int, seconds: float) -> None:
        tell(f"{name}: stopping, up to {seconds:.0f} s for {num_ranks} process(es) to keep their work")

    return on_wait


@dataclass(frozen=True)
class Limits:
    """max_attempts: starts of a partition in a row that bring no token. grace_seconds: from SIGTERM to SIGKILL.

    stuck_seconds: a worker is killed when its oldest trajectory, or without trajectories its batches, do not go on for
    so long; `loading_seconds` until its first batch. max_given_up: trajectories of the stage that may be given up.
    """

    max_attempts: int
    grace_seconds: float
    stuck_seconds: float = math.inf
    max_given_up: int = 0


class Watcher(Protocol):
    """A drill or a bench that interferes with the workers; called many times a second."""

    def look(self, pool: Pool) -> None: ...


class _Worker:
    """One slot: its remaining partitions and its current process.

    still_seconds: since its oldest trajectory, or without trajectories any batch, has gone on; silent_seconds: since
    its last report; loading: no batch has come out of it yet.
    """

    def __init__(self, index: int, partitions: list[int]) -> None:
        self.index, self.left = index, partitions
        self.process: RankProcess | None = None
        self.still_seconds = self.silent_seconds = 0.0
        self.loading = True
        self.killed_because = ""


class Pool:
    """The workers of one stage; `run` returns when every partition has finished."""

    def __init__(
        self, session: Session, stage: str, iteration: int, work: PoolWork, todo: Mapping[int, PoolPartition],
        workers: int,
    ) -> None:  # fmt: skip
        """work: without partitions."""
        self.session, self.stage, self.iteration = session, stage, iteration
        self.folder = work_folder(session, stage, iteration)
        self.work = work
        self.todo = dict(todo)
        order = sorted(todo)
        # Neighbours to one worker: partitions of one teacher follow one another.
        share = -(-len(order) // workers)
        self.workers = [_Worker(i, order[i * share : (i + 1) * share]) for i in range(workers)]
        self.acknowledged: dict[int, Acknowledged] = {}
        self.resumed: dict[int, messages.Resumed] = {}
        self.progress: dict[int, tuple[int, int, str]] = {}
        self.attempts: Counter[int] = Counter()
        self.suspects: dict[int, Suspects] = {}
        self.given_up: dict[int, dict[str, str]] = {}

    def run(self, limits: Limits, watcher: Watcher | None = None) -> None:
        """Raises StageError when a partition keeps failing or too many trajectories are given up, or the error that
        a worker reported."""
        try:
            self._remember()
            for worker in self.workers:
                self._start(worker)
            looked = time.monotonic()
            while any(worker.left for worker in self.workers):
                time.sleep(_POLL_SECONDS)
                self.session.moves()
                # While this process stood still nobody was watched.
                passed, looked = min(time.monotonic() - looked, 1.0), time.monotonic()
                for worker in self.workers:
                    if worker.process is not None and worker.process.status is not None:
                        self._ended(worker, worker.process, limits)
                    else:
                        self._watch(worker, passed, limits.stuck_seconds)
                check_given_up(self.given_up, limits.max_given_up, self.iteration)
                if watcher is not None:
                    watcher.look(self)
        finally:
            running = [w.process for w in self.workers if w.process is not None and not w.process.wait(0)]
            launch.stop(running, limits.grace_seconds, stopping(f"{self.stage} of iteration {self.iteration}"))

    def owner_of(self, partition: int) -> RankProcess | None:
        """The live process that works on a partition now."""
        for worker in self.workers:
            if worker.left[:1] == [partition] and worker.process is not None and worker.process.status is None:
                return worker.process
        return None

    def _remember(self) -> None:
        """What partitions of trajectories went through under earlier drivers."""
        work = self.work
        if not isinstance(work, RolloutWork):
            return
        partitions = list(self.todo)

        def last(partition: int) -> tuple[Suspects, GivenUp | None] | None:
            owned = keys.partition_prefix(work.stage_prefix, partition)
            return last_life(self.session.store, Path(work.scratch), owned, self._ids(partition))

        for partition, life in zip(partitions, at_once(last, partitions, _READ_AT_ONCE), strict=True):
            if life is not None:
                self.suspects[partition], found = life
                if found is not None:
                    self.given_up[partition] = {found.trajectory_id: found.text}

    def _ids(self, partition: int) -> list[str]:
        entry = self.todo[partition]
        assert isinstance(entry, RolloutPartition)
        return sorted(request.trajectory_id for request in entry.requests)

    def _start(self, worker: _Worker) -> None:
        if not worker.left:
            worker.process = None
            return
        entries = tuple(map(self._entry, worker.left))
        worker.still_seconds = worker.silent_seconds = 0.0
        worker.loading = True
        worker.killed_because = ""
        path = self.folder / f"worker-{worker.index}.json"
        path.write_bytes(typed_json.encode(replace(self.work, partitions=entries)))
        command = RankCommand(
            f"tasks.ranks.{self.stage}",
            path,
            worker.index,
            {"OMP_NUM_THREADS": str(self.work.threads), "LOCAL_RANK": str(worker.index)},
        )
        log = self.session.scratch / "logs" / f"{self.stage}-{worker.index}.log"
        worker.process = RankProcess(command, log, lambda _, line: self._heard(worker, line))

    def _entry(self, partition: int) -> PoolPartition:
        """What the next worker of a partition is given."""
        entry, suspects = self.todo[partition], self.suspects.get(partition)
        if not isinstance(entry, RolloutPartition):
            return entry
        entry = replace(entry, acknowledged=self.acknowledged.get(partition))
        if suspects is None:
            return entry
        suspects.started()
        return replace(
            entry, groups=tuple(map(tuple, suspects.groups)), given_up=self.given_up.get(partition, {}),
            suspects=suspects.known(),
        )  # fmt: skip

    def _heard(self, worker: _Worker, line: dict[str, Any]) -> None:
        message = messages.read(line, f"{self.stage} of iteration {self.iteration}, worker {worker.index}")
        partition: int | None = getattr(message, "partition", None)
        if partition not in self.suspects:
            batch = isinstance(message, messages.Progress)
            worker.still_seconds = 0.0
            worker.loading = isinstance(message, messages.Finished) or (worker.loading and not batch)
        match message:
            case messages.Sampled():
                self.acknowledged[message.partition] = Acknowledged(message.epoch, message.tokens)
                worker.silent_seconds = 0.0
                suspects = self.suspects[message.partition]
                if suspects.reported(message.tokens, message.running, message.positions):
                    worker.still_seconds = 0.0
            case messages.Waiting():
                worker.still_seconds = worker.silent_seconds = 0.0  # the store's fault, and no trajectory's
                tell(f"{self.stage} of iteration {self.iteration}: {message.text}")
            case messages.Resumed():
                self._resumed(message)
            case messages.Progress(partition=int(partition)):
                self.progress[partition] = (message.done, message.total, message.unit)
                self._report()
            case messages.Finished(partition=int(partition)):
                if partition in worker.left:
                    worker.left.remove(partition)
                done, total, unit = self.progress.get(partition, (1, 1, "partitions"))
                self.progress[partition] = (max(done, total), total, unit)
                self._report()

    def _report(self) -> None:
        known = list(self.progress.values())
        if known:
            # Partitions that nobody has spoken of yet count like the mean of the others.
            expected = sum(total for _, total, _ in known) * len(self.todo) / len(known)
            self.session.progress(self.stage, sum(done for done, _, _ in known), round(expected), known[0][2])

    def _ended(self, worker: _Worker, process: RankProcess, limits: Limits) -> None:
        if not worker.left:
            worker.process = None
            return
        if process.error is not None:
            raise error_from_json(process.error)
        if process.status != EXIT_PREEMPTED:
            self._crashed(worker, process, limits)
        self._start(worker)

    def _resumed(self, message: messages.Resumed) -> None:
        partition, before = message.partition, self.resumed.get(message.partition)
        if sum(message.recovered.values()) > (sum(before.recovered.values()) if before else 0):
            self.attempts[partition] = 0
        self.resumed[partition] = message
        self.suspects.setdefault(partition, Suspects(self._ids(partition))).resumed(message.recovered)
        if message.given_up:
            self.given_up.setdefault(partition, {}).update(message.given_up)

    def _watch(self, worker: _Worker, seconds: float, stuck_seconds: float) -> None:
        if worker.process is None or not worker.left or worker.killed_because:
            return
        suspects = self.suspects.get(worker.left[0])
        if suspects is not None and not suspects.running:
            return
        worker.still_seconds += seconds
        worker.silent_seconds += seconds
        limit = loading_seconds(stuck_seconds) if suspects is None and worker.loading else stuck_seconds
        if worker.still_seconds > limit:
            worker.killed_because = f"no {self._missing(worker, stuck_seconds)} in {limit:g} s"
            worker.process.send(signal.SIGKILL)

    def _missing(self, worker: _Worker, stuck_seconds: float) -> str:
        if worker.left[0] not in self.suspects:
            return "start" if worker.loading else "batch"
        return "step" if worker.silent_seconds > stuck_seconds / 2 else "token while others went on"

    def _crashed(self, worker: _Worker, process: RankProcess, limits: Limits) -> None:
        partition, status = worker.left[0], process.status
        suspects = self.suspects.get(partition)
        self.attempts[partition] += 1
        if suspects is not None and suspects.running:
            assert status is not None
            died = f"its worker ended with {signal.Signals(-status).name if status < 0 else f'exit status {status}'}"
            stuck = "others went on" in worker.killed_because
            found = suspects.crashed(worker.killed_because or died, stuck=stuck)
            if found is not None:
                self.given_up.setdefault(partition, {})[found.trajectory_id] = found.text
            if suspects.struck:
                return
        found = f"{worker.killed_because}: {process.describe()}" if worker.killed_because else process.describe()
        if self.attempts[partition] >= limits.max_attempts:
            raise StageError(
                f"{self.stage} of iteration {self.iteration}, partition {partition}",
                expected=f"to finish in {limits.max_attempts} attempts", found=found,
                safe="finished partitions, and every logged token of this one",
                next_command=f"opd {self.stage} CONFIG --iteration {self.iteration}",
            )  # fmt: skip


def run_workers(
    session: Session,
    stage: str,
    iteration: int,
    work: PoolWork,
    todo: Mapping[int, PoolPartition],
    *,
    workers: int,
    limits: Limits,
    kill_after_tokens: int = 0,
) -> dict[str, int] | None:
    """Execute partitions in worker processes. `Drill.result` when a worker was killed for the drill."""
    pool = Pool(session, stage, iteration, work, todo, workers)
    drill = Drill(kill_after_tokens) if kill_after_tokens else None
    pool.run(limits, drill)
    return drill.result(session.store, work.stage_prefix, pool.resumed) if drill and drill.killed else None
