from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from infra import launch


@pytest.fixture
def rank_module(tmp_path, monkeypatch):
    """Makes importable rank modules out of source text."""

    def make(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}")
        return name

    return make


def run(commands, tmp_path, grace_seconds=5.0):
    messages: list[tuple[int, dict]] = []
    processes = launch.run_group(
        commands,
        log_folder=tmp_path / "logs",
        on_message=lambda rank, message: messages.append((rank, message)),
        grace_seconds=grace_seconds,
    )
    return processes, messages


def test_messages_come_home_and_other_words_go_to_the_log(rank_module, tmp_path):
    module = rank_module(
        "talker",
        """
        import json, sys
        print("loading weights"); print("[1, 2]"); print(json.dumps({"event": "progress", "done": 1}))
        print("trouble", file=sys.stderr)
        """,
    )
    (process,), messages = run([launch.RankCommand(module, tmp_path / "w")], tmp_path)
    assert process.status == 0
    assert messages == [(0, {"event": "progress", "done": 1})]
    log = process.log_path.read_text()
    assert "loading weights" in log
    assert "[1, 2]" in log
    assert "trouble" in log


def test_a_group_knows_its_ranks(rank_module, tmp_path):
    module = rank_module(
        "member",
        """
        import json, os
        print(json.dumps({"event": "env", **{k: os.environ[k] for k in ("RANK", "WORLD_SIZE", "MASTER_PORT", "X")}}))
        """,
    )
    processes, messages = run(launch.group_commands(module, tmp_path / "w", 3, {"X": "y"}), tmp_path)
    assert [p.status for p in processes] == [0, 0, 0]
    assert sorted(m["RANK"] for _, m in messages) == ["0", "1", "2"]
    assert len({m["MASTER_PORT"] for _, m in messages}) == 1
    assert {m["X"] for _, m in messages} == {"y"}


def test_the_first_failure_stops_the_others_and_is_described(rank_module, tmp_path):
    module = rank_module(
        "failing",
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            print("it broke here", file=sys.stderr); sys.exit(6)
        time.sleep(600)
        """,
    )
    started = time.monotonic()
    processes, _ = run(launch.group_commands(module, tmp_path / "w", 3, {}), tmp_path)
    assert time.monotonic() - started < 300
    assert processes[1].status == 6
    assert {processes[0].status, processes[2].status} == {-signal.SIGTERM}
    assert "status 6" in processes[1].describe()
    assert "it broke here" in processes[1].describe()


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(rank_module, tmp_path):
    module = rank_module(
        "deaf",
        """
        import json, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(json.dumps({"event": "ready"}), flush=True)
        time.sleep(600)
        """,
    )
    ready = []
    process = launch.RankProcess(
        launch.RankCommand(module, tmp_path / "w"), tmp_path / "log", lambda _, message: ready.append(message)
    )
    while not ready:
        time.sleep(0.01)
    launch.stop([process], grace_seconds=0.3)
    assert process.status == -signal.SIGKILL
    assert "SIGKILL" in process.describe()


def test_its_own_error_is_what_is_told(rank_module, tmp_path):
    module = rank_module(
        "speaker",
        """
        import json, sys
        print(json.dumps({"event": "error", "kind": "format error", "text": "format error: shard x"})); sys.exit(3)
        """,
    )
    (process,), _ = run([launch.RankCommand(module, tmp_path / "w")], tmp_path)
    assert (process.status, process.describe()) == (3, "format error: shard x")


def test_ranks_die_with_a_parent_that_is_killed(rank_module, tmp_path):
    module = rank_module(
        "orphan",
        "import json, os, time; print(json.dumps({'event': 'pid', 'pid': os.getpid()}), flush=True); time.sleep(600)",
    )
    parent = rank_module(
        "parent",
        f"""
        from pathlib import Path
        from infra import launch
        launch.run_group([launch.RankCommand("{module}", Path("w"))], log_folder=Path({str(tmp_path)!r}),
                         on_message=lambda _, m: print(m["pid"], flush=True), grace_seconds=1)
        """,
    )
    with subprocess.Popen([sys.executable, "-m", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"rank {orphan} outlived its parent")
