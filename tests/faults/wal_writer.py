"""A writer of token logs that remembers, for each record, what a reader must see once it is the last one."""

from __future__ import annotations

from collections import Counter

import pytest

from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_recovery import Recovered, recover
from schemas.errors import FormatError

HEADER = LogHeader("run", 0, 4, 1, "student")
Segments = list[tuple[str, bytes]]
State = dict[str, tuple[list[int], list[float], str | None]]


def token_of(name: str, index: int) -> tuple[int, float]:
    """What trajectory `name` samples at `index`: any writer of any epoch says the same."""
    value = (hash_of(name) * 31 + index * 7919) % 49152
    return value, -value / 1024


def hash_of(name: str) -> int:
    return sum(ord(c) * 17**i for i, c in enumerate(name))


class Writer:
    """Appends to a log and keeps, for each sequence number, the state that a reader must then see."""

    def __init__(self, log: TokenLog, state: State | None = None) -> None:
        self.log = log
        self.state: State = {k: (list(v[0]), list(v[1]), v[2]) for k, v in (state or {}).items()}
        self.numbers = {n: log.admit(n, prompt_digest=bytes(32), prompt_tokens=3) for n in self.state}
        self.history: dict[int, State] = {log.acknowledged: self.snapshot()}

    def snapshot(self) -> State:
        return {k: (list(v[0]), list(v[1]), v[2]) for k, v in self.state.items()}

    def admit(self, name: str) -> None:
        before = self.log.acknowledged
        self.state[name] = ([], [], None)
        self.numbers[name] = self.log.admit(name, prompt_digest=bytes(32), prompt_tokens=3)
        self.history[max(self.history, default=before) + 1] = self.snapshot()

    def step(self, *names: str, count: int = 1) -> int:
        heads: list[tuple[int, int]] = []
        tokens: list[tuple[int, float]] = []
        for name in names:
            ids, logprobs, _ = self.state[name]
            for _ in range(count):
                heads.append((self.numbers[name], len(ids)))
                tokens.append(token_of(name, len(ids)))
                ids.append(tokens[-1][0])
                logprobs.append(tokens[-1][1])
        numbers, firsts = zip(*heads, strict=True)
        new_ids, values = zip(*tokens, strict=True)
        sequence = self.log.append_step(numbers, firsts, new_ids, values, values)
        self.history[sequence] = self.snapshot()
        return sequence

    def finish(self, name: str) -> int:
        ids, logprobs, _ = self.state[name]
        self.state[name] = (ids, logprobs, "stop")
        sequence = self.log.append_finish(self.numbers[name], len(ids), "stop")
        self.history[sequence] = self.snapshot()
        return sequence

    def commit(self, sequence: int) -> None:
        self.log.commit()
        self.log.wait_local(sequence)


def state_of(recovered: Recovered) -> State:
    out: State = {}
    for t in recovered.trajectories:
        assert t.logprobs_raw.tolist() == t.logprobs_sampled.tolist()
        out[t.trajectory_id] = (t.ids.tolist(), t.logprobs_raw.tolist(), t.finish_reason)
    return out


def outcome(segments: Segments, history: dict[int, State], at_least: int = 0) -> str:
    """ "refused", or "prefix" after checking that it is one and holds everything up to `at_least`."""
    try:
        recovered = recover(segments, "log")
    except FormatError:
        return "refused"
    assert recovered.last_sequence >= at_least
    assert state_of(recovered) == history[recovered.last_sequence]
    return "whole" if recovered.last_sequence == max(history) else "prefix"


class DamageTable:
    """Counts what became of each damaged log, by kind of damage; printed where pytest runs with -s."""

    COLUMNS = ("whole", "tail dropped", "refused", "told by acknowledgement")

    def __init__(self) -> None:
        self.rows: dict[str, Counter[str]] = {}

    def judge(self, damage: str, segments: Segments, history: dict[int, State], acknowledged: int) -> str:
        """Recovers a damaged log of which `acknowledged` is the last acknowledged record; counts and returns a column.

        Whatever comes back is a state that the log once had, and a caller who knows what was acknowledged is told of
        a loss that the bytes do not show.
        """
        try:
            recovered = recover(segments, "log")
        except FormatError:
            column = "refused"
        else:
            assert state_of(recovered) == history[recovered.last_sequence]
            if recovered.last_sequence >= acknowledged:
                column = "whole" if recovered.last_sequence == max(history) else "tail dropped"
            else:
                column = "told by acknowledgement"
                told = {name: len(ids) for name, (ids, _, _) in history[acknowledged].items()}
                if told != {t.trajectory_id: len(t.ids) for t in recovered.trajectories}:
                    with pytest.raises(FormatError, match="acknowledged tokens"):
                        recovered.require(told)
        self.rows.setdefault(damage, Counter())[column] += 1
        return column

    def print(self) -> None:
        print(f"\n\n{'damage':66}{'cases':>8}" + "".join(f"{c:>{max(9, len(c) + 2)}}" for c in self.COLUMNS))
        for damage, counts in self.rows.items():
            cells = "".join(f"{counts[c]:>{max(9, len(c) + 2)}}" for c in self.COLUMNS)
            print(f"{damage:66}{sum(counts.values()):>8}{cells}")
        print("a token changed, or an acknowledged one lost in silence: 0 (each case is checked)")
