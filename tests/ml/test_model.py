"""The transformer against transformers' own: states, logits, gradients; packing, rows and configs."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from kernels.rows import rotate, silu_gate
from ml.model import ModelConfig, PackedCausal, RmsNorm, Transformer
from ml.model_config import Rope
from schemas.errors import ConfigError, ContractError

SHAPE: dict[str, Any] = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 84, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama_tied_biased": LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama3_rope": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "linear_rope": LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "yarn_rope": LlamaConfig(**SHAPE, rope_parameters=YARN_ROPE),
    "llama_one_kv_head": LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}, head_dim=10),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2_windows_past_the_context": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=256, max_window_layers=1
    ),
    "qwen2_windows_past_the_layers": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=3
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
}
LENGTHS = [7, 1, 33, 12]


def pair(name: str, seed: int = 0, **kwargs):
    """(transformers' model, ours) with equal random weights, biases and norms included."""
    torch.manual_seed(seed)
    config = CONFIGS[name]
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    settings = {"precision": "fp32", "compute": torch.float32, "trainable": True} | kwargs
    ours = Transformer(ModelConfig.from_hf(json.loads(config.to_json_string()), name), **settings)
    state = theirs.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    ours.load_state_dict(state)
    return theirs, ours


def packed(sequences: list[torch.Tensor]):
    cu_tokens = [0, *itertools.accumulate(len(s) for s in sequences)]
    return torch.cat(sequences), torch.cat([torch.arange(len(s)) for s in sequences]), PackedCausal(cu_tokens)


def some_sequences(seed: int = 1, lengths=LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 101, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name):
    theirs, ours = pair(name)
    sequences = some_sequences()
    with torch.no_grad():
        want = torch.cat([theirs(s[None]).logits[0] for s in sequences])
        found = ours.logits(ours(*packed(sequences)))
        alone = torch.cat([ours.logits(ours(*packed([s]))) for s in sequences])
    with_gradient = ours.logits(ours(*packed(sequences)))
    assert want.abs().max() > 0.5
    for logits in (found, alone, with_gradient):
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=2e-5)
    assert torch.equal(found, alone)
    assert torch.equal(ours.logits(ours(*packed(sequences)).detach(), 50), with_gradient[:, :50])


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize("name", ["llama_tied_biased", "qwen2", "qwen3"])
def test_gradients_of_a_packed_batch_equal_transformers(name, checkpoint_layers):
    theirs, ours = pair(name)
    ours.checkpoint_layers = checkpoint_layers
    sequences = some_sequences()
    upstream = torch.randn(sum(LENGTHS), 101, generator=torch.Generator().manual_seed(2))
    for logits, part in zip((theirs(s[None]).logits[0] for s in sequences), upstream.split(LENGTHS), strict=True):
        (logits * part).sum().backward()
    h_ND = ours(*packed(sequences))
    (h_ND @ ours.head_weight.t() * upstream).sum().backward()
    want = dict(theirs.named_parameters())
    assert len(list(ours.parameters())) == len(want)
    for parameter_name, parameter in ours.named_parameters():
        scale = want[parameter_name].grad.abs().max()
        torch.testing.assert_close(parameter.grad / scale, want[parameter_name].grad / scale, rtol=1e-4, atol=2e-5)


