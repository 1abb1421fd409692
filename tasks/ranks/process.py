"""The two ends of a rank process: the work file it is given, and what it tells its parent (schemas.work.messages)."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from infra import leases, waiting
from infra.store import ObjectStore
from schemas import typed_json
from schemas.errors import OpdError
from schemas.work import messages
from schemas.work.messages import Message

Say = Callable[[Message], None]
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


def say(message: Message) -> None:
    """To the parent, whole, from any thread."""
    with _saying:
        print(messages.write(message), end="", flush=True)


class OwnedWork(Protocol):
    """Fields of a work file that say how its partitions are owned."""

    @property
    def run_epoch(self) -> int: ...
    @property
    def dead_after_seconds(self) -> float: ...


def own(
    store: ObjectStore, owned: str, work: OwnedWork, owner: dict[str, str | int], say: Say
) -> leases.Lease | leases.FinishedEpoch:  # fmt: skip
    """A partition for this rank, or what it was finished with; the parent is told for whom it waits.

    owner: facts for people. Errors as `leases.acquire`.
    """
    return leases.acquire(
        store, owned, owner=owner, dead_after_seconds=work.dead_after_seconds, run_epoch=work.run_epoch,
        on_wait=lambda text: say(messages.Waiting(text)),
    )  # fmt: skip


def _say_wait(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    say(messages.Waiting(text))


def run_rank(arguments: list[str], kind: type[W], run: Callable[[W], None]) -> int:
    """Runs `run` on the work, of type `kind`, in the file that the only argument names.

    Exit status: 0, or that of the OpdError, which the parent is told and the log shows.
    """
    waiting.speak_through(_say_wait)
    try:
        run(typed_json.decode(kind, Path(arguments[0]).read_bytes(), arguments[0]))
    except OpdError as error:
        say(messages.Failed.of(error))
        print(error, file=sys.stderr)
        return error.exit_status
    return 0
