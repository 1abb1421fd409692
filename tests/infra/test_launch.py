"""Rank processes, real ones: heard, stopped, killed, restarted, and gone with their owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.launch import RankCommand, RankProcess, group_commands, run_group, stop
from schemas.errors import StoreError

REPOSITORY = Path(__file__).parents[2]
PREEMPTIBLE = """
def leave(*_):
    say(kept="all")
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
say(pid=os.getpid())
time.sleep(600)
"""
DEAF = "signal.signal(signal.SIGTERM, lambda *_: say(asked=True))\nsay(pid=os.getpid())\nwhile True: time.sleep(600)"


class Site:
    """A folder with one rank module and its work file; starts ranks of it and keeps what they say."""

    def __init__(self, folder: Path, body: str) -> None:
        self.folder, self.logs = folder, folder / "logs"
        self.said: list[tuple[int, dict[str, Any]]] = []
        prelude = """
            import json, os, signal, subprocess, sys, time
            from pathlib import Path
            rank, folder = int(os.environ.get("RANK", "0")), Path(sys.argv[1]).parent
            def say(**message): print(json.dumps(message), flush=True)
        """
        folder.mkdir(exist_ok=True)
        (folder / "toy_rank.py").write_text(textwrap.dedent(prelude) + textwrap.dedent(body))
        self.work = folder / "work.json"
        self.env = {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        self.said.append((rank, message))

    def start(self, on_message: Callable[[int, dict[str, Any]], None] | None = None, rank: int = 0) -> RankProcess:
        command = RankCommand("toy_rank", self.work, rank, self.env)
        return RankProcess(command, self.logs / f"w{rank}.log", on_message or self.hear)

    def run(self, num_ranks: int = 1, grace_seconds: float = 30.0) -> list[RankProcess]:
        commands = group_commands("toy_rank", self.work, num_ranks, self.env)
        return run_group(commands, log_folder=self.logs, on_message=self.hear, grace_seconds=grace_seconds)

    def await_message(self, count: int = 1) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while len(self.said) < count:
            assert time.monotonic() < deadline, "a rank is silent"
            time.sleep(0.005)
        return self.said[count - 1][1]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone_within(pid: int, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_messages_come_home_in_order_and_other_lines_go_to_the_log(tmp_path: Path):
    site = Site(
        tmp_path,
        """
        for i in range(50):
            say(event="progress", done=i)
        print("plain words\\n[1, 2]")
        print("to stderr", file=sys.stderr)
        sys.stdout.write('{"event": "last, without a line end"}')
        """,
    )
    (process,) = site.run()
    assert (process.rank, process.status, process.asked, process.error) == (0, 0, False, None)
    assert site.said == [*((0, {"event": "progress", "done": i}) for i in range(50)),
                         (0, {"event": "last, without a line end"})]  # fmt: skip
    assert process.log_path == tmp_path / "logs" / "rank0.log"
    assert sorted(process.log_path.read_text().splitlines()) == ["[1, 2]", "plain words", "to stderr"]


def test_a_status_is_shown_only_after_all_was_heard(tmp_path: Path):
    site = Site(tmp_path, "for i in range(20): say(i=i)")
    slow: list[int] = []

    def hear(_rank: int, message: dict[str, Any]) -> None:
        time.sleep(0.01)
        slow.append(message["i"])

    process = site.start(hear)
    while process.status is None:
        time.sleep(0.001)
    assert slow == list(range(20))


def test_a_group_meets_at_one_free_port(tmp_path: Path):
    site = Site(
        tmp_path,
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        say(**{name: os.environ.get(name) for name in names}, argv=sys.argv[1:], main=__name__)
        """,
    )
    site.env["OMP_NUM_THREADS"] = "5"
    assert [p.status for p in site.run(3)] == [0, 0, 0]
    said = dict(site.said)
    assert {rank: (m["RANK"], m["LOCAL_RANK"]) for rank, m in said.items()} == {i: (str(i), str(i)) for i in range(3)}
    assert {(m["WORLD_SIZE"], m["MASTER_ADDR"], m["OMP_NUM_THREADS"], m["main"]) for m in said.values()} == {
        ("3", "127.0.0.1", "5", "__main__")
    }
    assert len({m["MASTER_PORT"] for m in said.values()}) == 1
    assert int(said[0]["MASTER_PORT"]) > 1024
    assert said[0]["argv"] == [str(tmp_path / "work.json")]


