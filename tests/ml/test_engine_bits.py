"""Nothing but prompt, key and weights decides the bits of a response."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from ml.rollout.engine import RolloutEngine
from ml.rollout.requests import Request
from ml.rollout.sampling import SamplingParams
from schemas.errors import ContractError
from tests.support.rollout_world import (
    CONFIG,
    KINDS,
    VOCABULARY,
    Lives,
    MemoryLog,
    alone,
    bits,
    engine,
    models,
    requests,
    run,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_company_order_chunks_and_pauses_change_no_bit(kind, compute):
    model = models(kind)[1 if compute == "fp32" else 2]
    everything = [replace(r, prompt_ids=r.prompt_ids[:25], max_response_tokens=30) for r in requests(12, seed=4)]
    wanted = [alone(model, request) for request in everything]
    variants = [
        (CONFIG, everything),
        (replace(CONFIG, prefill_chunk_tokens=1), everything[::-1]),
        (replace(CONFIG, max_sequences=3, prefill_chunk_tokens=7), random.Random(2).sample(everything, 12)),
        (replace(CONFIG, num_pages=8, max_sequences=12), everything),
        (replace(CONFIG, num_pages=8, max_sequences=12, steps_in_flight=1), everything[::-1]),
        (replace(CONFIG, max_sequences=5, prefill_chunk_tokens=9, steps_in_flight=2), everything),
    ]
    pauses = 0
    for config, order in variants:
        one = engine(model, config)
        for request in order:
            one.add(request)
        finished = run(one)
        assert [bits(finished[request.trajectory_id]) for request in everything] == wanted
        pauses += sum(f.interruptions.kv_restores for f in finished.values())
        assert all(f.interruptions.prefill_rebuilds == 0 for f in finished.values())
    assert pauses > 0


@pytest.mark.parametrize("steps_in_flight", [0, 1])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_group_that_shares_its_prompt_equals_its_members_alone(compute, steps_in_flight):
    """Prompts of less than a page, of whole pages, and of more; some members resumed; too few pages for all."""
    model = models("qwen2")[1 if compute == "fp32" else 2]
    r = random.Random(11)
    everything = []
    for group, length in enumerate((1, 5, 8, 16, 21, 40)):
        prompt = tuple(r.randrange(VOCABULARY) for _ in range(length))
        everything += [Request(f"{group}.{i}", prompt, r.getrandbits(64), r.choice([3, 20, 40])) for i in range(4)]
    wanted = {request.trajectory_id: alone(model, request) for request in everything}
    resumed = []
    for request in everything:
        _, ids, _, _ = wanted[request.trajectory_id]
        cut = r.randint(0, len(ids) - 1) if request.trajectory_id.endswith("2") else 0
        one = engine(model)
        one.add(request)
        done = run(one)[request.trajectory_id]
        logged = ids[:cut], done.logprobs_raw[:cut], done.logprobs_sampled[:cut]
        resumed.append(replace(request, logged_ids=logged[0], logged_raw=logged[1], logged_sampled=logged[2]))
    for num_pages in (200, 14):
        config = replace(CONFIG, max_sequences=20, num_pages=num_pages, steps_in_flight=steps_in_flight)
        one = engine(model, config)
        rows = count_rows(one)
        for request in resumed:
            one.add(request)
        finished = run(one)
        assert {i: bits(f) for i, f in finished.items()} == wanted
        if num_pages == 200 and steps_in_flight == 0:
            # Each prompt once, its last row again for each other member that has no token yet, and every sampled
            # token but the last.
            prompts = sum(len(request.prompt_ids) for request in everything[::4])
            again = sum(not request.logged_ids for request in resumed) - 6
            assert rows() == prompts + again + sum(len(ids) - 1 for _, ids, _, _ in wanted.values())


class FilledUp:
    """In the place of graphs: batches of their sizes, computed as they are."""

    def __init__(self) -> None:
        self.keys: set[tuple] = set()

    def replay(self, batch, forward):
        self.keys.add(batch.key)
        out_3R = forward(torch.from_numpy(batch.integers_X))
        return lambda: out_3R.numpy()[:, : batch.num_results]


@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_filling_up_to_the_sizes_of_graphs_changes_no_bit(monkeypatch, steps_in_flight):
    graphs = FilledUp()
    monkeypatch.setattr("ml.rollout.runner._Graphs", lambda: graphs)
    model = models("qwen3")[2]
    everything = requests(26, seed=12)
    wanted = [alone(model, request) for request in everything]
    config = replace(CONFIG, max_sequences=26, num_pages=250, prefill_chunk_tokens=150, graphs=True)
    one = engine(model, replace(config, steps_in_flight=steps_in_flight))
    for request in everything:
        one.add(request)
    finished = run(one)
    assert [bits(finished[request.trajectory_id]) for request in everything] == wanted
    assert {key[:2] for key in graphs.keys} == {("decode", 16), ("decode", 32), ("chunks", 128), ("chunks", 256)}


def count_rows(one: RolloutEngine):
    """How many rows the model of an engine has computed since."""
    total = 0

    def hook(_, arguments):
        nonlocal total
        total += len(arguments[0])

    one.model.register_forward_pre_hook(hook)
    return lambda: total


@pytest.mark.parametrize("sampling", [SamplingParams(0.8, 10), SamplingParams(1.0, 0, 0.7)], ids=str)
def test_arrival_during_the_run_changes_no_bit(sampling):
    model = models("llama")[2]
    everything = requests(12, seed=5)
    wanted = [alone(model, request, sampling) for request in everything]
    one = engine(model, sampling=sampling)
    r, out, left = random.Random(0), {}, list(everything)
    while left or one.has_work():
        if left and r.random() < 0.4:
            one.add(left.pop())
        if one.has_work():
            out.update({f.trajectory_id: f for f in one.step()})
    assert [bits(out[request.trajectory_id]) for request in everything] == wanted


@pytest.mark.parametrize(("compute", "num_threads"), [("fp32", 1), ("bf16", 1), ("bf16", 2)])
def test_interrupted_at_random_equals_uninterrupted(compute, num_threads):
    """By spilled KV, by KV that is shorter than the log, and from the log alone; KV bytes too."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        model = models("qwen3")[1 if compute == "fp32" else 2]
        # Threads that share a busy machine's cores wait for each other at every product.
        everything = requests(9, seed=6) if num_threads == 1 else requests(5, seed=6)
        wanted = [alone(model, request) for request in everything]
        restores = rebuilds = 0
        for seed in (0, 1, 2) if num_threads == 1 else (0,):
            lives = _run_interrupted(model, everything, random.Random(seed))
            restores, rebuilds = restores + lives.num_restores, rebuilds + lives.num_rebuilds
            assert [bits(lives.finished[request.trajectory_id]) for request in everything] == wanted
        assert restores > 0
        assert rebuilds > 0 or num_threads == 2
    finally:
        torch.set_num_threads(before)


