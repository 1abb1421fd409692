"""MXFP4 weights from the master to every pass: the same values in folders, sampling, teaching and training.

Codes are checked against ml_dtypes' own E2M1 and E8M0, gradients against float64.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ml.checkpoint import export_mxfp4, fp8_exact, load_model, read_head
from ml.linear import Linear, weight_values
from ml.model import SPLIT_TOKENS, PackedCausal, SampledCausal, Transformer
from schemas.errors import ConfigError, FormatError
from tests.ml.test_train_parity import ITEMS, LENGTHS, WIDTHS, run_ranks, scenario
from tests.support.rollout_world import CONFIG, VOCABULARY, engine, requests, run
from tests.support.training_world import make_world, plan_rows

ROWS = 64


def write_model(folder: Path, *, width: int = 64, tied: bool = False, seed: int = 3) -> Path:
    """A tiny Llama whose linears have blocks of zeros, of one value, and of scales far apart."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=ROWS, hidden_size=width, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=160, tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        weights = dict(model.named_parameters())
        weights["model.layers.0.self_attn.q_proj.weight"][0, :32] = 0.0
        weights["model.layers.0.mlp.up_proj.weight"][1, :32] = -0.75
        weights["model.layers.0.mlp.down_proj.weight"][2, :32] *= 2.0**-20
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("mxfp4") / "source")


def oracle_values(w: np.ndarray) -> np.ndarray:
    """MXFP4 values of an fp32 matrix by ml_dtypes: the smallest power-of-two scale that clips nothing."""
    out = np.empty_like(w, dtype=np.float64)
    for row in range(w.shape[0]):
        for first in range(0, w.shape[1], 32):
            block = w[row, first : first + 32].astype(np.float64)
            exponent = -126
            while np.abs(block).max() > 6 * 2.0**exponent:
                exponent += 1
            scale = np.float64(np.asarray(2.0**exponent).astype(ml_dtypes.float8_e8m0fnu))
            assert scale == 2.0**exponent
            codes = (block / scale).astype(ml_dtypes.float4_e2m1fn)
            out[row, first : first + 32] = codes.astype(np.float64) * scale
    return out


def fp8_holds(w: np.ndarray) -> bool:
    """Whether E4M3 holds a matrix's MXFP4 values: less than 128 x 128, one tile, scaled to an amax of at most 448."""
    values = oracle_values(w)
    scale = 2.0 ** np.ceil(np.log2(np.abs(values).max() / 448))
    rounded = (values / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    return bool(np.array_equal(rounded, values))


def is_linear(name: str) -> bool:
    return "_proj." in name


def master_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_folder_of_fp32_loads_as_the_values_of_ml_dtypes_and_the_rest_as_bf16(source):
    stored = dict(load_model(source, precision="mxfp4", compute="bf16").named_parameters())
    master = load_model(source, precision="mxfp4", compute="bf16", trainable=True)
    linears = {f"{n}.weight": m for n, m in master.named_modules() if isinstance(m, Linear)}
    assert sorted(linears) == sorted(n for n in stored if is_linear(n))
    for name, w in master_of(source).items():
        if is_linear(name):
            want = oracle_values(w.numpy())
            assert np.array_equal(stored[name].double().numpy(), want), name
            # What the training forward takes from its fp32 master, as it takes it.
            assert torch.equal(linears[name].weight.detach(), w)
            assert torch.equal(weight_values(linears[name].weight, "mxfp4").to(torch.bfloat16), stored[name]), name
        else:
            assert torch.equal(stored[name].float(), w.bfloat16().float()), name
    assert torch.count_nonzero(stored["model.layers.0.self_attn.q_proj.weight"][0, :32]) == 0


def test_rounding_to_bf16_first_would_give_other_codes(source):
    """Why the quantiser reads the master."""
    w = torch.full((1, 32), 0.25 + 2.0**-12)
    w[0, 0] = 6.0
    assert weight_values(w, "mxfp4")[0, 1] == 0.5
    assert weight_values(weight_values(w, "bf16"), "mxfp4")[0, 1] == 0.0


def test_a_written_mxfp4_folder_gives_the_same_bits_and_holds_the_format(source, tmp_path):
    export_mxfp4(tmp_path / "packed", source)
    export_mxfp4(tmp_path / "cut", source, shard_bytes=500)  # blocks and scales in different files
    want = load_model(source, precision="mxfp4", compute="bf16").state_dict()
    for folder in (tmp_path / "packed", tmp_path / "cut"):
        found = load_model(folder, precision="mxfp4", compute="bf16").state_dict()
        assert found.keys() == want.keys()
        for name, values in want.items():
            assert torch.equal(found[name], values), name
        assert torch.equal(read_head(folder), read_head(source))
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    for name, w in master_of(source).items():
        if not is_linear(name):
            assert torch.equal(tensors.pop(name), w.bfloat16())
            continue
        blocks, scales = tensors.pop(f"{name}.blocks").numpy(), tensors.pop(f"{name}.scales").numpy()
        assert (blocks.shape, scales.shape) == ((w.shape[0], w.shape[1] // 2), (w.shape[0], w.shape[1] // 32))
        codes = np.stack([blocks & 15, blocks >> 4], 2).reshape(w.shape)  # even column in the low nibble
        by_element = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64).repeat(32, 1)
        values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64) * by_element
        assert np.array_equal(values, oracle_values(w.numpy())), name
    assert not tensors


def test_mxfp4_folders_are_not_taken_for_anything_else(source, tmp_path):
    export_mxfp4(tmp_path / "packed", source)
    for options in ({"precision": "bf16"}, {"precision": "mxfp4", "trainable": True}):
        with pytest.raises(ConfigError, match="MXFP4 weights"):
            load_model(tmp_path / "packed", compute="bf16", **options)  # pyright: ignore[reportArgumentType]
    config = tmp_path / "packed" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="quantization_config"):
        load_model(tmp_path / "packed", precision="mxfp4", compute="bf16")


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(f"{Q}.scales"), "blocks only"),
        (lambda t: t.pop(f"{Q}.blocks"), "scales only"),
        (lambda t: (t.pop(f"{Q}.scales"), t.pop(f"{Q}.blocks")), f"tensor {Q}"),
        (lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:, :1].clone()}), "a scale for each 32"),
        (lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].float()}), "U8 matrix"),
        (lambda t: t[f"{Q}.scales"].fill_(255), "NaN or infinity"),
        (lambda t: t.update({f"{Q}.blocks": t[f"{Q}.blocks"][:5], f"{Q}.scales": t[f"{Q}.scales"][:5]}), "shape"),
        (lambda t: t.update({"x.weight.blocks": t[f"{Q}.blocks"], "x.weight.scales": t[f"{Q}.scales"]}), "unexpected"),
    ],
)
def test_damage_to_an_mxfp4_folder_is_named(source, tmp_path, damage, message):
    export_mxfp4(tmp_path / "packed", source)
    weights = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(weights)
    damage(tensors)
    save_file({n: t.clone() for n, t in tensors.items()}, weights)
    with pytest.raises(FormatError, match=message):
        load_model(tmp_path / "packed", precision="mxfp4", compute="bf16")


