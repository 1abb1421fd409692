"""Which rows each engine step computes: admission, chunked prefill beside decode, pausing when pages run out.

Sequences run in order of admission. Decode rows always go; prefill rows share a budget of tokens a step. A sequence
whose prompt a running one has in the cache takes it from there. When sequences need pages that are not there, the one
is paused whose KV is least to bring back: its pages go back, and it waits at the head of the queue. Nothing is ever
dropped.

Steps are planned ahead of their results: counts say which tokens will exist once the launched steps have ended, and
no decision looks at a token. Only of a step with guesses they cannot say it, so no step is planned behind it.
Invariant: a sequence that fits the cache alone finishes, since the oldest one is never paused and can always take every
page.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ml.rollout.pages import PagePool, pages_for


@dataclass(eq=False)
class Sequence:
    """One trajectory in flight. tokens: prompt and response ids that are known, which is none of the scheduler's.

    num_tokens: tokens once the launched steps have ended. prompt_key: sequences with one key start with the same
    num_prompt tokens; None shares nothing. num_kept: positions whose KV the launched steps leave in the cache,
    and while it waits, those whose KV comes with it when it is admitted. slot: its number among the running ones, -1
    while it waits.
    """

    trajectory_id: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    prompt_key: bytes | None = None
    num_tokens: int = -1
    num_kept: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    num_pauses: int = 0

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            self.num_tokens = len(self.tokens)


@dataclass(frozen=True)
class Admitted:
    """A sequence that runs from now on. copied: (from, to), a page whose contents it needs in a page of its own."""

    sequence: Sequence
    copied: tuple[int, int] | None


@dataclass(frozen=True)
class Chunk:
    """Prefill rows of one sequence: positions start..start+count-1. samples: the last row's state is sampled."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True)
class Paused:
    """A sequence that waits again. The KV of its num_kept positions is in `pages` until the next launch."""

    sequence: Sequence
    pages: list[int]


