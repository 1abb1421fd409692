"""The rollout stage: prompts of an iteration in, trajectories and their token shards out.

A partition is a few whole groups (all samples of a prompt), so that a lost worker costs no group twice. The
work files hold all that a worker needs; workers may die and be started again at any moment.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas import keys
from schemas.config import RunConfig, compute_dtype
from schemas.rows import metric_row
from schemas.typed_json import to_json
from schemas.work.manifest import PartitionManifest, RolloutManifest
from schemas.work.model import ModelSource
from schemas.work.rollout import EngineSizes, RolloutPartition, RolloutRequest, RolloutWork, SamplingSettings
from tasks.inputs.models import check_models, resolve_model, teacher_checks
from tasks.inputs.prompts import prompts_of_iteration, split_prompts
from tasks.inputs.room import Room
from tasks.inputs.text import Tokenizer
from tasks.rewards.child import check_verifiers, no_namespaces, verifier_settings
from tasks.rewards.verifiers import source_digest
from tasks.runs.finished import StageResult
from tasks.runs.session import LOGS, Session
from tasks.runs.stage import Stage, run_stage
from tasks.runs.students import Student
from tasks.stages.prompt_table import commit_prompts
from tasks.stages.teacher_proof import prove_teachers
from tasks.workers.pool import Limits, run_workers
from tasks.workers.suspects import check_given_up


def requests_of_iteration(
    session: Session, iteration: int, tokenizer: Tokenizer, prompts: list[dict[str, Any]]
) -> list[list[RolloutRequest]]:
    """One group (list of requests) a prompt: training prompts of the iteration, then the held-out ones.

    A prompt that one iteration takes twice (around an epoch's end) gets further sample indices. Raises ContractError
    for a prompt of the run that leaves the student, a teacher or a pack no room for the longest response, ConfigError
    for one that a template cannot take.
    """
    config = session.config
    train, heldout = split_prompts(prompts, config.seed, config.prompts.heldout)
    room = Room(config, tokenizer)
    if not session.prompts_checked:  # all of them, since a fault in the last one should not wait for its iteration
        room.check(prompts)
        session.prompts_checked = True
    taken = prompts_of_iteration(train, config.seed, config.prompts.per_iteration, iteration)
    groups = []
    times_taken: Counter[str] = Counter()
    for split, chosen, samples in (("train", taken, config.rollout.samples_per_prompt), ("heldout", heldout, 1)):
        for prompt in chosen:
            prompt_ids = tuple(room.checked(prompt))
            first_sample = times_taken[prompt["prompt_id"]] * samples
            times_taken[prompt["prompt_id"]] += 1
            group = []
            for sample_index in range(first_sample, first_sample + samples):
                trajectory_id = keys.trajectory_id(config.run_id, iteration, prompt["prompt_id"], sample_index)
                group.append(
                    RolloutRequest(
                        trajectory_id=trajectory_id,
                        prompt_id=prompt["prompt_id"],
                        sample_index=sample_index,
                        split=split,
                        prompt_ids=prompt_ids,
                        sampling_key=keys.sampling_key(config.seed, trajectory_id),
                        max_response_tokens=config.rollout.max_response_tokens,
                        prompt=prompt,
                    )
                )
            groups.append(group)
    return groups


def _content(request: RolloutRequest) -> dict[str, Any]:
    """Without the prompt's row, of which prompt_id is the digest."""
    return {name: value for name, value in to_json(request).items() if name != "prompt"}


def _metrics(run_id: str, iteration: int, rows: list[dict[str, Any]], verifier_failures: int) -> list[dict[str, Any]]:
    def metric(name: str, value: float) -> dict[str, Any]:
        return metric_row(run_id, iteration, "rollout", name, value)

    metrics = [
        metric("trajectories", float(len(rows))),
        metric("sampled_tokens", float(sum(r["sampled_tokens"] for r in rows))),
        metric("verifier_failures", float(verifier_failures)),
        metric("given_up", float(sum(r["status"] == "given_up" for r in rows))),
        metric("given_up_tokens", float(sum(r["response_tokens"] for r in rows if r["status"] == "given_up"))),
        metric("stopped_share", sum(r["finish_reason"] == "stop" for r in rows) / max(len(rows), 1)),
    ]
    for split in ("train", "heldout"):
        rewards = [r["reward"] for r in rows if r["split"] == split and r["reward"] is not None]
        if rewards:
            metrics.append(metric(f"{split}_reward", math.fsum(rewards) / len(rewards)))
    return metrics


def rollout_work(
    config: RunConfig,
    *,
    student_folder: Path,
    student_version: str,
    stop_ids: Sequence[int],
    vocab_size: int,
    workers: int,
    scratch: Path,
    iteration: int,
    stage_prefix: str,
    run_epoch: int,
    scoring: dict[str, str],
) -> RolloutWork:
    """Work of the stage's workers, without partitions. workers: that share this machine's cores."""
    rollout = config.rollout
    return RolloutWork(
        root=config.data,
        scratch=str(scratch / LOGS),
        run_id=config.run_id,
        iteration=iteration,
        stage_prefix=stage_prefix,
        run_epoch=run_epoch,
        student=ModelSource(
            str(student_folder), student_version, config.student.precision, compute_dtype(config.student.precision)
        ),
        sampling=SamplingSettings(rollout.temperature, rollout.top_k, rollout.top_p),
        stop_ids=tuple(sorted(stop_ids)),
        vocab_size=vocab_size,
        engine=EngineSizes(rollout.max_sequences, rollout.page_tokens, rollout.kv_bytes),
        ranks=rollout.tensor_parallel,
        threads=rollout.threads or max(1, (os.cpu_count() or 1) // (workers * rollout.tensor_parallel)),
        seal_seconds=rollout.seal_seconds,
        grace_seconds=rollout.grace_seconds,
        dead_after_seconds=rollout.dead_after_seconds,
        verifier=verifier_settings(config.prompts),
        max_verifier_failures=config.prompts.max_verifier_failures,
        scoring=scoring,
        partitions=(),
    )


def _cut(groups: list[list[RolloutRequest]], size: int) -> dict[int, RolloutPartition]:
    """Partitions of `size` whole groups, the last one of what is left."""
    return {
        index: RolloutPartition(index, tuple(r for group in groups[first : first + size] for r in group))
        for index, first in enumerate(range(0, len(groups), size))
    }


def _limits(config: RunConfig) -> Limits:
    return Limits(
        max_attempts=config.rollout.max_attempts,
        grace_seconds=config.rollout.grace_seconds,
        stuck_seconds=config.rollout.stuck_seconds,
        max_given_up=config.rollout.max_given_up,
    )


def rollout(session: Session, iteration: int, student: Student) -> StageResult:
    """Sample every trajectory of an iteration.

    Raises ContractError, before the first token, for a teacher that cannot teach this student, and StageError when a
    partition keeps failing or more trajectories are given up than the configuration allows.
    """
    config = session.config
    configured = resolve_model(config.student.path)  # every student of the run has its shapes and its tokenizer
    check_models(configured, config)
    vocab_size = teacher_checks(configured, config.teachers)
    prompts, repeated = session.prompts
    if repeated:
        told = ", ".join(f"{number} of {path}" for path, number in repeated.items())
        session.notes["prompt rows that repeat an earlier one, each prompt counted once"] = told
    tokenizer = session.tokenizer
    scoring = {name: source_digest(name) for name in sorted({p["verifier"] for p in prompts} - {None})}
    drills: list[dict[str, int]] = []

    def partitions() -> dict[int, RolloutPartition]:
        groups = requests_of_iteration(session, iteration, tokenizer, prompts)
        check_verifiers(scoring, verifier_settings(config.prompts))
        if scoring and no_namespaces():
            session.notes["verifiers run without namespaces, so with the network and your files"] = no_namespaces()
        prove_teachers(session)
        commit_prompts(session, prompts)  # before an hour of sampling: the first call that needs Java
        return _cut(groups, config.rollout.prompts_per_partition)

    def execute(prefix: str, todo: dict[int, RolloutPartition]) -> None:
        workers = min(config.rollout.workers, len(todo))
        work = rollout_work(
            config,
            student_folder=student.folder(session),
            student_version=student.version,
            stop_ids=tokenizer.stop_ids,
            vocab_size=vocab_size,
            workers=workers,
            scratch=session.scratch,
            iteration=iteration,
            stage_prefix=prefix,
            run_epoch=session.run_epoch,
            scoring=scoring,
        )
        kill_after = config.drill.kill_rollout_worker_after_tokens if iteration == 0 else 0
        drill = run_workers(
            session, "rollout", iteration, work, todo,
            workers=workers, limits=_limits(config), kill_after_tokens=kill_after,
        )  # fmt: skip
        if drill is not None:
            drills.append(drill)

    def derive(partitions: dict[int, PartitionManifest], rows: list[dict[str, Any]]):
        manifests = {i: m for i, m in partitions.items() if isinstance(m, RolloutManifest)}
        check_given_up({i: m.given_up for i, m in manifests.items()}, config.rollout.max_given_up, iteration)
        failures = sum(m.verifier_failures for m in manifests.values())
        metrics = _metrics(config.run_id, iteration, rows, failures)
        stats = {m["name"]: m["value"] for m in metrics}
        return {"metrics": metrics}, stats | ({"drill": drills[0]} if drills else {})

    stage = Stage(
        name="rollout",
        iteration=iteration,
        table="trajectories",
        config={name: session.content.get(name, {}) for name in ("seed", "prompts", "rollout", "student")},
        inputs={
            "student": student.version,
            "tokenizer": tokenizer.fingerprint,
            "stop_ids": keys.digest([sorted(tokenizer.stop_ids), vocab_size]),
            "prompts": keys.digest([prompt["prompt_id"] for prompt in prompts]),
        },
        given=lambda work: [_content(request) for request in work.requests],
        scoring=scoring,
        partitions=partitions,
        execute=execute,
        derive=derive,
    )
    result = run_stage(session, stage)
    commit_prompts(session, prompts)
    return result
