"""Guesses beside a step change no bit of what is sampled, logged and spilled, whatever they are and whenever.

The oracle is the engine without guesses. What is guessed is drawn here from the responses that it gave, with mistakes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ml.device import traits
from ml.rollout.engine import RolloutEngine
from ml.rollout.guesses import Guesser
from ml.rollout.pages import pages_for
from ml.rollout.requests import EngineConfig, Finished, Request
from ml.rollout.sampling import SamplingParams
from ml.rollout.scheduler import Scheduler, Sequence
from ml.rollout.spill import decode_kv
from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_recovery import read_folder, recover
from schemas.errors import ContractError
from tests.ml.test_engine_bits import FilledUp, count_rows
from tests.support.rollout_world import (
    CONFIG,
    STOP,
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

GUESSING = replace(CONFIG, guess_tokens=5)


class Known:
    """In the place of a Guesser: it has the responses, and makes mistakes. rightly: how often a token is the right one.

    often: how often a step has guesses.
    """

    def __init__(self, responses: dict[str, tuple[int, ...]], seed: int, rightly: float = 0.8, often: float = 0.9):
        self.responses, self.random, self.rightly, self.often = responses, random.Random(seed), rightly, often
        self.most, self.guessed = 0, 0
        self.clear()

    def made(self, most: int, *, ahead: bool) -> Known:
        self.most = most
        return self

    def clear(self) -> None:
        self.texts: dict[str, tuple[list[int], int]] = {}

    def add(self, name: str, prompt_key: bytes, tokens: list[int], num_prompt: int, earlier: Any) -> None:
        self.texts[name] = tokens, num_prompt

    def remove(self, name: str) -> None:
        del self.texts[name]

    def launching(self, rows: int, in_flight: int, *, disturbed: bool) -> None: ...

    def holds_back(self, names: list[str]) -> bool:
        return bool(names) and self.random.random() < self.often

    def guesses(self, names: list[str]) -> list[list[int]]:
        out = []
        for name in names:
            tokens, num_prompt = self.texts[name]
            # Past the end of the response too, where nothing is right.
            known = len(tokens) - num_prompt
            ids = [*self.responses[name][known:], *[3] * self.most][: self.random.randint(0, self.most)]
            ids = [i if self.random.random() < self.rightly else self.random.randrange(VOCABULARY) for i in ids]
            out.append(ids if self.random.random() < self.often else [])
        self.guessed += sum(map(len, out))
        return out


@pytest.fixture
def guess(monkeypatch) -> Callable[..., Known]:
    """Lets engines that are made from now on guess by a Known."""

    def patch(wanted: dict[str, tuple], seed: int = 0, **chances: float) -> Known:
        known = Known({name: found[1] for name, found in wanted.items()}, seed, **chances)
        monkeypatch.setattr("ml.rollout.engine.Guesser", known.made)
        return known

    return patch


@cache
def world(compute: str = "bf16", count: int = 6, seed: int = 6) -> tuple[Any, list[Request], dict[str, tuple]]:
    """A model, requests, and what they give without guesses."""
    model = models("qwen3")[1 if compute == "fp32" else 2]
    everything = [
        replace(r, prompt_ids=r.prompt_ids[:25], max_response_tokens=min(30, r.max_response_tokens))
        for r in requests(count, seed)
    ]
    return model, everything, {request.trajectory_id: alone(model, request) for request in everything}


def check_log(log: Any, finished: dict[str, Finished]) -> None:
    """Token by token what was handed out, and nothing else."""
    for name, f in finished.items():
        assert log.tokens[name] == list(zip(f.response_ids, f.logprobs_raw, f.logprobs_sampled, strict=True))
        assert log.finishes[name] == (len(f.response_ids), f.finish_reason)
    assert set(log.tokens) == set(finished)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_guesses_of_any_kind_change_no_bit(data):
    model, everything, wanted = world()
    draw = data.draw
    config = replace(
        CONFIG, guess_tokens=draw(st.integers(1, 20)), max_sequences=draw(st.integers(1, 8)),
        num_pages=draw(st.sampled_from([12, 20, 80])), prefill_chunk_tokens=draw(st.sampled_from([1, 7, 100])),
        steps_in_flight=draw(st.integers(0, 2)), graphs=draw(st.booleans()),
    )  # fmt: skip
    known = Known({name: found[1] for name, found in wanted.items()}, draw(st.integers(0, 9999)),
                  draw(st.sampled_from([0.0, 0.8, 1.0])), draw(st.sampled_from([0.3, 1.0])))  # fmt: skip
    log = MemoryLog()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ml.rollout.engine.Guesser", known.made)
        patch.setattr("ml.rollout.runner._Graphs", FilledUp)
        one = engine(model, config, log=log)
        for request in draw(st.permutations(everything)):
            one.add(request)
        finished = run(one)
    assert {i: bits(f) for i, f in finished.items()} == wanted
    check_log(log, finished)
    assert one.live() == {i: len(f.response_ids) for i, f in finished.items()}
    assert one._scheduler.pool.num_free == config.num_pages
    assert not known.texts


@pytest.mark.parametrize("sampling", [SamplingParams(0.8, 10), SamplingParams(1.0, 0, 0.7)], ids=str)
def test_temperature_and_cuts(guess, sampling):
    model, everything, _ = world()
    wanted = {r.trajectory_id: alone(model, r, sampling) for r in everything}
    guess(wanted, rightly=0.9)
    one = engine(model, GUESSING, sampling)
    for request in everything:
        one.add(request)
    assert {i: bits(f) for i, f in run(one).items()} == wanted


def test_right_guesses_save_steps_and_wrong_ones_cost_none(guess):
    model, everything, wanted = world()
    request = everything[3]
    length = len(wanted[request.trajectory_id][1])
    for rightly, steps in ((1.0, 1 + math.ceil((length - 1) / 6)), (0.0, length)):
        known = guess(wanted, rightly=rightly, often=1.0)
        known.random = Most() if rightly else WrongMost()
        one, count = engine(model, GUESSING), 0
        one.add(request)
        rows = count_rows(one)
        while one.has_work():
            one.step()
            count += 1
        assert count == steps
        assert rows() <= len(request.prompt_ids) + steps * 6


class Most(random.Random):
    """As many guesses as there may be."""

    def randint(self, a: int, b: int) -> int:
        return b

    def random(self) -> float:
        return 0.5


class WrongMost(Most):
    def randrange(self, *_: Any) -> int:
        return VOCABULARY - 1


def test_a_guess_of_a_stop_token_ends_the_response_and_nothing_is_kept_behind_it(guess):
    model, everything, wanted = world(count=20, seed=3)
    stopped = {i: w for i, w in wanted.items() if w[3] == "stop"}
    assert stopped
    # Behind the stop token stand more right guesses: what the model would go on with.
    endless = {}
    for request in everything:
        if request.trajectory_id in stopped:
            one = engine(model, stop_ids=())
            one.add(replace(request, max_response_tokens=request.max_response_tokens + 10))
            endless |= {i: bits(f) for i, f in run(one).items()}
    known = guess(endless, rightly=1.0, often=1.0)
    known.random = Most()
    log = MemoryLog()
    one = engine(model, replace(GUESSING, guess_tokens=20), log=log)
    for request in everything:
        if request.trajectory_id in stopped:
            one.add(request)
    finished = run(one)
    assert {i: bits(f) for i, f in finished.items()} == stopped
    assert all(f.response_ids[-1] in STOP for f in finished.values())
    check_log(log, finished)


@pytest.mark.parametrize("max_response_tokens", [1, 2, 3, 7])
def test_guesses_never_pass_the_limit_nor_the_models_context(guess, max_response_tokens):
    model, _, _ = world()
    positions = model.config.max_positions
    prompt = tuple(i % VOCABULARY for i in range(positions + 1 - max_response_tokens))
    request = Request("full", prompt, 5, max_response_tokens)
    wanted = {"full": alone(model, request)}
    known = guess(wanted, rightly=1.0, often=1.0)
    known.random = Most()
    seen: list[int] = []
    model_pre_hook = model.register_forward_pre_hook(lambda _, arguments: seen.append(int(arguments[1].max())))
    config = replace(GUESSING, num_pages=pages_for(positions, CONFIG.page_tokens), guess_tokens=20)
    try:
        one = engine(model, config)
        one.add(request)
        assert {i: bits(f) for i, f in run(one).items()} == wanted
    finally:
        model_pre_hook.remove()
    assert max(seen) <= positions - 1


def test_not_a_number_in_a_row_that_is_not_kept_is_nobodys_error(guess, monkeypatch):
    model, everything, wanted = world()
    request = everything[3]
    guess(wanted, rightly=0.0, often=1.0)
    one = engine(model, GUESSING)
    one.add(request)
    collect = one._runner.collect

    def broken(ticket):
        found = collect(ticket)
        if ticket.guessed:
            found.raw_R[-1:] = math.nan if found.ids_R[0] != ticket.guessed[ticket.sequences[0]][0] else found.raw_R[-1]
        return found

    monkeypatch.setattr(one._runner, "collect", broken)
    assert bits(run(one)["t3"]) == wanted["t3"]
    # In a row that is kept it is one, at its position.
    known = guess(wanted, rightly=1.0, often=1.0)
    known.random = Most()
    two = engine(model, GUESSING)
    two.add(request)
    collect_two = two._runner.collect

    def broken_in_the_third(ticket):
        found = collect_two(ticket)
        if ticket.guessed:
            found.raw_R[2] = math.nan
        return found

    monkeypatch.setattr(two._runner, "collect", broken_in_the_third)
    with pytest.raises(ContractError, match=f"position {len(request.prompt_ids) + 1 + 2}"):
        run(two)


# --- interrupted at any moment


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_interrupted_at_random_equals_uninterrupted(guess, compute, seed):
    """By spilled KV, by KV that is shorter than the log, from the log alone, and with too few pages for all."""
    model, everything, wanted = world(compute)
    known, r, lives = guess(wanted, seed), random.Random(seed), Lives()
    while len(lives.finished) < len(everything):
        config = replace(GUESSING, prefill_chunk_tokens=r.choice([1, 9, 40]), max_sequences=r.choice([2, 9]),
                         steps_in_flight=r.choice([0, 1, 2]), num_pages=r.choice([12, 80]))  # fmt: skip
        one = engine(model, config)
        lives.live(one, r.sample(everything, len(everything)), r, kv_share=0.7, steps=(1, 12))
        assert one.live() == {n: len(lives.logged.get(n, [])) for n in one.live()}
        lives.spill(one)
        for name in list(lives.logged):
            if r.random() < 0.3 and name not in lives.finished:
                lives.logged[name] = lives.logged[name][: r.randint(0, len(lives.logged[name]))]
    assert {i: bits(f) for i, f in lives.finished.items()} == wanted
    assert known.guessed > 0
    assert min(lives.num_restores, lives.num_rebuilds) > 0


@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_kv_of_a_step_with_guesses_ends_where_the_log_does(guess, steps_in_flight):
    """Spilled while rows of wrong guesses lie behind it: the bytes are those of a run without guesses."""
    model, everything, wanted = world()
    request = everything[3]
    plain = engine(model, stop_ids=())
    plain.add(replace(request, max_response_tokens=60))
    while plain.live()["t3"] < 50:
        plain.step()
    want = plain.kept_kv("t3")
    guess(wanted, rightly=0.6, often=1.0)
    for steps in range(2, 9):  # the first one computes the prompt
        one = engine(model, replace(GUESSING, steps_in_flight=steps_in_flight), stop_ids=())
        one.add(replace(request, max_response_tokens=60))
        for _ in range(steps):
            one.step()
        spilled: dict[str, bytes] = {}
        (record,) = one.spill(lambda name, parts, s=spilled: s.update({name: b"".join(parts)}) or True, math.inf)
        log: Any = one.log
        tokens = [*request.prompt_ids, *(token for token, _, _ in log.tokens["t3"])]
        # A step without guesses that is in flight has a known id, and its KV stays.
        assert len(tokens) - 1 <= record.positions <= len(tokens) - 1 + steps_in_flight
        kv = decode_kv(spilled["t3.kv"], "", one.kv_layout, "t3", tokens)
        assert torch.equal(kv.k_MLGC, want.k_MLGC[: kv.positions])
        assert torch.equal(kv.v_MLGC, want.v_MLGC[: kv.positions])


def test_the_real_log_says_the_same_token_by_token(guess, tmp_path):
    model, everything, wanted = world()
    recovered = []
    for index, config in enumerate((CONFIG, GUESSING)):
        guess(wanted, rightly=0.9, often=1.0)
        header = LogHeader("r", 0, 0, 1, "s" * 64)
        with TokenLog(tmp_path / str(index), header, seal_seconds=100.0) as log:
            one = RolloutEngine(model, config, SamplingParams(), STOP, VOCABULARY, log)
            for request in everything:
                one.add(request)
            finished = run(one)
        assert {i: bits(f) for i, f in finished.items()} == wanted
        found = recover(read_folder(tmp_path / str(index)), "log")
        recovered.append({
            t.admit.trajectory_id: (t.admit, t.ids.tobytes(), t.logprobs_raw.tobytes(), t.logprobs_sampled.tobytes(),
                                    t.sampled_mask.tobytes(), t.finish_reason)
            for t in found.trajectories
        })  # fmt: skip
    assert recovered[0] == recovered[1]
    records = [sum(len(data) for _, data in read_folder(tmp_path / str(index))) for index in (0, 1)]
    assert records[1] < records[0]  # fewer steps


def test_nothing_of_a_step_with_guesses_is_shown_before_it_is_durable(guess):
    model, everything, wanted = world()
    known = guess(wanted, rightly=1.0, often=1.0)
    known.random = Most()
    log = MemoryLog(immediate=False)
    one = engine(model, GUESSING, log=log)
    one.add(everything[3])
    for _ in range(3):
        assert one.step() == []
    assert one.live() == {"t3": 0}
    log.acknowledged = 1
    assert one.live() == {"t3": 1}
    log.acknowledged = 2
    assert one.live() == {"t3": 7}


# --- the scheduler's pages, without a model


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pages_of_guesses_come_back_and_pause_nobody(data):
    draw = data.draw
    page_tokens, count = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    sizes = [(draw(st.integers(1, 9)), draw(st.integers(1, 20))) for _ in range(count)]
    least = max(pages_for(prompt + response, page_tokens) for prompt, response in sizes)
    s = Scheduler(max_sequences=3, page_tokens=page_tokens, num_pages=least + draw(st.integers(0, 6)), prefill_tokens=4)
    for n, (prompt, response) in enumerate(sizes):
        s.add(Sequence(str(n), [0] * prompt, prompt, prompt + response))
    for _ in range(400):
        s.admit()
        plan = s.plan()
        if not plan:
            break
        paused = s.num_pauses
        if not plan.chunks:
            for sequence in plan.decode:
                s.guess(plan, sequence, [1] * draw(st.integers(0, 7)))
        assert s.num_pauses == paused
        number = s.launched(plan)
        for sequence, ids in plan.guessed.items():
            assert sequence.num_tokens + len(ids) < sequence.max_tokens
            assert sequence.num_kept + len(ids) < len(sequence.pages) * page_tokens
        s.step_ended(number)
        for sequence in [*plan.decode, *(c.sequence for c in plan.chunks if c.samples)]:
            gained = 1
            if sequence in plan.guessed:
                gained = draw(st.integers(1, 1 + len(plan.guessed[sequence])))
                s.verified(sequence, gained)
            sequence.tokens += [7] * gained
            assert sequence.num_tokens == len(sequence.tokens)
            assert sequence.num_kept == sequence.num_tokens - 1
            assert len(sequence.pages) <= pages_for(sequence.num_tokens, page_tokens)
            if len(sequence.tokens) == sequence.max_tokens:
                s.finish(sequence)
    assert not s.running
    assert not s.waiting
    assert s.pool.num_free == s.pool.num_pages


# --- with the guesser itself


def test_the_engine_guesses_by_itself_what_others_of_a_group_said(monkeypatch):
    """Equal prompts and keys: the second says what the first has said."""
    model, _, _ = world()
    monkeypatch.setattr("ml.rollout.guesses._Times.seconds", lambda self, rows, waits, always=False: 1.0)
    first = Request("a", (1, 2, 3), 77, 80)
    one = engine(model, GUESSING, stop_ids=())
    one.add(first)
    response = run(one)["a"]
    steps = {}
    for name, earlier in (("alone", ()), ("b", (response.response_ids,)), ("c", iter([(5, 6), response.response_ids]))):
        again = replace(first, trajectory_id=name, earlier_responses=earlier)
        one.begin(MemoryLog())
        # That guesses hold is known from elsewhere.
        monkeypatch.setattr("ml.rollout.guesses._LEAST_SHARE", -1.0)
        monkeypatch.setattr("ml.rollout.guesses._LEAST_GAIN", -1.0)
        one.add(again)
        steps[name] = 0
        while one.has_work():
            for f in one.step():
                assert f.response_ids == response.response_ids
                assert bits(f)[2] == bits(response)[2]
            steps[name] += 1
    assert steps["b"] < 40
    assert steps["c"] < 40


def test_an_earlier_response_of_strange_ids_is_refused():
    model, everything, _ = world()
    for ids in ((1, VOCABULARY), (-1,)):
        with pytest.raises(ContractError, match="token ids below 61"):
            engine(model, GUESSING).add(replace(everything[0], earlier_responses=(ids,)))
    engine(model, CONFIG).add(replace(everything[0], earlier_responses=((VOCABULARY,),)))  # never read
    with pytest.raises(ContractError, match="guess_tokens of at least 0"):
        engine(model, replace(CONFIG, guess_tokens=-1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_guesses_only_when_asked(device):
    config = EngineConfig.on(torch.device(device), max_sequences=1, page_tokens=64, num_pages=1)
    assert config.guess_tokens == 0
    most = traits(device).guess_tokens
    assert Guesser(most, ahead=config.steps_in_flight > 0).most == most > 0
