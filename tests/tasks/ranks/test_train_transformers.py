"""A training step towards teachers of kind "transformers": its KL and gradient are float64's of their own logits."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from ml.teacher import Reading
from schemas.typed_json import to_json
from schemas.work.model import ModelSource
from schemas.work.train import TeacherHead
from tasks.teachers import kinds
from tests.support.families import family_model
from tests.support.train_site import events, rows_of, settings, write_base, write_work
from tests.support.training_world import Trajectory, World, make_world, plan_rows, world_of, write_store

FAMILIES = ("GPT2", "Phi", "Cohere", "Mixtral")
KIND = kinds.of("transformers")


def read_by(folder: Path, trajectories: list[Trajectory]) -> list[np.ndarray]:
    """Stored states of each trajectory's response, as uint16."""
    teacher = KIND.load(ModelSource(str(folder), KIND.digests(folder).model, "bf16", "bf16"), torch.device("cpu"))
    readings = [Reading(t.prompt.tolist(), t.response.tolist()) for t in trajectories]
    return [hidden.view(torch.uint16).numpy() for hidden in teacher.hidden_states(readings, batch_tokens=64)]


def own_logits(folder: Path, trajectory: Trajectory, stored_TW: np.ndarray) -> torch.Tensor:
    """float64 [T, V]: the model itself, with the stored states put before its output embedding."""
    eager = {"experts_implementation": "eager"} if folder.name == "Mixtral" else {}  # the other knows no float64
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **eager).eval().double()
    head: Any = model.get_output_embeddings()
    states_TE = torch.from_numpy(stored_TW).view(torch.bfloat16).double()[:, : head.weight.shape[1]]
    first = len(trajectory.prompt) - 1

    def put(_module, inputs):
        h_1NE = inputs[0].clone()
        torch.testing.assert_close(h_1NE[0, first:-1], states_TE, rtol=0.2, atol=0.2)  # bf16's rounding, no other rows
        h_1NE[0, first:-1] = states_TE
        return (h_1NE,)

    head.register_forward_pre_hook(put)
    ids = torch.from_numpy(np.concatenate([trajectory.prompt, trajectory.response])).long()
    with torch.no_grad():
        return model(ids[None]).logits[0, first:-1]


def world_for(folders: list[Path]) -> World:
    drawn = make_world([(5, 9), (3, 20), (8, 4), (4, 12)], {0: 32}, vocab=259, seed=5)
    parts = [drawn.trajectories[i] for i in sorted(drawn.trajectories)]
    states = [read_by(folder, parts) for folder in folders]
    return world_of({
        part.trajectory_id: dataclasses.replace(part, hidden={t: states[t][i] for t in range(len(folders))})
        for i, part in enumerate(parts)
    })  # fmt: skip


def test_the_kl_and_gradient_of_a_step_are_those_of_the_teachers_own_logits(tmp_path):
    base = write_base(tmp_path)
    folders = [
        family_model(base / f, f, tokenizer=base / "student", dtype="bfloat16", seed=i) for i, f in enumerate(FAMILIES)
    ]
    world = world_for(folders)
    write_store(world, base / "objects")
    pairs = [("t000", 0, 1.0), ("t001", 0, 0.5), ("t001", 1, 2.0), ("t002", 1, 1.0), ("t003", 2, 1.0), ("t000", 3, 1.5)]
    plan = plan_rows(world, [[pairs[:3], pairs[3:]]], slots=2)
    for name, rows in (("plan", plan), ("trajectories", world.trajectory_rows), ("hidden", world.hidden_rows)):
        (base / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    heads = [
        to_json(TeacherHead(i, dataclasses.replace(KIND.facts(f).head, digest=KIND.digests(f).head)))
        for i, f in enumerate(folders)
    ]
    work = write_work(
        base, "families", teachers=heads, precision="fp32", compute="fp32", settings=settings(save_every_steps=0)
    )
    events(work)
    found = {(r["name"], r["teacher_index"]): r["value"] for r in rows_of(work) if r["step"] in (0, 1)}

    student = AutoModelForCausalLM.from_pretrained(base / "student", dtype=torch.float64)
    sums, counts, loss = {}, {}, torch.zeros((), dtype=torch.float64)
    for trajectory_id, teacher, weight in pairs:
        part = world.trajectories[trajectory_id]
        ids = torch.from_numpy(np.concatenate([part.prompt, part.response])).long()
        q_TV = torch.log_softmax(student(ids[None]).logits[0, len(part.prompt) - 1 : -1], 1)
        p_TV = torch.log_softmax(own_logits(folders[teacher], part, part.hidden[teacher]), 1)
        kl_T = (q_TV.exp() * (q_TV - p_TV)).sum(1)[torch.from_numpy(part.mask).bool()]
        sums[teacher] = sums.get(teacher, 0.0) + float(kl_T.sum().detach())
        counts[teacher] = counts.get(teacher, 0) + len(kl_T)
        loss = loss + weight * kl_T.sum() / plan[0]["denominator_tokens"]
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None]).norm()
    for teacher in range(len(FAMILIES)):
        np.testing.assert_allclose(found["kl", teacher], sums[teacher] / counts[teacher], rtol=1e-5)
    np.testing.assert_allclose(found["loss", None], float(loss.detach()), rtol=1e-5)
    np.testing.assert_allclose(found["grad_norm", None], float(norm), rtol=1e-4)
