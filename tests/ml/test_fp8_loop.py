"""Training in FP8 on real gloo ranks: whose weights it multiplies, what it leaves in bf16, that nothing else decides.

The student has a linear that FP8 does not hold, and one that it holds until the first update: a block of zeros, whose
scale counts only once they have moved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kernels.scaled_mm
from kernels.testing import relative_error
from ml.checkpoint import load_model
from ml.linear import Linear
from ml.model import PackedCausal
from schemas.errors import ConfigError
from tests.ml.test_mxfp4_loop import fp8_holds, is_linear, master_of, oracle_values, write_model
from tests.ml.test_train_parity import ITEMS, LENGTHS, WIDTHS, close, gradient, metric, run_ranks, scenario
from tests.support.random_models import random_model
from tests.support.training_world import make_world, plan_rows

INEXACT, ZEROS = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"
RANKS, STEPS = (1, 2), 3


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("fp8") / "source")


@pytest.fixture(scope="module")
def results(source, tmp_path_factory) -> dict[int, dict[str, Any]]:
    """ranks -> scenario name -> result."""
    world = make_world(LENGTHS, WIDTHS, vocab=61)
    plan = plan_rows(world, [[ITEMS[:3], ITEMS[3:]]] * STEPS, slots=2)
    plan += plan_rows(world, [[ITEMS[:1]]], slots=2, split="heldout")
    # A step moves a weight by its rate: enough for a block of zeros to count, too little to move another code.
    fp8 = {"precision": "mxfp4", "compute": "fp8", "learning_rate": 1e-6, "record_weights": True}
    both = [scenario(f"zero-{stage}", plan, zero_stage=stage, **fp8) for stage in (1, 3)]
    single = [
        scenario("no_checkpointing", plan, checkpoint_layers=False, **fp8),
        scenario("resumed", plan, resume_after=1, **fp8),
        scenario("fp32", plan, **fp8 | {"compute": "fp32"}),
        scenario("bf16", plan, **fp8 | {"compute": "bf16"}),
        scenario("fast", plan, **fp8 | {"learning_rate": 1e-3}),
    ]
    out = {}
    for ranks in RANKS:
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        out[ranks] = run_ranks(folder, source, world, both + (single if ranks == 1 else []), ranks)
        assert not [r for r in out[ranks].values() if "error" in r]
    return out


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", [1, 3])
def test_fp8_multiplies_the_samplers_weights_and_leaves_out_what_it_does_not_hold(results, source, stage, ranks):
    used = results[ranks][f"zero-{stage}"]["weights"]
    sampler = load_model(source, precision="mxfp4", compute="bf16").state_dict()
    names = {n for n in sampler if is_linear(n)}
    assert set(used["in_fp8_first"]) == {n for n, w in master_of(source).items() if n in names and fp8_holds(w.numpy())}
    assert set(used["in_fp8_first"]) == names - {INEXACT}
    # In bf16 from the first step, and from the second.
    assert set(used["with_gradient_first"]) == {INEXACT, ZEROS}
    for name in names:
        first = used["with_gradient_first"] if name == INEXACT else used["in_fp8_first"]
        assert torch.equal(first[name].bfloat16(), sampler[name]), name
        assert torch.equal(first[name].bfloat16().float(), first[name]), name


@pytest.mark.parametrize("name", ["zero-1", "zero-3", "no_checkpointing", "fast"])
def test_codes_are_held_where_weights_stay_and_never_outlive_an_update(results, name):
    used = results[1][name]["weights"]
    assert not used["stale"]
    assert set(used["not_held"]) == (set(used["in_fp8_first"]) if name == "zero-3" else set())
    # Updates that a stale code would miss.
    moved = {
        n for n, values in used["in_fp8_first"].items()
        if not np.array_equal(oracle_values(results[1][name]["parameters"][n].numpy()), values.numpy())
    }  # fmt: skip
    assert moved >= (set(used["in_fp8_first"]) if name == "fast" else {ZEROS})


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", [1, 3])
def test_each_step_asks_anew_and_counts_what_stays_in_bf16(results, stage, ranks):
    result = results[ranks][f"zero-{stage}"]
    assert metric(result, "fp8_inexact_linears") == [1.0, *[2.0] * (STEPS - 1)]
    after = [n for n, w in result["parameters"].items() if is_linear(n) and not fp8_holds(w.numpy())]
    assert sorted(after) == sorted([INEXACT, ZEROS])


def test_recomputation_resumption_and_stage_change_no_bit(results):
    straight = results[1]["zero-1"]
    for other in ("no_checkpointing", "resumed", "zero-3"):
        for kind in ("parameters", "moments"):
            for name, value in straight[kind].items():
                assert torch.equal(value, results[1][other][kind][name]), (other, name)
        assert metric(straight, "loss") == metric(results[1][other], "loss")


def test_ranks_agree_within_rounding(results):
    one = results[1]["zero-1"]
    for stage in (1, 3):
        other = results[2][f"zero-{stage}"]
        assert metric(other, "loss") == pytest.approx(metric(one, "loss"), rel=1e-4)
        for name in one["parameters"]:
            close(gradient(other, name), gradient(one, name).double(), 1e-5)


def test_gradients_are_off_by_what_four_bits_less_than_bf16_cost_and_the_mismatch_tells_the_loss(results):
    fp8, fp32, bf16 = (results[1][name] for name in ("zero-1", "fp32", "bf16"))
    for name in fp32["parameters"]:
        wrong, bound = (relative_error(gradient(r, name), gradient(fp32, name)) for r in (fp8, bf16))
        assert bound < wrong < 16 * bound, name
    assert metric(fp8, "mismatch_sampler_mean") == metric(bf16, "mismatch_sampler_mean")
    assert metric(fp8, "heldout_kl_before") == metric(bf16, "heldout_kl_before")
    assert metric(fp8, "mismatch_trained_mean") != metric(bf16, "mismatch_trained_mean")


def test_the_loss_falls(results):
    losses = metric(results[1]["fast"], "loss")
    assert losses[-1] < losses[1] < losses[0]


def test_an_input_that_several_linears_read_is_quantised_once_and_changes_no_bit(source, monkeypatch):
    quantise, made = kernels.scaled_mm.fp8_quantize_both, []
    monkeypatch.setattr(kernels.scaled_mm, "fp8_quantize_both", lambda x: made.append(x.shape) or quantise(x))

    def passes() -> list[torch.Tensor]:
        made.clear()
        model = load_model(source, precision="mxfp4", compute="fp8", trainable=True)
        h_ND = model(torch.arange(20), torch.arange(20), PackedCausal([0, 20]))
        h_ND.backward(torch.linspace(-1, 1, h_ND.numel()).view_as(h_ND).to(h_ND.dtype))
        return [h_ND.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    shared = passes()
    # Of each of two layers: attention's input and output, the gate's input and output, less the linear in bf16.
    assert len(made) == 2 * 4 - 1
    monkeypatch.setattr(Linear, "shared_input", lambda *_: None)
    alone = passes()
    assert len(made) == 2 * 7 - 1
    assert len(alone) == len(shared) > 20
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16", "trainable": True}, "an MXFP4 student"),
        ({"precision": "mxfp4", "trainable": False}, "an MXFP4 student"),
    ],
)
def test_fp8_is_for_training_an_mxfp4_student(source, options, message):
    with pytest.raises(ConfigError, match=message):
        load_model(source, compute="fp8", **options)


def test_rows_that_an_fp8_product_does_not_take_are_refused_by_name(tmp_path):
    random_model(tmp_path / "m", "small", seed=1, num_attention_heads=8, num_key_value_heads=1, head_dim=8)
    load_model(tmp_path / "m", precision="mxfp4", compute="bf16", trainable=True)
    with pytest.raises(ConfigError, match=r"k_proj\.weight[^\0]*16 rows[^\0]*found: 8"):
        load_model(tmp_path / "m", precision="mxfp4", compute="fp8", trainable=True)
