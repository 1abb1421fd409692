"""The dispatch stage as the flow sees it: one partition, planned in the Spark child (`tasks.dispatch`)."""

from __future__ import annotations

from typing import Any

from infra import leases
from schemas import keys
from tasks.session import Session
from tasks.stage import Stage, StageResult, run_stage

_DEAD_AFTER_SECONDS = 30.0


def dispatch(session: Session, iteration: int, rollout: StageResult, teach: StageResult) -> StageResult:
    """Shuffle and pack an iteration. Raises ContractError when trajectories and hidden states do not match."""
    config = session.config

    def partitions(prefix: str) -> dict[int, Any]:
        return {0: keys.partition_prefix(prefix, 0)}

    def execute(_prefix: str, todo: dict[int, Any]) -> None:
        owned = todo[0]
        lease = leases.acquire(
            session.store, owned, owner={"stage": "dispatch"}, dead_after_seconds=_DEAD_AFTER_SECONDS
        )
        if isinstance(lease, leases.Finished):
            return
        with lease:
            session.progress("dispatch", 0, 1, "plan")
            plan = session.spark.call(
                "tasks.dispatch:build_plan",
                root=config.data,
                run_id=config.run_id,
                iteration=iteration,
                seed=config.seed,
                teachers=[
                    {"teacher_id": t.id, "weight": t.weight} for t in map(config.teacher, range(len(config.teachers)))
                ],
                mini_batch_trajectories=config.dispatch.mini_batch_trajectories,
                pack_tokens=config.dispatch.pack_tokens,
                slots=config.dispatch.slots,
                out_key=keys.owned_object(owned, lease.epoch, "plan.jsonl"),
            )
            lease.finish(
                {
                    "objects": [],
                    "rows_key": plan["rows_key"],
                    "rows_digest": plan["rows_digest"],
                    "num_rows": plan["num_rows"],
                    "stats": plan["stats"],
                }
            )
        session.progress("dispatch", 1, 1, "plan")

    def derive(manifests: dict[int, dict[str, Any]], _rows: list[dict[str, Any]]):
        stats = manifests[0]["stats"]
        observed = {"seconds"}
        metrics = [
            {"run_id": config.run_id, "iteration": iteration, "stage": "dispatch", "step": 0, "name": name,
             "teacher_index": None, "value": float(value)}
            for name, value in sorted(stats.items())
            if name not in observed
        ]  # fmt: skip
        return {"metrics": metrics}, stats

    stage = Stage(
        name="dispatch",
        iteration=iteration,
        table="plan",
        config={
            "seed": config.seed,
            "dispatch": config.dispatch.content(),
            "weights": {t.id: t.weight for t in config.teachers},
        },
        inputs={"rollout": rollout.output_digest, "teach": teach.output_digest},
        partitions=partitions,
        execute=execute,
        derive=derive,
    )
    return run_stage(session, stage)
