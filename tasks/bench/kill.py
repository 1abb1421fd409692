"""Rollout workers killed at random moments, under the parent that a campaign has: what comes out, and what it costs.

Rounds of partitions are sampled twice by real worker processes: once undisturbed, once with SIGKILL before, while and
after they go on from their logs, and now and then a SIGTERM, whose spilled KV the next worker restores. The checks: the
same trajectories come out, byte for byte; every acknowledged token is in the log that the next worker goes on from; no
acknowledged token is sampled again, counted from that worker's own log.
"""

from __future__ import annotations

import platform
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.launch import RankProcess
from kernels.testing import check, environment, figure
from schemas.errors import EXIT_PREEMPTED
from schemas.work.messages import Resumed
from tasks.bench.trial import Trial
from tasks.workers.drill import sampled_again
from tasks.workers.pool import Pool

_PARTITIONS, _TRAJECTORIES, _RESPONSE_TOKENS = 4, 96, 400
#: Of a hundred lives so many end while their process starts, as they begin to sample, and by SIGTERM; the rest in the
#: middle of sampling, after so many seconds on average.
_STARTING, _BEGINNING, _PREEMPTED = 15, 10, 15
_SAMPLING_SECONDS = 0.3


def run(quick: bool, kills: int = 200) -> dict[str, Any]:
    """Raises CheckFailed for another byte, a lost token or a token sampled twice."""
    kills = min(kills, 8) if quick else kills
    started = time.monotonic()
    totals = Totals()
    trajectories = rounds = 0
    with tempfile.TemporaryDirectory(prefix="opd-bench-") as folder:
        sizes = (2, 24, 300) if quick else (_PARTITIONS, _TRAJECTORIES, _RESPONSE_TOKENS)
        trial = Trial(
            Path(folder), partitions=sizes[0], trajectories=sizes[1], response_tokens=sizes[2], max_sequences=16, seed=3
        )
        while totals.kills < kills:
            undisturbed = trial.run(f"undisturbed-{rounds}", rounds)
            name = f"killed-{rounds}"
            killer = _Killer(trial, name, rounds, kills, totals)
            killed = trial.run(name, rounds, killer)
            killer.finished()
            for partition, outcome in undisturbed.items():
                same = killed[partition].shard == outcome.shard and killed[partition].content == outcome.content
                check(same, f"round {rounds}, partition {partition}: the bytes of the undisturbed run")
                trajectories += len(outcome.rows)
            rounds += 1
    check(totals.lost == 0, f"no acknowledged token lost: {totals.lost}")
    check(totals.again == 0, f"no acknowledged token sampled again: {totals.again}")
    seconds = time.monotonic() - started
    return {
        "figures": {
            "kills": figure(totals.kills, "SIGKILLs", ">= 200") | ({"holds": None} if quick else {}),
            "kills_before_sampling": figure(totals.starting, "SIGKILLs"),
            "preemptions": figure(totals.preemptions, "SIGTERMs"),
            "kv_restored": figure(totals.kv_restored, "trajectories"),
            "prefill_rebuilt": figure(totals.prefill_rebuilt, "trajectories"),
            "same_bytes": figure(trajectories, "trajectories", "all", True),
            "acknowledged_tokens": figure(totals.acknowledged, "tokens"),
            "acknowledged_lost": figure(totals.lost, "tokens", "0", totals.lost == 0),
            "acknowledged_sampled_again": figure(totals.again, "tokens", "0", totals.again == 0),
            "seconds": figure(seconds, "s"),
        },
        "peers": {},
        "env": environment(
            f"{rounds} rounds of {sizes[0]} partitions of {sizes[1]} trajectories, at most {sizes[2]} tokens"
        ) | {"python": platform.python_version()},
    }  # fmt: skip


@dataclass
class Totals:
    """Over all rounds. acknowledged: tokens that a life told of before it was ended, no token twice."""

    kills: int = 0
    starting: int = 0
    preemptions: int = 0
    kv_restored: int = 0
    prefill_rebuilt: int = 0
    acknowledged: int = 0
    lost: int = 0
    again: int = 0


@dataclass
class _Life:
    """One worker process of one partition. told: response tokens that were acknowledged before it began.

    signum, phase, delay: how it ends, and after how many seconds of which phase; since: when that phase began.
    """

    process: RankProcess
    told: dict[str, int]
    resumed_before: Resumed | None
    signum: int
    phase: str
    delay: float
    began: float = field(default_factory=time.monotonic)
    since: float | None = None


