"""Which rows each engine step computes: admission, chunked prefill beside decode, pausing when pages run out.

Sequences run in order of admission. Decode rows always go; prefill rows share a budget of tokens a step. When the
oldest sequences need pages that are not there, the youngest is paused: its pages go back, and it waits at the head
of the queue until its KV can be rebuilt from its tokens. Nothing is ever dropped.
Invariant: a sequence that fits the cache alone finishes, since the oldest one can always take every page.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ml.rollout.pages import PagePool, pages_for


@dataclass(eq=False)
class Sequence:
    """One trajectory in flight. tokens: prompt and response ids; num_kept: positions whose KV the cache holds."""

    trajectory_id: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    num_kept: int = 0
    pages: list[int] = field(default_factory=list)
    num_pauses: int = 0

    @property
    def num_response(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence in one step: positions start..start+count-1. samples: the last row's state is sampled."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


class Scheduler:
    """num_kept of a sequence is advanced by `step_ended`; tokens are appended by the caller."""

    def __init__(self, *, max_sequences: int, page_tokens: int, num_pages: int, prefill_tokens: int) -> None:
        self.max_sequences, self.page_tokens, self.prefill_tokens = max_sequences, page_tokens, prefill_tokens
        self.pool = PagePool(num_pages)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_pauses = 0
        self._step = 0

    def fits(self, max_tokens: int) -> bool:
        """Whether a sequence of max_tokens tokens can be held by the whole cache."""
        return pages_for(max_tokens, self.page_tokens) <= self.pool.num_pages

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into the cache, first come first served; returns them with their pages.

        A sequence gets pages for all of its tokens at once. Beside running ones, it is admitted only if each of
        them could still grow by a page, so that a newcomer is not paused at once.
        """
        admitted = []
        while self.waiting and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            needed = pages_for(len(sequence.tokens), self.page_tokens)
            if self.running and self.pool.num_free < needed + len(self.running):
                break
            pages = self.pool.take(needed)
            if pages is None:
                break
            sequence.pages = pages
            self.running.append(self.waiting.popleft())
            admitted.append(sequence)
        return admitted

    def plan(self) -> list[Rows]:
        """Rows of the next step, in order of admission; pauses the youngest sequences if pages are missing."""
        budget = self.prefill_tokens
        rows: list[Rows] = []
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            missing = len(sequence.tokens) - sequence.num_kept
            count = missing if missing == 1 else min(missing, budget)
            if count == 0:
                index += 1
                continue
            if not self._grow(sequence, sequence.num_kept + count):
                if self.running[-1] is not sequence:
                    self._pause(self.running[-1])
                    continue
                self._pause(sequence)
                break
            if missing > 1:
                budget -= count
            rows.append(Rows(sequence, sequence.num_kept, count, samples=count == missing))
            index += 1
        return rows

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        more = pages_for(num_tokens, self.page_tokens) - len(sequence.pages)
        if more <= 0:
            return True
        pages = self.pool.take(more)
        if pages is None:
            return False
        sequence.pages += pages
        return True

    def _pause(self, sequence: Sequence) -> None:
        self.finish(sequence)
        sequence.num_kept = 0
        sequence.num_pauses += 1
        self.num_pauses += 1
        self.waiting.appendleft(sequence)

    def step_ended(self, rows: list[Rows]) -> None:
        """The step that computed `rows` has ended: their positions' KV is kept from now on."""
        self._step += 1
        for row in rows:
            row.sequence.num_kept = row.start + row.count
        self.pool.step_ended(self._step)

    def finish(self, sequence: Sequence) -> None:
        """Take a finished sequence out and give its pages back."""
        self.running.remove(sequence)
        # No step is in flight between step_ended and the next plan, so the last one that names these pages has ended.
        self.pool.give_back(sequence.pages, self._step)
        self.pool.step_ended(self._step)
        sequence.pages = []
