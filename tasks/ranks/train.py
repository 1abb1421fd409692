"""One rank of the training stage: `python -m tasks.ranks.train WORK.json`, RANK and friends from the environment.

Rank 0 owns the partition's lease, speaks JSON lines on stdout, writes the objects and finishes. A killed group
starts again from the newest whole checkpoint (`tasks.ranks.checkpoints`), else from the student that the iteration
began with; either way the bytes that it makes are the same.

SIGTERM, to any rank: at the end of the step, or before the next micro-batch of a longer one, all ranks agree to stop.
The parameters are then those of the last finished step: they are saved, their upload is waited for within the grace,
and the group exits with status 75. Before the first step nothing is lost, and it exits at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from infra import leases
from infra.store import ObjectStore
from infra.stores import open_store
from ml.checkpoint import fp8_exact, load_model, save_model
from ml.device import observed, rank_device, traits
from ml.linear import COMPUTE_DTYPES
from ml.model_files import model_digest, read_config
from ml.ranks import join_ranks, leave_ranks
from ml.teacher_head import read_teacher_head
from ml.train.batches import Frame, schedule
from ml.train.engine import EngineSettings, TrainEngine
from ml.train.heads import TeacherHeads
from ml.train.loader import NodeLoader, RankBatches
from ml.train.loop import Report, reduce, train
from ml.train.loss import LossSettings, Student
from ml.train.objectives.kinds import make_objective
from ml.train.objectives.objective import Objective
from ml.train.state import State, load_state, save_state
from schemas import keys
from schemas.config import compute_dtype
from schemas.errors import EXIT_PREEMPTED, ContractError, OpdError
from schemas.rows import json_lines, metric_row
from schemas.typed_json import from_json, to_json
from schemas.work import messages
from schemas.work.manifest import CheckpointRow, ModelObject, TrainManifest
from schemas.work.messages import Message
from schemas.work.train import CheckpointFacts, OptimizerFacts, OptimizerSettings, TrainWork
from tasks.ranks.checkpoints import Checkpoints, put_file
from tasks.ranks.process import Preempted, StopSignal, own, run_rank, say

_EXPORT_SHARD_BYTES = 1 << 30
_PREFIX = "transformer."
#: From the last upload to the end of the process: the lease is released.
_EXIT_SECONDS = 2.0


@dataclass
class Notes:
    """What rank 0 tells and keeps: metric rows so far, micro-batches done, when it last spoke."""

    work: TrainWork
    rank: int
    total: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    new: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0
    spoken: float = 0.0
    progress: Callable[[], None] = lambda: None

    def say(self, message: Message) -> None:
        if self.rank == 0:
            say(message)

    def metric(self, step: int, name: str, teacher_index: int | None, value: float) -> None:
        if not math.isfinite(value):
            raise ContractError(f"metric {name}, step {step}", expected="a finite number", found=str(value))
        work = self.work
        row = metric_row(work.run_id, work.iteration, "train", name, value, step=step, teacher_index=teacher_index)
        self.rows.append(row)
        self.new.append(row)

    def micro_batch(self, _frame: Frame) -> None:
        self.done += 1
        self.progress()
        if self.done == self.total or time.monotonic() - self.spoken > 0.5:
            self.spoken = time.monotonic()
            self.say(messages.Progress(self.done, self.total, "micro-batches"))
            if self.new:
                self.say(messages.Metrics(self.new))
                self.new = []


def run(work: TrainWork, stop: StopSignal) -> None:
    """This rank's part of the work; Raises OpdError, and Preempted after SIGTERM."""
    torch.set_num_threads(work.threads)
    device = rank_device()
    with stop.at_once():
        rank, _ = join_ranks(device)
    store = open_store(work.root)
    if rank > 0:
        if not _told(None):
            _train_and_export(work, store, device, stop, None, None)
        return
    owner = {"stage": "train", "iteration": work.iteration}
    with stop.at_once():
        lease = own(store, work.owned, work, owner, say)
    if _told(isinstance(lease, leases.FinishedEpoch)) or isinstance(lease, leases.FinishedEpoch):
        say(messages.Finished(lease.epoch))
        return
    with lease:
        # Named by the stage's own prefix, so that a checkpoint of another plan or configuration is never taken up.
        scratch = Path(work.scratch) / keys.local_name(work.owned)
        checkpoints = Checkpoints(store, lease, scratch, say)
        lease.finish(to_json(_train_and_export(work, store, device, stop, lease, checkpoints)))
    checkpoints.clear()
    say(messages.Finished(lease.epoch))


