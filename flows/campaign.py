"""A campaign: iterations in a row, each sampling with the student that the one before has trained."""

from __future__ import annotations

import re
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
from infra.store import ObjectStore, open_store
from schemas import config as run_config
from schemas import keys
from schemas.config import RunConfig
from schemas.errors import StoreError
from tasks.manifests import read_flow_run
from tasks.session import Progress, open_session, silent
from tasks.stage import StageResult


@flow(name="campaign", flow_run_name="{run_id}", persist_result=False, on_crashed=[preemption.name_crash])
@preemption.noting_stops()
def _campaign(run_id: str, iterations: int) -> list[dict[str, StageResult]]:
    return [iteration_flow(run_id, iteration) for iteration in range(iterations)]


def _reach_server() -> None:
    """Raises StoreError when a Prefect server is configured and something else, or nothing, answers there.

    Without one Prefect starts a server of this process's own on a free port.
    """
    url = PREFECT_API_URL.value()
    if url is None:
        return
    try:
        with get_client(sync_client=True) as client:
            client.raise_for_api_version_mismatch()
    except Exception as error:
        where, found = (
            re.sub(r"//[^/@\s]*@", "//", text).partition("\n")[0]  # without credentials
            for text in (f"PREFECT_API_URL = {url}", str(error.__cause__ or error))
        )
        raise StoreError(
            where, expected=f"a Prefect {prefect.__version__} server", found=found,
            safe="everything: nothing was started",
            next_command="prefect server start (--port if another program has it), or unset PREFECT_API_URL",
        ) from error  # fmt: skip


def run_campaign(
    config: RunConfig, *, progress: Progress = silent, from_iteration: int | None = None
) -> tuple[list[dict[str, StageResult]], dict[str, Any]]:
    """Run or continue a campaign in this process. Returns each iteration's stage results, and the session's notes."""
    _reach_server()
    with open_session(config, progress=progress, from_iteration=from_iteration) as session:
        return _campaign(config.run_id, config.iterations), session.notes


def run_id_of(store: ObjectStore, flow_run_id: str, planned: datetime) -> str:
    """The planned start time names the run, once: a retry of the flow run, at whatever time, meets the same name."""
    key = keys.flow_run(flow_run_id)
    store.put_if_absent(key, keys.canonical_json({"run_id": f"{planned:%Y%m%dT%H%M%SZ}"}))
    return read_flow_run(store, key)


def _preempted(flow: Any, flow_run: FlowRun, state: State) -> None:
    preemption.name_crash(flow, flow_run, state)
    parameters = dict(flow_run.parameters)
    if parameters.get("run_id") is None:
        config = run_config.load(parameters["config_path"], parameters.get("settings"))
        assert flow_run.expected_start_time is not None
        planned = flow_run.expected_start_time
        parameters["run_id"] = run_id_of(open_store(config.data), str(flow_run.id), planned)
    preemption.schedule_successor(flow_run, parameters)


@flow(name="opd", flow_run_name="{config_path}", persist_result=False, on_crashed=[_preempted])
@preemption.noting_stops()
def scheduled_campaign(
    config_path: str, settings: list[str] | None = None, run_id: str | None = None
) -> dict[str, Any]:
    """Entry point of deployments: a TOML file and overrides, as parameters that the Prefect UI edits.

    Without run_id the flow run's planned start time names the run: a retry continues it, the next night starts anew.
    A flow run that is stopped by a signal leaves a successor with its run_id, which any worker of the pool may take.
    """
    config = run_config.load(config_path, settings)
    if run_id is None:
        run_id = run_id_of(open_store(config.data), str(flow_run.id), flow_run.scheduled_start_time)
    results, _ = run_campaign(run_config.load(config_path, [*(settings or []), f'run_id="{run_id}"']))
    return {"run_id": run_id, "iterations": [{n: r.reference() for n, r in stages.items()} for stages in results]}