@dataclass(frozen=True)
class Plan:
    """Rows of one step. decode: sequences with one row each, at position num_kept, which is sampled.

    paused: sequences that had to make room for them. guessed: ids that are guessed to follow a decode row's, each of
    which has a row at the next position, which is sampled too.
    """

    decode: list[Sequence]
    chunks: list[Chunk]
    paused: list[Paused]
    guessed: dict[Sequence, list[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)


class Scheduler:
    """Between `plan` and `launched` nothing else is called; tokens are appended to sequences by the caller."""

    def __init__(self, *, max_sequences: int, page_tokens: int, num_pages: int, prefill_tokens: int) -> None:
        self.page_tokens, self.prefill_tokens = page_tokens, prefill_tokens
        self.pool = PagePool(num_pages)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # in order of admission
        self.num_pauses = 0
        self._slots = deque(range(max_sequences))
        self._prompts: dict[bytes, list[Sequence]] = {}
        self._launched = self._ended = 0

    def fits(self, max_tokens: int) -> bool:
        """Whether a sequence of max_tokens tokens can be held by the whole cache."""
        return pages_for(max_tokens, self.page_tokens) <= self.pool.num_pages

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Admitted]:
        """Move waiting sequences into the cache, first come first served; returns them with their pages.

        A sequence gets pages for all of its tokens at once. Beside running ones, it is admitted only if each of
        them could still grow by a page, so that a newcomer is not paused at once. A sequence whose prompt is being
        computed by another waits for that, and lets others pass.
        """
        admitted, passed = [], []
        while self.waiting and self._slots:
            sequence = self.waiting.popleft()
            source = None
            if sequence.prompt_key is not None and not sequence.num_kept:
                source = next(iter(self._prompts.get(sequence.prompt_key, ())), None)
            shared = min(sequence.num_prompt, sequence.num_tokens - 1) if source is not None else 0
            if source is not None and source.num_kept < shared:
                passed.append(sequence)
                continue
            num_whole = shared // self.page_tokens
            needed = pages_for(sequence.num_tokens, self.page_tokens) - num_whole
            crowded = self.running and self.pool.num_free < needed + len(self.running)
            own = None if crowded else self.pool.take(needed)
            if own is None:
                self.waiting.appendleft(sequence)
                break
            copied = None
            if source is not None:
                self.pool.share(source.pages[:num_whole])
                sequence.num_kept = shared
                if shared % self.page_tokens:
                    copied = source.pages[num_whole], own[0]
                own = source.pages[:num_whole] + own
            sequence.pages, sequence.slot = own, self._slots.popleft()
            self.running[sequence] = None
            if sequence.prompt_key is not None:
                self._prompts.setdefault(sequence.prompt_key, []).append(sequence)
            admitted.append(Admitted(sequence, copied))
        self.waiting.extendleft(reversed(passed))
        return admitted

    def plan(self) -> Plan:
        """Rows of the next step, in order of admission; pauses sequences if pages are missing.

        Empty when nothing can run before launched steps have ended, or nothing is left to run.
        """
        paused = self._grow()
        budget, page_tokens = self.prefill_tokens, self.page_tokens
        decode, chunks = [], []
        for sequence in self.running:
            kept = sequence.num_kept
            missing = sequence.num_tokens - kept
            if sequence.num_tokens >= sequence.max_tokens or kept >= len(sequence.pages) * page_tokens:
                continue  # its last token is on its way, or its next page
            if missing == 1:
                decode.append(sequence)
            elif budget:
                count = min(missing, budget)
                budget -= count
                chunks.append(Chunk(sequence, kept, count, samples=count == missing))
        return Plan(decode, chunks, paused)

    def _grow(self) -> list[Paused]:
        """A page more for each sequence whose next token needs one; only decode does, prefill has its pages."""
        tokens, paused = self.page_tokens, []
        short = [s for s in self.running if s.num_kept >= len(s.pages) * tokens and s.num_tokens < s.max_tokens]
        while short and self.pool.num_free + self.pool.num_resting < len(short) and len(self.running) > 1:
            # Bringing KV back costs a copy of each position, and the youngest of equals has waited least.
            victim = min(list(self.running)[:0:-1], key=lambda s: s.num_kept)
            paused.append(Paused(victim, victim.pages))
            self.finish(victim)
            victim.num_pauses += 1
            self.num_pauses += 1
            self.waiting.appendleft(victim)
            short = [s for s in short if s is not victim]
        for sequence in short:
            pages = self.pool.take(1)
            if pages is None:
                break  # the others' pages rest until the launched steps have ended
            sequence.pages += pages
        return paused

    def decoding(self, most: int) -> list[Sequence]:
        """The running sequences when there are at most so many and each lacks one position, else none."""
        running = list(self.running) if len(self.running) <= most else []
        return running if all(s.num_tokens - s.num_kept == 1 for s in running) else []

    def guess(self, plan: Plan, sequence: Sequence, ids: list[int]) -> None:
        """Give a decode row of `plan` rows for guessed ids behind it, as many of them as can be sampled and have pages.

        Pages are taken for them only while every running sequence could still grow by one. All tokens of the sequence
        are known, and it is planned again only when `verified` said how many of the ids were right.
        """
        ids = ids[: max(0, sequence.max_tokens - 1 - sequence.num_tokens)]
        needed = pages_for(sequence.num_tokens + len(ids), self.page_tokens) - len(sequence.pages)
        extra = max(0, min(needed, self.pool.num_free - len(self.running)))
        sequence.pages += self.pool.take(extra) or []
        ids = ids[: len(sequence.pages) * self.page_tokens - sequence.num_tokens]
        if ids:
            plan.guessed[sequence] = ids

    def verified(self, sequence: Sequence, count: int) -> None:
        """The ended step that had rows for guesses of a sequence gave so many tokens, whose KV is kept up to the last.

        0: what the step gave is dropped. Pages of which nothing is kept go back.
        """
        sequence.num_kept += count
        sequence.num_tokens += count
        num_pages = pages_for(sequence.num_tokens, self.page_tokens)
        self.pool.give_back(sequence.pages[num_pages:], self._launched)
        self.pool.step_ended(self._ended)
        del sequence.pages[num_pages:]

    def launched(self, plan: Plan) -> int:
        """The step of `plan` runs on the device from now on; returns its number."""
        for sequence in plan.decode:
            if sequence not in plan.guessed:
                sequence.num_kept += 1
                sequence.num_tokens += 1
        for chunk in plan.chunks:
            chunk.sequence.num_kept = chunk.start + chunk.count
            chunk.sequence.num_tokens += chunk.samples
        self._launched += 1
        return self._launched

    def step_ended(self, step: int) -> None:
        """Step number `step`, and so each one before it, has ended on the device."""
        self._ended = step
        self.pool.step_ended(step)

    def finish(self, sequence: Sequence) -> None:
        """Take out a sequence that runs, or waits after a pause, and give its pages back."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        del self.running[sequence]
        self._slots.append(sequence.slot)
        sequence.slot = -1
        if sequence.prompt_key is not None:
            holders = self._prompts[sequence.prompt_key]
            holders.remove(sequence)
            if not holders:
                del self._prompts[sequence.prompt_key]
        self.pool.give_back(sequence.pages, self._launched)
        self.pool.step_ended(self._ended)
        sequence.pages = []
