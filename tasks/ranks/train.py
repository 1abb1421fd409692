"""One rank of the training stage: `python -m tasks.ranks.train WORK.json`, RANK and friends from the environment.

Rank 0 owns the partition's lease, speaks JSON lines on stdout, writes the objects and finishes. A killed group
starts again from the newest complete mid-plan checkpoint in its scratch folder, else from the student that the
iteration began with; either way the bytes that it makes are the same.

    stdout: {"event": "progress" | "metrics" | "resumed" | "finished" | "error", ...}
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from infra import leases
from infra.store import ObjectStore, open_store
from ml.checkpoint import fp8_exact, load_model, read_head, save_model
from ml.device import observed, rank_device, traits
from ml.linear import COMPUTE_DTYPES
from ml.model_files import model_digest, read_config
from ml.ranks import join_ranks, leave_ranks
from ml.train.batches import Frame, schedule
from ml.train.engine import EngineSettings, TrainEngine
from ml.train.heads import TeacherHeads
from ml.train.loader import NodeLoader, RankBatches
from ml.train.loop import Report, train
from ml.train.loss import LossSettings, Student
from ml.train.state import State, load_state, newest_state, save_state
from schemas import keys
from schemas.config import compute_dtype
from schemas.errors import ContractError
from tasks.ranks.process import run_rank, say

_EXPORT_SHARD_BYTES = 1 << 30
_PREFIX = "transformer."


@dataclass
class Notes:
    """What rank 0 tells and keeps: metric rows so far, micro-batches done, when it last spoke."""

    work: dict[str, Any]
    rank: int
    total: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    new: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0
    spoken: float = 0.0

    def say(self, event: str, **facts: Any) -> None:
        if self.rank == 0:
            say(event, **facts)

    def metric(self, step: int, name: str, teacher_index: int | None, value: float) -> None:
        if not math.isfinite(value):
            raise ContractError(f"metric {name}, step {step}", expected="a finite number", found=str(value))
        row = {"run_id": self.work["run_id"], "iteration": self.work["iteration"], "stage": "train", "step": step,
               "name": name, "teacher_index": teacher_index, "value": value}  # fmt: skip
        self.rows.append(row)
        self.new.append(row)

    def micro_batch(self, _frame: Frame) -> None:
        self.done += 1
        if self.done == self.total or time.monotonic() - self.spoken > 0.5:
            self.spoken = time.monotonic()
            self.say("progress", done=self.done, total=self.total, unit="micro-batches")
            if self.new:
                self.say("metrics", rows=self.new)
                self.new = []


def run(work: dict[str, Any]) -> None:
    """This rank's part of the work; see tasks.train for the fields. Raises OpdError."""
    torch.set_num_threads(work["threads"])
    device = rank_device()
    rank, _ = join_ranks(device)
    store = open_store(work["root"])
    if rank > 0:
        if not _told(None):
            _train_and_export(work, store, device, None)
        return
    owner = {"stage": "train", "iteration": work["iteration"]}
    lease = leases.acquire(store, work["owned"], owner=owner, dead_after_seconds=work["dead_after_seconds"])
    if _told(isinstance(lease, leases.Finished)) or isinstance(lease, leases.Finished):
        say("finished", epoch=lease.epoch)
        return
    with lease:
        manifest = _train_and_export(work, store, device, lease)
        lease.finish(manifest)
    say("finished", epoch=lease.epoch)


