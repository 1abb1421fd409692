"""The seam of objectives: one of the tests' own is trained on the data plane, alone and beside KL in one pack."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ml.train.batches import schedule
from ml.train.objectives.kinds import OBJECTIVES, make_objective
from ml.train.objectives.kl import KL
from schemas import objectives as variants
from schemas.errors import ConfigError, ContractError, FormatError
from tests.ml.test_train_parity import (
    VOCAB,
    close,
    gradient,
    load_oracle,
    metric,
    oracle_kl,
    run_ranks,
    scenario,
    states_and_logits,
    write_student,
)
from tests.support.policy_gradient import PolicyGradient, PolicyGradientSettings
from tests.support.training_world import World, make_world, plan_rows

LENGTHS = [(3, 4), (1, 1), (5, 9), (2, 7), (4, 2), (6, 5)]
ADVANTAGES = {"t000": 1.5, "t001": -0.5, "t002": 0.0, "t003": -2.0, "t004": 0.25, "t005": 1.0}
BOTH = {"policy_gradient": PolicyGradient(scale=0.5), "kl": KL()}
ITEMS = [("t000", None, 1.0), ("t001", None, 0.5), ("t003", None, 1.0), ("t005", None, 2.0)]
#: Two segments of policy gradient around one of KL, and a pack of each alone.
MIXED = [[ITEMS[0], ("t002", 1, 2.0), ITEMS[1]], [ITEMS[2], ITEMS[3]], [("t004", 1, 1.0)]]


def named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without a teacher as dispatch writes them for the tests' objective."""
    return [
        row | {"objective": "policy_gradient", "advantage": ADVANTAGES[row["trajectory_id"]]}
        if row["teacher_index"] is None else row
        for row in rows
    ]  # fmt: skip


def policy_terms(model, world: World, trajectory_id: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [R]: ratio of each response token, and its mask."""
    t = world.trajectories[trajectory_id]
    logits = states_and_logits(model, np.concatenate([t.prompt, t.response]))[len(t.prompt) - 1 : -1, :VOCAB]
    chosen = torch.log_softmax(logits, -1)[torch.arange(len(t.response)), torch.from_numpy(t.response.astype(int))]
    ratio = (chosen - torch.from_numpy(t.behaviour.astype(np.float64))).exp()
    return ratio, torch.from_numpy(t.mask.astype(np.float64))


def oracle(folder: Path, world: World, plan: list[dict[str, Any]], scale: float) -> dict[str, Any]:
    """Loss, gradient and mean figures of one step's rows in float64, a trajectory at a time."""
    model = load_oracle(folder)
    loss, sums = torch.zeros((), dtype=torch.float64), {"kl": [0.0, 0.0], "ratio": [0.0, 0.0]}
    for row in plan:
        if row["teacher_index"] is None:
            value, mask = policy_terms(model, world, row["trajectory_id"])
            terms, name = -scale * row["advantage"] * value, "ratio"
        else:
            mask = torch.from_numpy(world.trajectories[row["trajectory_id"]].mask.astype(np.float64))
            terms = value = oracle_kl(model, world, row["trajectory_id"], row["teacher_index"])
            name = "kl"
        loss = loss + row["weight"] * (mask * terms).sum() / row["denominator_tokens"]
        sums[name] = [sums[name][0] + float((mask * value).sum().detach()), sums[name][1] + float(mask.sum())]
    loss.backward()
    return {
        "loss": float(loss.detach()),
        "gradient": {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        **{name: total / tokens for name, (total, tokens) in sums.items() if tokens},
    }


def check(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, grad in expected["gradient"].items():
        close(gradient(result, name), grad, 2e-5)
    for name in ("loss", "kl", "ratio"):
        assert metric(result, name) == ([pytest.approx(expected[name], rel=1e-5)] if name in expected else [])


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(LENGTHS, {0: 8, 1: 12}, vocab=VOCAB, seed=3)


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    return write_student(tmp_path_factory.mktemp("students"), tied=True)


def alone(world: World) -> list[dict[str, Any]]:
    heldout = plan_rows(world, [[[("t002", None, 1.0)]]], slots=2, split="heldout")
    return named(plan_rows(world, [[ITEMS[:1], ITEMS[1:3], ITEMS[3:]]], slots=2) + heldout)


def mixed(world: World) -> list[dict[str, Any]]:
    return named(plan_rows(world, [MIXED], slots=2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_objective_of_ones_own_trains_with_the_gradients_of_float64(tmp_path, world, student, ranks):
    plan = alone(world)
    only = {"policy_gradient": PolicyGradient()}
    scenarios = [scenario(f"alone-{s}", plan, objectives=only, teachers={}, zero_stage=s) for s in (1, 3)]
    scenarios += [scenario(f"mixed-{s}", mixed(world), objectives=BOTH, zero_stage=s) for s in (1, 3)]
    results = run_ranks(tmp_path, student, world, scenarios, ranks)
    expected = oracle(student, world, [r for r in plan if r["split"] == "train"], 1.0)
    both = oracle(student, world, mixed(world), 0.5)
    before, mask = (x.detach() for x in policy_terms(load_oracle(student), world, "t002"))
    for stage in (1, 3):
        check(results[f"alone-{stage}"], expected)
        check(results[f"mixed-{stage}"], both)
        mean = float((before * mask).sum() / mask.sum())
        assert metric(results[f"alone-{stage}"], "heldout_ratio_before") == [pytest.approx(mean, rel=1e-5)]
        assert metric(results[f"mixed-{stage}"], "kl", 1) == metric(results[f"mixed-{stage}"], "kl")
        assert metric(results[f"alone-{stage}"], "head_loads") == [0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "unheard"}, r"objective\nexpected: policy_gradient\nfound: unheard"),
        ({"advantage": None}, "advantage None"),
        ({"teacher_index": 0}, "teacher_index 0"),
    ],
)
def test_rows_that_lack_what_their_objective_needs_are_refused(world, change, message):
    plan = alone(world)
    plan[0] |= change
    with pytest.raises(ContractError, match=message):
        schedule(plan, world.trajectory_rows, [], ranks=1, needs={"policy_gradient": PolicyGradient.needs})


def variant_classes() -> tuple[type[variants.ObjectiveSettings], ...]:
    union = variants.Objective
    return typing.get_args(union) or (union,)


@pytest.mark.parametrize(
    ("variant", "objective"),
    [*[(v, OBJECTIVES[v.model_fields["type"].default]) for v in variant_classes()],
     (PolicyGradientSettings, PolicyGradient)],
)  # fmt: skip
def test_an_objective_and_its_variant_of_the_configuration_say_the_same(variant, objective: Any):
    assert (variant.needs, variant.metrics) == (objective.needs, objective.metrics)
    values = variant.model_validate({}).model_dump(exclude={"type"})
    assert set(values) == {field.name for field in dataclasses.fields(objective)}
    assert objective(**values) == objective()


def test_every_objective_has_a_variant():
    assert {v.model_fields["type"].default for v in variant_classes()} == set(OBJECTIVES)


def test_settings_that_are_no_objectives_are_refused_with_their_path():
    assert make_objective("kl", {"divergence": "forward", "temperature": 2, "precision": "exact"}) == KL("forward", 2.0)
    with pytest.raises(ConfigError, match="one of kl"):
        make_objective("ppo", {})
    with pytest.raises(FormatError, match="divergence"):
        make_objective("kl", {"divergence": "sideways"})
