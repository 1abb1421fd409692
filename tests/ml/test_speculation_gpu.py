"""Guesses on a GPU: rows of one sequence beside each other in a graph change no bit, and the guesser's own pay."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ml.rollout.requests import Request
from tests.ml.test_engine_gpu import engine, model, plainly, requests, sampled
from tests.ml.test_speculation import Known
from tests.support.rollout_world import Lives, bits

__all__ = ["model"]

pytestmark = pytest.mark.gpu


@pytest.fixture
def known(model, monkeypatch):
    """(requests, what they give without guesses), guessed with mistakes from now on."""
    everything = requests(20, seed=7)
    wanted = plainly(model, everything)
    made = Known({name: found[1] for name, found in wanted.items()}, 3, rightly=0.9)
    monkeypatch.setattr("ml.rollout.engine.Guesser", made.made)
    yield everything, wanted
    assert made.guessed > 100


def test_guesses_of_any_kind_change_no_bit(model, known):
    everything, wanted = known
    for changes in (
        {"guess_tokens": 15},
        {"guess_tokens": 3, "graphs": False},
        {"guess_tokens": 15, "steps_in_flight": 0, "prefill_chunk_tokens": 50},
        {"guess_tokens": 100, "num_pages": 20},
        {"guess_tokens": 31, "max_sequences": 4},
    ):
        config: dict[str, Any] = changes
        assert sampled(engine(model, **config), everything) == wanted, changes


def test_interrupted_equals_uninterrupted(model, known):
    everything, wanted = known
    lives, r = Lives(), random.Random(5)
    while len(lives.finished) < len(everything):
        one = engine(model, prefill_chunk_tokens=r.choice([70, 8192]), guess_tokens=15)
        lives.live(one, everything, r, kv_share=0.6, steps=(5, 30))
        lives.spill(one)
    assert {i: bits(f) for i, f in lives.finished.items()} == wanted
    assert min(lives.num_restores, lives.num_rebuilds) > 0


def test_the_guesser_itself_changes_no_bit_and_saves_rows_of_time(model):
    """A text that an earlier response foretells, long enough for times to be known."""
    prompt = tuple(range(20))
    plain, guessing = engine(model), engine(model, guess_tokens=15)
    plain.stop_ids = guessing.stop_ids = frozenset()
    wanted = sampled(plain, [Request("a", prompt, 1, 1500)])["a"]
    first = Request("a", prompt, 1, 1500, earlier_responses=(wanted[1],))
    second = Request("b", prompt, 1, 1500, earlier_responses=(wanted[1],))
    steps = []
    for request in (first, second):
        guessing.add(request)
        steps.append(0)
        while guessing.has_work():
            for f in guessing.step():
                assert bits(f)[1:] == wanted[1:]
            steps[-1] += 1
    assert min(steps) < 1000
