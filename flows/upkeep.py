"""Upkeep as a flow: deletes the token logs of finished partitions, on a schedule or from the Prefect UI."""

from __future__ import annotations

from typing import Any

from prefect import flow

from tasks import upkeep


@flow(name="upkeep", flow_run_name="{data}", persist_result=False)
def scheduled_upkeep(data: str, run_ids: list[str] | None = None, dry_run: bool = False) -> list[dict[str, Any]]:
    """Entry point of deployments. data: root of objects and tables. run_ids: all runs without it."""
    return [vars(line) for line in upkeep.upkeep(data, run_ids, dry_run=dry_run)]