def test_a_single_rank_gets_no_rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    site = Site(tmp_path, "say(world='WORLD_SIZE' in os.environ, master='MASTER_ADDR' in os.environ)")
    site.run()
    assert site.said == [(0, {"world": False, "master": False})]


def test_the_first_failure_stops_the_others_and_comes_first(tmp_path: Path):
    site = Site(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        if rank == 1:
            while len(list(folder.glob("up*"))) < 2:
                time.sleep(0.01)
            print("it broke here", file=sys.stderr)
            sys.exit(3)
        (folder / f"up{rank}").touch()
        time.sleep(600)
        """,
    )
    first, *others = site.run(3)
    assert (first.rank, first.status, first.asked) == (1, 3, False)
    assert "exit status 3" in first.describe()
    assert "it broke here" in first.describe()
    assert {(p.rank, p.status, p.asked) for p in others} == {(0, 75, True), (2, 75, True)}


def test_the_error_that_a_rank_sent_is_what_is_told(tmp_path: Path):
    site = Site(tmp_path, "say(event='error', kind='format error', text='format error: shard 7'); sys.exit(3)")
    (process,) = site.run()
    assert process.error == {"event": "error", "kind": "format error", "text": "format error: shard 7"}
    assert (process.status, process.describe()) == (3, "format error: shard 7")


def test_a_rank_that_is_asked_keeps_its_work(tmp_path: Path):
    site = Site(tmp_path, PREEMPTIBLE)
    process = site.start()
    assert process.status is None
    assert site.await_message() == {"pid": process.pid}
    stop([process], grace_seconds=60.0)
    assert (process.status, process.asked) == (75, True)
    assert site.said[1:] == [(0, {"kept": "all"})]
    stop([process], grace_seconds=60.0)
    assert process.status == 75


def test_a_rank_that_does_not_listen_is_killed_after_the_grace_time(tmp_path: Path):
    site = Site(tmp_path, DEAF)
    process = site.start()
    site.await_message()
    began = time.monotonic()
    stop([process], grace_seconds=0.3)
    assert time.monotonic() - began >= 0.3
    assert process.status == -signal.SIGKILL
    assert "SIGKILL" in process.describe()
    assert not alive(process.pid)


def test_one_worker_is_killed_and_started_again_while_another_works_on(tmp_path: Path):
    site = Site(
        tmp_path,
        """
        print(f"words of {os.getpid()}", file=sys.stderr)
        say(pid=os.getpid())
        while not (folder / "go").exists():
            time.sleep(0.01)
        """,
    )
    killed, other = site.start(rank=0), site.start(rank=1)
    site.await_message(2)
    killed.send(signal.SIGKILL)
    assert killed.wait(60)
    assert killed.status == -signal.SIGKILL
    assert not killed.asked
    assert f"words of {killed.pid}" in killed.describe()
    again = site.start(rank=0)
    site.await_message(3)
    killed.send(signal.SIGKILL)  # ended: nobody gets it
    (tmp_path / "go").touch()
    assert again.wait(60)
    assert other.wait(60)
    assert (again.status, other.status) == (0, 0)
    assert f"words of {again.pid}" in again.describe()
    assert f"words of {killed.pid}" not in again.describe(), "the log of an earlier start is not its own"
    assert again.log_path == killed.log_path


def test_processes_that_a_rank_started_end_with_it(tmp_path: Path):
    """The child holds the rank's stdout open and would go on for ever."""
    site = Site(
        tmp_path,
        """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        say(child=child.pid)
        sys.exit(4)
        """,
    )
    (process,) = site.run()
    assert process.status == 4
    assert gone_within(site.said[0][1]["child"])


def test_an_exception_of_the_callback_ends_the_group_and_goes_through(tmp_path: Path):
    site = Site(tmp_path, PREEMPTIBLE)

    def hear(rank: int, message: dict[str, Any]) -> None:
        site.hear(rank, message)
        if rank == 1 and "pid" in message:
            raise KeyError("callback")

    commands = group_commands("toy_rank", site.work, 2, site.env)
    with pytest.raises(KeyError, match="callback"):
        run_group(commands, log_folder=site.logs, on_message=hear, grace_seconds=30.0)
    assert site.said
    assert not any(alive(message["pid"]) for _, message in site.said if "pid" in message)
    assert 'KeyError("callback")' in (site.logs / "rank1.log").read_text()


def test_a_module_that_does_not_exist_is_a_failure_with_its_reason(tmp_path: Path):
    site = Site(tmp_path, "")
    command = RankCommand("no_such_module_here", site.work, env=site.env)
    (process,) = run_group([command], log_folder=site.logs, on_message=site.hear, grace_seconds=1.0)
    assert process.status == 1
    assert "no_such_module_here" in process.describe()


def test_a_full_log_disk_loses_neither_messages_nor_how_it_ended(tmp_path: Path):
    site = Site(
        tmp_path,
        """
        print("words " * 9999)
        say(event="progress", done=1)
        say(event="error", kind="store error", text="store error: the cause")
        sys.exit(4)
        """,
    )
    site.logs.mkdir()
    (site.logs / "w0.log").symlink_to("/dev/full")
    process = site.start()
    assert process.wait(60)
    assert [message["event"] for _, message in site.said] == ["progress", "error"]
    assert (process.status, process.describe()) == (4, "store error: the cause")


def test_a_callback_that_fails_is_raised_though_the_log_is_full_or_gone(tmp_path: Path):
    site = Site(tmp_path, PREEMPTIBLE)
    site.logs.mkdir()
    (site.logs / "w0.log").symlink_to("/dev/full")

    def hear(_rank: int, _message: dict[str, Any]) -> None:
        raise KeyError("callback")

    process = site.start(hear)
    assert process.wait(60)
    with pytest.raises(KeyError, match="callback"):
        _ = process.status
    (site.logs / "w0.log").unlink()
    assert "signal SIGKILL" in process.describe()
    assert "cannot be read" in process.describe()


def test_a_log_that_cannot_be_written_is_a_store_error_and_no_rank_runs_on(tmp_path: Path):
    site = Site(tmp_path, PREEMPTIBLE)
    (site.logs / "rank1.log").mkdir(parents=True)
    with pytest.raises(StoreError) as caught:
        site.run(2)
    assert "rank1.log" in caught.value.where
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


_OWNER = """
import json, signal, sys
from pathlib import Path
from infra.launch import RankCommand, RankProcess, run_group, stop
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
folder = Path(sys.argv[1])
command = RankCommand("toy_rank", folder / "work.json")
def hear(rank, message): print(json.dumps(message), flush=True)
def group(): return run_group([command], log_folder=folder / "logs", on_message=hear, grace_seconds=60.0)
"""


def owner_of(site: Site, code: str) -> tuple[subprocess.Popen[str], int]:
    """An owning process, and the pid of its rank once that is up."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER + textwrap.dedent(code), str(site.folder)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **site.env},
    )  # fmt: skip
    assert owner.stdout is not None
    said = owner.stdout.readline()
    assert said.startswith('{"pid": '), said + owner.stdout.read()
    return owner, int(said.split()[1].strip("}"))


def test_the_death_of_the_owner_is_the_death_of_its_ranks(tmp_path: Path):
    owner, rank_pid = owner_of(Site(tmp_path, DEAF), "group()")
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert gone_within(rank_pid)


def test_an_interrupted_owner_lets_its_ranks_keep_their_work(tmp_path: Path):
    owner, rank_pid = owner_of(
        Site(tmp_path, PREEMPTIBLE),
        """
        try:
            group()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """,
    )
    owner.send_signal(signal.SIGINT)
    said, _ = owner.communicate(timeout=60)
    assert said.splitlines() == ['{"kept": "all"}', "interrupted"]
    assert not alive(rank_pid)


def test_a_second_interrupt_does_not_wait_for_the_grace_time(tmp_path: Path):
    owner, rank_pid = owner_of(Site(tmp_path, DEAF), "group()")
    assert owner.stdout is not None
    owner.send_signal(signal.SIGINT)
    assert owner.stdout.readline() == '{"asked": true}\n'
    owner.send_signal(signal.SIGINT)
    said, _ = owner.communicate(timeout=30)
    assert "KeyboardInterrupt" in said
    assert not alive(rank_pid)
