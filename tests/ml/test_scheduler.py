"""Scheduling without a model: admission, chunks, pauses; simulated workloads end, whatever their sizes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ml.rollout.pages import pages_for
from ml.rollout.scheduler import Rows, Scheduler, Sequence


def scheduler(max_sequences=4, page_tokens=4, num_pages=20, prefill_tokens=16) -> Scheduler:
    return Scheduler(
        max_sequences=max_sequences, page_tokens=page_tokens, num_pages=num_pages, prefill_tokens=prefill_tokens
    )


def sequence(name: str, prompt: int, response: int = 5) -> Sequence:
    return Sequence(name, list(range(prompt)), prompt, prompt + response)


def step(s: Scheduler) -> list[Rows]:
    """One step; a row that samples gets token 7, and its sequence ends at its limit."""
    s.admit()
    rows = s.plan()
    s.step_ended(rows)
    for row in rows:
        if row.samples:
            row.sequence.tokens.append(7)
            if len(row.sequence.tokens) >= row.sequence.max_tokens:
                s.finish(row.sequence)
    return rows


def shape(rows: list[Rows]) -> list[tuple[str, int, int, bool]]:
    return [(r.sequence.trajectory_id, r.start, r.count, r.samples) for r in rows]


def test_a_long_prompt_is_cut_and_decode_goes_on_beside_it():
    s = scheduler(prefill_tokens=6)
    s.add(sequence("a", 2))
    s.add(sequence("b", 14))
    assert shape(step(s)) == [("a", 0, 2, True), ("b", 0, 4, False)]
    assert shape(step(s)) == [("a", 2, 1, True), ("b", 4, 6, False)]
    assert shape(step(s)) == [("a", 3, 1, True), ("b", 10, 4, True)]
    assert shape(step(s)) == [("a", 4, 1, True), ("b", 14, 1, True)]


def test_one_prompt_token_is_a_decode_row():
    s = scheduler(prefill_tokens=1)
    s.add(sequence("a", 1, 1))
    assert shape(step(s)) == [("a", 0, 1, True)]
    assert s.running == []
    assert s.pool.num_free == 20


def test_first_come_first_served_up_to_max_sequences():
    s = scheduler(max_sequences=2)
    for name in "abc":
        s.add(sequence(name, 3, 2))
    step(s)
    assert [x.trajectory_id for x in s.running] == ["a", "b"]
    step(s)
    step(s)
    assert [x.trajectory_id for x in s.running] == ["c"]


def test_the_youngest_is_paused_and_comes_back():
    s = scheduler(page_tokens=2, num_pages=5)
    a, b = sequence("a", 2, 8), sequence("b", 2, 4)
    s.add(a)
    s.add(b)
    paused_at = None
    for number in range(40):
        kept = b.num_kept
        step(s)
        if paused_at is None and b.num_pauses:
            paused_at, tokens = number, len(b.tokens)
            assert kept > 0
            assert b.num_kept == 0
            assert b.pages == []
            assert list(s.waiting) == [b]
            assert tokens > 2
        if not s.running and not s.waiting:
            break
    assert paused_at is not None
    assert (a.num_pauses, s.num_pauses) == (0, b.num_pauses)
    assert (len(a.tokens), len(b.tokens)) == (10, 6)


def test_fits_counts_whole_pages():
    s = scheduler(page_tokens=4, num_pages=3)
    assert s.fits(12)
    assert not s.fits(13)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12),
    max_sequences=st.integers(1, 6),
    page_tokens=st.integers(1, 9),
    spare_pages=st.integers(0, 12),
    prefill_tokens=st.integers(1, 20),
)
def test_every_request_finishes_and_pages_are_never_shared(
    requests, max_sequences, page_tokens, spare_pages, prefill_tokens
):
    largest = max(pages_for(prompt + response - 1, page_tokens) for prompt, response in requests)
    s = scheduler(max_sequences, page_tokens, largest + spare_pages, prefill_tokens)
    everything = [sequence(str(i), *request) for i, request in enumerate(requests)]
    for one in everything:
        s.add(one)
    for _ in range(5000):
        if not s.running and not s.waiting:
            break
        rows = step(s)
        assert rows, "a step without rows makes no progress"
        assert sum(r.count for r in rows if r.count > 1) <= prefill_tokens
        assert len(s.running) <= max_sequences
        held = [page for x in everything for page in x.pages]
        assert len(held) == len(set(held))
        assert s.pool.num_free == s.pool.num_pages - len(held)
        for x in s.running:
            assert x.num_kept <= len(x.pages) * page_tokens
        alive = [x for x in everything if len(x.tokens) < x.max_tokens]
        assert {id(x) for x in alive} == {id(x) for x in (*s.running, *s.waiting)}
    assert [len(x.tokens) for x in everything] == [sum(request) for request in requests]
    assert s.pool.num_free == s.pool.num_pages
    assert s.num_pauses == sum(x.num_pauses for x in everything)
