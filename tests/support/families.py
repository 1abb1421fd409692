"""Tiny random models of families that our own transformer does not know, made by transformers' own classes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

_SIZES = {
    "vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.15,
}  # fmt: skip
_LLAMA_LIKE = _SIZES | {"intermediate_size": 64, "num_key_value_heads": 2}
#: Name -> settings of its class in transformers.
FAMILIES: dict[str, dict[str, Any]] = {
    # tied head; positions that are learnt
    "GPT2": {
        "vocab_size": 259, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "bos_token_id": 1,
        "eos_token_id": 2, "initializer_range": 0.15,
    },
    "Gemma": _LLAMA_LIKE | {"head_dim": 8, "num_key_value_heads": 1},
    # a bias of the head
    "Phi": _SIZES | {"intermediate_size": 64},
    "Falcon": _SIZES | {"alibi": False},
    # norms without weights
    "Olmo": _LLAMA_LIKE,
    "Mixtral": _LLAMA_LIKE | {"num_local_experts": 4},
    # logits times a power of two
    "Cohere": _LLAMA_LIKE | {"logit_scale": 0.25},
    "Granite": _LLAMA_LIKE | {"logits_scaling": 8.0},
    # a projection before the head, whose width is not the model's
    "OPT": _SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 16, "init_std": 0.15},
}  # fmt: skip


def family_model(
    folder: Path, family: str, *, tokenizer: Path, seed: int = 0, dtype: str = "float32", **changes
) -> Path:
    """A folder of a random model; tokenizer: a folder of `tiny_model`, whose tokenizer it gets. Biases are random."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family] | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    return folder
