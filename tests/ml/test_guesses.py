"""Guesses without a model: where they come from, and how many of them are computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml.rollout.guesses import MOST_SEQUENCES, SIZES, Guesser

KEY = b"prompt"
#: Few ids, so that text repeats itself.
texts = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def places(text: list[int], first: int, gram: list[int]) -> list[int]:
    """Indices from `first` on of the tokens that follow a gram."""
    return [i for i in range(max(first, len(gram)), len(text)) if text[i - len(gram) : i] == gram]


def wanted(tokens: list[int], num_prompt: int, earlier: list[list[int]], most: int) -> list[int] | None:
    """By search: the longest gram first; the last place in the response before the first one in the prompt and in
    earlier responses. Behind its own end a text repeats itself."""
    for size in SIZES:
        gram = tokens[len(tokens) - size :] if size <= len(tokens) else []
        if not gram:
            continue
        if own := places(tokens, num_prompt, gram):
            return read_on(tokens, own[-1], most)
        if prompt := places(tokens[:num_prompt], 0, gram):
            # An earlier response's prompt is its own text, and what follows the prompt there is that response.
            return read_on(tokens, prompt[0], most) if not earlier else (tokens[:num_prompt] + earlier[0])[
                prompt[0] : prompt[0] + most
            ]  # fmt: skip
        for response in earlier:
            whole = tokens[:num_prompt] + response
            if found := places(whole, num_prompt, gram):
                return whole[found[0] : found[0] + most]
    return None


def read_on(tokens: list[int], i: int, most: int) -> list[int]:
    whole = list(tokens)
    for j in range(i, i + most):
        whole.append(whole[j])
    return whole[len(tokens) :]


@settings(max_examples=100, deadline=None)
@given(texts, texts, st.lists(texts, max_size=3), st.integers(1, 20))
def test_a_guess_is_what_followed_the_same_tokens_before(prompt, response, earlier, most):
    tokens = list(prompt)
    guesser = Guesser(most, ahead=False)
    guesser.add("a", KEY, tokens, len(prompt), earlier)
    text = guesser._texts["a"]
    for token in [*response, None]:
        found = guesser._look(text)
        assert (found.ids if found else None) == wanted(tokens, len(prompt), earlier, most)
        if found:
            assert len(found.shares) == len(found.ids)
            assert sorted(found.shares, reverse=True) == found.shares
        if token is not None:
            tokens.append(token)


def test_other_samples_of_the_prompt_are_read_while_they_grow_and_after_their_end():
    guesser = Guesser(4, ahead=False)
    prompt, a, b = [1, 2], [1, 2], [1, 2]
    guesser.add("a", KEY, a, 2)
    guesser.add("b", KEY, b, 2)
    assert guesser._look(guesser._texts["b"]) is None
    a += [3, 4, 5]
    found = guesser._look(guesser._texts["b"])
    assert found is not None
    assert found.ids == [3, 4, 5]
    guesser.remove("a")
    found = guesser._look(guesser._texts["b"])
    assert found is not None
    assert found.ids == [3, 4, 5]
    other = list(prompt)
    guesser.add("c", b"another prompt", other, 2)
    assert guesser._look(guesser._texts["c"]) is None
    guesser.remove("b")
    again = list(prompt)
    guesser.add("d", KEY, again, 2)  # nobody kept the texts of a prompt that is done
    assert guesser._look(guesser._texts["d"]) is None


def test_a_long_text_is_read_bit_by_bit():
    guesser = Guesser(3, ahead=False)
    tokens = [0, 1, *range(2, 5000), 0, 1]
    guesser.add("a", KEY, tokens, 1)
    text = guesser._texts["a"]
    for _ in range(6):
        found = guesser._look(text)
    assert found is not None
    assert found.ids == [2, 3, 4]
    assert text.own_done == len(tokens)


# --- how many are computed: a device of known times


@dataclass
class Device:
    """Steps of a guesser's choice. seconds(rows, waits): of one step; waits: nothing ran while it was planned."""

    seconds: Callable[[int, bool], float]
    ahead: bool = False
    most: int = 15
    now: float = 0.0
    rows: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        self.guesser = Guesser(self.most, ahead=self.ahead, clock=lambda: self.now)

    def run(self, responses: dict[str, list[int]], prompt: int = 2, earlier: tuple[list[int], ...] = ()) -> float:
        """How much faster than without guesses all responses are done. A step in flight is behind the tokens known."""
        live = {name: response[:prompt] for name, response in responses.items()}
        for name, tokens in live.items():
            self.guesser.add(name, name.encode(), tokens, prompt, earlier)
        plain, started, running = 0.0, self.now, 0
        for count in range(max(len(r) for r in responses.values()) - prompt):
            rows = sum(len(r) - prompt > count for r in responses.values())
            plain += self.seconds(rows, not self.ahead)
        while live:
            names = list(live)
            waits = self.guesser.holds_back(names) or not self.ahead
            if waits and running:
                running = 0  # the step in flight ends, and its tokens are known
                self.append(dict.fromkeys(names, 1), responses, live)
                names = list(live)
                if not names:
                    break
            guesses = self.guesser.guesses(names) if waits else [[] for _ in names]
            assert all(len(ids) <= self.most for ids in guesses)
            rows = len(names) + sum(map(len, guesses))
            self.guesser.launching(rows, running, disturbed=False)
            self.now += self.seconds(rows, waits)
            self.rows, self.steps = self.rows + rows, self.steps + 1
            if not waits and not running:
                running = 1
                continue
            counts = {}
            for name, ids in zip(names, guesses, strict=True):
                known = len(live[name])
                right = responses[name][known : known + len(ids)]
                counts[name] = 1 + next((j for j, (a, b) in enumerate(zip(ids, right, strict=False)) if a != b),
                                        len(right))  # fmt: skip
            self.append(counts, responses, live)
        return plain / (self.now - started)

    def append(self, counts: dict[str, int], responses: dict[str, list[int]], live: dict[str, list[int]]) -> None:
        for name, count in counts.items():
            live[name] += responses[name][len(live[name]) : len(live[name]) + count]
            if len(live[name]) == len(responses[name]):
                del live[name]
                self.guesser.remove(name)


