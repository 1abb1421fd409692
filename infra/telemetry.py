"""Spans and metrics of one process as JSON lines, for timelines and benches; never part of a result.

    {"kind": "span", "name": ..., "start": unix seconds, "seconds": ..., "attributes": {...}, "error": type or null}
    {"kind": "metric", "name": ..., "start": unix seconds, "value": ..., "unit": ..., "attributes": {...}}

A line is one write to a file opened for appending: lines of several threads do not mix, and a killed process
loses at most the span that was open.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Telemetry:
    """Writes FOLDER/PROCESS-PID.jsonl. Attributes must be JSON-ready; no secrets."""

    def __init__(self, folder: Path, process: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{process}-{os.getpid()}.jsonl"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @contextlib.contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[dict[str, Any]]:
        """Time the block; it may add to the attributes that it is given. An exception is named and goes on."""
        start, began, error = time.time(), time.monotonic(), None
        try:
            yield attributes
        except BaseException as caught:
            error = type(caught).__name__
            raise
        finally:
            seconds = time.monotonic() - began
            self._write(kind="span", name=name, start=start, seconds=seconds, attributes=attributes, error=error)

    def metric(self, name: str, value: float, unit: str, **attributes: Any) -> None:
        self._write(kind="metric", name=name, start=time.time(), value=value, unit=unit, attributes=attributes)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, **line: Any) -> None:
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """All spans and metrics of a folder in order of their start; a line cut off by a full disk is left out."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().split(b"\n")[:-1]]
    return sorted((json.loads(line) for line in lines), key=lambda entry: entry["start"])
