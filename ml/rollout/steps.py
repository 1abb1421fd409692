"""One engine step as the host sees it: its rows on the way to the device, its ticket, what comes back."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from ml.rollout.scheduler import Admitted, Plan, Sequence


@dataclass(frozen=True)
class Ticket:
    """A launched step. sequences: of the sampled rows, in the order of its results, int32 [3, R].

    guessed: as in its plan; the rows of one sequence follow each other.
    """

    sequences: list[Sequence]
    results: Callable[[], np.ndarray]
    guessed: dict[Sequence, list[int]]


@dataclass(frozen=True)
class Collected:
    """ids int32 [R]; log-probabilities fp32 [R] of the raw model and of the distribution sampled from."""

    ids_R: np.ndarray
    raw_R: np.ndarray
    sampled_R: np.ndarray


@dataclass(frozen=True)
class Placed:
    """Sequences that get their slots: int64 slots [A], page tables int32 [A, P], sampling keys int64 [A], and copied
    pages int64 [C, 2], from and to."""

    slots_A: np.ndarray
    tables_AP: np.ndarray
    keys_A: np.ndarray
    copies_C2: np.ndarray

    @classmethod
    def of(cls, admitted: Seq[Admitted], keys: Seq[int]) -> Placed:
        width = max(len(a.sequence.pages) for a in admitted)
        tables_AP = np.zeros((len(admitted), width), np.int32)
        for row, a in zip(tables_AP, admitted, strict=True):
            row[: len(a.sequence.pages)] = a.sequence.pages
        slots_A = np.array([a.sequence.slot for a in admitted], np.int64)
        copies = np.array([a.copied for a in admitted if a.copied is not None], np.int64).reshape(-1, 2)
        return cls(slots_A, tables_AP, np.array(keys, np.uint64).view(np.int64), copies)


@dataclass(frozen=True)
class StepRows:
    """Rows of a step. decode int32 [4, D]: ids, or -1 for the last one sampled in the slot, positions, slots, pages;
    those of one slot follow each other, in the order of their positions. width: of their widest page table. chunks:
    slot, first position, ids, and whether the last row is sampled."""

    decode_4D: np.ndarray
    width: int
    chunks: list[tuple[int, int, np.ndarray, bool]]

    @classmethod
    def of(cls, plan: Plan, page_tokens: int) -> StepRows:
        decode = plan.decode
        rows_4D = np.empty((4, len(decode)), np.int32)
        rows_4D[0] = [s.tokens[s.num_kept] if len(s.tokens) > s.num_kept else -1 for s in decode]
        rows_4D[1] = [s.num_kept for s in decode]
        rows_4D[2] = [s.slot for s in decode]
        rows_4D[3] = [s.pages[s.num_kept // page_tokens] for s in decode]
        if plan.guessed:
            parts = []
            for row_4, s in zip(rows_4D.T, decode, strict=True):
                ids = plan.guessed.get(s, [])
                positions = range(s.num_kept, s.num_kept + 1 + len(ids))
                pages = [s.pages[position // page_tokens] for position in positions]
                parts.append([[row_4[0], *ids], positions, [s.slot] * len(positions), pages])
            rows_4D = np.concatenate([np.array(part, np.int32) for part in parts], 1)
        width = max((len(s.pages) for s in decode), default=0)
        chunks = [
            (c.sequence.slot, c.start, np.array(c.sequence.tokens[c.start : c.start + c.count]), c.samples)
            for c in plan.chunks
        ]
        return cls(rows_4D, width, chunks)
