"""Confinement of code that others wrote: limits, no network, and an end that leaves nothing behind.

    owner ==stdin==> keeper --fork--> first process of a PID namespace --fork--> the confined process
                                      (ends with all of it, reaps)               (limits, no capabilities, then code)

The keeper lives outside, runs none of that code, and ends everything when the confined process ends or the last
writer of its stdin is gone. Inside a user namespace the owner's memory and environment cannot be read, inside a
network namespace nobody can be reached, and a PID namespace dies whole with its first process. Where the kernel gives
no namespaces the limits hold, and the keeper, to whom orphans are given, still ends all that was started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
_CAPABILITY_VERSION_3 = 0x20080522
_FILE_BYTES = 1 << 30
_OPEN_FILES = 256
_PROCESSES = 512


def missing() -> str:
    """Why this machine gives no namespaces, or "": tried by a process of its own."""
    if sys.platform != "linux":
        return "the system is not Linux"
    done = subprocess.run([sys.executable, "-m", "infra.confine"], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()


def run_confined(code: Callable[[], None], *, memory_bytes: int, network: bool, namespaces: bool) -> NoReturn:
    """Run code() in a confined process, then end as that process ended. The caller, one thread, becomes the keeper.

    memory_bytes: address space of each process inside. network: leave it reachable. namespaces: use them; they are
    there where `missing` says "". stdin and stdout are the confined process's alone; the keeper writes to neither.
    HOME and TMPDIR are a folder that goes with it.
    """
    home = os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="opd-confined-")
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if namespaces:
        _enter_namespaces(network)
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        if namespaces:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _be_first(tells, lambda: _be_confined(code, memory_bytes, namespaces))
        os.close(tells)
        _be_confined(code, memory_bytes, namespaces)
    os.close(tells)
    os.dup2(2, 1)  # who waits for answers must hear that nobody is left to give one
    status = _keep(child)
    _end_children()
    shutil.rmtree(home, ignore_errors=True)
    with os.fdopen(told, "rb") as words:
        said = words.read()
    _end_as(int(said) if said else status)


def _keep(child: int) -> int:
    """Wait status of the child; SIGKILL when the writers of stdin went first. Reaps orphans meanwhile."""
    events = select.poll()
    events.register(0, 0)  # POLLHUP alone: what is written is not for the keeper
    events.register(os.pidfd_open(child), select.POLLIN)
    while True:
        owner_gone = any(event & (select.POLLHUP | select.POLLERR) for fd, event in events.poll(500) if fd == 0)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return signal.SIGKILL
            if pid == child:
                return status
            if pid == 0:
                break
        if owner_gone:
            return signal.SIGKILL


def _end_children() -> None:
    """Kill children until there are none: orphans of those killed become children, wherever they had hidden."""
    while True:
        for entry in os.listdir("/proc"):
            if entry.isdigit() and _parent(entry) == os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(entry), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0  # it has just ended


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _enter_namespaces(network: bool) -> None:
    """OSError where the kernel refuses."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEWUSER | _NEWPID | _NEWIPC | (0 if network else _NEWNET)):
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _be_first(tells: int, confined: Callable[[], NoReturn]) -> NoReturn:
    """Process 1 of the namespace: adopts and reaps; when it ends the kernel ends all others."""
    child = os.fork()
    if child == 0:
        os.close(tells)
        confined()
    os.dup2(2, 1)
    while True:
        pid, status = os.wait()
        if pid == child:
            os.write(tells, str(status).encode())
            os._exit(0)


def _be_confined(code: Callable[[], None], memory_bytes: int, namespaces: bool) -> NoReturn:
    status = 1
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        limits = {
            resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: _FILE_BYTES,
            resource.RLIMIT_NOFILE: _OPEN_FILES, resource.RLIMIT_CORE: 0,
        }  # fmt: skip
        if namespaces and _counts_by_namespace():
            limits[resource.RLIMIT_NPROC] = _PROCESSES
        for limit, value in limits.items():
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        if namespaces:
            _drop_capabilities()
        code()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status & 0xFF)


def _counts_by_namespace() -> bool:
    """Whether RLIMIT_NPROC counts a user's processes of this namespace alone, as kernels do from 5.14 on."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return release is not None and (int(release[1]), int(release[2])) >= (5, 14)


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capset")


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _try_namespaces() -> None:
    try:
        _enter_namespaces(network=False)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    except OSError as error:
        print(error)


if __name__ == "__main__":
    _try_namespaces()
