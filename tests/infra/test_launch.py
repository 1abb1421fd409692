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

from infra.launch import RankCommand, RankExit, Ranks, run_ranks
from infra.telemetry import Telemetry, read
from schemas.errors import StoreError

REPOSITORY = Path(__file__).parents[2]


class Site:
    """A folder with one rank module and its work file; `run` starts a group of it and keeps what was said."""

    def __init__(self, folder: Path, body: str) -> None:
        self.folder = folder
        self.said: list[tuple[int, dict[str, Any]]] = []
        prelude = """
            import json, os, signal, subprocess, sys, time
            from pathlib import Path
            rank, folder = int(os.environ.get("RANK", "0")), Path(sys.argv[1]).parent
            def say(**message): print(json.dumps(message), flush=True)
        """
        folder.mkdir(exist_ok=True)
        (folder / "toy_rank.py").write_text(textwrap.dedent(prelude) + textwrap.dedent(body))
        (folder / "work.json").write_text("{}")
        self.env = {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}

    def command(self, rank: int = 0, world_size: int = 1, **env: str) -> RankCommand:
        return RankCommand("toy_rank", self.folder / "work.json", rank, world_size, {**self.env, **env})

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        self.said.append((rank, message))

    def ranks(
        self, on_message: Callable[[int, dict[str, Any]], None] | None = None, grace_seconds: float = 30.0
    ) -> Ranks:
        return Ranks(log_dir=self.folder / "logs", on_message=on_message or self.hear, grace_seconds=grace_seconds)

    def run(self, world_size: int = 1, grace_seconds: float = 30.0, **rest: Any) -> list[RankExit]:
        return run_ranks(
            [self.command(rank, world_size) for rank in range(world_size)],
            log_dir=self.folder / "logs", on_message=self.hear, grace_seconds=grace_seconds, **rest,
        )  # fmt: skip


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


def test_messages_reach_the_owner_in_order_and_other_lines_the_log(tmp_path: Path):
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
    (ended,) = site.run()
    assert (ended.rank, ended.status, ended.asked, ended.error) == (0, 0, False, None)
    assert site.said == [*((0, {"event": "progress", "done": i}) for i in range(50)),
                         (0, {"event": "last, without a line end"})]  # fmt: skip
    log = (tmp_path / "logs" / "rank0.log").read_text()
    assert sorted(log.splitlines()) == ["[1, 2]", "plain words", "to stderr"]


def test_the_callback_runs_in_the_thread_that_waits(tmp_path: Path):
    site = Site(tmp_path, "say(event='x')")
    threads = []
    with site.ranks(lambda *_: threads.append(threading.current_thread())) as ranks:
        ranks.start(site.command())
        assert ranks.next_exit() is not None
    assert threads == [threading.current_thread()]


