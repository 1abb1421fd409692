"""What the benches of ml compute with: shapes of known models, as Hugging Face settings, and random weights."""

from __future__ import annotations

from typing import Any

import torch

from ml.linear import Linear, Precision
from ml.model import ModelConfig, Transformer

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip
SMOLLM2_135M = _LLAMA | {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048, "rope_theta": 100000.0,
}  # fmt: skip
#: Llama 3.2 1B: 1.24 B parameters.
LLAMA_1B = _LLAMA | {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}  # fmt: skip
_QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}  # fmt: skip
#: By the number of parameters: Qwen3, Llama 3.2, Qwen3, Llama 3, Qwen3.
SIZES = {
    "0.6 B": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                       "num_attention_heads": 16, "tie_word_embeddings": True},
    "1.24 B": LLAMA_1B,
    "4 B": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                     "num_attention_heads": 32, "tie_word_embeddings": True},
    "8 B": LLAMA_1B | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
                       "tie_word_embeddings": False},
    "14 B": _QWEN3 | {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
                      "num_attention_heads": 40, "tie_word_embeddings": False},
}  # fmt: skip
#: For checks, and for figures of a machine without a GPU.
SMALL = LLAMA_1B | {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
                    "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip


def random_model(config_json: dict[str, Any], precision: Precision, device: torch.device | str) -> Transformer:
    """An inference model in bf16 whose weights follow from a fixed seed."""
    generator = torch.Generator(device).manual_seed(0)
    model = Transformer(
        ModelConfig.from_hf(config_json, "bench"), precision=precision, compute=torch.bfloat16, trainable=False,
        device=device,
    )  # fmt: skip
    linears = {module.weight: module for module in model.modules() if isinstance(module, Linear)}
    with torch.no_grad():
        for parameter in list(model.parameters()):
            mean = 1.0 if parameter.ndim == 1 else 0.0
            values = torch.empty(parameter.shape, device=device).normal_(mean, 0.02, generator=generator)
            linears[parameter].set_weight(values) if parameter in linears else parameter.copy_(values)
    return model
