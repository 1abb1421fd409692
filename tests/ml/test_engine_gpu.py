"""The rollout engine on a GPU: graphs, steps in flight, company, resumption and shared prompts change no bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from ml.bench_models import random_model
from ml.rollout.engine import RolloutEngine
from ml.rollout.requests import EngineConfig, Request
from ml.rollout.sampling import SamplingParams
from tests.support.rollout_world import PLAIN, Lives, MemoryLog, bits, run

pytestmark = pytest.mark.gpu

SIZES = {
    "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
STOP = (7, 8, 9, 10)


@pytest.fixture(scope="module", params=["bf16", "mxfp4"])
def model(request):
    made = random_model(SIZES, request.param, "cuda")
    made.check_row_invariance()
    return made


def engine(model, sampling=PLAIN, log=None, **changes) -> RolloutEngine:
    config = EngineConfig.on(torch.device("cuda"), max_sequences=256, page_tokens=64, num_pages=1500)
    return RolloutEngine(model, replace(config, **changes), sampling, STOP, 1021, log or MemoryLog())


def requests(count: int, seed: int = 0) -> list[Request]:
    r = random.Random(seed)
    lengths = [1, 2, 63, 64, 65, 129, 700, *(r.randint(1, 300) for _ in range(count))][:count]
    return [
        Request(f"t{i}", tuple(r.randrange(1021) for _ in range(n)), r.getrandbits(64), r.choice([1, 5, 70, 150]))
        for i, n in enumerate(lengths)
    ]


def sampled(one: RolloutEngine, everything: list[Request]) -> dict[str, tuple]:
    for request in everything:
        one.add(request)
    return {i: bits(f) for i, f in run(one).items()}


def plainly(model, everything: list[Request], sampling=PLAIN) -> dict[str, tuple]:
    """One at a time, without graphs and guesses, each step ended before the next."""
    wanted = {}
    one = engine(model, sampling, graphs=False, steps_in_flight=0)
    for request in everything:
        wanted |= sampled(one, [request])
    return wanted


def test_no_way_of_running_changes_a_bit(model):
    everything = requests(24)
    wanted = plainly(model, everything)
    for changes in (
        {},
        {"graphs": False},
        {"steps_in_flight": 0},
        {"prefill_chunk_tokens": 50},
        {"max_sequences": 7},
        {"num_pages": 20},
    ):
        config: dict[str, Any] = changes
        assert sampled(engine(model, **config), everything) == wanted, changes


def test_company_of_any_size_changes_no_bit(model):
    crowd = requests(256, seed=1)
    wanted = plainly(model, crowd[:12])
    for count in (12, 16, 17, 33, 64, 100, 256):
        got = sampled(engine(model), crowd[:count])
        assert {i: got[i] for i in wanted} == wanted, count


@pytest.mark.parametrize("sampling", [SamplingParams(0.7), SamplingParams(1.0, 20), SamplingParams(0.9, 0, 0.8)])
def test_temperature_and_cuts(model, sampling):
    everything = requests(9, seed=2)
    assert sampled(engine(model, sampling), everything) == plainly(model, everything, sampling)


def test_groups_share_their_prompts(model):
    r = random.Random(3)
    everything = []
    for group, length in enumerate((1, 64, 65, 200)):
        prompt = tuple(r.randrange(1021) for _ in range(length))
        everything += [Request(f"{group}.{i}", prompt, r.getrandbits(64), 90) for i in range(5)]
    assert sampled(engine(model), everything) == plainly(model, everything)


def test_interrupted_equals_uninterrupted(model):
    """By spilled KV and from the log alone, again and again."""
    everything, r = requests(40, seed=4), random.Random(5)
    wanted = sampled(engine(model), everything)
    lives = Lives()
    while len(lives.finished) < len(everything):
        one = engine(model, prefill_chunk_tokens=r.choice([70, 8192]))
        lives.live(one, everything, r, kv_share=0.6, steps=(5, 60))
        lives.spill(one)
    assert {i: bits(f) for i, f in lives.finished.items()} == wanted
    assert min(lives.num_restores, lives.num_rebuilds) > 0
