"""One rank of a training test: `python -m tests.support.training_rank SPEC`, many scenarios in one process group.

SPEC is a pickle {"folder", "world", "vocab_size", "scenarios": [{...}]}; rank 0 writes its results beside it. A
scenario: name, plan, zero_stage, precision, compute, learning_rate, teachers (heads by index), steps, and optionally
folder, world, objectives (by name; KL by default), resume_after (save the state there, throw the engine away, continue
from the state in a fresh one), record_weights (keep what the linears took from their weights in the first training pass
and in the last evaluation).
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ml.linear
from ml.checkpoint import load_model
from ml.linear import COMPUTE_DTYPES
from ml.ranks import join_ranks, leave_ranks
from ml.train.batches import schedule
from ml.train.engine import EngineSettings, TrainEngine
from ml.train.heads import TeacherHeads
from ml.train.loader import NodeLoader, RankBatches
from ml.train.loop import Report, train
from ml.train.loss import LossSettings, Student
from ml.train.objectives.kl import KL
from ml.train.objectives.objective import Objective
from ml.train.state import State, load_state, save_state
from schemas.errors import OpdError
from tests.support.training_world import World

CPU = torch.device("cpu")


def objectives_of(scenario: dict[str, Any]) -> dict[str, Objective]:
    return scenario.get("objectives", {"kl": KL()})


def make_engine(spec: dict[str, Any], scenario: dict[str, Any], state: State | None = None) -> TrainEngine:
    """A fresh engine over the spec's student, or over a saved state of it."""
    model = load_model(
        scenario.get("folder", spec["folder"]), precision=scenario["precision"], compute=scenario["compute"],
        trainable=True,
    )  # fmt: skip
    model.checkpoint_layers = scenario.get("checkpoint_layers", True)
    # chunk_bytes so small that a segment takes several chunks of the KL
    settings = LossSettings(spec["vocab_size"], chunk_bytes=24 * spec["vocab_size"] * 5)
    student = Student(model, settings, objectives_of(scenario))
    settings = EngineSettings(
        scenario["learning_rate"], gradient_clip=scenario.get("gradient_clip", 1e9),
        warmup_steps=scenario.get("warmup_steps", 0), zero_stage=scenario["zero_stage"],
    )  # fmt: skip
    if state is None:
        return TrainEngine(student, settings, device=CPU)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            parameter.copy_(state.read(name))
    engine = TrainEngine(student, settings, device=CPU, steps_done=state.facts["steps"])
    engine.load_moments(state.read, state.facts["steps"])
    return engine


@contextmanager
def recorded_weights(engine: TrainEngine) -> Iterator[dict[str, dict[str, torch.Tensor]]]:
    """What `weight_values` gives the linears, and what their FP8 products multiply by, by weight name, while the block
    runs. not_held: codes made in the forward; stale: values that the weight no longer stands for."""
    original, original_fp8 = ml.linear.weight_values, ml.linear.fp8_linear
    names = {id(p): n.removeprefix("transformer.") for n, p in engine.module.named_parameters() if "_proj." in n}
    kept: dict[str, dict[str, torch.Tensor]] = {
        kind: {} for kind in ("with_gradient_first", "in_fp8_first", "without_gradient_last", "not_held", "stale")
    }

    def recording(w, precision, dtype=None):
        values = original(w, precision, dtype)
        if id(w) in names and torch.is_grad_enabled():
            kept["with_gradient_first"].setdefault(names[id(w)], values.detach().float())
        elif id(w) in names:
            kept["without_gradient_last"][names[id(w)]] = values.float()
        return values

    def recording_fp8(x, w, w_fp8, x_fp8):
        by_row = w_fp8.scales.repeat_interleave(128, 0)[: len(w)]
        values = w_fp8.codes.float() * by_row.repeat_interleave(128, 1)[:, : w.shape[1]]
        kept["in_fp8_first"].setdefault(names[id(w)], values)
        if w_fp8.transposed is None:
            kept["not_held"][names[id(w)]] = values
        if not torch.equal(values, original(w.detach(), "mxfp4")):
            kept["stale"][names[id(w)]] = values
        return original_fp8(x, w, w_fp8, x_fp8)

    ml.linear.weight_values, ml.linear.fp8_linear = recording, recording_fp8
    try:
        yield kept
    finally:
        ml.linear.weight_values, ml.linear.fp8_linear = original, original_fp8


def gather(engine: TrainEngine) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return (
        {name.removeprefix("transformer."): tensor.clone() for name, tensor in engine.parameters()},
        {name.replace("transformer.", ""): tensor.clone() for name, tensor in engine.moments()},
    )


def run_scenario(spec: dict[str, Any], scenario: dict[str, Any], scratch: Path) -> dict[str, Any]:
    world: World = scenario.get("world", spec["world"])
    rank, ranks = dist.get_rank(), dist.get_world_size()
    num_steps = 1 + max(r["step"] for r in scenario["plan"] if r["split"] == "train")
    heads = TeacherHeads(scenario["teachers"].__getitem__, vocab_size=spec["vocab_size"], device=CPU)
    metrics: list[tuple[int, str, int | None, float]] = []
    done = []

    def run(engine: TrainEngine, first_step: int, stop: int) -> None:
        plan = [r for r in scenario["plan"] if r["split"] == "heldout" or r["step"] < stop]
        needs = {name: objective.needs for name, objective in objectives_of(scenario).items()}
        frames = schedule(
            plan, world.trajectory_rows, world.hidden_rows, ranks=ranks, needs=needs, first_step=first_step
        )
        loader = (
            NodeLoader(frames, world.blobs, ranks=ranks, loader_bytes=8 << 20, job_id="test") if rank == 0 else None
        )
        box = [loader.folder if loader else None]
        dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        report = Report(
            lambda *row: metrics.append(row), lambda frame: done.append(frame), lambda steps: None, lambda: None
        )
        try:
            train(
                engine, RankBatches(box[0], frames, rank=rank, ranks=ranks, device=CPU), heads, report,
                num_teachers=len(scenario["teachers"]), first_step=first_step, num_steps=stop,
                sampler_compute=COMPUTE_DTYPES[scenario.get("sampler_compute", scenario["compute"])],
            )  # fmt: skip
            dist.barrier()
        finally:
            if loader is not None:
                loader.close()

    engine = make_engine(spec, scenario)
    cut, weights = scenario.get("resume_after"), {}
    if cut:
        run(engine, 0, cut)
        folder = scratch / scenario["name"]
        tensors = [*engine.parameters(), *engine.moments()]
        if rank == 0:
            save_state(folder, tensors, {"steps": cut})
        dist.barrier()
        engine.close()
        state = load_state(folder)
        assert state is not None
        engine = make_engine(spec, scenario, state)
        run(engine, cut, num_steps)
    else:
        with recorded_weights(engine) if scenario.get("record_weights") else nullcontext({}) as weights:
            run(engine, 0, num_steps)
    parameters, moments = gather(engine)
    engine.close()
    return {
        "parameters": parameters, "moments": moments, "metrics": metrics, "micro_batches": len(done),
        "weights": weights,
    }  # fmt: skip


def main(path: Path) -> None:
    torch.set_num_threads(1)
    spec = pickle.loads(path.read_bytes())
    join_ranks(CPU)
    results = {}
    for scenario in spec["scenarios"]:
        try:
            results[scenario["name"]] = run_scenario(spec, scenario, path.parent)
        except OpdError as error:  # every rank meets the same one, so that the group goes on
            results[scenario["name"]] = {"error": error}
    if dist.get_rank() == 0:
        torch.save(results, path.with_suffix(".results"))
    leave_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
