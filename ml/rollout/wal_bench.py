"""Figures of the token log: durable throughput against raw appends and SQLite, size, and recovery.

Each step logs one token of each of 64 sequences and waits until it is durable, as slow as the log can be used; the
engine overlaps the wait with its next step. The raw writer puts the same bytes to a file and calls fdatasync.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kernels.testing import check
from ml.rollout.wal import LogHeader, TokenLog
from ml.rollout.wal_recovery import read_folder, recover

_SEQUENCES = 64
_HEADER = LogHeader("bench", 0, 0, 1, "student")


def run(quick: bool) -> dict[str, Any]:
    """Raises CheckFailed when what is recovered is not what was logged."""
    steps = 400 if quick else 2000
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50_000, (steps, _SEQUENCES), dtype=np.int32)
    logprobs = rng.standard_normal((steps, _SEQUENCES)).astype(np.float32)
    with tempfile.TemporaryDirectory(prefix="opd-bench-") as name:
        folder = Path(name)
        log_seconds, sizes = _log(folder / "log", ids, logprobs, durable_steps=True)
        raw_seconds = _timed(lambda: _raw(folder / "raw", sizes))
        sqlite_seconds = _timed(lambda: _sqlite(folder / "peer.db", ids, logprobs))
        bytes_per_token = sum(sizes) / ids.size
        million_steps = (1 << 20) // _SEQUENCES
        long_ids = np.resize(ids, (million_steps, _SEQUENCES))
        _log(folder / "long", long_ids, np.resize(logprobs, long_ids.shape), durable_steps=False)
        started = time.perf_counter()
        recovered = recover(read_folder(folder / "long"), "long")
        recovery_seconds = time.perf_counter() - started
    got = np.stack([t.ids for t in recovered.trajectories], 1)
    check(np.array_equal(got, long_ids), "recovered tokens are those that were logged")
    ratio = raw_seconds / log_seconds
    return {
        "figures": {
            "durable_ratio": _figure(ratio, "x", ">= 0.8", ratio >= 0.8),
            "durable_tokens_per_s": _figure(ids.size / log_seconds, "tokens/s", "", None),
            "bytes_per_token": _figure(bytes_per_token, "bytes", "", None),
            "recovery_1m_tokens": _figure(recovery_seconds, "s", "<= 1 s", recovery_seconds <= 1.0),
        },
        "peers": {
            "raw write + fdatasync": {"value": 1.0, "unit": "x", "version": "the same bytes"},
            "sqlite": {"value": raw_seconds / sqlite_seconds, "unit": "x", "version": sqlite3.sqlite_version},
        },
        "env": {"device": "cpu", "cores": os.cpu_count(), "shape": f"{steps} steps of {_SEQUENCES} sequences"},
    }


def _figure(value: float, unit: str, target: str, holds: bool | None) -> dict[str, Any]:
    return {"value": value, "unit": unit, "target": target, "holds": holds}


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _log(folder: Path, ids: np.ndarray, logprobs: np.ndarray, *, durable_steps: bool) -> tuple[float, list[int]]:
    """(seconds, bytes of each step's record)."""
    sizes, size = [], 0
    with TokenLog(folder, _HEADER, seal_seconds=3600.0) as log:
        numbers = [log.admit(f"t{i}", prompt_digest=bytes(32), prompt_tokens=8) for i in range(ids.shape[1])]
        log.commit()
        started = time.perf_counter()
        for step in range(len(ids)):
            firsts = np.full(len(numbers), step)
            last = log.append_step(numbers, firsts, ids[step], logprobs[step], logprobs[step])
            log.commit()
            if durable_steps:
                log.wait_local(last)
        log.wait_local(last)
        seconds = time.perf_counter() - started
    for path in sorted(folder.iterdir())[1:]:
        size += path.stat().st_size
    sizes = [size // len(ids)] * len(ids)
    return seconds, sizes


def _raw(path: Path, sizes: list[int]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for size in sizes:
            os.write(fd, b"\x5a" * size)
            os.fdatasync(fd)
    finally:
        os.close(fd)


def _sqlite(path: Path, ids: np.ndarray, logprobs: np.ndarray) -> None:
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE log (sequence INT, position INT, id INT, raw REAL, sampled REAL)")
        for step in range(len(ids)):
            values = [float(v) for v in logprobs[step]]
            connection.execute("BEGIN")
            connection.executemany(
                "INSERT INTO log VALUES (?, ?, ?, ?, ?)",
                [(n, step, int(i), v, v) for n, (i, v) in enumerate(zip(ids[step], values, strict=True))],
            )
            connection.execute("COMMIT")
