"""Which pages of the KV cache are free, and when a page that was given back may be handed out again.

A page is a fixed number of token slots in every layer's cache. The pool hands out page numbers; it never sees the
cache itself.
Invariant: a page has at most one holder, and is reused only after the last launched step that names it has ended.
"""

from __future__ import annotations

from collections import deque


class PagePool:
    """Pages 0..num_pages-1, handed out oldest freed first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._is_free = [True] * num_pages
        self._resting: deque[tuple[int, list[int]]] = deque()

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now; those whose last step still runs are not among them."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None, and nothing taken, when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def give_back(self, pages: list[int], last_step: int) -> None:
        """Give up pages that launched steps up to `last_step` may still read or write.

        last_step never decreases from call to call. Raises ValueError for a page that is not held.
        """
        for page in pages:
            if self._is_free[page]:
                raise ValueError(f"page {page} was given back twice")
            self._is_free[page] = True
        self._resting.append((last_step, pages))

    def step_ended(self, step: int) -> None:
        """Step `step`, and so each one before it, has ended on the device."""
        while self._resting and self._resting[0][0] <= step:
            self._free.extend(self._resting.popleft()[1])


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold num_tokens positions."""
    return -(-num_tokens // page_tokens)
