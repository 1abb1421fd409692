"""Which trajectory of a partition crashes its worker: told by running suspects apart, and at last one alone.

    crash, no new token -> a strike for those in the cache -> two strikes: run apart, in halves -> third strike, alone

A worker that dies does not say why. But a trajectory that kills it does so at the same token each time, since its log
brings the next worker straight back to it, while the death of a node takes trajectories that had gone on.
Invariant: a trajectory is blamed only for strikes without a token in between, and the last one with no other in the
cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.errors import StageError
from schemas.work.rollout import Strikes

#: Strikes after which a trajectory is run apart. One more, alone, and it is given up.
_SUSPECT_STRIKES = 2


@dataclass(frozen=True)
class GivenUp:
    """A trajectory that cannot go on, and why."""

    trajectory_id: str
    text: str


class Suspects:
    """Of one partition, over all of its workers. trajectory_ids: in the order in which a worker takes them.

    before: `known` of an earlier driver's.
    """

    def __init__(self, trajectory_ids: Sequence[str], before: Strikes | None = None) -> None:
        before = before or Strikes()
        self._order = list(trajectory_ids)
        self._apart: list[list[str]] = [list(group) for group in before.apart]
        self._strikes: dict[str, int] = dict(before.strikes)
        self._struck_at: dict[str, int] = dict(before.struck_at)
        self._began: Mapping[str, int] = {}
        self._tokens: Mapping[str, int] = {}
        self._positions = 0
        self.running: list[str] = []
        self.struck: list[str] = []

    def known(self) -> Strikes:
        """What the past lives have shown."""
        return Strikes(tuple(map(tuple, self._apart)), dict(self._strikes), dict(self._struck_at))

    @property
    def groups(self) -> list[list[str]]:
        """What the next worker runs, one group after another; all at once as long as nothing is suspected."""
        apart = {i for group in self._apart for i in group}
        return [*self._apart, [i for i in self._order if i not in apart]]

    def started(self) -> None:
        """A worker starts. Until it reports nobody is running, and nobody is blamed for its death."""
        self.running = []

    def resumed(self, recovered: Mapping[str, int]) -> None:
        """recovered: response tokens in the log that the worker goes on from."""
        self._began = self._tokens = recovered

    def reported(self, tokens: Mapping[str, int], running: Sequence[str], positions: int = 0) -> bool:
        """Durable response tokens so far; who may be in the cache, the oldest first, and how far that one is there.

        Whether the oldest has gone on since the last report, as it must: it never waits for others.
        """
        before = self._oldest()
        self._tokens, self.running, self._positions = tokens, list(running), positions
        return not before or not running or before != self._oldest()

    def crashed(self, how: str, *, stuck: bool = False) -> GivenUp | None:
        """The worker has died. Who is to be given up, once that is certain; how: what goes into the record.

        stuck: it was killed since the oldest did not go on while others did. `struck`: who did not go on in its life;
        if there are any, further crashes without a token end with one of them given up.
        """
        self.struck = self.running[:1] if stuck else [i for i in self.running if self._now(i) <= self._began.get(i, 0)]
        for trajectory_id in self.running:
            if self._now(trajectory_id) > self._struck_at.get(trajectory_id, -1):
                self._strikes[trajectory_id] = 0
        for trajectory_id in self.struck:
            self._strikes[trajectory_id] += 1
            self._struck_at[trajectory_id] = self._now(trajectory_id)
        alone = self.running[:1] if stuck or len(self.running) == 1 else []
        for trajectory_id in alone:
            if (strikes := self._strikes[trajectory_id]) > _SUSPECT_STRIKES:
                return GivenUp(trajectory_id, f"{how}, {strikes} times after {self._now(trajectory_id)} tokens")
        suspects = [i for i in self.running if self._strikes[i] >= _SUSPECT_STRIKES]
        half = (len(suspects) + 1) // 2 if len(suspects) == len(self.running) else len(suspects)
        if suspects:
            self._apart = [group for group in (suspects[:half], suspects[half:]) if group]
        return None

    def _oldest(self) -> tuple[str, int, int] | None:
        return (self.running[0], self._now(self.running[0]), self._positions) if self.running else None

    def _now(self, trajectory_id: str) -> int:
        return self._tokens.get(trajectory_id, 0)


def check_given_up(given_up: Mapping[int, Mapping[str, str]], allowed: int, iteration: int) -> None:
    """StageError when more trajectories are given up than allowed. given_up: partition -> trajectory_id -> why."""
    total = sum(map(len, given_up.values()))
    if total <= allowed:
        return
    partition, trajectories = next((p, t) for p, t in sorted(given_up.items()) if t)
    trajectory_id, text = next(iter(trajectories.items()))
    raise StageError(
        f"rollout of iteration {iteration}, partition {partition}, trajectory {trajectory_id}",
        expected=f"at most {allowed} given up (rollout.max_given_up)", found=f"{total}, this one: {text}",
        safe="its tokens so far and every other trajectory: they are in the log",
        next_command=f"the worker's log says more; --set rollout.max_given_up={total} goes on without "
        "it, its length recorded",
    )  # fmt: skip