def _run_interrupted(model, everything, r) -> Lives:
    lives = Lives()
    while len(lives.finished) < len(everything):
        config = replace(CONFIG, prefill_chunk_tokens=r.choice([1, 9, 40]), max_sequences=r.choice([2, 9]),
                         steps_in_flight=r.choice([0, 1]))  # fmt: skip
        one = engine(model, config)
        lives.live(one, r.sample(everything, len(everything)), r, kv_share=0.7, steps=(1, 25))
        assert one.live() == {n: len(lives.logged.get(n, [])) for n in one.live()}
        lives.spill(one)
        # A log whose tail was lost knows fewer tokens than the KV covers.
        for name in list(lives.logged):
            if r.random() < 0.3 and name not in lives.finished:
                lives.logged[name] = lives.logged[name][: r.randint(0, len(lives.logged[name]))]
    return lives


def left_finished(one: RolloutEngine) -> None:
    run(one)


def left_in_flight(one: RolloutEngine) -> None:
    """Some trajectories paused, two steps launched and never collected."""
    for _ in range(25):
        one.step()
    assert one.has_work()


def left_by_an_error(one: RolloutEngine) -> None:
    """In the middle of a step, after the device computed NaN everywhere."""
    weight = one.model.head_weight
    kept = weight.detach().clone()
    for _ in range(4):
        one.step()
    try:
        with torch.no_grad():
            weight.fill_(float("nan"))
        with pytest.raises(ContractError, match="position"):
            run(one)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    runner = one._runner
    for state in (runner.k_LPTGC, runner.v_LPTGC):
        state.fill_(float("nan"))
    for state in (runner.tables, runner.keys, runner.last_ids):
        state.fill_(3)


@pytest.mark.parametrize("leave", [left_finished, left_in_flight, left_by_an_error])
def test_an_engine_that_begins_anew_is_a_new_engine(leave):
    """Equal names and prompts, other keys: nothing of the trajectories before can be met."""
    model = models("llama")[2]
    config = replace(CONFIG, max_sequences=6, num_pages=14, prefill_chunk_tokens=9, steps_in_flight=2)
    before = [replace(r, sampling_key=r.sampling_key ^ 1, max_response_tokens=60) for r in requests(10, seed=21)]
    everything = requests(10, seed=21)
    wanted = [alone(model, request) for request in everything]
    one = engine(model, config)
    for request in before:
        one.add(request)
    leave(one)
    log = MemoryLog()
    one.begin(log)
    assert not one.has_work()
    assert one.live() == one.running() == {}
    # A page's last positions are read before they are written, with weight zero, and zero times NaN is NaN.
    assert not one._runner.k_LPTGC.any()
    assert not one._runner.v_LPTGC.any()
    for request in everything:
        one.add(request)
    finished = run(one)
    assert [bits(finished[request.trajectory_id]) for request in everything] == wanted
    assert {name: len(tokens) for name, tokens in log.tokens.items()} == {w[0]: len(w[1]) for w in wanted}


def test_kv_of_an_interrupted_trajectory_equals_the_uninterrupted_ones():
    model = models("llama")[2]
    request = replace(requests(6, seed=7)[5], max_response_tokens=60)
    spilled: list[dict[str, bytes]] = [{}, {}]

    def stop_after(one: RolloutEngine, tokens: int, into: dict[str, bytes]) -> tuple:
        while one.live()["t5"] < tokens:
            assert not one.step()
        one.spill(lambda name, parts: into.update({name: b"".join(parts)}) or True, math.inf)
        log = one.log
        assert isinstance(log, MemoryLog)
        return tuple(zip(*log.tokens["t5"], strict=True))

    straight, first = (engine(model, stop_ids=()) for _ in range(2))
    straight.add(request)
    stop_after(straight, 20, spilled[0])
    first.add(request)
    ids, raw, sampled = stop_after(first, 9, {})
    rebuilt = engine(model, replace(CONFIG, prefill_chunk_tokens=3), stop_ids=())
    for companion in requests(4, seed=8):
        rebuilt.add(replace(companion, max_response_tokens=90))
    rebuilt.add(replace(request, logged_ids=ids, logged_raw=raw, logged_sampled=sampled))
    stop_after(rebuilt, 20, spilled[1])
    assert spilled[0]["t5.kv"] == spilled[1]["t5.kv"]
