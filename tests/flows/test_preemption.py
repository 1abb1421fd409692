"""A stop of a deployed flow run: told from a crash, and followed by one successor that meets the same run."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import UUID

import pytest
from prefect.exceptions import TerminationSignal

from flows import campaign, preemption
from schemas import keys

RUN = UUID(int=7)


class Server:
    """What the hooks ask of a Prefect server."""

    def __init__(self) -> None:
        self.states: list[tuple] = []
        self.created: dict[str, dict] = {}

    def __call__(self, *, sync_client: bool):
        assert sync_client
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def set_flow_run_state(self, flow_run_id, state, *, force):
        self.states.append((flow_run_id, state.name, state.type.value, force))

    def create_flow_run_from_deployment(self, deployment_id, *, parameters, idempotency_key, tags, state):
        assert state.is_scheduled()
        self.created.setdefault(idempotency_key, {"deployment": deployment_id, "parameters": parameters})


@pytest.fixture
def server(monkeypatch) -> Server:
    server = Server()
    monkeypatch.setattr(preemption, "get_client", server)
    monkeypatch.setattr(preemption, "_stops", [])
    return server


def flow_run(tmp_path, **parameters) -> SimpleNamespace:
    path = tmp_path / "run.toml"
    path.write_text(
        f'run_id = "x"\ndata = "{tmp_path}/data"\nstudent.path = "s"\nteachers = [{{id = "a", path = "t"}}]\n'
        '[[prompts.datasets]]\nname = "chain_sum"\nsize = 5\nteachers = ["a"]\n'
    )
    return SimpleNamespace(
        id=RUN, name="night", deployment_id=UUID(int=9), expected_start_time=datetime(2026, 1, 2, 1, 0, tzinfo=UTC),
        parameters={"config_path": str(path), "settings": ["seed=4"], **parameters},
    )  # fmt: skip


def stop() -> None:
    with pytest.raises(TerminationSignal), preemption.noting_stops():
        raise TerminationSignal(15)


def test_a_crash_that_is_no_stop_stays_one(server, tmp_path):
    with pytest.raises(SystemExit), preemption.noting_stops():
        raise SystemExit(3)
    campaign._preempted(None, flow_run(tmp_path), None)  # pyright: ignore
    assert server.states == []
    assert server.created == {}


@pytest.mark.parametrize("times", [1, 2])
def test_a_stop_has_one_successor_of_the_same_run(server, tmp_path, times):
    stop()
    for _ in range(times):
        campaign._preempted(None, flow_run(tmp_path), None)  # pyright: ignore
    assert server.states == [(RUN, "Preempted", "CRASHED", True)] * times
    (created,) = server.created.values()
    assert created["deployment"] == UUID(int=9)
    assert created["parameters"]["run_id"] == "20260102T010000Z"
    assert created["parameters"]["settings"] == ["seed=4"]
    assert json.loads((tmp_path / "data" / keys.flow_run(str(RUN))).read_bytes()) == {"run_id": "20260102T010000Z"}


def test_a_named_run_keeps_its_name_and_a_local_one_has_no_successor(server, tmp_path):
    stop()
    campaign._preempted(None, flow_run(tmp_path, run_id="mine"), None)  # pyright: ignore
    assert next(iter(server.created.values()))["parameters"]["run_id"] == "mine"
    server.created.clear()
    local = flow_run(tmp_path, run_id="mine")
    local.deployment_id = None
    campaign._preempted(None, local, None)  # pyright: ignore
    assert server.created == {}


def test_a_stopped_task_stops_its_flow(server):
    ran = []

    def as_task(function):
        def task(*args):
            ran.append(function(*args))
            return ran[-1]

        return task

    def work(how: type[BaseException] | None) -> int:
        if how is not None:
            raise how(15)
        return 5

    stage = preemption.stoppable(as_task)(work)
    assert stage(None) == 5
    with pytest.raises(ValueError, match="15"):
        stage(ValueError)
    with pytest.raises(TerminationSignal):
        stage(TerminationSignal)
    assert ran[-1].name == "Preempted"


def test_a_stop_is_of_its_own_campaign(server, monkeypatch):
    """In a notebook the next campaign begins in the same process."""
    stop()
    monkeypatch.setattr(campaign, "reach_server", raising)
    with pytest.raises(ValueError, match="campaign"):
        campaign.run_campaign(None)  # pyright: ignore
    stage = preemption.stoppable(lambda function: function)(lambda: 5)
    assert stage() == 5


def raising() -> None:
    raise ValueError("campaign")
