"""Rank processes of a stage: started, heard, watched, and never left behind.

A rank is `python -m MODULE WORK_PATH` in its own session. It speaks JSON objects on stdout, one a line, which go
to a callback; whatever else it prints goes to its log. Invariant: when a rank ends so do all processes that it
started, and when the owning process dies in any way, so do its ranks.

A rank that is asked to stop gets SIGTERM, and SIGKILL after a grace time. An owner that wants its ranks to keep
their work when it is itself told to stop turns the signal into an exception (as Python does with SIGINT): `stop`
belongs into the `finally`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra import waiting
from schemas.errors import StoreError

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 4000
_LINE_BYTES = 1 << 24
_POLL_SECONDS = 0.02
#: Until somebody who waits for ranks to end is told so, for the first time and then again.
_FIRST_WORD_SECONDS, _WORD_SECONDS = 0.5, 8.0
#: glibc hands memory of tensors back to the kernel as soon as they are freed, and a step on a CPU then takes its pages
#: anew, a fifth of its time. So up to 1 GiB is kept, for blocks of up to 256 MiB.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(256 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


@dataclass(frozen=True)
class RankCommand:
    """One rank to start. env comes on top of this process's environment; OMP_NUM_THREADS belongs there."""

    module: str
    work_path: Path
    rank: int = 0
    env: Mapping[str, str] = field(default_factory=dict)


