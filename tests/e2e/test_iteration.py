"""Two iterations of the whole loop on tiny random models: real workers, real Spark, real DeepSpeed, a local store."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra import tables
from tasks.runs.finished import STAGES
from tests.support import prefect_server
from tests.support.prefect_server import ask
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.spark]

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


def opd(*arguments: str | Path, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *map(str, arguments)],
        cwd=REPOSITORY, text=True, capture_output=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def object_bytes(data: Path) -> dict[str, bytes]:
    """Everything under the root but heartbeats and the run's leases, which each start adds to."""
    found = {str(p.relative_to(data)): p.read_bytes() for p in data.rglob("*") if p.is_file()}
    return {k: v for k, v in found.items() if "/heartbeats/" not in k and "/lease/" not in k}


def output_digests(data: Path) -> dict[tuple[int, str], str]:
    manifests = [json.loads(p.read_text()) for p in data.glob("runs/tiny/*/*/*/manifest.json")]
    return {(m["iteration"], m["stage"]): m["output_digest"] for m in manifests}


@pytest.fixture(scope="module", autouse=True)
def prefect_api(tmp_path_factory):
    with prefect_server.running(tmp_path_factory.mktemp("prefect")) as url:
        yield url


@pytest.fixture(scope="module")
def finished(prefect_api, tmp_path_factory):
    """(folder, configuration, output) of a campaign that ran to its end; one worker was killed by its drill."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder)
    return folder, config, opd("run", config)


def test_the_server_shows_runs_tasks_and_artifacts(finished, prefect_api):
    flow_runs = ask(f"{prefect_api}/flow_runs/filter", {})
    names = {run["name"]: run["state_type"] for run in flow_runs}
    assert names["tiny"] == names["tiny 0"] == names["tiny 1"] == "COMPLETED"
    task_runs = {run["name"]: run["state_type"] for run in ask(f"{prefect_api}/task_runs/filter", {})}
    assert {f"{stage} {i}" for i in (0, 1) for stage in STAGES} <= set(task_runs)
    artifacts = {a["key"]: a for a in ask(f"{prefect_api}/artifacts/latest/filter", {})}
    assert "| opd.metrics |" in artifacts["tiny-train"]["data"]
    assert any(row["name"] == "heldout_kl_after" for row in json.loads(artifacts["tiny-train-metrics"]["data"]))


def test_the_loop_closes(finished):
    folder, _, out = finished
    assert "0 acknowledged tokens lost, 0 regenerated" in out
    assert "opd verify tiny" in out
    assert "0 breaches" in opd("verify", "tiny", "--data", folder / "data")
    assert set(output_digests(folder / "data")) == {(i, stage) for i in (0, 1) for stage in STAGES}


def test_the_trainer_sees_the_weights_that_have_sampled(finished):
    """Also after an update, when the FP32 masters lie off the bf16 grid that both compute on."""
    rows = tables.read_rows(str(finished[0] / "data"), "metrics", {"run_id": "tiny", "stage": "train"})
    found = {r["iteration"]: r["value"] for r in rows if r["name"] == "mismatch_sampler_max"}
    assert set(found) == {0, 1}
    assert max(found.values()) < 2e-5


def test_a_finished_campaign_changes_nothing(finished):
    folder, config, _ = finished
    before = object_bytes(folder / "data")
    assert "already finished" in opd("run", config)
    assert object_bytes(folder / "data") == before


def test_a_lost_table_comes_back_from_the_manifests(finished):
    folder, config, _ = finished
    shutil.rmtree(folder / "data" / "tables" / "plan")
    broken = opd("verify", "tiny", "--data", folder / "data", status=1)
    assert "BREACH" in broken
    assert "plan" in broken
    opd("run", config)
    assert "0 breaches" in opd("verify", "tiny", "--data", folder / "data")


def test_a_changed_configuration_is_refused(finished):
    _folder, config, _ = finished
    changed = opd("run", config, "--set", "train.learning_rate=1e-3", status=5)
    assert "--from-iteration" in changed
    assert "train.learning_rate: 0.01 -> 0.001" in changed


def test_one_stage_alone_and_questions(finished):
    folder, config, _ = finished
    data = folder / "data"
    out = opd("train", config, "--iteration", "1")
    assert '"stage": "train"' in out
    assert "0 to 1" in opd("train", config, "--iteration", "2", status=2)
    assert "question" in opd("show", "tiny", "--data", data)
    rows = opd(
        "sql", "SELECT count(*) n, count(DISTINCT prompt_id) p FROM opd.trajectories WHERE split = 'train'",
        "--json", "--data", data,
    )  # fmt: skip
    assert '{"n": 20, "p": 10}' in rows
    ready = (
        "SELECT domain, count(*), avg(reward) FROM opd.trajectories JOIN opd.prompts USING (prompt_id) GROUP BY domain"
    )
    assert "chain_sum" in opd("sql", ready, "--data", data)


def test_from_iteration_leaves_what_lies_below_as_it_was_made(finished, tmp_path):
    """Another learning rate from iteration 1 on: iteration 0 keeps its rows and its student, and is not executed."""
    shutil.copytree(finished[0] / "data", tmp_path / "data")
    config = tmp_path / "run.toml"
    config.write_text(finished[1].read_text().replace(f"{finished[0]}/data", f"{tmp_path}/data"))
    data = tmp_path / "data"

    def rows(iteration: int) -> dict[str, list]:
        found = {t: tables.read_rows(str(data), t, {"run_id": "tiny", "iteration": iteration})
                 for t in ("trajectories", "plan", "metrics", "checkpoints", "stage_runs")}  # fmt: skip
        return found | {"objects": [v for k, v in object_bytes(data).items() if f"/{iteration:05d}/" in k]}

    before = rows(0), rows(1)
    out = opd("run", config, "--set", "train.learning_rate=1e-3", "--from-iteration", "1")
    assert "from-iteration" in opd("run", config, status=5), "the old configuration is no longer the run's"
    assert rows(0) == before[0]
    after = rows(1)
    assert after["trajectories"] == before[1]["trajectories"], "the rollout of 1 does not depend on it: it recommits"
    assert after["checkpoints"] != before[1]["checkpoints"]
    assert after["metrics"] != before[1]["metrics"]
    assert "held-out KL" in out
    again = opd("run", config, "--set", "train.learning_rate=1e-3", "--from-iteration", "1")
    assert "nothing differs" in again
    assert rows(1) == after
    assert "0 breaches" in opd("verify", "tiny", "--data", data)


def test_lost_objects_are_made_anew_as_they_were(finished, tmp_path):
    """A token shard, hidden states with another bit, a file of a student that the next iteration sampled with."""
    shutil.copytree(finished[0] / "data", tmp_path / "data")
    config = tmp_path / "run.toml"
    config.write_text(finished[1].read_text().replace(f"{finished[0]}/data", f"{tmp_path}/data"))
    data = tmp_path / "data"
    runs = data / "runs/tiny"
    sorted(runs.glob("00000/rollout/*/p00001/e*/tokens.safetensors"))[-1].unlink()
    hidden = sorted(runs.glob("00001/teach/*/p00000/e*/hidden-00000.safetensors"))[-1]
    hidden.write_bytes(hidden.read_bytes()[:-1] + bytes([hidden.read_bytes()[-1] ^ 1]))
    sorted(runs.glob("00000/train/*/p00000/e*/export/*.safetensors"))[0].unlink()
    shutil.rmtree(data / "tables/plan")
    found = opd("repair", "tiny", "--data", data, status=1)
    assert "1 repaired, 3 broken" in found.replace("3 repaired", "1 repaired")  # the table, and its slices
    assert found.count("revoked") == 3
    out = opd("run", config)
    assert out.count("were made anew, equal") == 3
    assert output_digests(data) == output_digests(finished[0] / "data")
    assert "0 breaches" in opd("verify", "tiny", "--data", data)
    assert "0 repaired, 0 broken" in opd("repair", "tiny", "--data", data)


def is_superseded(data: Path, key: str) -> bool:
    """Of a partition's owner that was not the one to finish, which the drill's may have been: its manifest lies at
    the epoch after its finisher's."""
    place = re.fullmatch(r"(runs/.+)/p(\d{5})/e(\d{6})/.+", key)
    if place is None:
        return False
    manifest = json.loads((data / place[1] / "manifest.json").read_text())
    return int(place[3]) != manifest["partitions"][str(int(place[2]))] - 1


