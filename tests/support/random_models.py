"""Random Llama folders of any shape, without transformers: weights on the bf16 grid, so that every dtype holds them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ml.checkpoint import save_model
from ml.model import ModelConfig, Transformer

#: Hugging Face settings by name. "small" has heads of 64 channels, which the GPU's kernels ask for.
SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1003, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "small-teacher": {
        "hidden_size": 384, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 1008, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "rope_theta": 100000.0,
    },
    "smollm2-360m": {
        "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
        "num_key_value_heads": 5, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "rope_theta": 100000.0,
    },
}  # fmt: skip


def config_json(shape: str, **changes: Any) -> dict[str, Any]:
    return (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5} | SHAPES[shape] | changes
    )


def random_model(
    folder: Path, shape: str, *, seed: int, companions: Path | None = None, device: str = "cpu", **changes: Any
) -> Path:
    """A folder of that shape. Logits have a spread of about 2 and gradients reach every layer."""
    settings = config_json(shape, **changes)
    model = Transformer(
        ModelConfig.from_hf(settings, shape), precision="fp32", compute=torch.float32, trainable=False, device="meta"
    )
    generator = torch.Generator(device).manual_seed(seed)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                yield name, torch.ones(parameter.shape, dtype=torch.bfloat16)
                continue
            spread = (2.0 if "embed" in name or "head" in name else 1.0) / math.sqrt(parameter.shape[1])
            values = torch.randn(parameter.shape, generator=generator, device=device) * spread
            yield name, values.to(torch.bfloat16).cpu()

    save_model(folder, settings, tensors(), companions=companions)
    return folder
