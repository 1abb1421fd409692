"""Packing against its definition: brute force for the best fit, plain first-fit for density, sets for coverage."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml.packing import pack, place
from schemas.errors import ContractError

CAPACITIES = [1, 2, 3, 7, 8, 9, 97, 1023, 1024, 1025, 4095, 4096, 4097, 8191, 65537, (1 << 20) + 1]


@st.composite
def lengths_and_capacity(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.sampled_from(CAPACITIES) | st.integers(1, 5000))
    small = st.integers(1, max(1, capacity // 10))
    return draw(st.lists(small | st.integers(1, capacity), max_size=60)), capacity


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Room left in each bin, by looking at every bin for every item."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


def first_fit(lengths: list[int], capacity: int) -> int:
    rooms: list[int] = []
    for length in lengths:
        for index, room in enumerate(rooms):
            if room >= length:
                rooms[index] -= length
                break
        else:
            rooms.append(capacity - length)
    return len(rooms)


@given(lengths_and_capacity())
def test_pack_is_best_fit_decreasing(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    packs = pack(lengths, capacity)
    assert sorted(item for items in packs for item in items) == list(range(len(lengths)))
    assert sorted(capacity - sum(lengths[i] for i in items) for items in packs) == best_fit_decreasing(
        lengths, capacity
    )


@given(lengths_and_capacity())
def test_any_two_packs_hold_more_than_one_could(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    fills = sorted(sum(lengths[i] for i in items) for items in pack(lengths, capacity))
    assert all(fill <= capacity for fill in fills)
    assert len(fills) < 2 or fills[0] + fills[1] > capacity


@pytest.mark.parametrize("capacity", [2047, 2048, 2049, 1 << 20])
def test_fewer_packs_than_first_fit(capacity: int) -> None:
    lengths = [min(capacity, max(1, int(random.Random(i).lognormvariate(6, 1)))) for i in range(2000)]
    num_packs = len(pack(lengths, capacity))
    assert num_packs <= first_fit(lengths, capacity)
    assert num_packs <= -(-sum(lengths) // capacity) + 1


def test_edges() -> None:
    assert pack([], 10) == []
    assert pack([10], 10) == [[0]]
    assert pack([3, 3, 3, 3], 3) == [[0], [1], [2], [3]]
    assert place([], [], capacity_tokens=10, slots=3) == []


@pytest.mark.parametrize(("lengths", "item"), [([4, 11], "item 1"), ([0], "item 0"), ([5, -1], "item 1")])
def test_a_length_that_cannot_be_packed_is_named(lengths: list[int], item: str) -> None:
    with pytest.raises(ContractError, match=item):
        pack(lengths, 10)
    with pytest.raises(ContractError, match=item):
        place([0] * len(lengths), lengths, capacity_tokens=10, slots=1)


def test_slots_below_one_are_refused() -> None:
    with pytest.raises(ContractError, match="slots"):
        place([0], [1], capacity_tokens=1, slots=0)


@given(lengths_and_capacity(), st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_placement(case: tuple[list[int], int], num_teachers: int, slots: int, rng: random.Random) -> None:
    lengths, capacity = case
    teachers = [rng.randrange(num_teachers) for _ in lengths]
    placements = place(teachers, lengths, capacity_tokens=capacity, slots=slots)
    assert sorted(p.item for p in placements) == list(range(len(lengths)))

    packs: dict[int, list] = defaultdict(list)
    for placed in placements:
        packs[placed.pack_id].append(placed)
        assert (placed.rank_slot, placed.micro_batch) == (placed.pack_id % slots, placed.pack_id // slots)
    assert sorted(packs) == list(range(len(packs)))

    walked = []
    for pack_id in sorted(packs):
        end = 0
        for placed in sorted(packs[pack_id], key=lambda p: p.offset):
            assert placed.offset == end
            end += lengths[placed.item]
            walked.append(teachers[placed.item])
        assert end <= capacity
    assert walked == sorted(walked), "a walk over packs and offsets meets a teacher twice"

    for slot in range(slots):
        micro_batches = sorted({p.micro_batch for p in placements if p.rank_slot == slot})
        assert micro_batches == list(range(len(micro_batches))), "an empty micro-batch lies between full ones"


def test_teachers_with_few_items_share_a_pack() -> None:
    placements = place([2, 0, 1, 0], [10, 10, 10, 10], capacity_tokens=40, slots=2)
    assert {p.pack_id for p in placements} == {0}
    assert [p.item for p in placements] == [1, 3, 2, 0]


def test_straddling_costs_little_against_packing_all_teachers_together() -> None:
    rng = random.Random(5)
    lengths = [min(2048, max(1, int(rng.lognormvariate(5.5, 0.8)))) for _ in range(1000)]
    teachers = [rng.randrange(12) for _ in lengths]
    num_packs = 1 + max(p.pack_id for p in place(teachers, lengths, capacity_tokens=2048, slots=2))
    apart = sum(len(pack([n for n, u in zip(lengths, teachers, strict=True) if u == t], 2048)) for t in range(12))
    together = len(pack(lengths, 2048))
    assert together <= num_packs < apart


def test_order_of_equal_lengths_is_that_of_the_input() -> None:
    assert [p.item for p in place([0, 0, 0], [5, 5, 5], capacity_tokens=20, slots=1)] == [0, 1, 2]