def flat(rows: int, waits: bool) -> float:
    """Weights are read once for up to 64 rows; a step that is waited for takes 0.2 more."""
    return max(1.0, rows / 64) + 0.2 * waits


def noise(count: int, length: int, ids: int = 50_000) -> dict[str, list[int]]:
    r = random.Random(count)
    return {f"t{i}": [r.randrange(ids) for _ in range(length)] for i in range(count)}


def periods(count: int, length: int, period: int = 60) -> dict[str, list[int]]:
    return {name: (text * (length // period + 1))[:length] for name, text in noise(count, period).items()}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("count", [1, 4, 20])
def test_text_that_repeats_is_guessed_and_text_that_does_not_is_left(ahead, count):
    assert Device(flat, ahead).run(periods(count, 2000)) > (1.8 if count > 4 else 4)
    device = Device(flat, ahead)
    assert device.run(noise(count, 2000)) >= 0.97
    assert device.rows == pytest.approx(count * 1998, rel=0.01)


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_that_cost_as_much_as_steps_are_not_taken(ahead):
    device = Device(lambda rows, waits: rows + 0.1 * waits, ahead)
    assert device.run(periods(4, 3000)) >= 0.97
    assert device.rows <= 4 * 3000 * 1.03


def test_no_step_waits_where_that_costs_more_than_guesses_win():
    device = Device(lambda rows, waits: 1.0 + 20.0 * waits, ahead=True)
    assert device.run(periods(4, 4000)) >= 0.9


def test_guesses_stop_when_text_stops_repeating_and_begin_again():
    r = random.Random(3)
    repeating, fresh = periods(1, 1500)["t0"], [r.randrange(50_000) for _ in range(1500)]
    device = Device(flat, ahead=True)
    alone = Device(flat, ahead=True).run({"t0": repeating})
    both = device.run({"t0": repeating + fresh + repeating})
    # Thirds of 1 / alone, 1 and 1 / alone.
    assert 1 / both <= (2 / alone + 1) / 3 * 1.15
    assert device.guesser._gain > 1.0 or not device.guesser._waits


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 20, 50_000]), st.booleans(), st.floats(0.0, 1.0), st.floats(0, 0.5))
def test_on_text_of_any_kind_little_is_lost(seed, ids, ahead, row_cost, wait_cost):
    r = random.Random(seed)
    device = Device(lambda rows, waits: 1.0 + row_cost * rows + wait_cost * waits, ahead)
    responses = {f"t{i}": [r.randrange(ids) for _ in range(2000)] for i in range(3)}
    assert device.run(responses) >= 0.95


def test_an_earlier_response_is_guessed_from_the_first_token():
    response = noise(1, 400)["t0"]
    device = Device(flat)
    device.run(periods(1, 600))  # that guesses hold is known from other text
    steps = device.steps
    device.run({"t0": response}, earlier=(response[2:],))
    assert device.steps - steps < 60


def test_a_compiled_step_is_not_taken_for_what_such_steps_cost():
    slow = {16: 1, 32: 1}

    def seconds(rows: int, waits: bool) -> float:
        size = 1 << (rows - 1).bit_length()
        slow[size] = slow.get(size, 0) - 1
        return 100.0 if slow[size] == 0 else 1.0

    device = Device(seconds)
    device.run(periods(1, 3000))
    assert device.steps < 500


def test_many_sequences_are_not_looked_at():
    guesser = Guesser(4, ahead=True)
    names = [f"t{i}" for i in range(MOST_SEQUENCES + 1)]
    tokens = {name: [1, 2, 1, 2, 1, 2] for name in names}
    for name in names:
        guesser.add(name, name.encode(), tokens[name], 2)
    assert guesser.guesses(names) == [[] for _ in names]
    assert not guesser.holds_back(names)
    assert all(text.own_done == 2 for text in guesser._texts.values())
    assert guesser.guesses([]) == []


def test_what_is_forgotten_and_what_is_not():
    device = Device(flat)
    device.run(periods(1, 500))
    shares = {kind: list(curve.shares) for kind, curve in device.guesser._all_curves.items()}
    device.guesser.add("x", KEY, [1, 2, 1, 2], 2)
    device.guesser.clear()
    assert device.guesser._texts == device.guesser._groups == {}
    assert shares == {kind: curve.shares for kind, curve in device.guesser._all_curves.items()}
    assert device.guesser._times.seconds(1, True) is not None
    with pytest.raises(ValueError, match="guesses of 0"):
        Guesser(0, ahead=False)