def test_bf16_forward_stays_near_fp32():
    _, ours = pair("qwen3")
    _, rounded = pair("qwen3", precision="bf16", compute=torch.bfloat16)
    sequences = some_sequences()
    with torch.no_grad():
        want, found = ours(*packed(sequences)), rounded(*packed(sequences))
    assert found.dtype == torch.bfloat16
    assert 1e-4 < (found.float() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt() < 0.03


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama_tied_biased", "qwen2", "qwen3"])
def test_a_row_has_the_same_bits_in_any_company(name, compute):
    _, ours = pair(name, precision="bf16", compute=compute)
    generator = torch.Generator().manual_seed(5)
    ids_N = torch.randint(0, 101, (200,), generator=generator)
    positions_N = torch.randint(0, 256, (200,), generator=generator)

    def see_nothing_else(_layer, q_NHC, k_NGC, v_NGC, rotation):
        q_NHC, k_NGC = rotate(q_NHC, k_NGC, *rotation)
        return q_NHC + (k_NGC + v_NGC).repeat_interleave(q_NHC.shape[1] // k_NGC.shape[1], 1)

    with torch.no_grad():
        alone = torch.cat([ours(ids_N[i : i + 1], positions_N[i : i + 1], see_nothing_else) for i in range(200)])
        for num_rows in [*range(2, 20), 31, 32, 33, 64, 65, 100, 127, 199, 200]:
            chosen = torch.randperm(200, generator=generator)[:num_rows]
            found = ours(ids_N[chosen], positions_N[chosen], see_nothing_else)
            assert torch.equal(found, alone[chosen]), num_rows


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_bits_in_any_pack(compute):
    _, ours = pair("llama", precision="bf16", compute=compute)
    sequences = some_sequences(lengths=[1, 2, 31, 32, 33, 100, 5])
    with torch.no_grad():
        alone = [ours(*packed([s])) for s in sequences]
        for order in ([6, 5, 4, 3, 2, 1, 0], [3, 0, 5, 1], [4, 2]):
            found = ours(*packed([sequences[i] for i in order]))
            assert torch.equal(found, torch.cat([alone[i] for i in order]))


def test_elementwise_parts_do_not_depend_on_the_place_in_a_tensor():
    generator = torch.Generator().manual_seed(0)
    norm = RmsNorm(37, 1e-5, "fp32")
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
        gate, up = (torch.randn(400, 37, generator=generator) * 4 for _ in range(2))
        gates = torch.cat([silu_gate(g, u) for g, u in zip(gate.split(1), up.split(1), strict=True)])
        norms = torch.cat([norm(row)[1] for row in up.split(1)])
        for num_rows in (2, 3, 17, 100, 333, 400):
            chosen = torch.randperm(400, generator=generator)[:num_rows]
            assert torch.equal(silu_gate(gate[chosen], up[chosen]), gates[chosen])
            assert torch.equal(norm(up[chosen])[1], norms[chosen])


def test_gate_is_finite_at_the_ends_and_equal_with_and_without_gradient():
    gate = torch.tensor([[-1e4, -200.0, -89.0, -1.0, 0.0, 1.0, 89.0, 1e4]])
    up = torch.full_like(gate, 2.0)
    want = (gate.double() * torch.sigmoid(gate.double()) * 2).float()
    with torch.no_grad():
        torch.testing.assert_close(silu_gate(gate, up), want)
    torch.testing.assert_close(silu_gate(gate, up), want)


def test_ids_and_positions_out_of_range_are_refused():
    _, ours = pair("llama")
    with pytest.raises(IndexError):
        ours(torch.tensor([101]), torch.tensor([0]), PackedCausal([0, 1]))
    with pytest.raises(IndexError):
        ours(torch.tensor([5]), torch.tensor([256]), PackedCausal([0, 1]))


@pytest.mark.parametrize("offsets", [[], [0], [1, 4], [0, 3, 3, 5], [0, 4, 2]])
def test_offsets_that_are_not_a_packing_are_refused(offsets):
    with pytest.raises(ContractError, match="cu_tokens"):
        PackedCausal(offsets)


BASE = json.loads(CONFIGS["llama"].to_json_string())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mixtral"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"sliding_window": 100}, "sliding_window"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
            "sliding_window",
        ),
        ({"frobnicate": 0.5}, "frobnicate"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"lm_head_bias": True}, "lm_head_bias"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}}, "rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}}, "full_attention"),
        ({"rope_parameters": LLAMA3_ROPE | {"beta_fast": 9.0}}, "beta_fast"),
        ({"rope_parameters": YARN_ROPE | {"attention_factor": -1.0}}, "attention_factor"),
        ({"rope_parameters": YARN_ROPE, "rope_scaling": {"rope_type": "frobnicate"}}, "frobnicate"),
        ({"rope_parameters": 7}, "an object"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
        ({"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"max_position_embeddings": True}, "max_position_embeddings"),
    ],
)
def test_what_is_not_supported_is_named(change, named):
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf(BASE | change, "folder/config.json")


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
OUTSIDE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("change", [
    {"rope_parameters": PLAIN, "rope_scaling": YARN_ROPE},
    {"rope_parameters": YARN_ROPE, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {}},
    {"rope_scaling": OUTSIDE, "original_max_position_embeddings": 64},
    {"rope_scaling": OUTSIDE | {"original_max_position_embeddings": 32}, "original_max_position_embeddings": 64},
    {"rope_scaling": {"rope_type": "default", "factor": 9.0}, "rope_theta": 500.0},
    {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 128},
    {"rope_scaling": YARN_ROPE | {"attention_factor": 0.5, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    {"rope_scaling": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3}, "rope_theta": 7.0},
])  # fmt: skip
def test_logits_are_those_of_transformers_however_rope_is_spelt(change):
    values = {k: v for k, v in BASE.items() if k != "rope_parameters"} | change
    theirs = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(copy.deepcopy(values)), attn_implementation="eager")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ours = Transformer(ModelConfig.from_hf(values, "x"), precision="fp32", compute=torch.float32, trainable=False)
    ours.load_state_dict(theirs.state_dict())
    plain = dataclasses.replace(ours.config, rope=Rope(1e4))
    unscaled = Transformer(plain, precision="fp32", compute=torch.float32, trainable=False)
    unscaled.load_state_dict(theirs.state_dict())
    ids_N = torch.randint(0, 101, (200,), generator=torch.Generator().manual_seed(1))
    where = torch.arange(200), PackedCausal([0, 200])
    with torch.no_grad():
        want_NV = theirs.eval()(ids_N[None]).logits[0]
        found_NV, other_NV = (model.logits(model(ids_N, *where)) for model in (ours, unscaled))
    torch.testing.assert_close(found_NV, want_NV, rtol=1e-4, atol=1e-4)
    assert (other_NV - want_NV).abs().max() > 1e-2, "these settings change nothing"


def test_both_spellings_of_rope_mean_the_same():
    old = {k: v for k, v in BASE.items() if k != "rope_parameters"} | {"rope_theta": 10000.0}
    scaled = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    read = [
        ModelConfig.from_hf(config, "x").rope
        for config in (
            BASE | {"rope_parameters": LLAMA3_ROPE},
            old | {"rope_scaling": scaled},
            old | {"rope_scaling": {"type" if k == "rope_type" else k: v for k, v in scaled.items()}},
        )
    ]
    assert read[0] == read[1] == read[2]
    assert read[0].kind == "llama3"
    # Qwen2 configs carry a window that is switched off.
    unused = BASE | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}
    assert ModelConfig.from_hf(unused, "x").qkv_bias