class RankProcess:
    """One started rank, watched until its end.

    The thread that starts it must outlive it: on Linux a process dies with the *thread* that has started it.
    asked: it was asked to stop; error: the last {"event": "error"} message that it sent.
    """

    def __init__(self, command: RankCommand, log_path: Path, on_message: Callable[[int, dict[str, Any]], None]) -> None:
        """log_path: appended to. on_message(rank, message) runs in a thread of this rank, one message at a time.

        StoreError if the log cannot be written or the system starts no process.
        """
        self.rank, self.log_path = command.rank, log_path
        self.asked = False
        self.error: dict[str, Any] | None = None
        self._on_message = on_message
        self._callback_error: Exception | None = None
        self._lock, self._reaped, self._ended = threading.Lock(), False, threading.Event()
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            # Spinning OpenMP threads starve one another on a machine that is also used for something else.
            "OMP_WAIT_POLICY": "PASSIVE",
            **_MALLOC,
            **command.env,
            "OPD_PARENT": str(os.getpid()),
        }
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = open(log_path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the process
            self._log_start = log_path.stat().st_size
            self._process = subprocess.Popen(
                [sys.executable, "-m", "infra.launch", command.module, str(command.work_path)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log,
                start_new_session=True, env=environment,
            )  # fmt: skip
        except OSError as error:
            raise StoreError(str(log_path), expected="to start a process that logs here", found=str(error)) from error
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name=f"rank {self.rank} stdout", daemon=True)
        self._reader.start()
        threading.Thread(target=self._await_end, name=f"rank {self.rank} end", daemon=True).start()

    @property
    def status(self) -> int | None:
        """None while it runs; then, all that it said having been heard, its exit status or minus its signal.

        An exception of the callback, which ends the rank, is raised here.
        """
        if not self._ended.is_set():
            return None
        if self._callback_error is not None:
            raise self._callback_error
        return self._process.returncode

    def send(self, signum: int) -> None:
        """Send a signal, SIGKILL to all processes of the rank. Never reaches another process with its old id."""
        with self._lock:
            if not self._reaped:
                (os.killpg if signum == signal.SIGKILL else os.kill)(self.pid, signum)

    def describe(self) -> str:
        """Why it ended: its own error if it sent one, else how, and the end of what this start of it logged."""
        if self.error is not None:
            return str(self.error.get("text", self.error))
        returned = self._process.returncode
        how = f"exit status {returned}" if returned >= 0 else f"signal {signal.Signals(-returned).name}"
        try:
            with open(self.log_path, "rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                tail = log.read().decode("utf-8", "replace").strip()
        except OSError as error:  # how it ended is the news, not that its log is gone
            tail = f"which cannot be read: {error.strerror}"
        return f"rank {self.rank} ended with {how}; log {self.log_path}" + (f"\n{tail}" if tail else "")

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for its end; False if it still runs."""
        return self._ended.wait(timeout_seconds)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            while line := stdout.readline(_LINE_BYTES):
                message = _message(line)
                if message is None:
                    self._note(line)
                elif self._callback_error is None:
                    self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        if message.get("event") == "error":
            self.error = message
        elif message.get("event") == "waiting":
            waiting.pass_on(f"rank {self.rank} is {message['text']}")
        try:
            self._on_message(self.rank, message)
        except Exception as error:
            self._callback_error = error
            self.send(signal.SIGKILL)
            self._note(traceback.format_exc().encode())

    def _note(self, text: bytes) -> None:
        # A disk with no room for the log is no reason to lose messages, which the rank may end with.
        with contextlib.suppress(OSError):
            self._log.write(text)

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
        self._ended.set()


def stop(
    processes: Sequence[RankProcess], grace_seconds: float, on_wait: Callable[[int, float], None] = lambda *_: None
) -> None:
    """Ask ranks to stop and return when all have ended; those that take longer than grace_seconds are killed.

    on_wait(ranks that still run, seconds left): called after a moment, and every few seconds.
    """
    try:
        for process in processes:
            process.asked = not process.wait(0)
            process.send(signal.SIGTERM)
        began, told = time.monotonic(), 0.0
        pause = _FIRST_WORD_SECONDS
        while (running := [p for p in processes if not p.wait(0)]) and (passed := time.monotonic() - began) < (
            grace_seconds
        ):
            if passed - told >= pause:
                on_wait(len(running), grace_seconds - passed)
                told, pause = passed, _WORD_SECONDS
            running[0].wait(min(_POLL_SECONDS, grace_seconds - passed))
    finally:  # also for a user who interrupts the waiting
        for process in processes:
            process.send(signal.SIGKILL)
        for process in processes:
            process.wait(threading.TIMEOUT_MAX)


def group_commands(module: str, work_path: Path, num_ranks: int, env: Mapping[str, str]) -> list[RankCommand]:
    """The ranks of one torch.distributed group on this host; a group of one needs no rendezvous and gets none."""
    if num_ranks == 1:
        return [RankCommand(module, work_path, 0, env)]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    return [
        RankCommand(module, work_path, rank, {**env, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]


def run_group(
    commands: Sequence[RankCommand],
    *,
    log_folder: Path,
    on_message: Callable[[int, dict[str, Any]], None],
    grace_seconds: float,
    watch: Callable[[Sequence[RankProcess]], None] = lambda _: None,
    on_wait: Callable[[int, float], None] = lambda *_: None,
) -> list[RankProcess]:
    """Run ranks that need each other: the first that ends other than with 0 stops the rest.

    Returns all, ended, in the order of their ends: the first with a status is the cause. Logs are rankN.log;
    on_message is called for one message at a time, watch(those that run) many times a second, on_wait as by `stop`.
    """
    one_at_a_time = threading.Lock()

    def hear(rank: int, message: dict[str, Any]) -> None:
        with one_at_a_time:
            on_message(rank, message)

    running: list[RankProcess] = []
    ended: list[RankProcess] = []
    try:
        for command in commands:
            running.append(RankProcess(command, log_folder / f"rank{command.rank}.log", hear))
        while running:
            time.sleep(_POLL_SECONDS)
            for process in [p for p in running if p.status is not None]:
                running.remove(process)
                ended.append(process)
            if any(process.status for process in ended):
                break
            watch(running)
    finally:
        stop(running, grace_seconds, on_wait)
    return ended + running


def _message(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _become_rank(module: str, work_path: str) -> None:
    """In the new process: tie its life to the owner's, then be `python -m MODULE WORK_PATH`.

    Done here and not between fork and exec, where a process with threads may run hardly any code.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.pop("OPD_PARENT")):
        sys.exit(f"{module}: the owner of this rank is gone")
    sys.argv = [module, work_path]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise  # Python prints the text
        # The interpreter takes a second or more to take torch apart, and what counts is durable already.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code or 0)


if __name__ == "__main__":
    _become_rank(*sys.argv[1:])
