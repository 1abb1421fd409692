"""A closed terminal and a killed driver, with Prefect's own server: how it ends, and that nothing stays behind."""

from __future__ import annotations

import fcntl
import os
import pty
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# `opd run` with a flow in the place of a campaign: the command line's signals, Prefect's flow and server are real.
_DRIVER = """
import os, sys, time
from pathlib import Path
from flows import cli, commands
def run(arguments):
    commands.quiet_prefect()
    from prefect import flow
    from prefect.server.api.server import SubprocessASGIServer
    from flows import preemption
    from flows.server import guard_server
    guard_server()
    @flow
    @preemption.noting_stops()
    def campaign():
        server = SubprocessASGIServer()
        part = Path(sys.argv[1] + ".part")
        part.write_text(f"{server.server_process.pid} {server.port}")
        part.rename(sys.argv[1])
        print("running", flush=True)
        time.sleep(600)
    campaign()
    return 0
commands.COMMANDS["run"] = run
sys.exit(cli.main(["run", "x.toml"]))
"""


def start(tmp_path: Path, **options) -> tuple[subprocess.Popen, int, int]:
    """(driver, process id of its server, the server's port) once the flow runs."""
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(tmp_path / "server")], cwd=tmp_path,
        env={**{k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"}, "PYTHONPATH": str(REPOSITORY),
             "PREFECT_HOME": str(tmp_path / "home")}, **options,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not (tmp_path / "server").exists():
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid, port = map(int, (tmp_path / "server").read_text().split())
    assert listens(port)
    return driver, pid, port


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_nothing_stays(pid: int, port: int) -> None:
    deadline = time.monotonic() + 30
    while (left := (runs(pid), listens(port), _guards(pid))) != (False, False, []):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _guards(pid: int) -> list[Path]:
    return [p for p in Path("/proc").glob("[0-9]*/cmdline") if _command(p)[-3:] == ["-m", "infra.guard", str(pid)]]


def _command(path: Path) -> list[str]:
    try:
        return path.read_text().rstrip("\0").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


@pytest.mark.slow
def test_a_killed_driver_leaves_no_server(tmp_path):
    driver, pid, port = start(tmp_path, stdout=subprocess.DEVNULL)
    driver.kill()
    driver.wait()
    assert_nothing_stays(pid, port)


@pytest.mark.slow
def test_a_closed_terminal_is_a_stop(tmp_path):
    """The driver leads the terminal's session: the kernel sends SIGHUP to its foreground group, server and all."""
    terminal, side = pty.openpty()
    driver, pid, port = start(
        tmp_path, stdin=side, stdout=side, stderr=side, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(side)
    began = time.monotonic()
    os.close(terminal)
    assert driver.wait(60) == 75
    assert time.monotonic() - began < 30
    assert_nothing_stays(pid, port)


def test_a_program_that_ignores_hangups_goes_on():
    code = (
        "import signal, sys\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\nfrom flows import cli\n"
        "cli._stop_when_hung_up()\nsignal.raise_signal(signal.SIGHUP)\nprint('goes on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout == "goes on\n", done.stderr
