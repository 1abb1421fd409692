"""Pages of the KV cache: one holder each, reused only after the last step that names them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml.rollout.pages import PagePool, pages_for


def test_pages_for():
    assert [pages_for(n, 16) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def test_nothing_is_taken_when_too_few_are_free():
    pool = PagePool(3)
    assert pool.take(4) is None
    assert pool.num_free == 3
    assert sorted(pool.take(3) or []) == [0, 1, 2]
    assert pool.take(1) is None
    assert pool.take(0) == []


def test_a_page_rests_until_its_last_step_has_ended():
    pool = PagePool(1)
    page = pool.take(1) or []
    assert page == [0]
    pool.give_back(page, last_step=5)
    pool.step_ended(4)
    assert pool.take(1) is None
    pool.step_ended(5)
    assert pool.take(1) == [0]


def test_giving_back_twice_is_refused():
    pool = PagePool(2)
    pages = pool.take(2) or []
    pool.give_back(pages[:1], 0)
    with pytest.raises(ValueError, match="more often"):
        pool.give_back(pages[:1], 0)


def test_a_shared_page_is_held_until_its_last_holder_gives_it_back():
    pool = PagePool(2)
    pages = pool.take(2) or []
    pool.share(pages[:1])
    pool.give_back(pages, 3)
    assert (pool.num_free, pool.num_resting) == (0, 1)
    pool.step_ended(3)
    assert pool.take(2) is None
    pool.give_back(pages[:1], 4)
    pool.step_ended(4)
    assert sorted(pool.take(2) or []) == [0, 1]


def test_sharing_a_page_that_nobody_holds_is_refused():
    with pytest.raises(ValueError, match="nobody"):
        PagePool(2).share([1])


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "step"]), st.integers(0, 6)), max_size=60))
def test_no_page_has_two_holders_and_none_is_lost(moves):
    pool = PagePool(10)
    held: list[list[int]] = []
    resting: list[tuple[int, list[int]]] = []
    step = 0
    for move, amount in moves:
        if move == "take":
            pages = pool.take(amount)
            free = 10 - sum(map(len, held)) - sum(len(p) for _, p in resting)
            assert (pages is None) == (amount > free)
            if pages:
                held.append(pages)
        elif move == "give" and held:
            pages = held.pop(amount % len(held))
            pool.give_back(pages, step + 1)
            resting.append((step + 1, pages))
        elif move == "step":
            step += 1
            pool.step_ended(step)
            resting = [(last, pages) for last, pages in resting if last > step]
        taken = [page for pages in held for page in pages] + [page for _, pages in resting for page in pages]
        assert len(taken) == len(set(taken))
        assert pool.num_free == 10 - len(taken)
