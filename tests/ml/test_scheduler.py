"""Scheduling without a model: admission, chunks, pauses; simulated workloads end, whatever their sizes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ml.rollout.pages import pages_for
from ml.rollout.scheduler import Plan, Scheduler, Sequence


def scheduler(max_sequences=4, page_tokens=4, num_pages=20, prefill_tokens=16) -> Scheduler:
    return Scheduler(
        max_sequences=max_sequences, page_tokens=page_tokens, num_pages=num_pages, prefill_tokens=prefill_tokens
    )


def sequence(name: str, prompt: int, response: int = 5, key: bytes | None = None) -> Sequence:
    return Sequence(name, list(range(prompt)), prompt, prompt + response, key)


@dataclass
class Device:
    """Steps end in the order of their launches, up to `in_flight` of them later; each sampled row gives token 7."""

    scheduler: Scheduler
    in_flight: int = 0
    launched: deque[tuple[int, list[Sequence]]] = field(default_factory=deque)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def step(self) -> Plan:
        s = self.scheduler
        self.copies += [a.copied for a in s.admit() if a.copied is not None]
        plan = s.plan()
        if plan:
            sampled = [*plan.decode, *(c.sequence for c in plan.chunks if c.samples)]
            self.launched.append((s.launched(plan), sampled))
        while len(self.launched) > (self.in_flight if plan else 0):
            self.end_step()
        return plan

    def end_step(self) -> None:
        number, sampled = self.launched.popleft()
        self.scheduler.step_ended(number)
        for sequence in sampled:
            sequence.tokens.append(7)
            if len(sequence.tokens) >= sequence.max_tokens:
                self.scheduler.finish(sequence)


def step(s: Scheduler) -> Plan:
    return Device(s).step()


def shape(plan: Plan) -> list[tuple[str, int, int, bool]]:
    decode = [(x.trajectory_id, x.num_kept - 1, 1, True) for x in plan.decode]
    return decode + [(c.sequence.trajectory_id, c.start, c.count, c.samples) for c in plan.chunks]


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
    assert not s.running
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


def test_the_youngest_of_equals_is_paused_and_comes_back():
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
            assert b.num_kept == kept == len(b.tokens) - 1
            assert b.pages == []
            assert list(s.waiting) == [b]
            assert tokens > 2
        if not s.running and not s.waiting:
            break
    assert paused_at is not None
    assert (a.num_pauses, s.num_pauses) == (0, b.num_pauses)
    assert (len(a.tokens), len(b.tokens)) == (10, 6)


def test_the_one_with_least_to_bring_back_is_paused_but_never_the_oldest():
    s = scheduler(page_tokens=4, num_pages=10, prefill_tokens=100)
    device = Device(s)
    for x in (sequence("a", 3, 30), sequence("b", 15, 9), sequence("c", 6, 20), sequence("d", 9, 20)):
        s.add(x)
    paused = []
    while not paused:
        paused = device.step().paused
    assert [p.sequence.trajectory_id for p in paused] == ["c"]
    assert len(paused[0].pages) == pages_for(paused[0].sequence.num_kept, 4)


def test_fits_counts_whole_pages():
    s = scheduler(page_tokens=4, num_pages=3)
    assert s.fits(12)
    assert not s.fits(13)


def test_a_group_computes_its_prompt_once():
    s = scheduler(page_tokens=4, num_pages=40, prefill_tokens=100)
    device = Device(s)
    group = [sequence(name, 10, 3, b"prompt") for name in "abc"]
    for x in (*group, other := sequence("d", 10, 3, b"another")):
        s.add(x)
    # The others of the group wait for the first one's prompt, and let "d" pass.
    assert shape(device.step()) == [("a", 0, 10, True), ("d", 0, 10, True)]
    assert list(s.waiting) == group[1:]
    # They compute the prompt's last row, each for its own sample; "a" goes on.
    assert shape(device.step()) == [("a", 10, 1, True), ("d", 10, 1, True), ("b", 9, 1, True), ("c", 9, 1, True)]
    first, *others = (x.pages for x in group)
    assert [x[:2] for x in others] == [first[:2]] * 2
    assert len({first[2], others[0][2], others[1][2], *other.pages}) == 3 + len(other.pages)
    assert device.copies == [(first[2], others[0][2]), (first[2], others[1][2])]
    while s.running:
        device.step()
    assert s.pool.num_free == 40


def test_a_prompt_of_whole_pages_is_shared_but_for_its_last_row():
    s = scheduler(page_tokens=4, num_pages=40, prefill_tokens=100)
    device = Device(s)
    a, b, c = sequence("a", 8, 3, b"p"), sequence("b", 8, 3, b"p"), sequence("c", 9, 6, b"q")
    c.tokens += [5, 5]
    c.num_tokens = 11
    d = sequence("d", 9, 3, b"q")
    for x in (a, b, c, d):
        s.add(x)
    device.step()
    device.step()
    # Row 7 lies in the second page, so "b" has a copy of that; "d" needs nothing of the page of row 8.
    assert b.pages[0] == a.pages[0]
    assert b.pages[1] != a.pages[1]
    assert d.pages[:2] == c.pages[:2]
    assert d.pages[2] != c.pages[2]
    assert device.copies == [(a.pages[1], b.pages[1])]


def test_a_shared_page_is_free_when_its_last_holder_has_finished():
    s = scheduler(page_tokens=4, num_pages=6, prefill_tokens=100)
    device = Device(s)
    a, b = sequence("a", 9, 1, b"p"), sequence("b", 9, 5, b"p")
    s.add(a)
    s.add(b)
    device.step()
    assert list(s.waiting) == [b]
    assert not s.running  # "a" has its one token, so "b" computes the prompt itself
    device.step()
    assert b.pages
    assert s.pool.num_free == 6 - len(b.pages)


@settings(max_examples=250, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.booleans()), min_size=1, max_size=12),
    max_sequences=st.integers(1, 6),
    page_tokens=st.integers(1, 9),
    spare_pages=st.integers(0, 12),
    prefill_tokens=st.integers(1, 20),
    in_flight=st.integers(0, 2),
)
def test_every_request_finishes_and_only_whole_pages_of_a_prompt_are_shared(
    requests, max_sequences, page_tokens, spare_pages, prefill_tokens, in_flight
):
    largest = max(pages_for(prompt + response - 1, page_tokens) for prompt, response, _ in requests)
    s = scheduler(max_sequences, page_tokens, largest + spare_pages, prefill_tokens)
    device = Device(s, in_flight)
    # Two of one prompt length are of one group, if both may share.
    everything = [
        sequence(str(i), prompt, response, bytes([prompt]) if shares else None)
        for i, (prompt, response, shares) in enumerate(requests)
    ]
    for x in everything:
        s.add(x)
    for _ in range(10_000):
        if not s.running and not s.waiting:
            break
        before = len(device.launched)
        plan = device.step()
        assert plan or before, "a step without rows makes no progress"
        assert sum(c.count for c in plan.chunks) <= prefill_tokens
        assert len(s.running) <= max_sequences
        holders: dict[int, list[Sequence]] = {}
        for x in everything:
            assert len(x.pages) == len(set(x.pages))
            for page in x.pages:
                holders.setdefault(page, []).append(x)
        for page, several in holders.items():
            if len(several) > 1:
                assert len({x.prompt_key for x in several}) == 1
                assert len({x.pages.index(page) for x in several}) == 1
                assert (several[0].pages.index(page) + 1) * page_tokens <= several[0].num_prompt
        assert s.pool.num_free + s.pool.num_resting == s.pool.num_pages - len(holders)
        for x in s.running:
            assert x.num_kept <= len(x.pages) * page_tokens
            assert x.num_kept < x.num_tokens <= x.max_tokens
        alive = [x for x in everything if len(x.tokens) < x.max_tokens]
        assert {id(x) for x in alive} == {id(x) for x in (*s.running, *s.waiting)}
    assert [len(x.tokens) for x in everything] == [prompt + response for prompt, response, _ in requests]
    assert s.pool.num_free == s.pool.num_pages
    assert s.num_pauses == sum(x.num_pauses for x in everything)