def test_a_group_meets_at_one_free_port(tmp_path: Path):
    site = Site(
        tmp_path,
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        say(**{name: os.environ.get(name) for name in names}, argv=sys.argv[1:], main=__name__)
        """,
    )
    with site.ranks() as ranks:
        for rank in range(3):
            ranks.start(site.command(rank, 3, OMP_NUM_THREADS="5"))
        while ranks.next_exit() is not None:
            pass
    said = dict(site.said)
    assert {rank: m["RANK"] for rank, m in said.items()} == {0: "0", 1: "1", 2: "2"}
    assert {(m["WORLD_SIZE"], m["MASTER_ADDR"], m["OMP_NUM_THREADS"], m["main"]) for m in said.values()} == {
        ("3", "127.0.0.1", "5", "__main__")
    }
    assert len({m["MASTER_PORT"] for m in said.values()}) == 1
    assert int(said[0]["MASTER_PORT"]) > 1024
    assert said[0]["argv"] == [str(tmp_path / "work.json")]


def test_a_single_rank_gets_no_rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
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
            say(event="error", kind="format error", text="format error: shard 7")
            print("Traceback of rank 1", file=sys.stderr)
            sys.exit(3)
        (folder / f"up{rank}").touch()
        time.sleep(600)
        """,
    )
    first, *others = site.run(3)
    assert (first.rank, first.status, first.asked) == (1, 3, False)
    assert first.error == {"event": "error", "kind": "format error", "text": "format error: shard 7"}
    assert "exit status 3" in first.describe()
    assert "shard 7" in first.describe()
    assert first.log_tail == "Traceback of rank 1"
    assert {(e.rank, e.status, e.asked) for e in others} == {(0, 75, True), (2, 75, True)}


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path: Path):
    site = Site(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(event="up", pid=os.getpid())
        time.sleep(600)
        """,
    )
    stop = threading.Event()

    def hear(rank: int, message: dict[str, Any]) -> None:
        site.hear(rank, message)
        stop.set()

    with Ranks(log_dir=tmp_path / "logs", on_message=hear, grace_seconds=0.3, stop=stop) as ranks:
        ranks.start(site.command())
        ended = ranks.next_exit()
        assert ended is not None
        assert ranks.stopping
    assert (ended.status, ended.asked) == (-signal.SIGKILL, True)
    assert "SIGKILL" in ended.describe()


def test_one_worker_is_killed_and_started_again_while_another_works_on(tmp_path: Path):
    site = Site(
        tmp_path,
        """
        me = os.environ["WORKER"]
        print(f"words of {me}", file=sys.stderr)
        say(event="up", worker=me, pid=os.getpid())
        while not (folder / "go").exists():
            time.sleep(0.01)
        """,
    )
    pids: dict[int, list[int]] = {0: [], 1: []}

    def hear(rank: int, message: dict[str, Any]) -> None:
        pids[rank].append(message["pid"])
        if all(pids.values()) and len(pids[0]) == 1:
            ranks.running[0].kill(signal.SIGKILL)
        elif len(pids[0]) == 2:
            (tmp_path / "go").touch()

    with site.ranks(hear) as ranks:
        for rank in (0, 1):
            ranks.start(site.command(rank, WORKER=f"w{rank}"))
        first = ranks.next_exit()
        assert first is not None
        assert (first.rank, first.status, first.asked) == (0, -signal.SIGKILL, False)
        assert first.log_tail == "words of w0"
        with pytest.raises(RuntimeError):
            ranks.start(site.command(1))
        ranks.start(site.command(0, WORKER="again"))
        ends = [ranks.next_exit(), ranks.next_exit()]
        assert {(e.rank, e.status) for e in ends if e} == {(0, 0), (1, 0)}
        assert {e.log_tail for e in ends if e} == {"words of again", "words of w1"}
        assert ranks.next_exit() is None
    assert len(set(pids[0])) == 2
    assert len(pids[1]) == 1


def test_children_of_a_rank_end_with_it(tmp_path: Path):
    """A grandchild holds the rank's stdout open and would go on for ever."""
    site = Site(
        tmp_path,
        """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        say(event="up", child=child.pid)
        sys.exit(4)
        """,
    )
    (ended,) = site.run()
    assert ended.status == 4
    assert gone_within(site.said[0][1]["child"])


def test_an_exception_of_the_callback_goes_through_and_nothing_is_left(tmp_path: Path):
    site = Site(tmp_path, "say(event='up', pid=os.getpid()); time.sleep(600)")

    def hear(rank: int, message: dict[str, Any]) -> None:
        site.hear(rank, message)
        raise KeyError("callback")

    with pytest.raises(KeyError):
        run_ranks([site.command()], log_dir=tmp_path / "logs", on_message=hear, grace_seconds=30.0)
    assert not alive(site.said[0][1]["pid"])


def test_a_module_that_does_not_exist_is_a_failure_with_its_reason(tmp_path: Path):
    site = Site(tmp_path, "")
    command = RankCommand("no_such_module_here", tmp_path / "work.json", env=site.env)
    (ended,) = run_ranks([command], log_dir=tmp_path / "logs", on_message=site.hear, grace_seconds=1.0)
    assert ended.status == 1
    assert "no_such_module_here" in ended.describe()


def test_a_log_folder_that_cannot_be_written_is_a_store_error(tmp_path: Path):
    site = Site(tmp_path, "")
    (tmp_path / "logs" / "rank0.log").mkdir(parents=True)
    with pytest.raises(StoreError) as caught:
        site.run()
    assert "rank0.log" in caught.value.where


_OWNER = """
import json, os, signal, sys, threading, time
from pathlib import Path
from infra.launch import RankCommand, Ranks, run_ranks
def hear(rank, message): print(json.dumps(message), flush=True)
def group(**rest):
    command = RankCommand("toy_rank", Path(sys.argv[1]) / "work.json")
    return run_ranks([command], log_dir=Path(sys.argv[1]) / "logs", on_message=hear, grace_seconds=60.0, **rest)
"""


def _owner(site: Site, code: str) -> tuple[subprocess.Popen[str], int]:
    """An owning process, and the pid of its rank once that is up."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER + textwrap.dedent(code), str(site.folder)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **site.env},
    )  # fmt: skip
    assert owner.stdout is not None
    said = owner.stdout.readline()
    assert said.startswith('{"pid": '), said + owner.stdout.read()
    return owner, int(said.split()[1].strip("}"))


_PREEMPTIBLE = """
def leave(*_):
    say(kept="all")
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, signal.SIG_IGN)
say(pid=os.getpid())
time.sleep(600)
"""


def test_the_death_of_the_owner_is_the_death_of_its_ranks(tmp_path: Path):
    site = Site(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); say(pid=os.getpid()); time.sleep(600)")
    owner, rank_pid = _owner(site, "group()")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert gone_within(rank_pid)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_owner_lets_ranks_keep_their_work_and_then_takes_its_course(tmp_path: Path, signum: int):
    site = Site(tmp_path, _PREEMPTIBLE)
    owner, rank_pid = _owner(
        site,
        """
        try:
            group()
        except BaseException as error:
            print(type(error).__name__, *error.args, flush=True)
        """,
    )
    owner.send_signal(signum)
    said, _ = owner.communicate(timeout=60)
    assert said.splitlines() == [
        '{"kept": "all"}',
        "SystemExit 75" if signum == signal.SIGTERM else "KeyboardInterrupt",
    ]
    assert not alive(rank_pid)


def test_a_handler_that_the_owner_had_is_called_after_the_ranks_ended(tmp_path: Path):
    site = Site(tmp_path, _PREEMPTIBLE)
    owner, _ = _owner(
        site,
        """
        signal.signal(signal.SIGTERM, lambda *_: print("handler", flush=True))
        print([(e.status, e.asked) for e in group()], flush=True)
        """,
    )
    owner.send_signal(signal.SIGTERM)
    said, _ = owner.communicate(timeout=60)
    assert said.splitlines() == ['{"kept": "all"}', "handler", "[(75, True)]"]


def test_another_thread_stops_ranks_by_the_event(tmp_path: Path):
    site = Site(tmp_path, _PREEMPTIBLE)
    owner, _ = _owner(
        site,
        """
        stop = threading.Event()
        def work(): print([(e.status, e.asked) for e in group(stop=stop)], flush=True)
        worker = threading.Thread(target=work); worker.start()
        while not (Path(sys.argv[1]) / "stop").exists(): time.sleep(0.01)
        stop.set(); worker.join()
        """,
    )
    (tmp_path / "stop").touch()
    said, _ = owner.communicate(timeout=60)
    assert said.splitlines() == ['{"kept": "all"}', "[(75, True)]"]


def test_a_second_interrupt_does_not_wait_for_the_grace_time(tmp_path: Path):
    site = Site(
        tmp_path, "signal.signal(signal.SIGTERM, lambda *_: say(asked=1)); say(pid=os.getpid())\nwhile 1: time.sleep(9)"
    )
    owner, rank_pid = _owner(site, "group()")
    assert owner.stdout is not None
    owner.send_signal(signal.SIGINT)
    assert owner.stdout.readline() == '{"asked": 1}\n'
    owner.send_signal(signal.SIGINT)
    said, _ = owner.communicate(timeout=30)
    assert "KeyboardInterrupt" in said
    assert not alive(rank_pid)


def test_spans_and_metrics_of_several_processes_read_back_in_order(tmp_path: Path):
    first, second = Telemetry(tmp_path / "t", "a"), Telemetry(tmp_path / "t", "b")
    with first.span("outer", stage="teach") as attributes:
        second.metric("tokens", 12.0, "tokens", partition=3)
        with pytest.raises(KeyError), first.span("inner"):
            raise KeyError
        attributes["rows"] = 5
    with open(first.path, "ab") as file:
        file.write(b'{"kind": "span", "na')
    first.close()
    second.close()
    outer, tokens, inner = read(tmp_path / "t")
    assert (outer["name"], outer["attributes"], outer["error"]) == ("outer", {"stage": "teach", "rows": 5}, None)
    assert (tokens["kind"], tokens["value"], tokens["unit"], tokens["attributes"]) == (
        "metric",
        12.0,
        "tokens",
        {"partition": 3},
    )
    assert (inner["name"], inner["error"]) == ("inner", "KeyError")
    assert 0.0 <= inner["seconds"] <= outer["seconds"]
