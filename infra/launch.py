"""Rank processes of a stage: started, heard, watched, and never left behind.

A rank is `python -m MODULE WORK_PATH` in its own session. It speaks JSON objects on stdout, one a line, which
the owner's callback gets in the thread that waits; whatever else it prints goes to LOG_DIR/rankN.log. Invariant:
when the block of `Ranks` is left, or the owning process dies in any way, no process of any rank remains.

A rank that is asked to stop gets SIGTERM, and SIGKILL after the grace time. SIGTERM and SIGINT to the owner ask
all of them; the signal then takes its course in the owner (SIGTERM without a handler: exit status 75).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from schemas.errors import EXIT_PREEMPTED, StoreError

OnMessage = Callable[[int, dict[str, Any]], None]

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded before any fork
_TAIL_BYTES = 4000
_LINE_BYTES = 1 << 24
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class RankCommand:
    """One rank to start. env comes on top of this process's environment; OMP_NUM_THREADS belongs there.

    With world_size > 1 the rank also gets MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK and WORLD_SIZE.
    """

    module: str
    work_path: Path
    rank: int = 0
    world_size: int = 1
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RankExit:
    """How a rank ended. status: exit status, or minus the signal that ended it.

    asked: it had been asked to stop; error: its last {"event": "error"} message; log_tail: the end of what this
    start of the rank wrote to its log.
    """

    rank: int
    status: int
    asked: bool
    error: dict[str, Any] | None
    log_path: Path
    log_tail: str

    def describe(self) -> str:
        """The reason in a few lines: the rank's own error if it sent one, else the end of its log."""
        how = f"exit status {self.status}" if self.status >= 0 else f"signal {signal.Signals(-self.status).name}"
        why = str(self.error["text"]) if self.error and "text" in self.error else self.log_tail
        return f"rank {self.rank} ended by {how}; log: {self.log_path}" + (f"\n{why}" if why else "")


