"""The Spark child as a process: answers, errors, deaths, and what is left when its flow is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from infra import tables
from infra.spark import SparkChild, _Scratch
from infra.stores import open_store
from schemas import keys
from schemas.errors import ConfigError, ContractError, StageError, StoreError
from schemas.rows import METRICS, content_digest
from tests.infra import spark_calls
from tests.support.spark_session import JARS, SETTINGS

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ONE_CORE = {**SETTINGS.model_dump(), "cores": 1, "driver_memory": "1g"}


def ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def wait_until_ended(pids: list[int], seconds: float = 60) -> list[int]:
    """Those that still run after the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(map(ended, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if not ended(pid)]


def test_answers_errors_and_deaths(tmp_path: Path) -> None:
    root = tmp_path / "data"
    with SparkChild(str(root), ONE_CORE, tmp_path / "logs" / "spark.log") as child:
        assert child.pid is None
        answer = child.call(spark_calls.count, rows=1000)
        assert answer == {"count": 1000, "text": "\u2028\n\ud800", "pid": child.pid}
        jvm = child.call(spark_calls.jvm_pid)

        with pytest.raises(StoreError) as caught:
            child.call(spark_calls.fail, kind="opd")
        assert str(caught.value) == "store error: disk\nexpected: room\nfound: none\nsafe: all\nnext: df -h"
        for call, words in [
            (("fail", {"kind": "sql"}), "TABLE_OR_VIEW_NOT_FOUND"), (("fail", {"kind": "bug"}), "a bug of ours"),
            (("unserialisable", {}), "not JSON serializable"),
        ]:  # fmt: skip
            with pytest.raises(StageError, match=words):
                child.call(getattr(spark_calls, call[0]), **call[1])
        with pytest.raises(StageError, match="has no attribute"):
            child.call(lambda spark: None)  # of no module, so the child cannot find it
        assert child.call(spark_calls.count, rows=3)["pid"] == answer["pid"]

        said: list[str] = []
        ticks: list[float] = []
        child.tell, child.tick = said.append, lambda: ticks.append(time.monotonic())
        assert child.call(spark_calls.wait, seconds=3.5, text="waiting for \u2028 a table") is None
        assert said == ["waiting for \u2028 a table"]
        assert 2 <= len(ticks) <= 4

        once = str(tmp_path / "once")
        assert child.call(spark_calls.die, marker=once, times=1) == "alive after 1"
        assert child.pid != answer["pid"]
        with pytest.raises(StageError, match=r"(?s)died twice.*about to die.*spark\.log"):
            child.call(spark_calls.die, marker=str(tmp_path / "always"), times=99)

        def lost() -> None:
            raise ContractError("run", expected="to be the newest epoch", found="an heir")

        child.tick = lost
        with pytest.raises(ContractError, match="an heir"):
            child.call(spark_calls.sleep, seconds=60.0)
        assert child.pid is None  # a driver that has lost its run commits no more
        assert wait_until_ended([answer["pid"], jvm]) == []
    assert not root.exists(), "a session made something under a root that has no tables"


def test_a_commit_whose_process_dies_is_found_whole_by_the_next(tmp_path: Path) -> None:
    root = str(tmp_path / "data")
    row = {
        "run_id": "r", "iteration": 0, "stage": "train", "step": 0, "name": "kl", "teacher_index": None, "value": 0.5,
    }  # fmt: skip
    open_store(root).put("rows.jsonl", keys.canonical_json(row) + b"\n")
    commit = {
        "root": root, "table": "metrics", "slice": {"run_id": "r", "iteration": 0, "stage": "train"},
        "row_keys": ["rows.jsonl"], "num_rows": 1, "content_digest": content_digest(METRICS, [row]),
    }  # fmt: skip
    with SparkChild(root, ONE_CORE, tmp_path / "spark.log") as child:
        done = child.call(spark_calls.commit_and_die, marker=str(tmp_path / "died"), commit=commit)
    assert (done["version"], done["written"]) == (1, False)
    assert tables.read_rows(root, "metrics", {"run_id": "r"}) == [row]


def test_the_child_ends_with_its_flow_even_in_the_middle_of_a_call(tmp_path: Path) -> None:
    flow = (
        "import sys, threading, time\n"
        "from pathlib import Path\n"
        "from infra.spark import SparkChild\n"
        "from tests.infra import spark_calls\n"
        f"child = SparkChild({str(tmp_path / 'data')!r}, {ONE_CORE!r}, Path({str(tmp_path / 'spark.log')!r}))\n"
        # The thread that starts the child ends long before the flow does.
        "first = threading.Thread(target=lambda: print(child.call(spark_calls.jvm_pid), child.pid, flush=True))\n"
        "first.start(); first.join(); time.sleep(0.5)\n"
        "print(child.call(spark_calls.count, rows=2)['count'], 'pyspark' in sys.modules, flush=True)\n"
        "child.call(spark_calls.sleep, seconds=600)\n"
    )
    (tmp_path / "cwd").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", flow], stdout=subprocess.PIPE, text=True, cwd=tmp_path / "cwd",
        env={**os.environ, "PYTHONPATH": str(JARS.parent)},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert process.stdout.readline() == "2 False\n"
        assert [pid for pid in pids if ended(pid)] == []
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert wait_until_ended(pids) == []
    assert list((tmp_path / "cwd").iterdir()) == []


def test_without_java_the_call_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    with (
        SparkChild(str(tmp_path / "data"), ONE_CORE, tmp_path / "spark.log") as child,
        pytest.raises(ConfigError, match="Java 17 or later"),
    ):
        child.call(spark_calls.count, rows=1)
    assert child.pid is None


_STAND_IN = """#!{python}
import os, sys, time
from pathlib import Path
lives = Path({lives!r})
lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
sys.stdin.readline()
if len(lives.read_text()) <= {silent}:
    time.sleep(600)
os.write(int(sys.argv[4]), b'{{"result": "an answer"}}\\n')
sys.stdin.read()
"""


@pytest.mark.parametrize("silent", [1, 2])
def test_a_call_without_an_answer_is_killed_and_tried_once_more(tmp_path: Path, monkeypatch, silent) -> None:
    """By a stand-in for the child: what is tried is the parent's patience."""
    stand_in = tmp_path / "python"
    stand_in.write_text(_STAND_IN.format(python=sys.executable, lives=str(tmp_path / "lives"), silent=silent))
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setattr("infra.spark._WORD_SECONDS", 0.4)
    said: list[str] = []
    with SparkChild("data", {**ONE_CORE, "call_seconds": 2.5}, tmp_path / "spark.log") as child:
        child.tell = said.append
        if silent == 1:
            assert child.call(spark_calls.jvm_pid) == "an answer"
        else:
            with pytest.raises(StageError, match=r"none in 2\.5 s \(spark\.call_seconds\), twice"):
                child.call(spark_calls.jvm_pid)
    assert "Spark: tests.infra.spark_calls:jvm_pid has run for 1 s" in said[0]
    assert "no answer to tests.infra.spark_calls:jvm_pid in 2.5 s: killed" in "".join(said)
    assert (tmp_path / "lives").read_text() == "xx"


def test_temporary_folders_of_dead_flows_alone_are_reaped(tmp_path: Path, monkeypatch) -> None:
    code = "import time\nfrom infra.spark import _Scratch\ns = _Scratch()\nprint(s.folder, flush=True)\ntime.sleep(600)"
    owners = []
    for _ in range(2):
        environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(JARS.parent)}
        owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        assert owner.stdout is not None
        owners.append((owner, Path(owner.stdout.readline().strip())))
    (dead, old), (alive, live) = owners
    try:
        dead.kill()
        dead.wait()
        (tmp_path / "opd-spark-begun").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        own = _Scratch()
        assert {p.name for p in tmp_path.iterdir()} == {live.name, own.folder.name, "opd-spark-begun"}
        assert not old.exists()
        own.remove()
    finally:
        alive.kill()
        alive.wait()
