"""A small random Llama over bytes, as a Hugging Face folder: what benches sample from when no model is at hand.

Its stop token is one of 259 ids that are about as likely as one another, so lengths of responses are spread widely:
most are short, a few run to any limit.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ml.checkpoint import save_model

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Of the stop token, and one more than the largest id.
STOP_ID, VOCAB_SIZE = 2, 259


def write_random_model(folder: Path, *, seed: int, width: int = 64, layers: int = 2, max_positions: int = 8192) -> None:
    """Weights depend on the arguments alone; width is a multiple of 32, in 4 heads and 2 KV heads."""
    heads, kv_heads = 4, 2
    channels, inner = width // heads, 2 * width
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": width,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": max_positions, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": STOP_ID,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, width), "model.norm.weight": (width,)}
    for layer in range(layers):
        linears = {
            "self_attn.q_proj": (width, width), "self_attn.k_proj": (kv_heads * channels, width),
            "self_attn.v_proj": (kv_heads * channels, width), "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
            "input_layernorm": (width,), "post_attention_layernorm": (width,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in linears.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        (name, (0.15 * torch.randn(shape, generator=generator) if len(shape) == 2 else torch.ones(shape)).bfloat16())
        for name, shape in shapes.items()
    ]
    with tempfile.TemporaryDirectory() as companions:
        _write_tokenizer(Path(companions))
        save_model(folder, config, tensors, companions=Path(companions))


def _write_tokenizer(folder: Path) -> None:
    tokens = [*_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIALS))
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE, "eos_token": _SPECIALS[STOP_ID],
        "bos_token": _SPECIALS[1], "pad_token": _SPECIALS[0],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
