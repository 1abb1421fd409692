"""Guesses of what a sequence's next tokens will be, and how many of them are worth a row of the next step.

A guess is the text that followed the same last tokens before: in the sequence itself, in its prompt, in other samples
of that prompt, in responses that the request brought. It costs a row if it is computed with the step, and saves a step
if the sampler draws it; whether it is right never depends on what is decided here.

    add(tokens) -> look: n-grams -> guess -> compared with the tokens that come -> how far guesses hold
    launching -> seconds between launches, by rows -> choose: the rows that give most tokens a second, often none

How far guesses hold is measured by comparing them with the tokens that come anyway, so that text which does not repeat
costs a look on the host and no row. Where steps stay in flight, a guess needs them to end first, since it continues the
last token: `holds_back` asks for that only while it pays.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

#: Last tokens by which text is found again, the most first.
SIZES = (8, 4, 2)
#: With more sequences than this no text is looked at: their rows fill a step, and the host has no time.
MOST_SEQUENCES = 32
#: Tokens that a look adds to an index at most, so that a long text is not read between two steps.
_READ_TOKENS = 1024
#: Where steps stay in flight, text is looked at in one step of so many until guesses pay.
_LOOK_EVERY = 4
#: Guesses must promise so much more tokens a second, to be computed and, higher, to let no step stay in flight.
_LEAST_GAIN, _GAIN_TO_WAIT, _GAIN_TO_GO_ON = 1.03, 1.10, 1.02
#: A guess that holds more rarely is not computed, whatever a row costs.
_LEAST_SHARE = 0.05
#: Times are the least of so many; one is not enough (a step may have compiled kernels or captured a graph), and those
#: of rows that have not occurred for so many launches are measured anew.
_KEPT_TIMES, _KNOWN_TIMES, _TIMES_HOLD = 8, 2, 2000

Gram = tuple[int, ...]


@dataclass
class _Curve:
    """Share of guesses of which the first j + 1 tokens came, for each j: a running mean over about `memory` guesses."""

    shares: list[float]
    memory: int
    count: int = 0

    def weight(self) -> float:
        """Of one guess more."""
        self.count = min(self.count + 1, self.memory)
        return 1 / (self.count + 1)

    def note(self, first: int, end: int, holds: bool, weight: float) -> None:
        """Whether the first j + 1 tokens of a guess came, for j from `first` to before `end`."""
        for j in range(first, end):
            self.shares[j] += weight * (holds - self.shares[j])


@dataclass
class _Pending:
    """A guess that is compared with the tokens that come, from index `start` on; the first `agreed` are as guessed."""

    ids: list[int]
    start: int
    curves: list[tuple[_Curve, float]]
    agreed: int = 0


@dataclass(eq=False)
class _Text:
    """tokens: of a live sequence, to which others append, or of a response that is known whole. done: how many are in
    the index of its group, and in its own."""

    tokens: list[int]
    num_prompt: int
    done: int
    group: _Group | None = None
    own: list[dict[Gram, int]] = field(default_factory=lambda: [{} for _ in SIZES])
    own_done: int = 0
    curves: dict[int, _Curve] = field(default_factory=dict)
    pending: _Pending | None = None


@dataclass(eq=False)
class _Group:
    """Texts that begin with one prompt. places: text and index of the token that followed a gram first."""

    key: bytes
    texts: list[_Text] = field(default_factory=list)
    places: list[dict[Gram, tuple[list[int], int]]] = field(default_factory=lambda: [{} for _ in SIZES])
    num_live: int = 0

    def read(self) -> None:
        """Add what has come; of a text that is alone its prompt, since its response has an index of its own."""
        left = _READ_TOKENS
        for text in self.texts:
            tokens = text.tokens
            end = min(len(tokens) if len(self.texts) > 1 else text.num_prompt, text.done + left)
            for i in range(text.done, end):
                place = tokens, i
                for size, places in zip(SIZES, self.places, strict=True):
                    if i >= size:
                        places.setdefault(tuple(tokens[i - size : i]), place)
            left -= max(0, end - text.done)
            text.done = max(text.done, end)
            if not left:
                return


@dataclass(frozen=True)
class _Found:
    """A guess, and the share of such guesses that hold for each number of tokens, which does not rise."""

    ids: list[int]
    shares: list[float]


class Guesser:
    """most: tokens guessed a sequence and step. ahead: whether steps stay in flight. clock: seconds.

    Raises ValueError for `most` below 1.
    """

    def __init__(self, most: int, *, ahead: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        if most < 1:
            raise ValueError(f"guesses of {most} tokens")
        self.most, self._ahead, self._clock = most, ahead, clock
        self._times = _Times()
        self._all_curves: dict[int, _Curve] = {}
        self._launched: tuple[float, int, int] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget every sequence; how long steps take, and how far guesses hold in general, stays known."""
        self._texts: dict[str, _Text] = {}
        self._groups: dict[bytes, _Group] = {}
        self._waits, self._gain, self._calls = False, 1.0, 0
        self._launched = None

    def add(
        self, name: str, prompt_key: bytes, tokens: list[int], num_prompt: int, earlier: Iterable[Sequence[int]] = ()
    ) -> None:
        """A sequence, whose `tokens` the caller goes on appending to; the first num_prompt are its prompt.

        prompt_key: of the prompt's ids. earlier: responses to the same prompt, token ids each.
        """
        group = self._groups.setdefault(prompt_key, _Group(prompt_key))
        prompt = tokens[:num_prompt]
        first = not group.texts
        for response in earlier:
            # Of the prompt as much as grams reach back, unless nobody has brought it yet.
            text = (prompt if first else prompt[-SIZES[0] :]) + list(response)
            group.texts.append(_Text(text, len(text), 0 if first else min(num_prompt, SIZES[0])))
            first = False
        text = _Text(tokens, num_prompt, 0 if first else num_prompt, group, own_done=num_prompt)
        group.texts.append(text)
        group.num_live += 1
        self._texts[name] = text

    def remove(self, name: str) -> None:
        """A sequence has ended; its text stays for the others of its prompt."""
        text = self._texts.pop(name)
        group = text.group
        assert group is not None
        text.own, text.pending = [], None
        group.num_live -= 1
        if not group.num_live:
            del self._groups[group.key]

    def launching(self, rows: int, in_flight: int, *, disturbed: bool) -> None:
        """A step of so many decode rows is launched next, behind in_flight others.

        disturbed: it has other rows too, or something was copied for it, so that its time and that of the step before
        say nothing.
        """
        now, before = self._clock(), self._launched
        self._times.launches += 1
        if disturbed:
            self._launched = None
            return
        # With another number in flight, what passed is not the time of one step.
        if before is not None and before[2] == in_flight:
            self._times.note(before[1], in_flight == 0, now - before[0])
        self._launched = now, rows, in_flight

    def holds_back(self, names: Sequence[str]) -> bool:
        """Whether the steps in flight should end before the next one is planned, for sequences that each decode."""
        if not self._ahead:
            return False
        if not 0 < len(names) <= MOST_SEQUENCES:
            self._waits, self._gain = False, 1.0
        elif self._waits:
            self._waits = self._gain >= _GAIN_TO_GO_ON
        else:
            self._calls += 1
            if self._calls % _LOOK_EVERY == 0:
                self._choose([self._look(self._texts[name]) for name in names])
                self._waits = self._gain >= _GAIN_TO_WAIT
        return self._waits

    def guesses(self, names: Sequence[str]) -> list[list[int]]:
        """For each of the sequences that a step decodes, all of whose tokens are known, the ids worth a row there."""
        if not 0 < len(names) <= MOST_SEQUENCES:
            return [[] for _ in names]
        found = [self._look(self._texts[name]) for name in names]
        return [f.ids[:n] if f else [] for f, n in zip(found, self._choose(found), strict=True)]

    # --- what follows the last tokens

    def _look(self, text: _Text) -> _Found | None:
        """Compare the guess that is kept with what came, and guess anew."""
        self._compare(text)
        found = self._find(text)
        if found is None:
            return None
        kind, ids = found
        curve = self._curve(text, kind)
        if text.pending is None:
            text.pending = _Pending(ids, len(text.tokens), [(c, c.weight()) for c in (curve, self._all_curves[kind])])
        shares, least = [], 1.0
        for share in curve.shares[: len(ids)]:
            least = min(least, share)
            shares.append(least)
        return _Found(ids, shares)

    def _compare(self, text: _Text) -> None:
        pending = text.pending
        if pending is None:
            return
        ids, before = pending.ids, pending.agreed
        come = text.tokens[pending.start + before : pending.start + len(ids)]
        agreed = before
        for token in come:
            if token != ids[agreed]:
                break
            agreed += 1
        differs = agreed - before < len(come)
        for curve, weight in pending.curves:
            curve.note(before, agreed, True, weight)
            if differs:
                curve.note(agreed, len(ids), False, weight)
        pending.agreed = agreed
        if differs or agreed == len(ids):
            text.pending = None

    def _curve(self, text: _Text, kind: int) -> _Curve:
        """Of guesses of a kind in a text; it starts as all texts' together, which counts as two guesses."""
        if kind not in text.curves:
            together = self._all_curves.setdefault(kind, _Curve([0.0] * self.most, 32))
            text.curves[kind] = _Curve(list(together.shares), 12, min(together.count, 2))
        return text.curves[kind]

    def _find(self, text: _Text) -> tuple[int, list[int]] | None:
        """(kind, ids): by the longest gram; found in the text itself, where it stood last, before anywhere else."""
        tokens, group = text.tokens, text.group
        length = len(tokens)
        end = min(length, text.own_done + _READ_TOKENS)
        for i in range(text.own_done, end):
            for size, places in zip(SIZES, text.own, strict=True):
                if i >= size:
                    places[tuple(tokens[i - size : i])] = i
        text.own_done = end
        assert group is not None
        group.read()
        for number, size in enumerate(SIZES):
            if size > length:
                continue
            gram = tuple(tokens[length - size :])
            i = text.own[number].get(gram)
            if i is not None:
                return 2 * number, self._continued(tokens, i)
            place = group.places[number].get(gram)
            if place is not None and place[1] < len(place[0]):
                ids = self._continued(*place) if place[0] is tokens else place[0][place[1] : place[1] + self.most]
                return 2 * number + 1, ids
        return None

    def _continued(self, tokens: list[int], i: int) -> list[int]:
        """From index i on, and on from what was guessed at the end: what stood there repeats itself."""
        ids = tokens[i : i + self.most]
        period = len(tokens) - i
        while len(ids) < self.most:
            ids.append(ids[len(ids) - period])
        return ids

    # --- how many are worth a row

    def _choose(self, found: Sequence[_Found | None]) -> list[int]:
        """How many ids of each guess to compute: those that promise most tokens a second.

        Notes what the choice promises against a step without guesses, and without waiting for it.
        """
        counts, rows = [0] * len(found), len(found)
        plain = self._times.seconds(rows, not self._ahead, always=True)
        if plain is None:
            self._gain = 1.0  # so that steps in flight are measured again
            return counts
        ranked = [(s, n) for n, f in enumerate(found) if f for s in f.shares if s >= _LEAST_SHARE]
        ranked.sort(key=lambda entry: -entry[0])
        none = plain / (self._times.seconds(rows, True) or plain)
        best, num_chosen, tokens, chosen, size = none, 0, float(rows), 0, _size(rows)
        known = True
        while known and chosen < len(ranked):
            # From few rows to many, no further than one size whose time is not known yet.
            fitting = min(size - rows, len(ranked))
            tokens += sum(share for share, _ in ranked[chosen:fitting])
            chosen = max(chosen, fitting)
            if chosen:
                known = self._times.seconds(rows + chosen, True) is not None
                seconds = self._times.least_seconds(rows + chosen) or plain
                gain = tokens / rows * plain / seconds
                if gain > best and gain >= _LEAST_GAIN * none:
                    best, num_chosen = gain, chosen
            size = _size(size + 1)
        self._gain += (best - self._gain) / 8
        for _, n in ranked[:num_chosen]:
            counts[n] += 1
        return counts


