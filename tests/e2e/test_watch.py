"""`opd watch` against a real server and worker: a flow run whose worker and process are killed goes on by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.runs.finished import STAGES
from tests.e2e.test_iteration import REPOSITORY, opd, output_digests, write_config
from tests.support import prefect_server
from tests.support.prefect_server import ask

#: In a process of its own: Prefect reads its settings when it is imported.
DEPLOY = f"""
from prefect.flows import Flow
flow = Flow.from_source(source={str(REPOSITORY)!r}, entrypoint="flows/campaign.py:scheduled_campaign")
print(flow.deploy(name="campaign", work_pool_name="opd", print_next_steps=False))
"""
NOTHING = "every running campaign has a living driver"

pytestmark = [pytest.mark.slow, pytest.mark.spark]


@pytest.fixture(scope="module")
def prefect_api(tmp_path_factory):
    with prefect_server.running(tmp_path_factory.mktemp("prefect")) as url:
        yield url


def descendants(pid: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                child = int(path.parent.name)
                yield from descendants(child)
                yield child


@contextlib.contextmanager
def worker(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with open(folder / "worker.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", "opd", "--type", "process"],
            cwd=REPOSITORY, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
    try:
        yield process
    finally:
        for pid in (*descendants(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def until(condition, log: Path, seconds: float = 240):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.2)
    return found


def flow_runs(api: str) -> dict[str, dict]:
    return {run["id"]: run for run in ask(f"{api}/flow_runs/filter", {})}


def test_a_campaign_whose_worker_and_process_are_killed_goes_on(prefect_api, tmp_path):
    config = write_config(tmp_path, iterations="1", kill="0")
    log = tmp_path / "worker.log"
    subprocess.run([sys.executable, "-m", "prefect", "work-pool", "create", "opd", "--type", "process"], check=True,
                   capture_output=True)  # fmt: skip
    deployed = subprocess.run(
        [sys.executable, "-c", DEPLOY], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    deployment = deployed.stdout.split()[-1]
    body = {"parameters": {"config_path": str(config), "run_id": "tiny"}, "state": {"type": "SCHEDULED"}}
    first = ask(f"{prefect_api}/deployments/{deployment}/create_flow_run", body)
    assert NOTHING in opd("watch")
    with worker(tmp_path) as process:
        until(lambda: list(tmp_path.glob("data/runs/tiny/00000/rollout/*/p00000/e*/wal/*.seg")), log)
        assert NOTHING in opd("watch")
        assert process.poll() is None
    assert flow_runs(prefect_api)[first["id"]]["state_type"] == "RUNNING", "nobody has told the server"
    said = opd("watch")
    assert "its process is gone" in said
    assert "run tiny goes on" in said
    runs = flow_runs(prefect_api)
    (second,) = [run for run in runs.values() if run["state_type"] == "SCHEDULED"]
    assert {run["state_type"] for run in runs.values() if run is not second} == {"CRASHED"}
    assert second["parameters"]["run_id"] == "tiny"
    assert NOTHING in opd("watch"), "once"
    with worker(tmp_path):
        until(lambda: flow_runs(prefect_api)[second["id"]]["state_type"] in ("COMPLETED", "FAILED", "CRASHED"), log)
    assert flow_runs(prefect_api)[second["id"]]["state_type"] == "COMPLETED", log.read_text()[-4000:]
    assert set(output_digests(tmp_path / "data")) == {(0, s) for s in STAGES}
    assert NOTHING in opd("watch")
