"""How a stop looks in Prefect: state "Preempted" on the stage and its flows, and a successor of a deployed flow run.

SIGTERM and Ctrl-C end a campaign in what Prefect calls a crash. But nothing has crashed: workers have sealed their
logs and spilled what the grace allowed, and the same command goes on from there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import TerminationSignal
from prefect.states import Scheduled

NAME = "Preempted"
_MESSAGE = "stopped on request, its work is kept; the same command, or a flow run with the same run_id, goes on"
_stops: list[BaseException] = []


def preempted() -> State:
    """Of Prefect's type for what infrastructure has ended, under a name of its own."""
    return State(type=StateType.CRASHED, name=NAME, message=_MESSAGE)


def forget() -> None:
    """A campaign begins: what stopped an earlier one of this process, as in a notebook, is no stop of this one."""
    _stops.clear()


@contextlib.contextmanager
def noting_stops() -> Iterator[None]:
    """Around whatever runs inside a flow: a stop that passes is remembered, so that crash hooks know it."""
    try:
        yield
    except (TerminationSignal, KeyboardInterrupt) as stop:
        _stops.append(stop)
        raise


def stoppable(
    as_task: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`as_task` is prefect.task with options. A stop of the function is its task's state, and stops the flow too."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            try:
                with noting_stops():
                    return function(*args, **kwargs)
            except (TerminationSignal, KeyboardInterrupt):
                return preempted()

        task = as_task(noting)

        @functools.wraps(function)
        def passing_on(*args: Any, **kwargs: Any) -> Any:
            result = task(*args, **kwargs)
            if _stops:
                raise _stops[-1]
            return result

        return passing_on

    return decorate


def name_crash(flow: Any, flow_run: FlowRun, state: State) -> None:
    """Crash hook of a flow: a crash that is a stop gets its name."""
    if _stops:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, preempted(), force=True)


def schedule_successor(flow_run: FlowRun, parameters: dict[str, Any]) -> FlowRun | None:
    """The flow run that goes on where a deployment's stopped one stood, once however often it is asked for.

    Prefect's own retries cannot do it: the process, and perhaps the node, is going away. None for a crash that is no
    stop, and for a flow run that no deployment has started.
    """
    if not _stops or flow_run.deployment_id is None:
        return None
    with get_client(sync_client=True) as client:
        return create_successor(client, flow_run, parameters, "which was pre-empted")


def _key(flow_run: FlowRun) -> str:
    return f"{flow_run.id}-successor"


def successor_of(client: SyncPrefectClient, flow_run: FlowRun) -> FlowRun | None:
    """The flow run that goes on where this one stood, if it was created."""
    wanted = FlowRunFilter.model_validate({"idempotency_key": {"any_": [_key(flow_run)]}})
    return next(iter(client.read_flow_runs(flow_run_filter=wanted)), None)


def create_successor(client: SyncPrefectClient, flow_run: FlowRun, parameters: dict[str, Any], why: str) -> FlowRun:
    """One for each flow run of a deployment, whoever asks: the one that is there is returned."""
    assert flow_run.deployment_id is not None
    return client.create_flow_run_from_deployment(
        flow_run.deployment_id, parameters=parameters, idempotency_key=_key(flow_run),
        tags=["preempted"], state=Scheduled(message=f"goes on after {flow_run.name}, {why}"),
    )  # fmt: skip
