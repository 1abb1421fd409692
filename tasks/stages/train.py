"""The training stage: the plan, token shards and hidden states in; the next student, its optimizer and metrics out.

One partition. Its ranks are one torchrun-like group: when one falls they are all started again, and go on from
the newest complete checkpoint of this stage, or from its start.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from schemas import keys
from schemas.config import Train
from schemas.typed_json import to_json
from schemas.work.manifest import PartitionManifest, TrainManifest
from schemas.work.model import ModelSource
from schemas.work.train import ObjectiveChoice, OptimizerSettings, TeacherHead, TrainSettings, TrainWork
from tasks.inputs.models import teacher_facts
from tasks.runs.finished import StageResult
from tasks.runs.session import TRAINING, Session
from tasks.runs.stage import Stage, input_rows, run_stage
from tasks.runs.students import Student
from tasks.workers.pool import Limits, work_folder, write_rows
from tasks.workers.rank_group import run_group


def _summary(config, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers that the run prints: each figure of the objective, FIGURE_by_step in training, heldout_FIGURE_before and
    _after by teacher and over all; loads; mismatch.

    heldout_FIGURE_unquantised: of an MXFP4 student before training, had its linears kept bf16 values.
    """

    def values(name: str, teacher_index: int | None = None) -> list[tuple[int, float]]:
        found = [r for r in rows if r["name"] == name and r["teacher_index"] == teacher_index]
        return [(r["step"], r["value"]) for r in sorted(found, key=lambda r: r["step"])]

    out: dict[str, Any] = {}
    phases = (*(["unquantised"] if config.student.precision == "mxfp4" else []), "before", "after")
    for figure in config.train.objective.metrics:
        for name in (f"heldout_{figure}_{when}" for when in phases):
            out[name] = {
                "all": next((v for _, v in values(name)), None),
                **{
                    teacher_id: next((v for _, v in values(name, index)), None)
                    for index, teacher_id in enumerate(config.teacher_ids)
                },
            }
        out[f"{figure}_by_step"] = [v for _, v in values(figure)]
    out["head_loads_per_mini_batch"] = max((v for _, v in values("head_loads")), default=0.0)
    for name in ("mismatch_sampler_max", "mismatch_sampler_mean", "mismatch_trained_mean"):
        found = [v for _, v in values(name)]
        out[name] = max(found) if found else None
    return out


def train_settings(train: Train) -> TrainSettings:
    """What the ranks are told of the section [train]."""
    return TrainSettings(
        optimizer=OptimizerSettings(
            learning_rate=train.learning_rate,
            beta1=train.beta1,
            beta2=train.beta2,
            weight_decay=train.weight_decay,
            gradient_clip=train.gradient_clip,
            warmup_steps=train.warmup_steps,
            zero_stage=train.zero_stage,
        ),
        objective=ObjectiveChoice(train.objective.type, train.objective.model_dump(exclude={"type"})),
        chunk_bytes=train.chunk_bytes,
        recompute_layers=train.recompute_layers,
        loader_bytes=train.loader_bytes,
        save_every_steps=train.save_every_steps,
        save_every_seconds=train.save_every_seconds,
        grace_seconds=train.grace_seconds,
    )


def _head(session: Session, teacher_index: int) -> TeacherHead:
    teacher = session.config.teacher(teacher_index)
    digest = session.models[f"teacher:{teacher.id}"].head
    return TeacherHead(teacher_index, dataclasses.replace(teacher_facts(teacher).head, digest=digest))


def train(session: Session, iteration: int, student: Student, inputs: dict[str, StageResult]) -> StageResult:
    """One pass over the plan of an iteration. inputs: the iteration's rollout, teach and dispatch.

    Raises StageError when the ranks keep failing.
    """
    config = session.config

    def partitions() -> dict[int, Any]:
        return {0: None}

    def execute(prefix: str, _todo: dict[int, Any]) -> None:
        folder, optimizer = work_folder(session, "train", iteration), student.optimizer_folder(session)
        work = TrainWork(
            root=config.data,
            run_id=config.run_id,
            iteration=iteration,
            owned=keys.partition_prefix(prefix, 0),
            run_epoch=session.run_epoch,
            student=ModelSource(
                str(student.folder(session)), student.version, config.student.precision, config.train.compute
            ),
            optimizer_from=str(optimizer) if optimizer else None,
            plan_rows_path=write_rows(folder / "plan.jsonl", input_rows(session, inputs["dispatch"], "plan")),
            trajectory_rows_path=write_rows(
                folder / "trajectories.jsonl", input_rows(session, inputs["rollout"], "trajectories")
            ),
            hidden_rows_path=write_rows(
                folder / "hidden_shards.jsonl", input_rows(session, inputs["teach"], "hidden_shards")
            ),
            teachers=tuple(_head(session, i) for i in range(len(config.teachers))),
            vocab_size=session.tokenizer.vocab_size,
            page_tokens=config.rollout.page_tokens,
            threads=config.train.threads or max(1, (os.cpu_count() or 1) // config.train.ranks),
            dead_after_seconds=config.train.dead_after_seconds,
            scratch=str(session.scratch / TRAINING),
            settings=train_settings(config.train),
        )
        limits = Limits(config.train.max_attempts, config.train.grace_seconds, config.train.stuck_seconds)
        run_group(session, "train", iteration, work, ranks=config.train.ranks, limits=limits, folder=folder)

    def derive(manifests: dict[int, PartitionManifest], rows: list[dict[str, Any]]):
        manifest = manifests[0]
        assert isinstance(manifest, TrainManifest)
        stats = _summary(config, rows)
        if config.student.precision == "mxfp4":
            stats["fp8_inexact"] = list(manifest.fp8_inexact)
        stats["checkpoint"] = {
            "version": manifest.checkpoint.version,
            "export": [o for o in manifest.objects if o.group == "export"],
            "optimizer": [o for o in manifest.objects if o.group == "optimizer"],
        }
        return {"checkpoints": [to_json(manifest.checkpoint)]}, stats

    stage = Stage(
        name="train",
        iteration=iteration,
        table="metrics",
        config={name: session.content.get(name, {}) for name in ("train", "student", "seed")},
        inputs={
            "student": student.version,
            **{name: result.output_digest for name, result in inputs.items()},
            **{name: d for name, d in session.model_digests.items() if name.startswith("teacher:")},
        },
        partitions=partitions,
        execute=execute,
        derive=derive,
    )
    return run_stage(session, stage)
