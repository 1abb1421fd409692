"""What the Prefect UI shows of a stage: a markdown summary and a table of its metrics."""

from __future__ import annotations

from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from infra import tables
from tasks.runs.finished import StageResult
from tasks.runs.session import current_session


def _lines(values: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in values.items():
        if name == "checkpoint" or name.endswith("_by_step"):
            continue
        if isinstance(value, dict):
            lines += [f"{indent}- **{name}**", *_lines(value, indent + "  ")]
        elif value is not None:
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            lines.append(f"{indent}- {name}: {shown}")
    return lines


def published(result: StageResult) -> StageResult:
    """The result itself, once artifacts `RUN-STAGE` (markdown) and `RUN-STAGE-metrics` (table) show it in the UI."""
    session = current_session()
    name = f"{session.run_id}-{result.stage}".lower().replace("_", "-").replace(".", "-")
    rows = {table: entry.num_rows for table, entry in result.manifest.tables.items()}
    text = "\n".join(
        [
            f"## {result.stage}, iteration {result.iteration} of run {session.run_id}",
            f"fingerprint `{result.fingerprint[:16]}`, output `{result.output_digest[:16]}`",
            "",
            "| table | rows |",
            "|---|---|",
            *(f"| opd.{table} | {count} |" for table, count in rows.items()),
            "",
            *_lines(result.stats),
        ]
    )
    create_markdown_artifact(key=name, markdown=text, description=f"{result.stage} {result.iteration}")
    place = {"run_id": session.run_id, "iteration": result.iteration, "stage": result.stage}
    metrics = tables.read_rows(session.config.data, "metrics", place)
    if metrics:
        shown = [{c: m[c] for c in ("step", "name", "teacher_index", "value")} for m in metrics]
        create_table_artifact(key=f"{name}-metrics", table=shown, description=f"{result.stage} {result.iteration}")
    return result