class _Killer:
    """Watcher that ends each life at a moment of its own, and then settles its account with the lives before."""

    def __init__(self, trial: Trial, name: str, iteration: int, kills: int, totals: Totals) -> None:
        self._trial, self._name, self._iteration = trial, name, iteration
        self._rng, self._kills, self._totals = random.Random(iteration), kills, totals
        self._lives: dict[int, _Life] = {}
        self._start_seconds = 2.0
        self._pool: Pool | None = None

    def look(self, pool: Pool) -> None:
        self._pool = pool
        for worker in pool.workers:
            process = worker.process
            if process is None or process.status is not None or not worker.left:
                continue
            partition = worker.left[0]
            life = self._lives.get(partition)
            if life is None or life.process is not process:
                life = self._lives[partition] = self._born(pool, partition, process)
            self._notice(pool, partition, life)
            due = life.since is not None and time.monotonic() >= life.since + life.delay
            if due and self._totals.kills < self._kills:
                self._end(pool, partition, life)

    def finished(self) -> None:
        """Settle the lives that nobody ended."""
        for partition, life in self._lives.items():
            assert self._pool is not None
            self._settle(self._pool, partition, life)

    def _born(self, pool: Pool, partition: int, process: RankProcess) -> _Life:
        lot = self._rng.randrange(100)
        if lot < _STARTING:
            end = signal.SIGKILL, "starting", self._rng.uniform(0, self._start_seconds)
        elif lot < _STARTING + _BEGINNING:
            end = signal.SIGKILL, "beginning", self._rng.uniform(0, 0.03)
        else:
            signum = signal.SIGTERM if lot < _STARTING + _BEGINNING + _PREEMPTED else signal.SIGKILL
            end = signum, "sampling", self._rng.expovariate(1 / _SAMPLING_SECONDS)
        return _Life(process, _acknowledged(pool, partition), pool.resumed.get(partition), *end)

    def _notice(self, pool: Pool, partition: int, life: _Life) -> None:
        """Whether the phase has begun at whose time the life ends."""
        if life.since is not None:
            return
        resumed = _resumed(pool, partition, life)
        if resumed is not None and life.phase == "beginning":
            self._start_seconds = time.monotonic() - life.began
        gained = resumed is not None and _acknowledged(pool, partition) != life.told
        if life.phase == "starting" or (resumed is not None and life.phase == "beginning") or gained:
            life.since = life.began if life.phase == "starting" else time.monotonic()

    def _end(self, pool: Pool, partition: int, life: _Life) -> None:
        life.process.send(life.signum)
        while life.process.status is None:
            time.sleep(0.005)
        if life.process.status not in (-signal.SIGKILL, EXIT_PREEMPTED):
            return  # it had finished, or it ends the bench with its error
        totals = self._totals
        totals.kills += life.process.status == -signal.SIGKILL
        totals.preemptions += life.process.status == EXIT_PREEMPTED
        totals.starting += _resumed(pool, partition, life) is None
        totals.acknowledged += sum(_acknowledged(pool, partition).values()) - sum(life.told.values())
        self._settle(pool, partition, life)
        del self._lives[partition]

    def _settle(self, pool: Pool, partition: int, life: _Life) -> None:
        """Count what the life lost or sampled again of what was acknowledged before it."""
        resumed = _resumed(pool, partition, life)
        if resumed is None:
            return
        totals = self._totals
        totals.kv_restored += resumed.kv_restored
        totals.prefill_rebuilt += resumed.prefill_rebuilt
        totals.lost += sum(max(0, count - resumed.recovered.get(i, 0)) for i, count in life.told.items())
        totals.again += sampled_again(self._trial.log(self._name, self._iteration, partition, resumed.epoch), life.told)


def _acknowledged(pool: Pool, partition: int) -> dict[str, int]:
    told = pool.acknowledged.get(partition)
    return told.tokens if told else {}


def _resumed(pool: Pool, partition: int, life: _Life) -> Resumed | None:
    """What the life said as it began to sample, if it came so far."""
    said = pool.resumed.get(partition)
    return None if said is life.resumed_before else said
