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
    """Rotary embedding: base, and the scaling kinds "default", "linear", "llama3" and "yarn" of Hugging Face configs.

    amplitude: factor of cosines and sines. Kinds whose frequencies depend on a sequence's length (dynamic, longrope)
    are refused: a key is turned once, when it is made, and must not change as its sequence grows.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    amplitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


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
        _refuse_windows(config_json, where, max_positions)
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


#: Settings that `ModelConfig.from_hf` and what it calls give their meaning.
_UNDERSTOOD = frozenset({
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "max_position_embeddings", "original_max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
    "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "quantization_config",
})  # fmt: skip
#: Settings of training, generation, storage and of classifiers, whatever their value.
_HARMLESS = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
    "attn_implementation", "bos_token_id", "chunk_size_feed_forward", "do_sample", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_llama_config", "keys_to_ignore_at_inference", "label2id", "max_length",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "repetition_penalty", "return_dict", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version", "unk_token_id", "unsloth_fixed",
    "unsloth_version", "use_cache",
})  # fmt: skip
#: Features that this model lacks -> the value that switches them off.
_NEUTRAL = {
    "final_logit_softcapping": 0,
    "attn_logit_softcapping": 0,
    "logit_scale": 1,
    "lm_head_bias": False,
    "partial_rotary_factor": 1,
    "rope_interleaved": False,
    "use_mrope": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "num_experts": 0,
    "num_local_experts": 0,
    "n_routed_experts": 0,
}


def _refuse_unsupported(config_json: Mapping[str, Any], where: str) -> None:
    for name, value in config_json.items():
        if name in _UNDERSTOOD or name in _HARMLESS or value is None:
            continue
        if name not in _NEUTRAL:
            raise ConfigError(
                f"{where}, {name}", expected="no setting that is not understood here", found=repr(value)[:200],
                next_command="another model, or the same again without that setting if it changes nothing",
            )  # fmt: skip
        if value != _NEUTRAL[name]:
            raise ConfigError(f"{where}, {name}", expected=f"absent or {_NEUTRAL[name]}", found=repr(value))
    activation = config_json.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ConfigError(f"{where}, hidden_act", expected="silu", found=repr(activation))
    stored = config_json.get("quantization_config") or MXFP4_STORED
    if stored != MXFP4_STORED:
        raise ConfigError(
            f"{where}, quantization_config", expected=f"none, or {MXFP4_STORED}", found=repr(stored)[:200]
        )


def _refuse_windows(config_json: Mapping[str, Any], where: str, max_positions: int) -> None:
    """Attention here sees all positions: a window must hold them all, or no layer have one."""
    window = config_json.get("sliding_window")
    on = config_json.get("use_sliding_window", "use_sliding_window" not in config_json) and window is not None
    wide = isinstance(window, int) and window >= max_positions
    layer_types = config_json.get("layer_types")
    if layer_types is None:
        narrow_layers = config_json.get("max_window_layers", 28) < _count(config_json, "num_hidden_layers", where)
        if on and not wide and (narrow_layers or config_json.get("model_type") == "llama"):
            raise ConfigError(f"{where}, sliding_window", expected="full attention", found=f"a window of {window}")
        return
    for kind in layer_types:
        if kind != "full_attention" and not (kind == "sliding_attention" and on and wide):
            raise ConfigError(f"{where}, layer_types", expected="full_attention in every layer", found=repr(kind))


#: Rope kind -> its settings, beside those that every kind has. "default" passes over the others'.
_ROPE_KINDS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip
_ROPE_KINDS["default"] = set().union(*_ROPE_KINDS.values())


def _read_rope(config_json: Mapping[str, Any], where: str, max_positions: int) -> Rope:
    # transformers 5 moved rope_theta and rope_scaling into rope_parameters; given both, it takes rope_scaling.
    values = config_json.get("rope_scaling") or config_json.get("rope_parameters") or {}
    where = f"{where}, rope"
    if not isinstance(values, Mapping):
        raise ConfigError(where, expected="an object", found=repr(values)[:200])
    values = {name: value for name, value in values.items() if value is not None}
    theta = _number(values.get("rope_theta", config_json.get("rope_theta") or 10000.0), f"{where}, rope_theta")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise ConfigError(f"{where}, rope_type", expected=f"one of {sorted(_ROPE_KINDS)}", found=repr(kind))
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{where}, partial_rotary_factor", expected="1", found=repr(values["partial_rotary_factor"]))
    for name in sorted(values.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}):
        if name not in _ROPE_KINDS[kind]:
            raise ConfigError(f"{where}, {name}", expected=f"a setting of {kind!r}", found=repr(values[name])[:200])
    if kind == "default":
        return Rope(theta)
    # Beside the scaling it comes first, as transformers has it for models that keep it there.
    outer = config_json.get("original_max_position_embeddings")
    original = outer if outer is not None else values.get("original_max_position_embeddings", max_positions)
    original = int(_number(original, f"{where}, original_max_position_embeddings"))
    if kind == "yarn":
        return _read_yarn(values, where, theta, original, max_positions)
    factor = _number(values.get("factor"), f"{where}, factor")
    if kind == "linear":
        return Rope(theta, "linear", factor)
    low = _number(values.get("low_freq_factor"), f"{where}, low_freq_factor")
    high = _number(values.get("high_freq_factor"), f"{where}, high_freq_factor")
    if high <= low:
        raise ConfigError(f"{where}, high_freq_factor", expected=f"more than low_freq_factor {low}", found=str(high))
    return Rope(theta, "llama3", factor, low, high, original)


def _read_yarn(values: Mapping[str, Any], where: str, theta: float, original: int, max_positions: int) -> Rope:
    def number(name: str, default: float) -> float:
        return _number(values.get(name, default), f"{where}, {name}")

    factor = number("factor", max_positions / original)

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "mscale" in values and "mscale_all_dim" in values:
        amplitude = growth(number("mscale", 1.0)) / growth(number("mscale_all_dim", 1.0))
    else:
        amplitude = growth(1.0)
    return Rope(
        theta, "yarn", factor, original_max_positions=original, amplitude=number("attention_factor", amplitude),
        beta_fast=number("beta_fast", 32.0), beta_slow=number("beta_slow", 1.0),
        truncate=bool(values.get("truncate", True)),
    )  # fmt: skip


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
