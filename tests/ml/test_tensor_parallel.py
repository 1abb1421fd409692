"""Ranks that share a model against the whole model in this process: states, logits and keys, bit for bit.

Over gloo on the CPU; on two GPUs over NCCL.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ml.checkpoint import load_model
from ml.model import ModelConfig, SampledCausal, Transformer
from ml.tensor_parallel import ALONE, Group
from schemas.errors import ConfigError

# 61 ids: the head's last part is short. Six KV heads: two and three ranks divide them.
SHAPE: dict[str, Any] = {"vocab_size": 61, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
         "num_attention_heads": 12, "num_key_value_heads": 6, "max_position_embeddings": 128}  # fmt: skip
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16)),
}
RUNS = [("llama", "fp32", "fp32"), ("llama", "bf16", "bf16"), ("llama", "mxfp4", "bf16"),
        ("qwen2_tied", "bf16", "bf16"), ("qwen3", "mxfp4", "fp32")]  # fmt: skip
# What the GPU's kernels take: 64 channels, bf16.
GPU_MODEL = LlamaConfig(vocab_size=1003, hidden_size=512, intermediate_size=1536, num_hidden_layers=2, head_dim=64,
                        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=128)  # fmt: skip
GPU_RUNS = [("llama_gpu", "bf16", "bf16"), ("llama_gpu", "mxfp4", "bf16")]
LENGTHS = [40, 1, 23, 6]


@torch.no_grad()
def results(folder: Path, run: tuple[str, str, str], group: Group, device: str = "cpu") -> dict[str, torch.Tensor]:
    """States and logits of packed sequences, and the keys that attention saw in the last layer."""
    name, precision, compute = run
    torch.set_num_threads(1)
    model = load_model(folder / name, precision=precision, compute=compute, device=device, group=group)  # pyright: ignore[reportArgumentType]
    cu_tokens = [0, *itertools.accumulate(LENGTHS)]
    ids_N = torch.arange(cu_tokens[-1], device=device) * 7 % 61
    positions_N = torch.cat([torch.arange(n, device=device) for n in LENGTHS])
    sampled, seen = SampledCausal(cu_tokens), {}

    def attend(layer_index, q_NHC, k_NGC, v_NGC, rotation):
        seen["k"] = k_NGC
        return sampled(layer_index, q_NHC, k_NGC, v_NGC, rotation)

    h_ND = model(ids_N, positions_N, attend)
    out = {"h": h_ND, "logits": model.logits(h_ND), "few": model.logits(h_ND, 50), "k": seen["k"]}
    return {name: tensor.cpu() for name, tensor in out.items()}


def be_rank(rank: int, ranks: int, folder: Path, on_gpus: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    runs, device, backend = (GPU_RUNS, f"cuda:{rank}", "nccl") if on_gpus else (RUNS, "cpu", "gloo")
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/meet-{ranks}", rank=rank, world_size=ranks)
    group = Group(rank, ranks, dist.group.WORLD)
    torch.save([results(folder, run, group, device) for run in runs], folder / f"{rank}-of-{ranks}.pt")
    dist.destroy_process_group()


def check_ranks(ranks: int, folder: Path, *, on_gpus: bool = False) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=be_rank, args=(rank, ranks, folder, on_gpus)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * ranks
    found = [torch.load(folder / f"{rank}-of-{ranks}.pt") for rank in range(ranks)]
    for index, run in enumerate(GPU_RUNS if on_gpus else RUNS):
        want = results(folder, run, ALONE, "cuda" if on_gpus else "cpu")
        assert want["logits"].abs().max() > 0.1
        for name in ("h", "logits", "few"):
            for rank in range(ranks):
                assert torch.equal(found[rank][index][name], want[name]), (run, name, rank)
        assert torch.equal(torch.cat([found[rank][index]["k"] for rank in range(ranks)], 1), want["k"]), run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, (kind, config) in MODELS.items():
        torch.manual_seed(5)
        model = kind(config)
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.05
        model.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_give_the_bits_of_one(folder, ranks):
    check_ranks(ranks, folder)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_bits_of_one(tmp_path):
    torch.manual_seed(5)
    LlamaForCausalLM(GPU_MODEL).save_pretrained(tmp_path / "llama_gpu")
    check_ranks(2, tmp_path, on_gpus=True)


def test_a_rank_keeps_its_part_alone():
    config = ModelConfig.from_hf(MODELS["llama"][1].to_dict(), "llama")
    whole, part = (
        Transformer(config, precision="bf16", compute=torch.bfloat16, trainable=False, group=group)
        for group in (ALONE, Group(1, 3))
    )
    for (name, a), b in zip(whole.named_parameters(), part.parameters(), strict=True):
        alike = any(whole_on_ranks in name for whole_on_ranks in ("norm", "embed_tokens", "lm_head"))
        assert b.numel() * (1 if alike else 3) == a.numel(), name


@pytest.mark.parametrize("ranks", [4, 5, 12])
def test_heads_that_the_ranks_cannot_share_are_refused(ranks):
    config = ModelConfig.from_hf(MODELS["llama"][1].to_dict(), "llama")
    with pytest.raises(ConfigError, match=rf"6 KV heads(.|\n)*{ranks} ranks"):
        Transformer(config, precision="bf16", compute=torch.bfloat16, trainable=False, group=Group(0, ranks))
