"""The teacher stage: every trajectory read by each of its prompt's teachers; last hidden states out, never logits.

A partition is whole trajectories of one teacher; partitions are ordered by teacher_index, so one worker loads each
teacher once. A teacher reads its own rendering of the prompt, then the student's response tokens unchanged.
"""

from __future__ import annotations

import os
from typing import Any

from schemas.config import compute_dtype
from schemas.errors import ContractError
from schemas.rows import metric_row
from schemas.typed_json import to_json
from schemas.work.manifest import PartitionManifest
from schemas.work.model import ModelSource
from schemas.work.teach import TeachItem, TeachPartition, TeachWork
from tasks.inputs.models import resolve_model
from tasks.inputs.room import teacher_context
from tasks.runs.finished import StageResult
from tasks.runs.session import Session
from tasks.runs.stage import Stage, input_rows, run_stage
from tasks.teachers.kinds import AnyTeacher
from tasks.workers.pool import Limits, run_workers


def _items(session: Session, rollout: StageResult) -> dict[int, list[TeachItem]]:
    """teacher_index -> what to read, in order of trajectory_id. Raises ContractError for an unknown prompt."""
    config = session.config
    prompts = {p["prompt_id"]: p for p in session.prompts[0]}
    index_of = {teacher_id: i for i, teacher_id in enumerate(config.teacher_ids)}
    tokenizers = session.teacher_tokenizers
    contexts: dict[tuple[int, str], tuple[int, ...]] = {}
    items: dict[int, list[TeachItem]] = {i: [] for i in index_of.values()}
    for row in sorted(input_rows(session, rollout, "trajectories"), key=lambda r: r["trajectory_id"]):
        if row["status"] == "given_up":
            continue  # counted by the rollout stage; dispatch leaves it out as well
        if row["prompt_id"] not in prompts:
            raise ContractError(
                f"opd.trajectories, {row['trajectory_id']}", expected="a prompt of this run", found=row["prompt_id"]
            )
        prompt = prompts[row["prompt_id"]]
        for entry in prompt["teachers"]:
            index = index_of[entry["teacher_id"]]
            if (index, row["prompt_id"]) not in contexts:
                context_ids = teacher_context(config.teacher(index), tokenizers[index], prompt)
                contexts[index, row["prompt_id"]] = tuple(context_ids)
            items[index].append(
                TeachItem(
                    trajectory_id=row["trajectory_id"],
                    context_ids=contexts[index, row["prompt_id"]],
                    shard_key=row["shard_key"],
                    shard_digest=row["shard_digest"],
                    first_row=row["first_row"],
                    response_tokens=row["response_tokens"],
                )
            )
    return items


def _content(item: TeachItem) -> dict[str, Any]:
    """Without the key of its token shard, in which an epoch stands: a shard is named by its digest."""
    return {name: value for name, value in to_json(item).items() if name != "shard_key"}


def teacher_source(session: Session, teacher: AnyTeacher) -> ModelSource:
    """What a rank loads of a teacher."""
    return ModelSource(
        str(resolve_model(teacher.path)), session.model_digests[f"teacher:{teacher.id}"], teacher.precision,
        compute_dtype(teacher.precision),
    )  # fmt: skip


def teach(session: Session, iteration: int, rollout: StageResult) -> StageResult:
    """Hidden states of every (trajectory, teacher) of an iteration."""
    config = session.config

    def partitions() -> dict[int, TeachPartition]:
        out: dict[int, TeachPartition] = {}
        for teacher_index, items in sorted(_items(session, rollout).items()):
            teacher = config.teacher(teacher_index)
            model = teacher_source(session, teacher)
            for first in range(0, len(items), config.teach.trajectories_per_partition):
                partition = len(out)
                out[partition] = TeachPartition(
                    partition, teacher_index, teacher.id, teacher.kind, model,
                    tuple(items[first : first + config.teach.trajectories_per_partition]),
                )  # fmt: skip
        return out

    def execute(prefix: str, todo: dict[int, TeachPartition]) -> None:
        workers = min(config.teach.workers, len(todo))
        work = TeachWork(
            root=config.data,
            run_id=config.run_id,
            iteration=iteration,
            stage_prefix=prefix,
            run_epoch=session.run_epoch,
            batch_tokens=config.teach.batch_tokens,
            threads=config.teach.threads or max(1, (os.cpu_count() or 1) // workers),
            dead_after_seconds=config.teach.dead_after_seconds,
            partitions=(),
        )
        run_workers(
            session, "teach", iteration, work, todo,
            workers=workers, limits=Limits(config.teach.max_attempts, 5.0, config.teach.stuck_seconds),
        )  # fmt: skip

    def derive(_manifests: dict[int, PartitionManifest], rows: list[dict[str, Any]]):
        tokens = {i: sum(r["rows"] for r in rows if r["teacher_index"] == i) for i in range(len(config.teachers))}
        metrics = [
            metric_row(config.run_id, iteration, "teach", "hidden_rows", float(count), teacher_index=index)
            for index, count in tokens.items()
        ]
        return {"metrics": metrics}, {"hidden_rows": {config.teacher_ids[i]: n for i, n in tokens.items()}}

    stage = Stage(
        name="teach",
        iteration=iteration,
        table="hidden_shards",
        config={name: session.content.get(name, {}) for name in ("teachers", "teach")},
        inputs={
            "rollout": rollout.output_digest,
            **{name: d for name, d in session.model_digests.items() if name.startswith("teacher:")},
        },
        given=lambda work: [work.teacher_index, [_content(item) for item in work.items]],
        partitions=partitions,
        execute=execute,
        derive=derive,
    )
    return run_stage(session, stage)
