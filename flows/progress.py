"""Progress for a person: one bar a stage on a terminal, a line every few seconds in a log file."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LINE_EVERY_SECONDS = 5.0


class Bars:
    """Callable as `tasks.runs.session.Progress`. A stage that starts again (the next iteration) gets a new bar."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description:<12}"), BarColumn(30), MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(), console=self.console,
        )  # fmt: skip
        self._live: dict[str, TaskID] = {}
        self._printed: dict[str, float] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Bars:
        if self.console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self.console.is_terminal:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        with self._lock:
            if self.console.is_terminal:
                self._draw(stage, done, total, unit)
            else:
                self._print(stage, done, total, unit)

    def _draw(self, stage: str, done: int, total: int, unit: str) -> None:
        bar = self._live.get(stage)
        if bar is None or self._bars.tasks[bar].finished:
            bar = self._live[stage] = self._bars.add_task(stage, total=total, unit=unit)
        self._bars.update(bar, completed=done, total=total, unit=unit)

    def _print(self, stage: str, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if done < total and now - self._printed.get(stage, 0.0) < LINE_EVERY_SECONDS:
            return
        self._printed[stage] = now
        print(f"{stage:<10} {done}/{total} {unit}", file=sys.stderr, flush=True)