class RankProcess:
    """One running rank. `kill` reaches it only while it lives, so never another process with its old pid."""

    def __init__(self, command: RankCommand, log_dir: Path, rendezvous: Mapping[str, str], events: queue.SimpleQueue):
        self.command, self.rank = command, command.rank
        self.log_path = log_dir / f"rank{command.rank}.log"
        self.asked = False
        self.error: dict[str, Any] | None = None
        self._events, self._lock, self._reaped = events, threading.Lock(), False
        try:
            self._log = open(self.log_path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the process
            self._log_start = self.log_path.stat().st_size
            self._process = subprocess.Popen(
                [sys.executable, "-m", "infra.launch", command.module, str(command.work_path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    **rendezvous,
                    **command.env,
                    "OPD_PARENT": str(os.getpid()),
                },
            )
        except OSError as error:
            raise StoreError(
                str(self.log_path), expected="to start a process that logs here", found=str(error)
            ) from error
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name=f"rank {self.rank} stdout", daemon=True)
        self._reader.start()
        threading.Thread(target=self._await_end, name=f"rank {self.rank} end", daemon=True).start()

    def kill(self, signum: int) -> None:
        """Send a signal; SIGKILL goes to all processes of the rank. Nothing happens if it has ended."""
        with self._lock:
            if not self._reaped:
                (os.killpg if signum == signal.SIGKILL else os.kill)(self.pid, signum)

    def exit(self) -> RankExit:
        """How it ended; only after its end was reported."""
        with open(self.log_path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            tail = file.read().decode("utf-8", "replace").strip()
        return RankExit(self.rank, self._process.returncode, self.asked, self.error, self.log_path, tail)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            while line := stdout.readline(_LINE_BYTES):
                message = _message(line)
                if message is None:
                    self._log.write(line)
                else:
                    self._events.put((self, message))

    def _await_end(self) -> None:
        # Until it is reaped the rank's id is nobody else's, so the rest of its group can be killed by it.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._reaped = True
        self._reader.join()
        self._log.close()
        self._events.put((self, None))


class Ranks:
    """The ranks of one group or pool: start, hear and await them inside a `with` block.

    All in one thread, which is to outlive them: on Linux the death of the thread that started a process is what
    ends the process.
    """

    def __init__(
        self, *, log_dir: Path, on_message: OnMessage, grace_seconds: float, stop: threading.Event | None = None
    ) -> None:
        """grace_seconds: between SIGTERM and SIGKILL. stop: set by another thread, asks all ranks to stop."""
        self.running: dict[int, RankProcess] = {}
        self._log_dir, self._on_message, self._grace_seconds = log_dir, on_message, grace_seconds
        self._stop = stop or threading.Event()
        self._events: queue.SimpleQueue[tuple[RankProcess, dict[str, Any] | None]] = queue.SimpleQueue()
        self._kill_at: float | None = None
        self._rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        self._received: int | None = None
        self._old_handlers: dict[int, Any] = {}

    @property
    def stopping(self) -> bool:
        """The ranks were asked to stop; none may be started any more."""
        return self._kill_at is not None or self._stop.is_set() or self._received is not None

    def start(self, command: RankCommand) -> RankProcess:
        """Start a rank, also one that ended before; others are not touched. StoreError if the system refuses."""
        if self._kill_at is not None or command.rank in self.running:
            raise RuntimeError(f"rank {command.rank} may not start: it is running, or the ranks are stopping")
        many = command.world_size > 1
        ids = {"RANK": str(command.rank), "LOCAL_RANK": str(command.rank), "WORLD_SIZE": str(command.world_size)}
        process = RankProcess(command, self._log_dir, {**self._rendezvous, **ids} if many else {}, self._events)
        self.running[command.rank] = process
        return process

    def terminate(self) -> None:
        """Ask all ranks to stop, and return at once; `next_exit` sees to it that they end within the grace time."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_seconds
            for process in self.running.values():
                process.asked = True
                process.kill(signal.SIGTERM)

    def next_exit(self) -> RankExit | None:
        """Pass on messages until a rank ends; None once none is running. The callback's exceptions go through."""
        while self.running:
            if self.stopping:
                self.terminate()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                for process in self.running.values():
                    process.kill(signal.SIGKILL)
            try:
                process, message = self._events.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if message is None:
                del self.running[process.rank]
                return process.exit()
            if message.get("event") == "error":
                process.error = message
            self._on_message(process.rank, message)
        return None

    def __enter__(self) -> Ranks:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(signum) is not None:  # None: a handler that is not Python's, left alone
                    self._old_handlers[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._on_message = lambda _rank, _message: None
        try:
            self.terminate()
            while self.next_exit() is not None:
                pass
        finally:
            for signum, handler in self._old_handlers.items():
                signal.signal(signum, handler)
        if self._received is not None:
            if self._received == signal.SIGTERM and self._old_handlers[signal.SIGTERM] == signal.SIG_DFL:
                raise SystemExit(EXIT_PREEMPTED)  # the default would skip every `finally` above us
            signal.raise_signal(self._received)

    def _receive(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self._received == signum:  # the user will not wait
            self._grace_seconds, self._kill_at = 0.0, self._kill_at and time.monotonic()
        self._received = signum


def run_ranks(
    commands: Iterable[RankCommand],
    *,
    log_dir: Path,
    on_message: OnMessage,
    grace_seconds: float,
    stop: threading.Event | None = None,
) -> list[RankExit]:
    """Run a group whose ranks need each other: the first that ends other than with 0 stops the rest.

    Returns all ends in the order in which they came, so the first with a status is the cause of the others.
    """
    exits = []
    with Ranks(log_dir=log_dir, on_message=on_message, grace_seconds=grace_seconds, stop=stop) as ranks:
        for command in commands:
            ranks.start(command)
        while (ended := ranks.next_exit()) is not None:
            exits.append(ended)
            if ended.status != 0:
                ranks.terminate()
    return exits


def _message(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run_rank(module: str, work_path: str) -> None:
    """In the rank: tie its life to the owner's, then become `python -m MODULE WORK_PATH`.

    Done here and not between fork and exec, where a process with threads may run hardly any code.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.pop("OPD_PARENT")):
        sys.exit(f"{module}: the owner of this rank is gone")
    sys.argv = [module, work_path]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_rank(*sys.argv[1:])
