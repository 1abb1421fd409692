"""`opd show` prints what a run has made: its stages, its figures, and sampled texts."""

from __future__ import annotations

import json
from typing import Any

from infra import tables
from infra.stores import open_store
from schemas import shards
from schemas.errors import ContractError
from tasks.inputs.models import resolve_model
from tasks.inputs.text import Tokenizer
from tasks.runs.records import newest_record


def runs(root: str) -> list[str]:
    return sorted({key.split("/")[1] for key in open_store(root).list("runs/")})


def stages(root: str, run_id: str) -> list[dict[str, Any]]:
    """One line a stage and iteration: partitions, rows, bytes, seconds."""
    grouped: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in tables.read_rows(root, "stage_runs", {"run_id": run_id}):
        grouped.setdefault((row["iteration"], row["stage"]), []).append(row)
    order = {"rollout": 0, "teach": 1, "dispatch": 2, "train": 3}
    return [
        {
            "iteration": iteration,
            "stage": stage,
            "partitions": len(rows),
            "rows": sum(r["rows"] for r in rows),
            "bytes": sum(r["bytes"] for r in rows),
            "seconds": round(sum(r["seconds"] for r in rows), 1),
        }
        for (iteration, stage), rows in sorted(grouped.items(), key=lambda x: (x[0][0], order[x[0][1]]))
    ]


def texts(
    root: str, run_id: str, *, iteration: int | None = None, num: int = 4, best: bool = False
) -> list[dict[str, Any]]:
    """Sampled texts with question, answer and reward, one a domain in turn.

    Raises ContractError when the run has no trajectories.
    """
    where: dict[str, Any] = {"run_id": run_id}
    if iteration is not None:
        where["iteration"] = iteration
    rows = tables.read_rows(root, "trajectories", where)
    if not rows:
        raise ContractError(
            f"run {run_id} in {root}", expected="trajectories",
            found=f"none; begun or finished are {', '.join(runs(root)) or 'no runs'}",
            next_command="opd run CONFIG",
        )  # fmt: skip
    store = open_store(root)
    record = newest_record(store, run_id)
    if record is None:
        raise ContractError(f"run {run_id} in {root}", expected="a run record", found="none")
    tokenizer = Tokenizer.load(resolve_model(record[1].student_path))
    prompts = {p["prompt_id"]: p for p in tables.read_rows(root, "prompts", {})}
    rows.sort(key=lambda r: (-r["iteration"], -(r["reward"] or 0.0) if best else 0.0, r["trajectory_id"]))
    by_domain: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_domain.setdefault(prompts[row["prompt_id"]]["domain"], []).append(row)
    chosen = [row for rank in range(num) for found in by_domain.values() for row in found[rank : rank + 1]][:num]
    out = []
    for row in chosen:
        columns = shards.decode(store.get(row["shard_key"]), row["shard_key"])
        ids = columns["response_ids"][row["first_row"] : row["first_row"] + row["response_tokens"]]
        prompt = prompts[row["prompt_id"]]
        out.append(
            {
                "trajectory_id": row["trajectory_id"],
                "iteration": row["iteration"],
                "domain": prompt["domain"],
                "question": json.loads(prompt["messages"])[-1]["content"],
                "answer": prompt["answer"],
                "response": tokenizer.decode(ids.tolist()),
                "finish_reason": row["finish_reason"],
                "tokens": row["response_tokens"],
                "reward": row["reward"],
            }
        )
    return out