class Boundaries:
    """What ranks agree on where no update is in work: to save, or to stop. All of them call it at the same places.

    checkpoints: on rank 0. steps: finished, of which the parameters are.
    """

    def __init__(
        self, work: TrainWork, engine: TrainEngine, notes: Notes, stop: StopSignal,
        checkpoints: Checkpoints | None, steps: int, num_steps: int, optimizer_steps: int,
    ) -> None:  # fmt: skip
        self._settings, self._engine, self._notes, self._stop = work.settings, engine, notes, stop
        self._checkpoints, self._num_steps = checkpoints, num_steps
        self._optimizer_steps = optimizer_steps - steps  # of the iterations before
        self.steps = self._saved = steps
        self._num_rows = len(notes.rows)
        self._saved_at, self._save_seconds = time.monotonic(), 0.0

    def step_end(self, steps: int) -> None:
        """Raises Preempted, with the state of this step kept, when any rank was told to stop."""
        self.steps, self._num_rows = steps, len(self._notes.rows)
        every, seconds = self._settings.save_every_steps, self._settings.save_every_seconds
        due = (every and steps % every == 0) or (seconds and time.monotonic() - self._saved_at > seconds)
        stopped, due = self._agreed(self._stop.arrived is not None, bool(due) and steps < self._num_steps)
        if due and not stopped:
            self._save()
        if stopped:
            self._leave()

    def before_next(self) -> None:
        """Between micro-batches. Raises Preempted, with the state of the last finished step kept."""
        if self._agreed(self._stop.arrived is not None, False)[0]:
            self._leave()

    def _agreed(self, stopped: bool, due: bool) -> tuple[bool, bool]:
        # Any rank may have the signal; the clock is rank 0's alone.
        due = due and self._notes.rank == 0
        stop, save = reduce(torch.tensor([stopped, due], dtype=torch.float64), "max").tolist()
        return bool(stop), bool(save)

    def _save(self) -> None:
        started = time.monotonic()
        facts = CheckpointFacts(self.steps, self._optimizer_steps + self.steps, self._notes.rows[: self._num_rows])
        tensors = (pair for part in (self._engine.parameters(), self._engine.moments()) for pair in part)
        if self._checkpoints is None:
            for _ in tensors:  # gathering is collective: every rank takes part, rank 0 writes
                continue
        else:
            self._checkpoints.save(self.steps, tensors, facts)
        self._saved, self._saved_at = self.steps, time.monotonic()
        self._save_seconds = self._saved_at - started

    def _leave(self) -> None:
        arrived = self._stop.arrived or time.monotonic()
        deadline = arrived + self._settings.grace_seconds - _EXIT_SECONDS
        if self._saved < self.steps and _told(time.monotonic() + self._save_seconds < deadline):
            self._save()
        if self._checkpoints is not None:
            stored = self._checkpoints.settle(self._saved, deadline) if self._saved else 0
            say(messages.Stopped(self.steps, self._saved, stored))
        _told(None)  # the group ends when its first rank does
        raise Preempted


