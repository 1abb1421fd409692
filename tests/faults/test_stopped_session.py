"""A driver that stands still (Ctrl-Z), and the same command again: it says for whom it waits, and takes the run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from infra.store_local import LocalStore
from schemas import keys
from tests.support.tiny import tiny_model

REPOSITORY = Path(__file__).parents[2]
DRIVER = """
import sys
from schemas import config
from schemas.errors import ContractError
from tasks.runs import session
session.RUN_LEASE_DEAD_AFTER_SECONDS = 5.0
with session.open_session(config.parse({values!r})) as mine:
    print("owner", mine.run_epoch, flush=True)
    sys.stdin.readline()
    for ask in (mine.check_owner, mine.moves):
        try:
            ask()
            print("still the owner", flush=True)
        except ContractError as error:
            print(error.found, flush=True)
"""


def driver(values: dict, errors: Path) -> subprocess.Popen[str]:
    with open(errors, "w") as file:
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER.format(values=values)], cwd=REPOSITORY, text=True, stderr=file,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip


def test_the_same_command_again_says_for_whom_it_waits_and_takes_the_run(tmp_path: Path) -> None:
    student = str(tiny_model(tmp_path / "student"))
    values = {
        "run_id": "stopped", "data": str(tmp_path / "data"), "scratch": str(tmp_path / "scratch"),
        "student": {"path": student}, "teachers": [{"id": "t", "path": student}],
        "prompts": {
            "datasets": [{"name": "chain_sum", "size": 4, "teachers": ["t"]}], "per_iteration": 3, "heldout": 1,
        },
    }  # fmt: skip
    first = driver(values, tmp_path / "first.err")
    assert first.stdout is not None
    second: subprocess.Popen[str] | None = None
    try:
        assert first.stdout.readline() == "owner 1\n"
        first.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        second = driver(values, tmp_path / "second.err")
        assert second.stdout is not None
        assert second.stdout.readline() == "owner 2\n"
        assert time.monotonic() - began >= 5.0
        said = (tmp_path / "second.err").read_text()
        assert f"waiting for {keys.run_lease('stopped')}, held by run stopped, process {first.pid} on " in said
        assert "taken over after 5 s of silence" in said
        first.send_signal(signal.SIGCONT)
        out, _ = first.communicate("\n")
        assert [f"process {second.pid} on" in line for line in out.splitlines()] == [True, True]
        assert second.communicate("\n")[0] == "still the owner\n" * 2
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.communicate()
    assert LocalStore(tmp_path / "data").head(keys.epoch(keys.run_lease("stopped"), 3)) is None
