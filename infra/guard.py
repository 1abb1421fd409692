"""Ends a process whose owner has ended, in whatever way: `python -m infra.guard PID`, whose stdin ends with the owner.

It serves for processes that a library starts for us, on which we cannot set PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

_GRACE_SECONDS = 5.0


def guard(pid: int) -> None:
    """Start a guard of process `pid`, for as long as this process lives.

    Does nothing where the system cannot hold on to a process (pidfd, Linux 5.3).
    """
    if not hasattr(os, "pidfd_open"):
        return
    project = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, [project, os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        [sys.executable, "-m", "infra.guard", str(pid)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    # The pipe is left open: its end, with that of this process, is the signal.
    _guards.append(child)


_guards: list[subprocess.Popen[bytes]] = []


def _main(pid: int) -> int:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    # Whichever ends first: the owner, with whom stdin ends, or the process.
    ended, _, _ = select.select([process, 0], [], [])
    if process in ended:
        return 0
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            signal.pidfd_send_signal(process, signum)
        except ProcessLookupError:
            return 0
        if select.select([process], [], [], _GRACE_SECONDS)[0]:
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1])))