@pytest.mark.parametrize("trainable", [True, False])
def test_columns_that_blocks_do_not_fill_are_refused_by_name(tmp_path, trainable):
    write_model(tmp_path / "m", width=48)
    for call in (
        lambda: load_model(tmp_path / "m", precision="mxfp4", compute="bf16", trainable=trainable),
        lambda: export_mxfp4(tmp_path / "out", tmp_path / "m"),
        lambda: fp8_exact(tmp_path / "m"),
    ):
        with pytest.raises(ConfigError, match=r"proj\.weight.*\n.*32 columns"):
            call()
    assert not (tmp_path / "out").exists()


def test_fp8_verdicts_name_the_linear_whose_blocks_lie_too_far_apart(source, tmp_path):
    found = fp8_exact(source)
    assert sorted(found) == sorted(n for n in master_of(source) if is_linear(n))
    assert found == {name: fp8_holds(w.numpy()) for name, w in master_of(source).items() if is_linear(name)}
    assert [n for n, exact in found.items() if not exact] == ["model.layers.0.mlp.down_proj.weight"]
    export_mxfp4(tmp_path / "packed", source)
    assert fp8_exact(tmp_path / "packed") == found


@pytest.mark.parametrize("binades", range(11, 18))
def test_fp8_verdicts_hold_at_the_edge_of_what_fp8_holds(source, tmp_path, binades):
    """One linear gets blocks that many binades apart, at every place of the largest value between powers of two."""
    shutil.copytree(source, tmp_path / "m")
    tensors, name = load_file(source / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    for far, near in itertools.product((1.0, 1.5, 1.5000001, 1.99), repeat=2):
        tensors[name][:] = torch.linspace(-far, far, tensors[name].shape[1])
        tensors[name][:, 0] = far
        tensors[name][:, 32:64] = torch.linspace(-near, near, 32) * 2.0**-binades
        save_file(tensors, tmp_path / "m" / "model.safetensors")
        assert fp8_exact(tmp_path / "m")[name] == fp8_holds(tensors[name].numpy()), (far, near)


def test_the_gradient_is_that_of_the_plain_linear_at_the_quantised_weight():
    linear = Linear(96, 20, bias=True, precision="mxfp4", compute=torch.float32, dtype=torch.float32)
    for parameter in linear.parameters():
        parameter.data.normal_()
    x_NI, upstream = torch.randn(11, 96, requires_grad=True), torch.randn(11, 20)
    out = linear(x_NI)
    out.backward(upstream)
    w = torch.from_numpy(oracle_values(linear.weight.detach().numpy())).requires_grad_()
    x = x_NI.detach().double().requires_grad_()
    assert linear.bias is not None
    bias = linear.bias.detach().bfloat16().double().requires_grad_()
    plain = torch.nn.functional.linear(x, w, bias)
    plain.backward(upstream.double())
    for found, want in ((out, plain), (linear.weight.grad, w.grad), (linear.bias.grad, bias.grad), (x_NI.grad, x.grad)):
        assert found is not None
        assert want is not None
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


def test_the_sampler_s_log_probabilities_come_again_from_the_master(source):
    """Engine over an inference copy against whole sequences through the training copy: another path, equal values."""
    sampler = load_model(source, precision="mxfp4", compute="bf16")
    trainer = load_model(source, precision="mxfp4", compute="bf16", trainable=True)
    everything = [replace(r, max_response_tokens=min(r.max_response_tokens, 12)) for r in requests(6)]
    one = engine(sampler, replace(CONFIG, page_tokens=SPLIT_TOKENS, split_tokens=SPLIT_TOKENS))
    for request in everything:
        one.add(request)
    finished = run(one)
    ids, positions, cu_tokens = [], [], [0]
    for request in everything:
        whole = [*request.prompt_ids, *finished[request.trajectory_id].response_ids]
        ids, positions = ids + whole, [*positions, *range(len(whole))]
        cu_tokens.append(len(ids))
    logprobs_NV = sampled_logprobs(trainer, ids, positions, cu_tokens)
    plain_NV = sampled_logprobs(load_model(source, precision="bf16", compute="bf16"), ids, positions, cu_tokens)
    for request, first in zip(everything, cu_tokens, strict=False):
        done = finished[request.trajectory_id]
        rows = first + len(request.prompt_ids) - 1 + torch.arange(len(done.response_ids))
        logged = torch.tensor(done.logprobs_raw).double()
        assert (logprobs_NV[rows, torch.tensor(done.response_ids)] - logged).abs().max() < 2e-5
        # Four bits are seen: unquantised weights do not give these.
        assert (plain_NV[rows, torch.tensor(done.response_ids)] - logged).abs().max() > 1e-3


@torch.no_grad()
def sampled_logprobs(model: Transformer, ids, positions, cu_tokens) -> torch.Tensor:
    h_ND = model(torch.tensor(ids), torch.tensor(positions), SampledCausal(cu_tokens))
    return torch.log_softmax(model.logits(h_ND, VOCABULARY).double(), 1)


def test_values_with_gradients_are_those_without(source):
    model = load_model(source, precision="mxfp4", compute="fp32", trainable=True)
    ids_N = torch.arange(20)
    with torch.no_grad():
        want = model(ids_N, ids_N, PackedCausal([0, 20]))
    found = model(ids_N, ids_N, PackedCausal([0, 20]))
    assert found.requires_grad
    torch.testing.assert_close(found.detach(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_ranks_use_the_weights_that_the_next_sampler_loads(source, tmp_path, ranks):
    """ZeRO-1 and ZeRO-3 on real gloo ranks: every linear, before the first step and after the last, bit for bit."""
    world = make_world(LENGTHS, WIDTHS, vocab=61)
    plan = plan_rows(world, [[ITEMS[:3], ITEMS[3:]], [ITEMS[:2], ITEMS[2:]]], slots=2)
    plan += plan_rows(world, [[ITEMS[:1]]], slots=2, split="heldout")
    options = {"precision": "mxfp4", "compute": "bf16", "record_weights": True}
    scenarios = [scenario(f"zero-{stage}", plan, zero_stage=stage, **options) for stage in (1, 3)]
    results = run_ranks(tmp_path, source, world, scenarios, ranks)
    first = load_model(source, precision="mxfp4", compute="bf16").state_dict()
    exports = []
    for stage in (1, 3):
        result = results[f"zero-{stage}"]
        assert "error" not in result, result
        export = tmp_path / f"export-{stage}-{ranks}"
        write_model(export)
        save_file(result["parameters"], export / "model.safetensors", metadata={"format": "pt"})
        last = load_model(export, precision="mxfp4", compute="bf16").state_dict()
        exports.append(last)
        names = [n for n in last if is_linear(n)]
        for kind, want in (("with_gradient_first", first), ("without_gradient_last", last)):
            used = result["weights"][kind]
            assert sorted(used) == sorted(names)
            for name in names:
                assert torch.equal(used[name].to(torch.bfloat16), want[name]), (stage, kind, name)
                assert torch.equal(used[name].to(torch.bfloat16).float(), used[name])
        changed = [n for n in names if not torch.equal(first[n], last[n])]
        assert changed == names  # training moved the codes
    if ranks == 1:  # nothing is summed in another order
        assert all(torch.equal(exports[0][n], exports[1][n]) for n in exports[0])
