"""What a Hugging Face config.json says of a model, without torch; what is not understood is refused by name.

Letters: C head channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ml.model_files import MXFP4_STORED
from schemas.errors import ConfigError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base, and the scaling kinds "default", "linear" and "llama3" of Hugging Face configs."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model. vocab_rows counts rows of the embedding, which may exceed the tokenizer's size."""

    architecture: str
    vocab_rows: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_channels: int
    feed_forward: int
    rope: Rope
    norm_epsilon: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    feed_forward_bias: bool
    qk_norm: bool
    max_positions: int

    @classmethod
    def from_hf(cls, config_json: Mapping[str, Any], where: str) -> ModelConfig:
        """From the contents of a Hugging Face config.json. Raises ConfigError naming what is not supported."""
        kind = config_json.get("model_type")
        if kind not in ARCHITECTURES:
            raise ConfigError(f"{where}, model_type", expected=f"one of {sorted(ARCHITECTURES)}", found=repr(kind))
        _refuse_unsupported(config_json, where)
        width, heads = _count(config_json, "hidden_size", where), _count(config_json, "num_attention_heads", where)
        kv_heads = _count(config_json, "num_key_value_heads", where, heads)
        # Qwen3's own default is 128 channels whatever the width.
        head_channels = _count(config_json, "head_dim", where, 128 if kind == "qwen3" else width // heads)
        if heads % kv_heads:
            raise ConfigError(
                f"{where}, num_key_value_heads", expected=f"a divisor of {heads} heads", found=str(kv_heads)
            )
        if head_channels % 2:
            raise ConfigError(f"{where}, head_dim", expected="an even number", found=str(head_channels))
        max_positions = _count(config_json, "max_position_embeddings", where)
        bias = bool(config_json.get("attention_bias", False))
        return cls(
            architecture=kind,
            vocab_rows=_count(config_json, "vocab_size", where),
            width=width,
            layers=_count(config_json, "num_hidden_layers", where),
            heads=heads,
            kv_heads=kv_heads,
            head_channels=head_channels,
            feed_forward=_count(config_json, "intermediate_size", where),
            rope=_read_rope(config_json, where, max_positions),
            norm_epsilon=_number(config_json.get("rms_norm_eps", 1e-6), f"{where}, rms_norm_eps"),
            tied=bool(config_json.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bias,
            output_bias=kind != "qwen2" and bias,
            feed_forward_bias=bool(config_json.get("mlp_bias", False)) and kind == "llama",
            qk_norm=kind == "qwen3",
            max_positions=max_positions,
        )


#: Features of related models that this one lacks -> the value that switches them off.
_NEUTRAL = {
    "final_logit_softcapping": 0,
    "attn_logit_softcapping": 0,
    "logit_scale": 1,
    "lm_head_bias": False,
    "partial_rotary_factor": 1,
}


def _refuse_unsupported(config_json: Mapping[str, Any], where: str) -> None:
    layer_types = config_json.get("layer_types") or []
    odd = next((t for t in layer_types if t != "full_attention"), None)
    if odd is not None:
        raise ConfigError(f"{where}, layer_types", expected="full_attention in every layer", found=repr(odd))
    window = config_json.get("sliding_window")
    if config_json.get("use_sliding_window", "use_sliding_window" not in config_json) and window is not None:
        raise ConfigError(f"{where}, sliding_window", expected="full attention", found=f"a window of {window}")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config_json.get(name):
            raise ConfigError(f"{where}, {name}", expected="a dense model", found=f"{config_json[name]} experts")
    for name, neutral in _NEUTRAL.items():
        value = config_json.get(name)
        if value is not None and value != neutral:
            raise ConfigError(f"{where}, {name}", expected=f"absent or {neutral}", found=repr(value))
    activation = config_json.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"{where}, hidden_act", expected="silu", found=repr(activation))
    stored = config_json.get("quantization_config", MXFP4_STORED)
    if stored != MXFP4_STORED:
        raise ConfigError(
            f"{where}, quantization_config", expected=f"none, or {MXFP4_STORED}", found=repr(stored)[:200]
        )


def _read_rope(config_json: Mapping[str, Any], where: str, max_positions: int) -> Rope:
    # transformers 5 moved rope_theta and rope_scaling into rope_parameters.
    values = dict(config_json.get("rope_parameters") or config_json.get("rope_scaling") or {})
    where = f"{where}, rope"
    theta = _number(values.get("rope_theta", config_json.get("rope_theta", 10000.0)), f"{where}, rope_theta")
    kind = values.get("rope_type", values.get("type", "default"))
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{where}, partial_rotary_factor", expected="1", found=repr(values["partial_rotary_factor"]))
    if kind == "default":
        return Rope(theta)
    if kind not in ("linear", "llama3"):
        raise ConfigError(f"{where}, rope_type", expected="default, linear or llama3", found=repr(kind))
    factor = _number(values.get("factor"), f"{where}, factor")
    if kind == "linear":
        return Rope(theta, "linear", factor)
    low = _number(values.get("low_freq_factor"), f"{where}, low_freq_factor")
    high = _number(values.get("high_freq_factor"), f"{where}, high_freq_factor")
    if high <= low:
        raise ConfigError(f"{where}, high_freq_factor", expected=f"more than low_freq_factor {low}", found=str(high))
    original = values.get("original_max_position_embeddings", max_positions)
    return Rope(
        theta, "llama3", factor, low, high, int(_number(original, f"{where}, original_max_position_embeddings"))
    )


def _count(values: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{where}, {name}", expected="a positive whole number", found=repr(value))
    return value


def _number(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(where, expected="a positive number", found=repr(value))
    return float(value)
