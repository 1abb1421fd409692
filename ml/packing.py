"""Which trajectories share a pack, and where each pack runs: a pure function of lengths and teachers.

Invariants: every item is in exactly one pack; no pack holds more tokens than its budget; nothing is cut. Packs are
ordered so that a pack's teachers all come at or before the next pack's, so each rank, walking its packs in order,
meets every teacher once; a pack may straddle the border between teachers. Slots are virtual ranks: of S, pack p runs
in slot p mod S as micro-batch p div S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.errors import ContractError

_WORD_BITS = 10
_WORD = 1 << _WORD_BITS


@dataclass(frozen=True)
class Placement:
    """Where one item went. offset: first token inside the pack."""

    item: int
    pack_id: int
    rank_slot: int
    micro_batch: int
    offset: int


def pack(lengths: Sequence[int], capacity_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: item indices of each pack, in the order of packing; equal lengths keep their order.

    Any two packs together hold more than the capacity. Raises ContractError for a length below one or above
    capacity_tokens, naming the item. O(N log N) to sort, then a step of constant time an item.
    """
    bins = _Bins(capacity_tokens)
    bins.fill(range(len(lengths)), lengths)
    return bins.items


def place(
    teacher_indices: Sequence[int], lengths: Sequence[int], *, capacity_tokens: int, slots: int
) -> list[Placement]:
    """Pack the items of one mini-batch in teacher order and give each pack its slot; in order of (pack, offset).

    Of each teacher's packs the emptiest is last and is offered to the next teacher's items, so that teachers with few
    items share packs. Items enter in (teacher, falling length, position) order, so equal lengths keep their order.
    """
    if slots < 1:
        raise ContractError("dispatch.slots", expected="at least 1", found=str(slots))
    by_teacher: dict[int, list[int]] = {}
    for item, teacher_index in enumerate(teacher_indices):
        by_teacher.setdefault(teacher_index, []).append(item)
    packs: list[list[int]] = []
    for teacher_index in sorted(by_teacher):
        bins = _Bins(capacity_tokens)
        if packs:
            # The one pack that both teachers may share: it stays in front of everything that is opened now.
            bins.open(packs.pop(), lengths)
            shared = 1
        else:
            shared = 0
        bins.fill(by_teacher[teacher_index], lengths)
        emptiest = max(range(shared, len(bins.items)), key=bins.remaining.__getitem__, default=None)
        if emptiest is not None:
            bins.items.append(bins.items.pop(emptiest))
        packs += bins.items
    placements = []
    for pack_id, items in enumerate(packs):
        offset = 0
        for item in items:
            placements.append(Placement(item, pack_id, pack_id % slots, pack_id // slots, offset))
            offset += lengths[item]
    return placements


class _Bins:
    """Open bins, found by the room they have left.

    A bitmap in two levels holds the distinct amounts of room: `_words[r // 1024]` has bit r % 1024 set when some bin
    has room r, and `_summary` has bit w set when word w is not zero. The smallest room of at least n is two
    find-first-set steps; a tree over capacities would have to be sized to the next power of two, and rebuilt for each
    mini-batch.
    """

    def __init__(self, capacity: int) -> None:
        self.items: list[list[int]] = []
        self.remaining: list[int] = []
        self._capacity = capacity
        self._by_room: dict[int, list[int]] = {}
        self._words: dict[int, int] = {}
        self._summary = 0

    def open(self, items: list[int], lengths: Sequence[int]) -> None:
        """Start with a bin that already holds these items."""
        self.items.append(items)
        self.remaining.append(self._capacity - sum(lengths[i] for i in items))
        self._offer(len(self.items) - 1)

    def fill(self, items: Sequence[int], lengths: Sequence[int]) -> None:
        for item in sorted(items, key=lambda i: -lengths[i]):
            length = lengths[item]
            if not 1 <= length <= self._capacity:
                raise ContractError(
                    f"item {item}", expected=f"1 to {self._capacity} tokens, the budget of a pack",
                    found=f"{length} tokens",
                )  # fmt: skip
            index = self._take(length)
            if index is None:
                index = len(self.items)
                self.items.append([])
                self.remaining.append(self._capacity)
            self.items[index].append(item)
            self.remaining[index] -= length
            self._offer(index)

    def _offer(self, index: int) -> None:
        room = self.remaining[index]
        waiting = self._by_room.setdefault(room, [])
        waiting.append(index)
        if len(waiting) == 1:
            word = room >> _WORD_BITS
            self._words[word] = self._words.get(word, 0) | 1 << (room % _WORD)
            self._summary |= 1 << word

    def _take(self, length: int) -> int | None:
        """Remove and return a bin with the least room that is enough, or None."""
        word = length >> _WORD_BITS
        bits = self._words.get(word, 0) >> (length % _WORD)
        if bits:
            room = length + _lowest_bit(bits)
        else:
            later = self._summary >> (word + 1)
            if not later:
                return None
            word += 1 + _lowest_bit(later)
            room = (word << _WORD_BITS) + _lowest_bit(self._words[word])
        waiting = self._by_room[room]
        index = waiting.pop()
        if not waiting:
            del self._by_room[room]
            self._words[word] &= ~(1 << (room % _WORD))
            if not self._words[word]:
                self._summary &= ~(1 << word)
        return index


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
