"""A stage of one partition whose ranks need each other: started together, watched together, started again together.

A group that dies is started again, and goes on from the newest checkpoint. Attempts count as long as no life of the
group comes further than the one before, so that a long plan may outlive many deaths, and a step that kills its group
ends the stage. A group without a sign of progress is killed, which counts as a death.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from infra import launch
from infra.launch import RankProcess
from infra.terminal import tell
from schemas import typed_json
from schemas.errors import EXIT_PREEMPTED, StageError, error_from_json
from schemas.work import messages
from tasks.runs.session import Session
from tasks.workers.pool import Limits, loading_seconds, stopping

#: Told by threads beside the one that trains: no sign that training goes on.
_BESIDE = (messages.CheckpointStored, messages.Notice)


class GroupWork(Protocol):
    """The dataclass of the ranks' work file. threads: of each rank."""

    @property
    def threads(self) -> int: ...


def run_group(
    session: Session, stage: str, iteration: int, work: GroupWork, *, ranks: int, limits: Limits, folder: Path
) -> None:
    """Execute one partition. folder: of this attempt alone, for its work file.

    Raises StageError when `limits.max_attempts` lives in a row come no further, or the error that a rank reported.
    """
    path = folder / "group.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(typed_json.encode(work))
    lives = _Lives(session, stage, iteration, limits)
    attempts = reached = 0
    while True:
        commands = launch.group_commands(f"tasks.ranks.{stage}", path, ranks, {"OMP_NUM_THREADS": str(work.threads)})
        lives.begin()
        try:
            processes = launch.run_group(
                commands, log_folder=session.scratch / "logs", on_message=lives.heard, watch=lives.watch,
                grace_seconds=limits.grace_seconds, on_wait=stopping(lives.name),
            )  # fmt: skip
        except BaseException as stop:
            if not isinstance(stop, Exception):
                tell(f"{lives.name}: {lives.what_stands()}")
            raise
        failed = [p for p in processes if p.status != 0]
        if not failed:
            return
        for process in failed:
            if process.error is not None:
                raise error_from_json(process.error)
        if any(p.status == EXIT_PREEMPTED and not p.asked for p in failed):
            tell(f"{lives.name}: its ranks were told to stop; {lives.what_stands()}")
            continue
        first = next(p for p in failed if not p.asked)
        if lives.saved > reached:
            attempts, reached = 0, lives.saved
        attempts += 1
        found = f"{lives.killed_because}: {first.describe()}" if lives.killed_because else first.describe()
        if attempts >= limits.max_attempts:
            raise StageError(
                lives.name, expected=f"to come further in {limits.max_attempts} attempts", found=found,
                safe=lives.what_stands(), next_command=f"opd {stage} CONFIG --iteration {iteration}",
            )  # fmt: skip
        tell(f"{lives.name}: {found.partition(chr(10))[0]}; starts again, {lives.what_stands()}")


class _Lives:
    """What the ranks have told. saved, stored: steps of the newest checkpoint on this node, and in the store."""

    def __init__(self, session: Session, stage: str, iteration: int, limits: Limits) -> None:
        self.name = f"{stage} of iteration {iteration}"
        self._session, self._stage, self._limits = session, stage, limits
        self.saved = self.stored = 0
        self.begin()

    def begin(self) -> None:
        self.killed_because = ""
        self._loading, self._still_seconds, self._looked = True, 0.0, time.monotonic()

    def heard(self, rank: int, line: dict[str, Any]) -> None:
        message = messages.read(line, f"{self.name}, rank {rank}")
        if not isinstance(message, _BESIDE):
            self._still_seconds = 0.0
        match message:
            case messages.Progress():
                self._loading = False
                self._session.progress(self._stage, message.done, message.total, message.unit)
            case messages.ResumedAt() | messages.CheckpointSaved():
                self.saved = max(self.saved, message.steps)
            case messages.CheckpointStored():
                self.stored = max(self.stored, message.steps)
            case messages.Stopped():
                self.saved, self.stored = max(self.saved, message.saved), max(self.stored, message.stored)
            case messages.Notice() | messages.Waiting():
                tell(f"{self.name}: {message.text}")

    def watch(self, processes: Sequence[RankProcess]) -> None:
        """Kills a group that stands still: a collective holds the ranks that would go on."""
        self._session.moves()
        # While this process stood still nobody was watched.
        passed, self._looked = min(time.monotonic() - self._looked, 1.0), time.monotonic()
        self._still_seconds += passed
        limit = self._limits.stuck_seconds
        if self._loading:
            limit = loading_seconds(limit)
        if self._still_seconds > limit and not self.killed_because:
            self.killed_because = f"no {'start' if self._loading else 'progress'} in {limit:g} s"
            for process in processes:
                process.send(signal.SIGKILL)

    def what_stands(self) -> str:
        if not self.saved:
            return "from the student that it began with: no step was kept"
        if self.stored >= self.saved:
            return f"from the checkpoint of step {self.saved}, which is in the store"
        other = f"; the store has step {self.stored}" if self.stored else "; the store has none"
        return f"from the checkpoint of step {self.saved} on this node{other}"
