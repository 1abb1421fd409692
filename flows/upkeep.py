"""Upkeep as a flow: deletes what finished partitions need no more, on a schedule or from the Prefect UI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow

from tasks.operate import upkeep


@flow(name="upkeep", flow_run_name="{data}", persist_result=False)
def scheduled_upkeep(
    data: str, run_ids: list[str] | None = None, scratch: str = "scratch", dry_run: bool = False
) -> list[dict[str, Any]]:
    """Entry point of deployments. data: root of objects and tables. run_ids: all runs without it. scratch: local
    folder of runs on the node that this runs on."""
    return [vars(line) for line in upkeep.upkeep(data, run_ids, scratch=Path(scratch), dry_run=dry_run)]
