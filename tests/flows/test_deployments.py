from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint

from flows.campaign import run_id_of
from infra.store_local import LocalStore
from schemas import keys

REPOSITORY = Path(__file__).parents[2]


def test_every_deployment_loads_and_takes_its_parameters(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    deployments = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    assert {d["name"] for d in deployments} == {"campaign", "nightly", "upkeep", "watch"}
    for deployment in deployments:
        found = load_flow_from_entrypoint(deployment["entrypoint"])
        found.validate_parameters(deployment["parameters"])
        assert (
            "config_path" not in deployment["parameters"]
            or (REPOSITORY / deployment["parameters"]["config_path"]).is_file()
        )
        assert deployment["concurrency_limit"]["limit"] == 1


def test_a_retry_at_another_time_meets_the_same_run(tmp_path):
    store = LocalStore(tmp_path)
    night = datetime(2026, 1, 2, 1, 0, tzinfo=UTC)
    assert run_id_of(store, "f1", night) == "20260102T010000Z"
    assert run_id_of(store, "f1", night.replace(hour=9)) == "20260102T010000Z"
    assert run_id_of(store, "f2", night.replace(day=3)) == "20260103T010000Z"


def test_flow_runs_of_the_same_second_drive_runs_of_their_own(tmp_path):
    store = LocalStore(tmp_path)
    night = datetime(2026, 1, 2, 1, 0, tzinfo=UTC)
    names = [run_id_of(store, name, night) for name in ("f1", "f2", "f3", "f1", "f2")]
    assert names == ["20260102T010000Z", "20260102T010000Z-2", "20260102T010000Z-3", *names[:2]]
    store.delete(keys.flow_run("f2"))
    assert run_id_of(store, "f2", night) == names[1], "it died between taking the name and saying so"


@pytest.mark.parametrize("name", ["demo.toml"])
def test_shipped_configurations_load(name):
    from schemas import config

    run = config.load(REPOSITORY / "infra" / "runs" / name)
    assert {t for d in run.prompts.datasets for t in d.teachers} == set(run.teacher_ids)
