"""Figures of the rollout engine with its log on, random weights: decode on a CPU, and what guesses win there; on a GPU
everything that `engine_bench_gpu` lists.

The check: a trajectory sampled in the batch equals, bit for bit, the same trajectory sampled alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.testing import check, environment, figure
from ml.bench_models import SMOLLM2_135M, random_model
from ml.model import Transformer
from ml.rollout.engine import RolloutEngine
from ml.rollout.pages import pages_for
from ml.rollout.requests import EngineConfig, Finished, Request
from ml.rollout.sampling import SamplingParams
from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from schemas.errors import ContractError

PAGE_TOKENS = 64
#: vLLM's CPU build 0.32.0, the same shape and batch on two cores with AVX512-bf16.
_PEER_TOKENS_PER_S = 134.0


def run(quick: bool, parts: Sequence[str] = ()) -> dict[str, Any]:
    """parts: of a GPU's figures, by name; a CPU has "speculation" alone. Raises CheckFailed when company or guesses
    change a trajectory, ContractError for other parts without a GPU."""
    if torch.cuda.is_available():
        from ml.rollout.engine_bench_gpu import run as run_on_gpu

        return run_on_gpu(quick, parts)
    if tuple(parts) == ("speculation",):
        from ml.rollout.speculation_bench import run_on_cpu

        return run_on_cpu(quick)
    if parts:
        raise ContractError("bench rollout, --parts", expected="a GPU, whose figures have parts", found="a CPU alone")
    batch, prompt, new = (16, 32, 16) if quick else (64, 128, 64)
    model = random_model(SMOLLM2_135M, "bf16", "cpu")
    requests = random_requests(model, batch, prompt, new)
    with Run(model, batch, prompt + new) as together, Run(model, 1, prompt + new) as alone:
        finished = together.finish(requests)
        check(same(finished["t0"], alone.finish(requests[:1])["t0"]), "a trajectory does not depend on its company")
    decode = sorted(together.step_seconds)[: new - 1]  # the cheapest steps hold no prefill
    floor = 0.8 * _PEER_TOKENS_PER_S
    rate = figure(batch / (sum(decode) / len(decode)), "tokens/s", f">= {floor:.0f}")
    if quick:
        rate["holds"] = None
    return {
        "figures": {
            "decode_tokens_per_s": rate,
            "whole_run_s": figure(sum(together.step_seconds), "s", ""),
        },
        "peers": {
            "vLLM CPU build, measured apart": {"value": _PEER_TOKENS_PER_S, "unit": "tokens/s", "version": "0.32.0"}
        },
        "env": environment(f"SmolLM2-135M shape, batch {batch}, prompt {prompt}, new {new}, bf16, log on")
        | {"threads": torch.get_num_threads()},
    }  # fmt: skip


class Run:
    """An engine over a model, with its log in a folder that goes away with it. num_tokens: of the longest sequence.

    step_seconds: of each step so far.
    """

    def __init__(self, model: Transformer, max_sequences: int, num_tokens: int, **changes: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="opd-bench-")
        self._log = TokenLog(Path(self._folder.name) / "log", LogHeader("bench", 0, 0, 1, "random"))
        pages = max_sequences * pages_for(num_tokens, PAGE_TOKENS)
        config = EngineConfig.on(
            model.head_weight.device, max_sequences=max_sequences, page_tokens=PAGE_TOKENS, num_pages=pages
        )
        vocab_size = model.config.vocab_rows
        self.engine = RolloutEngine(model, replace(config, **changes), SamplingParams(), (), vocab_size, self._log)
        self.step_seconds: list[float] = []

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.add(request)

    def step(self) -> list[Finished]:
        started = time.perf_counter()
        finished = self.engine.step()
        self.step_seconds.append(time.perf_counter() - started)
        return finished

    def finish(self, requests: Sequence[Request] = ()) -> dict[str, Finished]:
        """Everything added before, and `requests`."""
        self.add(requests)
        finished = {}
        while self.engine.has_work():
            finished.update({f.trajectory_id: f for f in self.step()})
        return finished

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.abandon()
        self._folder.cleanup()


def random_requests(model: Transformer, count: int, prompt: int, new: int, *, prefix: str = "t") -> list[Request]:
    """Prompts and keys depend on their number alone."""
    ids = torch.randint(
        0, model.config.vocab_rows, (count, prompt), generator=torch.Generator().manual_seed(prompt)
    ).tolist()
    return [Request(f"{prefix}{i}", tuple(row), i, new) for i, row in enumerate(ids)]


def same(a: Finished, b: Finished) -> bool:
    """Tokens and log-probabilities, bit for bit."""
    return (a.response_ids, a.logprobs_raw, a.logprobs_sampled) == (b.response_ids, b.logprobs_raw, b.logprobs_sampled)
