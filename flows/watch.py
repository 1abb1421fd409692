"""`opd watch`: deployed runs whose driver died without a word are continued, and what Prefect still calls running ends.

A stop that a process hears leaves a successor by its own hook (`flows.preemption`). A process that is killed, or whose
node is gone, leaves nothing: its flow run stays Running for ever, or its worker calls it Crashed. This flow, on a short
schedule, looks for such flow runs, asks the run's lease whether somebody still drives it, and creates the successor
that the hook would have created, under the same key, so that it is created once.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort

from flows import preemption
from flows.campaign import reach_server, run_of
from infra import leases
from infra.store import ObjectStore
from infra.stores import open_store
from schemas import keys
from schemas.errors import ContractError, OpdError
from tasks.runs.admission import first_unfinished
from tasks.runs.records import read_history
from tasks.runs.session import RUN_LEASE_DEAD_AFTER_SECONDS

#: Who crashed longer ago and was not continued was left by somebody's choice.
_MEMORY = timedelta(hours=24)
_PAGE = 200


def watch() -> list[str]:
    """A line for each flow run that was ended or continued, or that could not be looked at.

    Raises StoreError when no Prefect server answers.
    """
    reach_server()
    lines = []
    with get_client(sync_client=True) as client:
        for flow_run in _candidates(client):
            try:
                lines += _look(client, flow_run)
            except OpdError as error:  # one run's broken configuration must not keep the others from being seen
                lines.append(f"{flow_run.name}: left alone, {error.where}: {error.found}")
    return lines


def _candidates(client: SyncPrefectClient) -> list[FlowRun]:
    """Flow runs of campaign deployments that are running, and those that crashed within the last day."""
    state: dict[str, Any] = {"type": {"any_": [StateType.RUNNING.value, StateType.CRASHED.value]}}
    wanted = FlowRunFilter.model_validate({
        "state": state,
        "deployment_id": {"is_null_": False},
        "expected_start_time": {"after_": (datetime.now(UTC) - 30 * _MEMORY).isoformat()},
    })  # fmt: skip
    found, offset = [], 0
    while page := client.read_flow_runs(
        flow_run_filter=wanted, sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=_PAGE, offset=offset
    ):
        found += page
        offset += _PAGE
    recent = datetime.now(UTC) - _MEMORY
    return [r for r in found if "config_path" in r.parameters and (_running(r) or (r.end_time or recent) >= recent)]


def _running(flow_run: FlowRun) -> bool:
    return flow_run.state_type == StateType.RUNNING


def _look(client: SyncPrefectClient, flow_run: FlowRun) -> list[str]:
    if not _running(flow_run) and preemption.successor_of(client, flow_run) is not None:
        return []
    config, parameters = run_of(flow_run)
    store = open_store(config.data)
    history = read_history(store, config.run_id)
    is_finished = first_unfinished(store, history, config.run_id, config.iterations) == config.iterations
    if (is_finished and not _running(flow_run)) or not _is_silent(store, config.run_id):
        return []
    lines = []
    if _running(flow_run):
        ended = _end(client, flow_run)
        lines.append(f"{flow_run.name}: its process is gone; {ended} flow runs of it are Crashed now")
    if not is_finished:
        successor = preemption.create_successor(client, flow_run, parameters, "whose process died")
        lines.append(f"{flow_run.name}: run {config.run_id} goes on as flow run {successor.name}")
    return lines


def _is_silent(store: ObjectStore, run_id: str) -> bool:
    """Does nobody drive the run? Asked by taking its lease for a moment, which tells a dead owner from a slow one."""
    try:
        lease = leases.acquire(
            store, keys.run_lease(run_id), owner={"run": run_id, "for": "opd watch"},
            dead_after_seconds=RUN_LEASE_DEAD_AFTER_SECONDS, wait=False,
        )  # fmt: skip
    except ContractError:
        return False
    if isinstance(lease, leases.Lease):
        leases.release(lease)
    return True


def _end(client: SyncPrefectClient, flow_run: FlowRun) -> int:
    """The flow run and those inside it as Crashed; how many."""
    crashed = State(type=StateType.CRASHED, name="Crashed", message="found without a living process by opd watch")
    inside = client.read_flow_runs(
        task_run_filter=None,
        flow_run_filter=FlowRunFilter.model_validate({
            "state": {"type": {"any_": [StateType.RUNNING.value]}},
            "parent_flow_run_id": {"any_": [str(flow_run.id)]},
        }),
    )  # fmt: skip
    count = 1 + sum(_end(client, child) for child in inside)
    tasks = client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [str(flow_run.id)]}}),
        task_run_filter=TaskRunFilter.model_validate({"state": {"type": {"any_": [StateType.RUNNING.value]}}}),
    )
    for task in tasks:
        client.set_task_run_state(task.id, crashed, force=True)
    client.set_flow_run_state(flow_run.id, crashed, force=True)
    return count


@flow(name="watch", flow_run_name="watch", persist_result=False, log_prints=True)
def scheduled_watch() -> list[str]:
    """Entry point of the deployment: continues campaigns whose process or node died, ends what still says Running."""
    lines = watch()
    print("\n".join(lines) or "every running campaign has a living driver")
    return lines