def test_upkeep_takes_logs_and_what_superseded_owners_left_and_nothing_else(finished, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(finished[0] / "data", data)
    assert ": 0 damaged" in opd("wal", "check", data)
    kept = {
        key: value for key, value in object_bytes(data).items()
        if "/wal/" not in key and "/spill/" not in key and not key.endswith("/life.json")
        and not is_superseded(data, key)
    }  # fmt: skip
    assert len(kept) < len(object_bytes(data))
    opd("upkeep", "tiny", "--data", data)
    assert object_bytes(data) == kept
    assert "0 breaches" in opd("verify", "tiny", "--data", data)


def test_damage_is_found(finished):
    folder, _, _ = finished
    shard = next((folder / "data").rglob("tokens.safetensors"))
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    try:
        report = opd("verify", "tiny", "--data", folder / "data", status=1)
    finally:
        shard.write_bytes(good)
    assert "BREACH  objects hash to their manifest's digest" in report
    assert str(shard.relative_to(folder / "data")) in report


def test_a_killed_campaign_ends_with_the_same_bytes(finished, prefect_api, tmp_path):
    """SIGKILL and SIGTERM in rollout, SIGTERM in training, then left alone: nothing of it shows in the digests.

    But the server shows which stage was pre-empted.
    """
    config = write_config(tmp_path, kill="0")

    def started() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "run", str(config)],
            cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def until(process: subprocess.Popen[str], pattern: str) -> None:
        while not list(tmp_path.glob(pattern)):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)

    with started() as process:
        until(process, "scratch/tiny/*/wal/**/wal/000001.seg")
        process.kill()
    for stage, sign in (
        ("rollout", "scratch/tiny/*/wal/**/e000002/wal/000001.seg"),
        ("train", "data/runs/tiny/00000/train/*/p00000/epochs/*.json"),
    ):
        with started() as process:
            until(process, sign)
            process.terminate()
            assert process.wait(120) == 75, process.communicate()
        newest = {"sort": "EXPECTED_START_TIME_DESC", "limit": 2}
        states = {run["name"]: run["state_name"] for run in ask(f"{prefect_api}/flow_runs/filter", newest)}
        assert states == {"tiny": "Preempted", "tiny 0": "Preempted"}
        runs = ask(f"{prefect_api}/task_runs/filter", {"task_runs": {"state": {"name": {"any_": ["Preempted"]}}}})
        assert f"{stage} 0" in {run["name"] for run in runs}
    opd("run", config)
    assert output_digests(tmp_path / "data") == output_digests(finished[0] / "data")
    assert "0 breaches" in opd("verify", "tiny", "--data", tmp_path / "data")