def _train_and_export(
    work: TrainWork, store: ObjectStore, device: torch.device, stop: StopSignal,
    lease: leases.Lease | None, checkpoints: Checkpoints | None,
) -> TrainManifest | None:  # fmt: skip
    """Trains; on rank 0, which holds the lease, uploads and returns the partition manifest."""
    started = time.monotonic()
    with _long(lease), stop.at_once():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        resumed = _told(checkpoints.newest() if checkpoints else None)
        kept = from_json(CheckpointFacts, resumed.facts, str(resumed.folder)) if resumed else None
        first_step = kept.steps if kept else 0
        plan = _read_rows(work.plan_rows_path)
        num_steps = 1 + max((r["step"] for r in plan if r["split"] == "train"), default=-1)
        objectives = _objectives(work)
        frames = schedule(
            plan, _read_rows(work.trajectory_rows_path), _read_rows(work.hidden_rows_path),
            ranks=ranks, needs={name: o.needs for name, o in objectives.items()}, first_step=first_step,
        )  # fmt: skip
        engine, optimizer_steps = _engine(work, device, resumed, objectives)
    notes = Notes(work, rank, len(frames) // ranks)
    if lease is not None:
        notes.progress = lease.progress
    if kept:
        notes.rows = list(kept.metrics)
        notes.say(messages.ResumedAt(first_step))
    boundaries = Boundaries(work, engine, notes, stop, checkpoints, first_step, num_steps, optimizer_steps)
    loader, batches = _open_loader(work, store, frames, device)
    teachers = {head.teacher_index: head for head in work.teachers}

    def read(teacher_index: int) -> torch.Tensor:
        return read_teacher_head(teachers[teacher_index].source)

    patience_seconds = None
    try:
        train(
            engine,
            batches,
            TeacherHeads(read, vocab_size=work.vocab_size, device=device),
            Report(notes.metric, notes.micro_batch, boundaries.step_end, boundaries.before_next),
            num_teachers=len(teachers),
            first_step=first_step,
            num_steps=num_steps,
            sampler_compute=COMPUTE_DTYPES[compute_dtype(work.student.precision)],
        )
        notes.say(messages.Metrics(notes.new))
    except BaseException:
        patience_seconds = 0.0  # what a read still waits for is no reason to be late with the news
        raise
    finally:
        if loader is not None:
            loader.close(patience_seconds)
    if checkpoints is not None:
        checkpoints.stop()
    with _long(lease):
        manifest = _export(work, store, engine, lease, checkpoints, notes, num_steps,
                           optimizer_steps + num_steps - first_step)  # fmt: skip
    stats = {"seconds": time.monotonic() - started, "steps": num_steps, "ranks": ranks}
    engine.close()
    return manifest and replace(manifest, stats=stats | observed(device))


def _long(lease: leases.Lease | None) -> contextlib.AbstractContextManager[None]:
    """Of rank 0: reading, gathering or writing whole models, which reports no progress."""
    return contextlib.nullcontext() if lease is None else lease.patience(leases.LONG_SECONDS)


def _objectives(work: TrainWork) -> dict[str, Objective]:
    """What the plan's rows may name."""
    choice = work.settings.objective
    return {choice.type: make_objective(choice.type, choice.settings)}


def _engine(
    work: TrainWork, device: torch.device, resumed: State | None, objectives: dict[str, Objective]
) -> tuple[TrainEngine, int]:
    """The engine, and the optimizer steps that its moments have seen."""
    source = work.student
    transformer = load_model(
        Path(source.folder), precision=source.precision, compute=source.compute, trainable=True, device=device,
        digest=source.digest,
    )  # fmt: skip
    transformer.checkpoint_layers = work.settings.recompute_layers
    loss = LossSettings(
        vocab_size=work.vocab_size, chunk_bytes=work.settings.chunk_bytes or traits(device).chunk_bytes,
        page_tokens=work.page_tokens,
    )  # fmt: skip
    student = Student(transformer, loss, objectives)
    optimizer = resumed
    if resumed is not None:
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                parameter.copy_(resumed.read(name))
    elif work.optimizer_from is not None:
        optimizer = load_state(Path(work.optimizer_from))
        if optimizer is None:
            raise ContractError(
                work.optimizer_from, expected="the optimizer of the iteration before", found="no complete state",
                safe="the student", next_command="opd repair RUN",
            )  # fmt: skip
    steps = 0
    if optimizer is not None:
        facts = from_json(OptimizerFacts, optimizer.facts, str(optimizer.folder), pass_over_unknown=True)
        steps = facts.optimizer_steps
    engine = TrainEngine(student, _engine_settings(work.settings.optimizer), device=device, steps_done=steps)
    if optimizer is not None:
        engine.load_moments(optimizer.read, steps)
    return engine, steps


def _engine_settings(chosen: OptimizerSettings) -> EngineSettings:
    return EngineSettings(
        learning_rate=chosen.learning_rate, beta1=chosen.beta1, beta2=chosen.beta2, weight_decay=chosen.weight_decay,
        gradient_clip=chosen.gradient_clip, warmup_steps=chosen.warmup_steps, zero_stage=chosen.zero_stage,
    )  # fmt: skip


def _open_loader(
    work: TrainWork, store: ObjectStore, frames: list[Frame], device: torch.device
) -> tuple[NodeLoader | None, RankBatches]:
    """The node's loader (on its first rank only) and this rank's way through it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    first = rank - local_rank
    mine = [f for i, f in enumerate(frames) if first <= i % ranks < first + local_ranks]
    loader = None
    if local_rank == 0:
        loader = NodeLoader(
            mine, store, ranks=local_ranks, loader_bytes=work.settings.loader_bytes,
            job_id=keys.digest(work.owned)[:12],
        )  # fmt: skip
    folders: list[Path | None] = [None] * ranks
    dist.all_gather_object(folders, loader.folder if loader else None)
    folder = folders[first]
    if folder is None:
        raise RuntimeError(f"rank {first} opened no loader")
    return loader, RankBatches(folder, mine, rank=local_rank, ranks=local_ranks, device=device)


def _export(
    work: TrainWork, store: ObjectStore, engine: TrainEngine, lease: leases.Lease | None,
    checkpoints: Checkpoints | None, notes: Notes, steps: int, optimizer_steps: int,
) -> TrainManifest | None:  # fmt: skip
    """Model folder, optimizer and metric rows as objects; without the lease only the collective gathering."""
    parameters = ((name.removeprefix(_PREFIX), tensor) for name, tensor in engine.parameters())
    if lease is None or checkpoints is None:
        for _ in (*parameters, *(engine.moments() if optimizer_steps else ())):
            continue
        return None
    out = checkpoints.folder / "out"  # of this epoch alone: nobody swaps it between its digest and its upload
    source = Path(work.student.folder)
    save_model(
        out / "export", read_config(source), parameters, companions=source, shard_bytes=_EXPORT_SHARD_BYTES
    )  # fmt: skip
    notes.say(messages.Working("export"))
    save_state(out / "optimizer", engine.moments() if optimizer_steps else (), to_json(OptimizerFacts(optimizer_steps)))
    version = model_digest(out / "export")
    inexact = _fp8_inexact(work, out / "export", notes, steps)
    lease.check()
    objects: list[ModelObject] = []
    for group in ("export", "optimizer"):
        for path in sorted((out / group).iterdir()):
            key = keys.owned_object(lease.owned, lease.epoch, f"{group}/{path.name}")
            stored = put_file(store, key, path)
            objects.append(ModelObject(key, stored.digest, stored.bytes, group=group, name=path.name))
            notes.say(messages.Working(f"upload of {group}/{path.name}"))
    data = json_lines(notes.rows)
    rows_key = keys.owned_object(lease.owned, lease.epoch, "rows.jsonl")
    store.put(rows_key, data)
    checkpoint = CheckpointRow(
        run_id=work.run_id, iteration=work.iteration, version=version, parent=work.student.digest,
        format="huggingface", config_digest=keys.digest(read_config(out / "export")), steps=steps,
        keys=json.dumps({group: [o.key for o in objects if o.group == group] for group in ("export", "optimizer")}),
    )  # fmt: skip
    return TrainManifest(
        objects=tuple(objects), rows_key=rows_key, rows_digest=keys.digest_bytes(data), num_rows=len(notes.rows),
        stats={}, checkpoint=checkpoint, fp8_inexact=tuple(inexact), notices=tuple(checkpoints.notices),
    )  # fmt: skip


def _fp8_inexact(work: TrainWork, export: Path, notes: Notes, steps: int) -> list[str]:
    """Names of the new student's linears whose MXFP4 values FP8 would change, counted as a metric.

    Training in FP8 computes such a linear in bf16, and counts it at each step (`ml.train.loop`); what this adds is the
    student after the last step, which the next iteration starts from. In bf16 they cost nothing."""
    if work.student.precision != "mxfp4":
        return []
    inexact = [name for name, exact in fp8_exact(export).items() if not exact]
    notes.metric(steps, "fp8_inexact_linears", None, float(len(inexact)))
    return inexact


def _told(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _read_rows(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main(arguments: list[str]) -> int:
    stop = StopSignal()

    def run_in_group(work: TrainWork) -> None:
        try:
            run(work, stop)
        except OpdError:
            raise
        except Exception:
            if stop.arrived is None:
                raise
            # Another rank has left at once, and a collective with it failed here.
            print(traceback.format_exc(), file=sys.stderr)
            raise Preempted from None
        leave_ranks()

    try:
        return run_rank(arguments, TrainWork, run_in_group)
    except Preempted:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_PREEMPTED)  # nothing is waited for: a read, an upload, threads of a group that is no more


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
