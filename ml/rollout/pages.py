"""Which pages of the KV cache are free, how many sequences hold the others, and when one may be handed out again.

A page is a fixed number of token slots in every layer's cache. The pool hands out page numbers; it never sees the
cache itself.
Invariant: a page is handed out again only when nobody holds it and the last launched step that names it has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PagePool:
    """Pages 0..num_pages-1, handed out oldest freed first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_resting = 0
        self._free = deque(range(num_pages))
        self._holders = [0] * num_pages
        self._resting: deque[tuple[int, list[int]]] = deque()

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now; those whose last step still runs (num_resting) are not among them."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None, and nothing taken, when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each page, which has one already. Raises ValueError otherwise."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} was shared, but nobody holds it")
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int], last_step: int) -> None:
        """Give up one hold on each page; launched steps up to `last_step` may still read or write them.

        last_step never decreases from call to call. Raises ValueError for a page that is not held.
        """
        unheld = []
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} was given back more often than it was taken")
            self._holders[page] -= 1
            if not self._holders[page]:
                unheld.append(page)
        if unheld:
            self._resting.append((last_step, unheld))
            self.num_resting += len(unheld)

    def step_ended(self, step: int) -> None:
        """Step `step`, and so each one before it, has ended on the device."""
        while self._resting and self._resting[0][0] <= step:
            pages = self._resting.popleft()[1]
            self.num_resting -= len(pages)
            self._free.extend(pages)


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold num_tokens positions."""
    return -(-num_tokens // page_tokens)
