"""Processes that own something: who they are, and whether one has certainly ended.

"Ended" lets an heir take over at once, so it needs proof from this very kernel: no such process by two independent
answers, or another process under the same number. All else (another host, a /proc that hides other users' processes,
a refusal) is unknown, and an unknown owner is judged by its heartbeat alone.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Identity of this process; boot, namespace and start are empty where the system does not tell."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot_id": _first_line("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _pid_namespace(),
        "pid": pid,
        "pid_start": _start_ticks(_first_line(f"/proc/{pid}/stat")),
    }


def is_this_process(process: dict[str, Any]) -> bool:
    """True only if `process` is this one beyond doubt."""
    here = this_process()
    return all(here.values()) and all(process.get(name) == value for name, value in here.items())


def has_ended(process: dict[str, Any]) -> bool:
    """True only if the process ran under this very kernel and process namespace and certainly runs no more."""
    here = this_process()
    if any(not here[name] or process.get(name) != here[name] for name in ("host", "boot_id", "pid_namespace")):
        return False
    pid, start = process.get("pid"), process.get("pid_start")
    if not isinstance(pid, int) or pid <= 0 or not start:
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # With hidepid other users' processes have no entry either.
        return _no_such_process(pid)
    except OSError:
        return False
    found = _start_ticks(stat)
    return bool(found) and (found != start or _only_to_be_reaped(stat))


def describe(owner: dict[str, Any]) -> str:
    """One line for messages: what the owner calls itself, its host and process id."""
    facts = [f"{name} {value}" for name, value in sorted(owner.items()) if name != "process"]
    process = owner.get("process", {})
    return ", ".join([*facts, f"process {process.get('pid')} on {process.get('host')}"])


def _no_such_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _fields(stat: str) -> list[str]:
    """Of /proc/PID/stat from the third, the state, on: the name before it may hold spaces and parentheses."""
    return stat.rpartition(")")[2].split()


def _start_ticks(stat: str) -> str:
    """Start time in clock ticks since boot; "" if the text has none."""
    fields = _fields(stat)
    return fields[19] if len(fields) > 19 else ""


def _only_to_be_reaped(stat: str) -> bool:
    """Dead, and none of its threads lives on: a process whose first thread alone has ended looks dead as well."""
    fields = _fields(stat)
    return fields[0] in ("Z", "X") and int(fields[17]) <= 1


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
