"""Figures of the token log: durable throughput beside raw appends and SQLite, its cost for the engine, recovery.

Contestants take turns, so that what else the disk does hits all of them; a ratio is the median over the rounds.

    waiting    a step is logged, and waited for until it is durable: as slow as the log can be used
    in flight  a step is waited for after the next one is logged, as the engine does, but with no step to compute:
               what it shows is two changes of threads a sync, which an engine's step hides
    raw        the bytes of such a round in as many writes, each with fdatasync, appended to a file that grows
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kernels.testing import check, environment, figure
from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_recovery import read_folder, recover
from ml.rollout.wal_segment import Disk

_SEQUENCES = 64
_ROUND_STEPS = 100
_STEP_SECONDS = 2e-3  # of the engine at 64 sequences, on an H200
_ROOM_BYTES = 1 << 20
_HEADER = LogHeader("bench", 0, 0, 1, "student")


class _CountingDisk(Disk):
    num_syncs = 0

    def sync(self, fd: int) -> None:
        self.num_syncs += 1
        super().sync(fd)


class _Log:
    """A token log that is given the same rows step by step."""

    def __init__(self, folder: Path, sequences: int) -> None:
        self.disk = _CountingDisk()
        self.log = TokenLog(folder, _HEADER, seal_seconds=3600.0, disk=self.disk)
        rng = np.random.default_rng(0)
        self.ids = rng.integers(0, 50_000, (_ROUND_STEPS, sequences), dtype=np.int32)
        self.logprobs = rng.standard_normal((_ROUND_STEPS, sequences)).astype(np.float32)
        self.numbers = np.array(
            [self.log.admit(f"t{i}", prompt_digest=bytes(32), prompt_tokens=8) for i in range(sequences)], np.int32
        )
        self.num_steps = self._last = 0
        self.log.wait_local(sequences)

    def columns(self) -> tuple[np.ndarray, ...]:
        """Of the next step, as an engine has them at hand."""
        row, firsts = self.num_steps % _ROUND_STEPS, np.full(len(self.numbers), self.num_steps, np.int32)
        self.num_steps += 1
        return self.numbers, firsts, self.ids[row], self.logprobs[row], self.logprobs[row]

    def append(self) -> int:
        return self.log.append_step(*self.columns())

    def step_waiting(self) -> None:
        self.log.wait_local(self.append())

    def step_in_flight(self) -> None:
        before, self._last = self._last, self.append()
        self.log.commit()
        if self.log.acknowledged < before:
            self.log.wait_local(before)

    def wait(self) -> None:
        self.log.wait_local(self._last)


class _Raw:
    """write + fdatasync; `prepared`: into zeros that were written before, as the log does."""

    def __init__(self, path: Path, *, prepared: bool = False) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._end, self._room, self._prepared = 0, 0, prepared

    def write(self, size: int) -> None:
        data, offset = b"\x5a" * size, self._end
        self._end += size
        if self._prepared and self._end > self._room:
            self._room = -(-self._end // _ROOM_BYTES) * _ROOM_BYTES
            data += bytes(self._room - self._end)
        os.pwrite(self._fd, data, offset)
        os.fdatasync(self._fd)


class _Sqlite:
    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.execute("CREATE TABLE log (sequence INT, position INT, id INT, raw REAL, sampled REAL)")
        self.num_steps = 0

    def step(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        values = zip(ids.tolist(), logprobs.tolist(), strict=True)
        self._connection.execute("BEGIN")
        self._connection.executemany(
            "INSERT INTO log VALUES (?, ?, ?, ?, ?)",
            [(n, self.num_steps, i, v, v) for n, (i, v) in enumerate(values)],
        )
        self.num_steps += 1
        self._connection.execute("COMMIT")


def run(quick: bool) -> dict[str, Any]:
    """Raises CheckFailed when what is recovered is not what was logged."""
    rounds = 5 if quick else 30
    with tempfile.TemporaryDirectory(prefix="opd-bench-") as name:
        folder = Path(name)
        seconds, bytes_per_token, steps_per_sync = _race(folder, rounds)
        handover_seconds = {n: _handover(folder / f"handover-{n}", n, 100 if quick else 500) for n in (64, 1024)}
        recovery_seconds = _recovery(folder / "long")
    waiting = _ratio(seconds["raw"], seconds["waiting"])
    in_flight = _ratio(seconds["raw of in flight"], seconds["in flight"])
    share = handover_seconds[_SEQUENCES] / _STEP_SECONDS
    tokens_per_s = _ROUND_STEPS * _SEQUENCES / statistics.median(seconds["in flight"])
    return {
        "figures": {
            "durable_ratio": figure(waiting, "x", ">= 0.8"),
            "durable_ratio_in_flight": figure(in_flight, "x"),
            "steps_per_sync_in_flight": figure(steps_per_sync, "steps"),
            "durable_tokens_per_s": figure(tokens_per_s, "tokens/s"),
            "bytes_per_token": figure(bytes_per_token, "bytes"),
            "handover_share_of_2ms_step": figure(100 * share, "%", "<= 2 %"),
            "handover_1024": figure(1e6 * handover_seconds[1024], "us"),
            "recovery_1m_tokens": figure(recovery_seconds, "s", "<= 1 s"),
        },
        "peers": {
            "raw write + fdatasync": {"value": 1.0, "unit": "x", "version": "the same bytes, a growing file"},
            "raw, zeros written before": {
                "value": _ratio(seconds["raw"], seconds["raw prepared"]), "unit": "x", "version": "the same bytes",
            },
            "sqlite": {
                "value": _ratio(seconds["raw"], seconds["sqlite"]), "unit": "x", "version": sqlite3.sqlite_version,
            },
        },
        "env": environment(f"{rounds} rounds of {_ROUND_STEPS} steps of {_SEQUENCES} sequences")
        | {"device": "cpu", "sync_us": 1e6 * statistics.median(seconds["raw"]) / _ROUND_STEPS},
    }  # fmt: skip


def _ratio(base: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(base, other, strict=True))


def _times(call: Callable[[], None], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - started


def _race(folder: Path, rounds: int) -> tuple[dict[str, list[float]], float, float]:
    """(seconds of each round by contestant, bytes a token, steps a sync in flight)."""
    logs = {name: _Log(folder / name, _SEQUENCES) for name in ("waiting", "in flight")}
    raw, raw_in_flight = _Raw(folder / "raw"), _Raw(folder / "raw-in-flight")
    prepared, peer = _Raw(folder / "prepared", prepared=True), _Sqlite(folder / "peer.db")
    step_bytes = _step_bytes(folder / "sizes")
    waiting, flying = logs["waiting"], logs["in flight"]
    seconds: dict[str, list[float]] = {}
    groups = [0]

    def fly() -> None:
        before = flying.disk.num_syncs
        for _ in range(_ROUND_STEPS):
            flying.step_in_flight()
        flying.wait()
        groups.append(flying.disk.num_syncs - before)

    def raw_of_in_flight() -> None:
        for _ in range(groups[-1]):
            raw_in_flight.write(_ROUND_STEPS * step_bytes // groups[-1])

    def sql() -> None:
        row = peer.num_steps % _ROUND_STEPS
        peer.step(waiting.ids[row], waiting.logprobs[row])

    turns: list[tuple[str, Callable[[], None], int]] = [
        ("waiting", waiting.step_waiting, _ROUND_STEPS),
        ("raw", lambda: raw.write(step_bytes), _ROUND_STEPS),
        ("raw prepared", lambda: prepared.write(step_bytes), _ROUND_STEPS),
        ("sqlite", sql, _ROUND_STEPS),
        ("in flight", fly, 1),
        ("raw of in flight", raw_of_in_flight, 1),
    ]
    for round_number in range(rounds):
        first = round_number % (len(turns) - 1)  # the two that belong together stay so
        for name, call, count in (*turns[first:], *turns[:first]):
            seconds.setdefault(name, []).append(_times(call, count))
    for log in logs.values():
        log.log.abandon()
    return seconds, step_bytes / _SEQUENCES, rounds * _ROUND_STEPS / sum(groups)


def _step_bytes(folder: Path) -> int:
    """Bytes of a step's frame, from the sealed segment that holds two rounds of them against one that holds one."""
    sizes = []
    for rounds in (1, 2):
        log = _Log(folder / str(rounds), _SEQUENCES)
        for _ in range(rounds * _ROUND_STEPS):
            log.append()
        log.log.close()
        sizes.append((folder / str(rounds) / "000001.seg").stat().st_size)
    return (sizes[1] - sizes[0]) // _ROUND_STEPS


def _handover(folder: Path, sequences: int, steps: int) -> float:
    """Median seconds that logging takes of the thread that runs the engine, which sleeps in the rest of its step."""
    log, taken = _Log(folder, sequences), []
    for _ in range(steps):
        columns = log.columns()
        started = time.perf_counter()
        log.log.append_step(*columns)
        log.log.commit()
        taken.append(time.perf_counter() - started)
        time.sleep(max(0.0, _STEP_SECONDS - taken[-1]))
    log.log.close()
    return statistics.median(taken)


def _recovery(folder: Path) -> float:
    """Seconds to read and replay 2^20 tokens, best of three."""
    log = _Log(folder, _SEQUENCES)
    num_steps = (1 << 20) // _SEQUENCES
    for _ in range(num_steps):
        log.append()
    log.log.close()
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        recovered = recover(read_folder(folder), "long")
        seconds.append(time.perf_counter() - started)
    rows = np.arange(num_steps) % _ROUND_STEPS
    got = recovered.trajectories
    check(
        np.array_equal(np.stack([t.ids for t in got], 1), log.ids[rows])
        and np.array_equal(np.stack([t.logprobs_raw for t in got], 1), log.logprobs[rows]),
        "recovered tokens are those that were logged",
    )
    return min(seconds)
