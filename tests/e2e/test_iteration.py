"""Two iterations of the whole loop on tiny random models: real workers, real Spark, real DeepSpeed, a local store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_model

REPOSITORY = Path(__file__).parents[2]


def write_config(folder: Path, **changes: str) -> Path:
    tiny_model(folder / "student", seed=0)
    tiny_model(folder / "second", seed=1, tied=False, width=64)
    settings = {"iterations": "2", "kill": "40"} | changes
    path = folder / "run.toml"
    path.write_text(
        f"""
run_id = "tiny"
seed = 11
iterations = {settings["iterations"]}
data = "{folder}/data"
scratch = "{folder}/scratch"
[student]
path = "{folder}/student"
[[teachers]]
id = "hinted"
path = "{folder}/student"
template = "Answer {{{{ answer }}}}"
[[teachers]]
id = "second"
path = "{folder}/second"
weight = 0.5
[prompts]
per_iteration = 5
heldout = 2
[[prompts.datasets]]
name = "chain_sum"
size = 20
teachers = ["hinted", "second"]
params = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
[[prompts.datasets]]
name = "spell_backward"
size = 20
teachers = ["second"]
[rollout]
samples_per_prompt = 2
max_response_tokens = 24
prompts_per_partition = 4
page_tokens = 16
max_sequences = 6
threads = 1
[teach]
trajectories_per_partition = 5
[dispatch]
mini_batch_trajectories = 4
pack_tokens = 512
[train]
learning_rate = 1e-2
ranks = 2
threads = 1
[spark]
cores = 1
driver_memory = "1g"
jars = "{REPOSITORY}/jars"
[drill]
kill_rollout_worker_after_tokens = {settings["kill"]}
"""
    )
    return path


def opd(*arguments: str | Path, folder: Path, status: int = 0) -> str:
    environment = os.environ | {"PREFECT_HOME": str(folder / "prefect"), "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *map(str, arguments)],
        cwd=REPOSITORY, env=environment, text=True, capture_output=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def object_bytes(data: Path) -> dict[str, bytes]:
    return {str(p.relative_to(data)): p.read_bytes() for p in data.rglob("*") if p.is_file()}


@pytest.mark.slow
@pytest.mark.spark
def test_the_loop_closes(tmp_path):
    config = write_config(tmp_path)
    data = tmp_path / "data"
    out = opd("run", config, folder=tmp_path)
    assert "0 acknowledged tokens lost, 0 regenerated" in out
    assert "opd verify tiny" in out
    report = opd("verify", "tiny", "--data", data, folder=tmp_path)
    assert "0 breaches" in report

    before = {k: v for k, v in object_bytes(data).items() if "/heartbeats/" not in k and "/lease/" not in k}
    again = opd("run", config, folder=tmp_path)
    assert "already finished" in again
    after = {k: v for k, v in object_bytes(data).items() if "/heartbeats/" not in k and "/lease/" not in k}
    assert after == before, "a finished campaign changes nothing"

    changed = opd("run", config, "--set", "train.learning_rate=1e-3", folder=tmp_path, status=5)
    assert "--from-iteration" in changed
    assert "train.learning_rate: 0.01 -> 0.001" in changed

    reference = json.loads(opd("train", config, "--iteration", "1", folder=tmp_path).partition("{")[2].join(["{", ""]))
    assert reference["stage"] == "train"
    shown = opd("show", "tiny", "--data", data, folder=tmp_path)
    assert "question" in shown
    rows = opd(
        "sql", "SELECT count(*) n, count(DISTINCT prompt_id) p FROM opd.trajectories WHERE split = 'train'",
        "--json", "--data", data, folder=tmp_path,
    )  # fmt: skip
    assert '{"n": 20, "p": 10}' in rows
    ready = (
        "SELECT domain, count(*), avg(reward) FROM opd.trajectories JOIN opd.prompts USING (prompt_id) GROUP BY domain"
    )
    assert "chain_sum" in opd("sql", ready, "--data", data, folder=tmp_path)
