"""Tiny random models, requests and a log in memory: what tests of the rollout engine stand on."""

from __future__ import annotations

import hashlib
import math
import random
import struct
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ml.checkpoint import load_model
from ml.model import Transformer
from ml.rollout.engine import RolloutEngine
from ml.rollout.requests import EngineConfig, Finished, Request
from ml.rollout.sampling import SamplingParams
from ml.rollout.spill import decode_kv

VOCABULARY, ROWS = 61, 64
STOP = (7, 8)
KINDS = ("llama", "qwen2", "qwen3")


@cache
def models(kind: str) -> tuple[Any, Transformer, Transformer]:
    """(transformers' own in fp32, ours in fp32, ours in bf16) of one tiny random checkpoint."""
    import transformers

    sizes = {
        "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160,
        "initializer_range": 0.2, "tie_word_embeddings": kind == "llama",
    }  # fmt: skip
    if kind == "qwen3":
        sizes["head_dim"] = 16
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    torch.manual_seed(5)
    theirs = model_class(config_class(**sizes)).eval()
    for parameter in theirs.parameters():
        if parameter.ndim == 1:  # biases and norms start as constants
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_model(Path(folder), precision="fp32", compute="fp32")
        small = load_model(Path(folder), precision="bf16", compute="bf16")
    return theirs, ours, small


@dataclass
class MemoryLog:
    """A log that is durable when told so, or at once."""

    immediate: bool = True
    acknowledged: int = 0
    sequence: int = 0
    committed: int = 0
    names: list[str] = field(default_factory=list)
    tokens: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    finishes: dict[str, tuple[int, str]] = field(default_factory=dict)

    def admit(self, trajectory_id: str, *, prompt_digest: bytes, prompt_tokens: int) -> int:
        assert len(prompt_digest) == 32
        self.names.append(trajectory_id)
        return len(self.names) - 1

    def append_step(self, numbers, first_token_indices, ids, raw, sampled) -> int:
        for number, first, *token in zip(numbers, first_token_indices, ids, raw, sampled, strict=True):
            column = self.tokens.setdefault(self.names[number], [])
            column.append(tuple(token))
            assert first + 1 >= len(column)
        return self._next()

    def append_finish(self, number: int, response_tokens: int, reason: str) -> int:
        self.finishes[self.names[number]] = (response_tokens, reason)
        return self._next()

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence

    def commit(self) -> None:
        self.committed = self.sequence
        if self.immediate:
            self.acknowledged = self.sequence

    def wait_local(self, sequence: int) -> None:
        assert sequence <= self.committed
        self.acknowledged = self.committed


CONFIG = EngineConfig(8, page_tokens=8, num_pages=80, prefill_chunk_tokens=24, split_tokens=16, student_digest="s")
PLAIN = SamplingParams()


def engine(model: Transformer, config=CONFIG, sampling=PLAIN, log: Any = None, stop_ids=STOP) -> RolloutEngine:
    return RolloutEngine(model, config, sampling, stop_ids, VOCABULARY, log or MemoryLog())


def requests(count: int, seed: int = 0) -> list[Request]:
    r = random.Random(seed)
    lengths = [1, 2, 8, 16, 17, 40, *(r.randint(1, 50) for _ in range(count))][:count]
    return [
        Request(f"t{i}", tuple(r.randrange(VOCABULARY) for _ in range(n)), r.getrandbits(64), r.choice([1, 5, 30, 60]))
        for i, n in enumerate(lengths)
    ]


def run(one: RolloutEngine) -> dict[str, Finished]:
    out: list[Finished] = []
    while one.has_work():
        out += one.step()
    assert len({f.trajectory_id for f in out}) == len(out)
    return {f.trajectory_id: f for f in out}


@dataclass
class Lives:
    """Trajectories over the lives of many engines: what is finished, logged (id and two log-probabilities) and
    spilled by now, and how often KV was restored and computed again."""

    finished: dict[str, Finished] = field(default_factory=dict)
    logged: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    spills: dict[str, bytes] = field(default_factory=dict)
    num_restores: int = 0
    num_rebuilds: int = 0

    def live(
        self,
        one: RolloutEngine,
        everything: list[Request],
        r: random.Random,
        *,
        kv_share: float,
        steps: tuple[int, int],
    ) -> None:
        """A life that ends within so many steps: goes on with what is not finished, of kv_share from spilled KV."""
        for request in everything:
            name = request.trajectory_id
            if name in self.finished:
                continue
            tokens = self.logged.get(name, [])
            ids, raw, sampled = (tuple(column) for column in zip(*tokens, strict=True)) if tokens else ((), (), ())
            kv = None
            if name in self.spills and r.random() < kv_share:
                kv = decode_kv(self.spills[name], name, one.kv_layout, name, [*request.prompt_ids, *ids])
            one.add(replace(request, logged_ids=ids, logged_raw=raw, logged_sampled=sampled, kv=kv))
        for _ in range(r.randint(*steps)):
            if one.has_work():
                for f in one.step():
                    self.finished[f.trajectory_id] = f
                    self.num_restores += f.interruptions.kv_restores
                    self.num_rebuilds += f.interruptions.prefill_rebuilds
        assert isinstance(one.log, MemoryLog)
        for name, tokens in one.log.tokens.items():
            self.logged[name] = self.logged.get(name, []) + tokens

    def spill(self, one: RolloutEngine) -> None:
        """Keep the KV that the engine leaves."""
        written: dict[str, bytes] = {}
        records = one.spill(lambda name, parts: written.update({name: b"".join(parts)}) or True, math.inf)
        assert {record.name: record.digest for record in records} == {
            name: hashlib.sha256(data).hexdigest() for name, data in written.items()
        }
        self.spills |= {record.trajectory_id: written[record.name] for record in records}


def bits(finished: Finished) -> tuple:
    logprobs = (*finished.logprobs_raw, *finished.logprobs_sampled)
    return (
        finished.trajectory_id,
        finished.response_ids,
        struct.pack(f"{len(logprobs)}d", *logprobs),
        finished.finish_reason,
    )


def alone(model: Transformer, request: Request, sampling=PLAIN) -> tuple:
    one = engine(model, sampling=sampling)
    one.add(request)
    return bits(run(one)[request.trajectory_id])
