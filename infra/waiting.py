"""Notes about long waits: a call that waits for a store registers here, and one thread of the process reports them all.

The oldest wait is spoken of after ten seconds and again every ten, on stderr or where `speak_through` says. A try that
hangs without an answer is a wait like one that failed and is tried again.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

from infra.terminal import tell
from schemas.errors import without_credentials

WORD_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 15.0


class Wait:
    """One call that waits. trouble: why its last try failed."""

    def __init__(self, what: str, patience_seconds: float) -> None:
        self.what, self.trouble = what, "no answer yet"
        self._patience_seconds, self._began = patience_seconds, time.monotonic()
        self._pauses = pauses()

    @property
    def seconds(self) -> float:
        """How long it has waited."""
        return time.monotonic() - self._began

    def pause(self, trouble: str) -> bool:
        """Waits a little before the next try; False, at once, when the patience would be over by then."""
        pause = next(self._pauses)
        if self.seconds + pause > self._patience_seconds:
            return False
        self.trouble = trouble
        time.sleep(pause)
        return True

    def __str__(self) -> str:
        left = self._patience_seconds - self.seconds
        more = f"; trying for {left:.0f} s more" if left > 0 else ""
        return f"waiting for the store for {self.seconds:.0f} s, {self.what}: {self.trouble}{more}"


def pauses() -> Iterator[float]:
    """Seconds between tries: random, so that many clients do not come back at once, and growing to a quarter minute."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield random.uniform(pause / 2, pause)
        pause = min(_LONGEST_PAUSE_SECONDS, 2 * pause)


@contextlib.contextmanager
def waiting(what: str, patience_seconds: float) -> Iterator[Wait]:
    """Around a call that may have to wait. patience_seconds: how long its tries may take in all."""
    wait = Wait(what, patience_seconds)
    with _lock:
        _waits[id(wait)] = wait  # the oldest is the first
        _start_speaking()
    try:
        yield wait
    finally:
        with _lock:
            _waits.pop(id(wait), None)


def speak_through(voice: Callable[[str], object]) -> None:
    """Where this process's waits are spoken of from now on; it is called from a thread of its own."""
    global _voice
    _voice = voice


def pass_on(text: str) -> None:
    """What another process said of its wait; one of many that wait for the same thing is enough."""
    global _spoken
    with _lock:
        now = time.monotonic()
        if now - _spoken < WORD_SECONDS / 2:
            return
        _spoken = now
    _voice(text)


_lock = threading.Lock()
_waits: dict[int, Wait] = {}
_voice: Callable[[str], object] = tell
_spoken = -WORD_SECONDS
_speaks = False


def _start_speaking() -> None:
    global _speaks
    if not _speaks:
        _speaks = True
        threading.Thread(target=_speak, name="speaks of waits", daemon=True).start()


def _speak() -> None:
    global _spoken
    while True:
        time.sleep(_LOOK_SECONDS)
        with _lock:
            wait = next(iter(_waits.values()), None)
            now = time.monotonic()
            if wait is None or wait.seconds < WORD_SECONDS or now - _spoken < WORD_SECONDS:
                continue
            _spoken = now
        with contextlib.suppress(Exception):  # who cannot be told, is not; the call goes on
            _voice(without_credentials(str(wait)))


def _forget() -> None:
    """In a forked child, which has neither the thread nor the calls."""
    global _lock, _speaks
    _lock, _speaks = threading.Lock(), False
    _waits.clear()


os.register_at_fork(after_in_child=_forget)