def _train_and_export(
    work: dict[str, Any], store: ObjectStore, device: torch.device, lease: leases.Lease | None
) -> dict[str, Any]:
    """Trains; on rank 0, which holds the lease, uploads and returns the partition manifest."""
    started = time.monotonic()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Named by the stage's own prefix, so that a checkpoint of another plan or configuration is never taken up.
    scratch = Path(work["scratch"]) / keys.local_name(work["owned"])
    resumed = _told(newest_state(scratch, "step-") if rank == 0 else None)
    first_step = resumed.facts["steps"] if resumed else 0
    plan = _read_rows(work["plan_rows_path"])
    num_steps = 1 + max((r["step"] for r in plan if r["split"] == "train"), default=-1)
    frames = schedule(
        plan, _read_rows(work["trajectory_rows_path"]), _read_rows(work["hidden_rows_path"]),
        ranks=ranks, first_step=first_step,
    )  # fmt: skip
    engine, optimizer_steps = _engine(work, device, resumed)
    notes = Notes(work, rank, len(frames) // ranks)
    if resumed:
        notes.rows = list(resumed.facts["metrics"])
        notes.say("resumed", steps=first_step)

    def step_end(steps: int) -> None:
        every = work["train"]["save_every_steps"]
        if every and steps % every == 0 and steps < num_steps:
            facts = {"steps": steps, "optimizer_steps": optimizer_steps + steps - first_step, "metrics": notes.rows}
            _save_mid_plan(engine, scratch, rank, steps, facts)

    loader, batches = _open_loader(work, store, frames, device)
    try:
        teachers = {t["teacher_index"]: (Path(t["folder"]), t["head_digest"]) for t in work["teachers"]}

        def read(teacher_index: int) -> torch.Tensor:
            folder, digest = teachers[teacher_index]
            return read_head(folder, digest=digest)

        train(
            engine,
            batches,
            TeacherHeads(read, vocab_size=work["vocab_size"], device=device),
            Report(notes.metric, notes.micro_batch, step_end),
            num_teachers=1 + max(teachers),
            first_step=first_step,
            num_steps=num_steps,
            sampler_compute=COMPUTE_DTYPES[compute_dtype(work["precision"])],
        )
        notes.say("metrics", rows=notes.new)
    finally:
        if loader is not None:
            loader.close()
    manifest = _export(work, store, engine, lease, notes, num_steps, optimizer_steps + num_steps - first_step)
    stats = {"seconds": time.monotonic() - started, "steps": num_steps, "ranks": ranks}
    manifest |= {"stats": stats | observed(device)}
    engine.close()
    if rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    return manifest


def _engine(work: dict[str, Any], device: torch.device, resumed: State | None) -> tuple[TrainEngine, int]:
    """The engine, and the optimizer steps that its moments have seen."""
    settings = work["train"]
    transformer = load_model(
        Path(work["student_folder"]), precision=work["precision"], compute=work["compute"], trainable=True,
        device=device, digest=work["student_version"],
    )  # fmt: skip
    transformer.checkpoint_layers = settings["recompute_layers"]
    loss = LossSettings(
        work["vocab_size"], settings["divergence"], settings["temperature"],
        settings["chunk_bytes"] or traits(device).chunk_bytes, work["page_tokens"], settings["kl_precision"],
    )  # fmt: skip
    student = Student(transformer, loss)
    names = EngineSettings.__dataclass_fields__
    optimizer = resumed
    if resumed is not None:
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                parameter.copy_(resumed.read(name))
    elif work["optimizer_from"]:
        optimizer = load_state(Path(work["optimizer_from"]))
        if optimizer is None:
            raise ContractError(
                work["optimizer_from"], expected="the optimizer of the iteration before", found="no complete state",
                safe="the student", next_command="opd repair RUN",
            )  # fmt: skip
    steps = optimizer.facts["optimizer_steps"] if optimizer else 0
    chosen = EngineSettings(**{name: settings[name] for name in names})
    engine = TrainEngine(student, chosen, device=device, steps_done=steps)
    if optimizer is not None:
        engine.load_moments(optimizer.read, steps)
    return engine, steps


def _open_loader(
    work: dict[str, Any], store: ObjectStore, frames: list[Frame], device: torch.device
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
            mine, store, ranks=local_ranks, loader_bytes=work["train"]["loader_bytes"],
            job_id=keys.digest(work["owned"])[:12],
        )  # fmt: skip
    folders: list[Path | None] = [None] * ranks
    dist.all_gather_object(folders, loader.folder if loader else None)
    folder = folders[first]
    if folder is None:
        raise RuntimeError(f"rank {first} opened no loader")
    return loader, RankBatches(folder, mine, rank=local_rank, ranks=local_ranks, device=device)


def _save_mid_plan(engine: TrainEngine, scratch: Path, rank: int, steps: int, facts: dict[str, Any]) -> None:
    tensors = (pair for part in (engine.parameters(), engine.moments()) for pair in part)
    if rank > 0:
        for _ in tensors:  # gathering is collective: every rank takes part, rank 0 writes
            continue
        return
    save_state(scratch / f"step-{steps:06d}", tensors, facts)
    for old in scratch.glob("step-*"):
        if old.name != f"step-{steps:06d}":
            shutil.rmtree(old, ignore_errors=True)


def _export(
    work: dict[str, Any], store: ObjectStore, engine: TrainEngine, lease: leases.Lease | None,
    notes: Notes, steps: int, optimizer_steps: int,
) -> dict[str, Any]:  # fmt: skip
    """Model folder, optimizer and metric rows as objects; without the lease only the collective gathering."""
    parameters = ((name.removeprefix(_PREFIX), tensor) for name, tensor in engine.parameters())
    if lease is None:
        for _ in (*parameters, *(engine.moments() if optimizer_steps else ())):
            continue
        return {}
    out = Path(work["out_folder"])
    source = Path(work["student_folder"])
    save_model(
        out / "export", read_config(source), parameters, companions=source, shard_bytes=_EXPORT_SHARD_BYTES
    )  # fmt: skip
    save_state(out / "optimizer", engine.moments() if optimizer_steps else (), {"optimizer_steps": optimizer_steps})
    version = model_digest(out / "export")
    inexact = _fp8_inexact(work, out / "export", notes, steps)
    lease.check()
    objects = []
    for group in ("export", "optimizer"):
        for path in sorted((out / group).iterdir()):
            key = keys.owned_object(lease.owned, lease.epoch, f"{group}/{path.name}")
            objects.append({"group": group, "name": path.name, "key": key, **_put_file(store, key, path)})
    data = b"".join(keys.canonical_json(row) + b"\n" for row in notes.rows)
    rows_key = keys.owned_object(lease.owned, lease.epoch, "rows.jsonl")
    store.put(rows_key, data)
    checkpoint = {
        "run_id": work["run_id"], "iteration": work["iteration"], "version": version,
        "parent": work["student_version"], "format": "huggingface",
        "config_digest": keys.digest(read_config(out / "export")), "steps": steps,
        "keys": json.dumps({group: [o["key"] for o in objects if o["group"] == group]
                            for group in ("export", "optimizer")}),
    }  # fmt: skip
    shutil.rmtree(out, ignore_errors=True)
    return {
        "objects": objects, "rows_key": rows_key, "rows_digest": keys.digest_bytes(data),
        "num_rows": len(notes.rows), "checkpoint": checkpoint, "fp8_inexact": inexact,
    }  # fmt: skip


def _fp8_inexact(work: dict[str, Any], export: Path, notes: Notes, steps: int) -> list[str]:
    """Names of the new student's linears whose MXFP4 values FP8 would change, counted as a metric.

    Training in FP8 computes such a linear in bf16, and counts it at each step (`ml.train.loop`); what this adds is the
    student after the last step, which the next iteration starts from. In bf16 they cost nothing."""
    if work["precision"] != "mxfp4":
        return []
    inexact = [name for name, exact in fp8_exact(export).items() if not exact]
    notes.metric(steps, "fp8_inexact_linears", None, float(len(inexact)))
    return inexact


def _put_file(store: ObjectStore, key: str, path: Path) -> dict[str, Any]:
    """Upload without a copy in memory."""
    if path.stat().st_size == 0:
        store.put(key, b"")
        return {"digest": keys.digest_bytes(b""), "bytes": 0}
    with open(path, "rb") as file:
        # Never closed by hand: an error of the store holds views of the bytes in its frames, and closing under them
        # would raise in its place. The mapping ends with the last of them.
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    store.put(key, data)
    return {"digest": keys.digest_bytes(data), "bytes": len(data)}


def _told(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _read_rows(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main(arguments: list[str]) -> int:
    def run_in_group(work: dict[str, Any]) -> None:
        run(work)
        leave_ranks()

    return run_rank(arguments, run_in_group)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
