"""The two ends of a rank process: the work file it is given, and what it tells its parent.

stdout: {"event": NAME, ...}, one a line; {"event": "error", "text", and the parts of the OpdError}
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from infra import waiting
from schemas import typed_json
from schemas.errors import OpdError

Say = Callable[..., None]
W = TypeVar("W")
_saying = threading.Lock()


class Preempted(BaseException):
    """SIGTERM arrived; what must be kept is kept. No Exception, so that nobody's retry takes it for a failure."""


class StopSignal:
    """SIGTERM: noticed between steps, or raised at once as Preempted where nothing would be lost."""

    def __init__(self) -> None:
        self.arrived: float | None = None
        self._at_once = False
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, *_: object) -> None:
        first = self.arrived is None
        self.arrived = self.arrived or time.monotonic()
        if self._at_once and first:
            raise Preempted

    @contextmanager
    def at_once(self) -> Iterator[None]:
        self._at_once = True
        try:
            if self.arrived is not None:
                raise Preempted
            yield
        finally:
            self._at_once = False


def say(event: str, **facts: Any) -> None:
    """One message to the parent, whole, from any thread."""
    with _saying:
        print(json.dumps({"event": event, **facts}) + "\n", end="", flush=True)


def _say_wait(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    say("waiting", text=text)


def run_rank(arguments: list[str], kind: type[W], run: Callable[[W], None]) -> int:
    """Runs `run` on the work, of type `kind`, in the file that the only argument names.

    Exit status: 0, or that of the OpdError, which the parent is told and the log shows.
    """
    waiting.speak_through(_say_wait)
    try:
        run(typed_json.decode(kind, Path(arguments[0]).read_bytes(), arguments[0]))
    except OpdError as error:
        say("error", text=str(error), **error.to_json())
        print(error, file=sys.stderr)
        return error.exit_status
    return 0
