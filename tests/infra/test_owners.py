"""Whether a process has ended: proofs, and all that is none."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra import owners

IDENTITY = "from infra import owners; import json; print(json.dumps(owners.this_process()), flush=True); "


@contextlib.contextmanager
def process(code: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A process that runs `code` after it has told its identity."""
    started = subprocess.Popen(
        [sys.executable, "-c", IDENTITY + code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    try:
        assert started.stdout is not None
        identity = json.loads(started.stdout.readline())
        assert identity["pid"] == started.pid
        yield started, identity
    finally:
        started.kill()
        started.wait()


def test_this_process_is_itself_and_lives():
    here = owners.this_process()
    assert owners.is_this_process(here)
    assert not owners.has_ended(here)
    assert not owners.is_this_process({**here, "pid_start": "1"})
    assert not owners.is_this_process({})
    assert not owners.has_ended({})


def test_running_stopped_dead_and_reaped():
    with process("input()") as (started, identity):
        assert not owners.has_ended(identity)
        assert not owners.is_this_process(identity)
        started.send_signal(signal.SIGSTOP)
        assert not owners.has_ended(identity)
        started.kill()
        deadline = time.monotonic() + 30
        while not owners.has_ended(identity) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert owners.has_ended(identity)  # dead, though nobody has reaped it
        started.wait()
        assert owners.has_ended(identity)


def test_a_process_whose_first_thread_alone_has_ended_lives():
    code = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    with process("exec(" + repr(code) + ")") as (started, identity):
        stat = Path(f"/proc/{started.pid}/stat")
        deadline = time.monotonic() + 30
        while ") Z " not in stat.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ") Z " in stat.read_text()
        assert not owners.has_ended(identity)


@pytest.mark.parametrize("error", [PermissionError(13, "hidden"), OSError(5, "unreadable"), OSError(24, "no files")])
def test_what_cannot_be_read_is_no_proof(monkeypatch: pytest.MonkeyPatch, error: OSError):
    with process("input()") as (started, identity):
        started.kill()
        started.wait()
        assert owners.has_ended(identity)
        read_text = Path.read_text

        def refuse(path: Path, *args: Any, **kwargs: Any) -> str:
            if str(path) == f"/proc/{started.pid}/stat":
                raise error
            return read_text(path, *args, **kwargs)

        monkeypatch.setattr(Path, "read_text", refuse)
        assert not owners.has_ended(identity)


def test_a_missing_entry_is_no_proof_when_a_signal_would_arrive(monkeypatch: pytest.MonkeyPatch):
    with process("input()") as (started, identity):
        started.kill()
        started.wait()
        monkeypatch.setattr(os, "kill", lambda *_: None)
        assert not owners.has_ended(identity)
        monkeypatch.setattr(os, "kill", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not yours")))
        assert not owners.has_ended(identity)


@pytest.fixture
def shared() -> Iterator[str]:
    """A folder that every user may write to, below none that is private."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield folder


@pytest.mark.parametrize("hidepid", [1, 2])
def test_the_live_owner_of_another_user_is_not_taken_for_dead_where_proc_hides_it(shared: str, hidepid: int):
    """Two users on a host whose /proc hides processes of others, as shared login nodes have it."""
    if os.getuid() != 0:
        pytest.skip("only root can mount /proc and become other users")
    take = f"""
import os, sys, time
from infra.leases import acquire
from infra.store_local import LocalStore
from schemas.errors import ContractError
def become(uid):
    os.setgroups([]); os.setgid(uid); os.setuid(uid); os.umask(0)
def take(dead_after, wait):
    return acquire(LocalStore({shared!r}), "runs/r/lease", owner={{"name": "u%d" % os.getuid()}},
                   dead_after_seconds=dead_after, wait=wait)
"""
    alice = take + "become(40001); lease = take(9.0, True); lease.start_heartbeat(0.05); print('owner', flush=True); "
    alice += "sys.stdin.read()"
    bob = (
        take
        + """
become(40002)
hidden = not os.path.exists(f"/proc/{sys.argv[1]}/cmdline") or not os.access(f"/proc/{sys.argv[1]}/cmdline", os.R_OK)
began = time.monotonic()
try:
    print(hidden, "took epoch", take(30.0, False).epoch, "after", time.monotonic() - began)
except ContractError as error:
    print(hidden, "u40001" in error.found and "heartbeat moves" in error.found)
"""
    )
    mounted = f'mount -t proc -o hidepid={hidepid} proc /proc || exit 77; exec "$@"'
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    owner = subprocess.Popen(
        [sys.executable, "-c", alice], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owner\n"
        found = subprocess.run(
            ["unshare", "-m", "--propagation", "private", "sh", "-c", mounted, "sh",
             sys.executable, "-c", bob, str(owner.pid)],
            capture_output=True, text=True, env=environment, timeout=60,
        )  # fmt: skip
        if found.returncode == 77 or "unshare failed" in found.stderr:
            pytest.skip(f"this kernel refuses the mount: {found.stderr}")
        assert found.stdout == "True True\n", found
    finally:
        owner.kill()
        owner.wait()
