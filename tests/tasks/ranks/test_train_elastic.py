"""Training killed in the middle of a plan and continued: by as many ranks bit for bit, by others within rounding."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ml.train.state import load_state
from tests.support.train_site import (
    STEPS,
    Group,
    change_work,
    content,
    events,
    fetch,
    rows_of,
    settings,
    write_base,
    write_work,
)  # fmt: skip

RATE = 1e-3
#: Products in fp32, so that rounding is far below what a lost, doubled or misplaced pack would do.
EXACT: dict[str, Any] = {"precision": "fp32", "compute": "fp32"}

# Each group of ranks is killed after one or two further steps; the last one finishes. (ranks, ZeRO stage)
CHAINS = {
    "more ranks, another stage": [(1, 1), (2, 3), (4, 1)],
    "fewer ranks, another stage": [(4, 3), (2, 1), (1, 3)],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("elastic"))


@pytest.fixture(scope="module")
def straight(base) -> Path:
    work = write_work(base, "straight", **EXACT)
    events(work)
    return work


def killed(work: Path, ranks: int, after: int) -> list[dict[str, Any]]:
    """What a group told that died by SIGKILL when the checkpoint of `after` steps was whole."""
    group = Group(work, ranks, die_after=after)
    assert group.statuses()[0] == -signal.SIGKILL, group.output()
    return group.told()


def resumed_at(told: list[dict[str, Any]]) -> list[int]:
    return [message["steps"] for message in told if message["event"] == "resumed_at"]


def tensors(work: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The trained student and the optimizer's moments, whole, by name."""
    out = dict(load_file(fetch(work, "export", folder / "export") / "model.safetensors"))
    state = load_state(fetch(work, "optimizer", folder / "optimizer"))
    assert state is not None
    assert state.facts["optimizer_steps"] == STEPS
    return out | {name: state.read(name) for name in state.files}


@pytest.mark.parametrize("chain", CHAINS)
def test_other_numbers_of_ranks_continue_the_same_plan(base, straight, tmp_path, chain):
    work = write_work(base, chain.replace(" ", "-"), **EXACT)
    at = 0
    for number, (ranks, stage) in enumerate(CHAINS[chain]):
        change_work(work, settings=settings(zero_stage=stage, learning_rate=RATE))
        last = number == len(CHAINS[chain]) - 1
        told = events(work, ranks) if last else killed(work, ranks, at + 1 + number)
        assert resumed_at(told) == ([at] if at else [])
        at += 1 + number
    ours, whole = rows_of(work), rows_of(straight)
    for one, other in zip(ours, whole, strict=True):
        assert {**one, "value": None} == {**other, "value": None}, "every step once, in order"
        if (one["step"] and one["name"] in ("loss", "kl", "grad_norm")) or "heldout" in one["name"]:
            assert one["value"] == pytest.approx(other["value"], rel=2e-5), one
    expected = tensors(straight, tmp_path / "straight")
    found = tensors(work, tmp_path / "found")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = float((found[name] - value).abs().max())
        # Adam divides by the gradient's own size: where that is rounding noise, so is an update's sign.
        limit = 1e-4 * float(value.abs().max()) if "exp_avg" in name else 0.05 * RATE
        assert difference <= limit, (name, difference, limit)


@pytest.mark.parametrize(("ranks", "stage"), [(2, 1), (2, 3)])
def test_as_many_ranks_end_in_the_same_bytes(base, ranks, stage):
    """The whole partition: student, moments and metrics, in bf16 as runs are by default.

    tests/ml/test_train_parity.py holds it for one to four ranks without their processes' ends.
    """
    options = {"settings": settings(zero_stage=stage, learning_rate=RATE)}
    straight = write_work(base, f"straight-{ranks}-{stage}", **options)
    events(straight, ranks)
    work = write_work(base, f"killed-{ranks}-{stage}", **options)
    killed(work, ranks, 2)
    assert resumed_at(events(work, ranks)) == [2]
    assert content(work) == content(straight)
    assert rows_of(work) == rows_of(straight)
