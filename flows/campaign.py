"""A campaign: iterations in a row, each sampling with the student that the one before has trained."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.iteration import iteration_flow
from schemas import config as run_config
from schemas.config import RunConfig
from tasks.session import Progress, open_session, silent
from tasks.stage import StageResult


@flow(name="campaign", flow_run_name="{run_id}", persist_result=False)
def _campaign(run_id: str, iterations: int) -> list[dict[str, StageResult]]:
    return [iteration_flow(run_id, iteration) for iteration in range(iterations)]


def run_campaign(
    config: RunConfig, *, progress: Progress = silent, from_iteration: int | None = None
) -> tuple[list[dict[str, StageResult]], dict[str, Any]]:
    """Run or continue a campaign in this process. Returns each iteration's stage results, and the session's notes."""
    with open_session(config, progress=progress, from_iteration=from_iteration) as session:
        return _campaign(config.run_id, config.iterations), session.notes


@flow(name="opd", flow_run_name="{config_path}", persist_result=False)
def scheduled_campaign(
    config_path: str, settings: list[str] | None = None, run_id: str | None = None
) -> dict[str, Any]:
    """Entry point of deployments: a TOML file and overrides, as parameters that the Prefect UI edits.

    Without run_id, the planned start time of the flow run names the run: a retry of the flow run continues it, the
    next planned one starts anew.
    """
    from prefect.runtime import flow_run

    planned = flow_run.scheduled_start_time
    name = run_id or f"{planned:%Y%m%dT%H%M%SZ}"
    config = run_config.load(config_path, [*(settings or []), f'run_id="{name}"'])
    results, _ = run_campaign(config)
    return {"run_id": name, "iterations": [{n: r.reference() for n, r in stages.items()} for stages in results]}