def _size(rows: int) -> int:
    """1, 2, ..., 8, 12, 16, 24, 32, 48, ...: steps of one size take about as long."""
    power = 1 << (rows - 1).bit_length()
    three_quarters = power * 3 // 4
    return rows if rows <= 8 else three_quarters if rows <= three_quarters else power


class _Times:
    """Seconds of steps, by the size of their rows and by whether nothing was in flight when they were launched."""

    def __init__(self) -> None:
        self.launches = 0
        self._seconds: dict[tuple[int, bool], deque[float]] = {}
        self._noted: dict[tuple[int, bool], int] = {}

    def note(self, rows: int, waits: bool, seconds: float) -> None:
        key = _size(rows), waits
        if self.launches - self._noted.get(key, self.launches) > _TIMES_HOLD:
            del self._seconds[key]
        self._noted[key] = self.launches
        self._seconds.setdefault(key, deque(maxlen=_KEPT_TIMES)).append(seconds)

    def seconds(self, rows: int, waits: bool, *, always: bool = False) -> float | None:
        """None where too few are known, or, unless `always`, none that is recent."""
        key = _size(rows), waits
        seconds = self._seconds.get(key, ())
        if len(seconds) < _KNOWN_TIMES or (not always and self.launches - self._noted[key] > _TIMES_HOLD):
            return None
        return min(seconds)

    def least_seconds(self, rows: int) -> float | None:
        """Of a step that waits; where it is not known, what it takes at least if more rows never take less time, nor
        less time a row."""
        size = _size(rows)
        known = {other: seconds for other, waits in self._seconds if waits and (seconds := self.seconds(other, True))}
        if size in known:
            return known[size]
        bounds = [seconds if other < size else seconds * size / other for other, seconds in known.items()]
        return max(bounds, default=None)
