"""Decode throughput of the rollout engine with its log on: a random model of SmolLM2-135M's shape, bf16.

The check: a trajectory sampled in the batch equals, bit for bit, the same trajectory sampled alone.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kernels.testing import check
from ml.model import ModelConfig, Transformer
from ml.rollout.engine import EngineConfig, Finished, Request, RolloutEngine
from ml.rollout.pages import pages_for
from ml.rollout.sampling import SamplingParams
from ml.rollout.wal import LogHeader, TokenLog

_SMOLLM2 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 2048, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip
_PAGE_TOKENS = 64
#: vLLM's CPU build 0.32.0, the same shape and batch on two cores with AVX512-bf16.
_PEER_TOKENS_PER_S = 134.0


def run(quick: bool) -> dict[str, Any]:
    """Raises CheckFailed when company changes a trajectory."""
    batch, prompt, new = (16, 32, 16) if quick else (64, 128, 64)
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig.from_hf(_SMOLLM2, "bench"), precision="bf16", compute=torch.bfloat16, trainable=False
    )
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.02)
    generator = torch.Generator().manual_seed(1)
    requests = [
        Request(f"t{i}", tuple(torch.randint(0, 49152, (prompt,), generator=generator).tolist()), i, new)
        for i in range(batch)
    ]
    together, steps = _sample(model, requests)
    alone, _ = _sample(model, requests[:1])
    check(
        together["t0"].response_ids == alone["t0"].response_ids
        and together["t0"].logprobs_raw == alone["t0"].logprobs_raw,
        "a trajectory does not depend on its company",
    )
    decode = sorted(steps)[: new - 1]  # the cheapest steps hold no prefill
    rate = batch / (sum(decode) / len(decode))
    floor = 0.8 * _PEER_TOKENS_PER_S
    comparable = not quick and model.head_weight.device.type == "cpu"
    return {
        "figures": {
            "decode_tokens_per_s": {
                "value": rate, "unit": "tokens/s", "target": f">= {floor:.0f} on two CPU cores",
                "holds": rate >= floor if comparable else None,
            },
            "whole_run_s": {"value": sum(steps), "unit": "s", "target": "", "holds": None},
        },
        "peers": {
            "vLLM CPU build, measured apart": {"value": _PEER_TOKENS_PER_S, "unit": "tokens/s", "version": "0.32.0"}
        },
        "env": {
            "device": "cpu", "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__,
            "shape": f"SmolLM2-135M shape, batch {batch}, prompt {prompt}, new {new}, bf16, log on",
        },
    }  # fmt: skip


def _sample(model: Transformer, requests: list[Request]) -> tuple[dict[str, Finished], list[float]]:
    """(finished by trajectory, seconds of each step)."""
    longest = len(requests[0].prompt_ids) + requests[0].max_response_tokens
    config = EngineConfig(
        max_sequences=len(requests),
        page_tokens=_PAGE_TOKENS,
        num_pages=len(requests) * pages_for(longest, _PAGE_TOKENS),
    )
    finished, steps = {}, []
    header = LogHeader("bench", 0, 0, 1, "random")
    with tempfile.TemporaryDirectory(prefix="opd-bench-") as folder, TokenLog(Path(folder) / "log", header) as log:
        engine = RolloutEngine(model, config, SamplingParams(), (), 49152, log)
        for request in requests:
            engine.add(request)
        while engine.has_work():
            started = time.perf_counter()
            finished.update({f.trajectory_id: f for f in engine.step()})
            steps.append(time.perf_counter() - started)
    return finished, steps
