"""The dispatch stage as the flow sees it: one partition, planned in the Spark child (`dispatch_in_spark`)."""

from __future__ import annotations

import math
from typing import Any

from infra import leases
from infra.terminal import tell
from schemas import keys
from schemas.rows import metric_row
from schemas.typed_json import to_json
from schemas.work.manifest import PartitionManifest
from tasks.runs.finished import StageResult
from tasks.runs.session import Session
from tasks.runs.stage import Stage, run_stage, version_of
from tasks.stages.dispatch_in_spark import build_plan
from tasks.stages.prompt_table import prompt_entries

_DEAD_AFTER_SECONDS = 30.0


def dispatch(session: Session, iteration: int, rollout: StageResult, teach: StageResult) -> StageResult:
    """Shuffle and pack an iteration. Raises ContractError when trajectories and hidden states do not match."""
    config, objective = session.config, session.config.train.objective

    def partitions() -> dict[int, Any]:
        return {0: None}

    def make_plan(lease: leases.Lease) -> dict[str, Any]:
        session.progress("dispatch", 0, 1, "plan")
        prompts = prompt_entries(session.store, session.prompts[0])
        versions = {
            "prompts": version_of(session, "prompts", prompts),
            "trajectories": version_of(session, "trajectories", [rollout.manifest.tables["trajectories"]]),
            "hidden_shards": version_of(session, "hidden_shards", [teach.manifest.tables["hidden_shards"]]),
        }
        plan = session.spark.call(
            build_plan,
            root=config.data,
            run_id=config.run_id,
            iteration=iteration,
            versions=versions,
            seed=config.seed,
            objective=objective.model_dump(),
            teachers=[
                {"teacher_id": t.id, "weight": t.weight} for t in map(config.teacher, range(len(config.teachers)))
            ],
            mini_batch_trajectories=config.dispatch.mini_batch_trajectories,
            pack_tokens=config.dispatch.pack_tokens,
            slots=config.dispatch.slots,
            out_key=keys.owned_object(lease.owned, lease.epoch, "plan.jsonl"),
        )
        return to_json(PartitionManifest((), plan["rows_key"], plan["rows_digest"], plan["num_rows"], plan["stats"]))

    def execute(prefix: str, _todo: dict[int, Any]) -> None:
        owned = keys.partition_prefix(prefix, 0)
        # The Spark child is at work as long as the call lasts, and the session's own lease moves with it.
        lease = leases.acquire(
            session.store, owned, owner={"stage": "dispatch"}, dead_after_seconds=_DEAD_AFTER_SECONDS,
            run_epoch=session.run_epoch, patience_seconds=math.inf, on_wait=tell,
        )  # fmt: skip
        leases.finish_with(lease, make_plan)
        session.progress("dispatch", 1, 1, "plan")

    def derive(manifests: dict[int, PartitionManifest], _rows: list[dict[str, Any]]):
        stats = manifests[0].stats
        metrics = [
            metric_row(config.run_id, iteration, "dispatch", name, float(value))
            for name, value in sorted(stats.items())
            if name != "seconds" and isinstance(value, int | float)
        ]
        return {"metrics": metrics}, stats

    stage = Stage(
        name="dispatch",
        iteration=iteration,
        table="plan",
        config={
            "seed": session.content.get("seed", 0),
            "dispatch": session.content.get("dispatch", {}),
            "weights": {t.id: t.weight for t in config.teachers},
            # Of KL, whose rows do not name it, nothing but teachers and their weights shapes the plan.
            **({} if objective.name_in_plan is None else {"objective": objective.content()}),
        },
        inputs={"rollout": rollout.output_digest, "teach": teach.output_digest},
        partitions=partitions,
        execute=execute,
        derive=derive,
    )
    return run_stage(session, stage)
