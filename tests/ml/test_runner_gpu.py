"""One engine for several partitions on a GPU: its graphs stay, and nothing else. Prints what a partition costs."""

from __future__ import annotations

import random
import time

import pytest
import torch

from ml.bench_models import LLAMA_1B, random_model
from ml.rollout.engine import RolloutEngine
from ml.rollout.requests import EngineConfig, Request
from tests.support.rollout_world import PLAIN, MemoryLog, bits, run

pytestmark = pytest.mark.gpu

VOCAB = 1024
STOP = (7, 8, 9, 10)


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA_1B, "bf16", "cuda")


def new_engine(model) -> RolloutEngine:
    config = EngineConfig.on(torch.device("cuda"), max_sequences=64, page_tokens=64, num_pages=700)
    return RolloutEngine(model, config, PLAIN, STOP, VOCAB, MemoryLog())


def partition(index: int, count: int = 96) -> list[Request]:
    """Prompts are those of every other partition, keys are not."""
    r = random.Random(0)
    prompts = [tuple(r.randrange(VOCAB) for _ in range(r.randint(1, 500))) for _ in range(count // 4)]
    r = random.Random(index)
    return [
        Request(f"{p}.{n}", prompt, r.getrandbits(64), r.choice([1, 5, 70, 150]))
        for p, prompt in enumerate(prompts)
        for n in range(4)
    ]


def sampled(one: RolloutEngine, requests: list[Request]) -> dict[str, tuple]:
    for request in requests:
        one.add(request)
    return {i: bits(f) for i, f in run(one).items()}


def test_partitions_of_one_engine_equal_those_of_new_engines(model):
    sampled(new_engine(model), partition(9, 8))  # kernels are compiled
    seconds, found = [], []
    one = new_engine(model)
    for index in range(3):
        started = time.perf_counter()
        if index:
            one.begin(MemoryLog())
        found.append(sampled(one, partition(index)))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        print(f"partition {index} on one engine: {seconds[-1]:.2f} s", flush=True)
    for index in range(3):
        started = time.perf_counter()
        assert sampled(new_engine(model), partition(index)) == found[index], index
        print(f"partition {index} on a new engine: {time.perf_counter() - started:.2f} s", flush=True)
    assert seconds[1] < seconds[0]


@pytest.mark.parametrize("poisoned", [False, True])
def test_a_partition_left_in_flight_leaves_nothing(model, poisoned):
    wanted = sampled(new_engine(model), partition(1))
    one = new_engine(model)
    for request in partition(2):
        one.add(request)
    for _ in range(40):
        one.step()
    assert one._in_flight
    if poisoned:
        one._runner.k_LPTGC.fill_(float("nan"))
        one._runner.v_LPTGC.fill_(float("nan"))
        one._runner.tables.fill_(3)
    one.begin(MemoryLog())
    assert sampled(one, partition(1)) == wanted


def test_kv_is_read_by_either_way(model):
    """More positions than are copied at once."""
    config = EngineConfig.on(torch.device("cuda"), max_sequences=1, page_tokens=64, num_pages=160)
    one = RolloutEngine(model, config, PLAIN, (), VOCAB, MemoryLog())
    one.add(Request("long", tuple(i % VOCAB for i in range(9000)), 1, 100))
    while one.live()["long"] < 5:
        one.step()
    locked, plain = (one.kept_kv("long", to_return=to_return) for to_return in (True, False))
    assert locked.positions == plain.positions > 9000
    assert locked.k_MLGC.is_pinned()
    assert not plain.k_MLGC.is_pinned()
    assert torch.equal(locked.k_MLGC, plain.k_MLGC)
    assert torch.equal(locked.v_MLGC, plain.v_MLGC)
