"""A campaign: iterations in a row, each sampling with the student that the one before has trained."""

from __future__ import annotations

import itertools
from datetime import datetime
from typing import Any

import prefect
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from flows import preemption
from flows.iteration import iteration_flow
from infra.store import ObjectStore
from infra.stores import open_store
from schemas import config as run_config
from schemas import keys
from schemas.config import RunConfig
from schemas.errors import StoreError
from tasks.runs.finished import StageResult
from tasks.runs.manifests import read_flow_run
from tasks.runs.session import Progress, open_session, silent


@flow(name="campaign", flow_run_name="{run_id}", persist_result=False, on_crashed=[preemption.name_crash])
@preemption.noting_stops()
def _campaign(run_id: str, iterations: int) -> list[dict[str, StageResult]]:
    return [iteration_flow(run_id, iteration) for iteration in range(iterations)]


def reach_server() -> None:
    """Raises StoreError when a Prefect server is configured and something else, or nothing, answers there.

    Without one Prefect starts a server of this process's own on a free port.
    """
    url = PREFECT_API_URL.value()
    if url is None:
        from flows.server import guard_server  # half of what importing Prefect costs, seconds, and only needed here

        guard_server()
        return
    try:
        with get_client(sync_client=True) as client:
            client.raise_for_api_version_mismatch()
    except Exception as error:
        raise StoreError(
            f"PREFECT_API_URL = {url}", expected=f"a Prefect {prefect.__version__} server",
            found=str(error.__cause__ or error).partition("\n")[0],
            safe="everything: nothing was started",
            next_command="prefect server start (--port if another program has it), or unset PREFECT_API_URL",
        ) from error  # fmt: skip


def run_campaign(
    config: RunConfig, *, progress: Progress = silent, from_iteration: int | None = None
) -> tuple[list[dict[str, StageResult]], dict[str, Any]]:
    """Run or continue a campaign in this process. Returns each iteration's stage results, and the session's notes."""
    preemption.forget()
    reach_server()
    with open_session(config, progress=progress, from_iteration=from_iteration) as session:
        return _campaign(config.run_id, config.iterations), session.notes


def run_id_of(store: ObjectStore, flow_run_id: str, planned: datetime) -> str:
    """The planned start time names the run, once: a retry of the flow run, at whatever time, meets the same name.

    Of flow runs that are planned for the same second each gets a name of its own.
    """
    key = keys.flow_run(flow_run_id)
    if store.head(key) is None:
        claim = keys.canonical_json({"flow_run_id": flow_run_id})
        name = second = f"{planned:%Y%m%dT%H%M%SZ}"
        for number in itertools.count(2):
            if store.put_if_absent(keys.run_name(name), claim) or store.get(keys.run_name(name)) == claim:
                break
            name = f"{second}-{number}"
        store.put_if_absent(key, keys.canonical_json({"run_id": name}))
    return read_flow_run(store, key)


def run_of(flow_run: FlowRun) -> tuple[RunConfig, dict[str, Any]]:
    """What a deployment's flow run drives: its run's configuration, and parameters that name the run."""
    parameters = dict(flow_run.parameters)
    config = run_config.load(parameters["config_path"], parameters.get("settings"))
    if parameters.get("run_id") is None:
        assert flow_run.expected_start_time is not None
        parameters["run_id"] = run_id_of(open_store(config.data), str(flow_run.id), flow_run.expected_start_time)
    return _named(parameters), parameters


def _named(parameters: dict[str, Any]) -> RunConfig:
    settings = [*(parameters.get("settings") or []), f'run_id="{parameters["run_id"]}"']
    return run_config.load(parameters["config_path"], settings)


def _preempted(flow: Any, flow_run: FlowRun, state: State) -> None:
    preemption.name_crash(flow, flow_run, state)
    preemption.schedule_successor(flow_run, run_of(flow_run)[1])


@flow(name="opd", flow_run_name="{config_path}", persist_result=False, on_crashed=[_preempted])
@preemption.noting_stops()
def scheduled_campaign(
    config_path: str,
    settings: list[str] | None = None,
    run_id: str | None = None,
    from_iteration: int | None = None,
) -> dict[str, Any]:
    """Entry point of deployments: a TOML file and overrides, as parameters that the Prefect UI edits.

    Without run_id the flow run's planned start time names the run: a retry continues it, the next night starts anew.
    from_iteration accepts a changed configuration from that iteration on, as `opd run --from-iteration` does.
    A flow run that is stopped by a signal leaves a successor with its run_id, which any worker of the pool may take.
    """
    config = run_config.load(config_path, settings)
    if run_id is None:
        run_id = run_id_of(open_store(config.data), str(flow_run.id), flow_run.scheduled_start_time)
    config = run_config.load(config_path, [*(settings or []), f'run_id="{run_id}"'])
    results, _ = run_campaign(config, from_iteration=from_iteration)
    return {"run_id": run_id, "iterations": [{n: r.reference() for n, r in stages.items()} for stages in results]}
