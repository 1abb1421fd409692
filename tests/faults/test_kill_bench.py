"""The kill bench: it runs, and its count of tokens that were sampled twice sees one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_recovery import read_folder, recover
from tasks.workers.drill import sampled_again


def append(log: TokenLog, numbers: list[int], firsts: list[int]) -> None:
    ids = np.arange(len(numbers), dtype=np.int32)
    logprobs = np.full(len(numbers), -1.0, np.float32)
    log.append_step(np.array(numbers), np.array(firsts), ids, logprobs, logprobs)


def test_tokens_sampled_twice_are_counted(tmp_path):
    with TokenLog(tmp_path / "first", LogHeader("r", 0, 0, 1, "s")) as log:
        for name in ("a", "b"):
            log.admit(name, prompt_digest=bytes(32), prompt_tokens=3)
        for index in range(5):
            append(log, [0, 1], [index, index])
    base = recover(read_folder(tmp_path / "first"), "first")
    with TokenLog(tmp_path / "second", LogHeader("r", 0, 0, 2, "s"), base=base, seal_seconds=0.01) as log:
        for index in range(5, 8):
            append(log, [0, 1], [index, index])
        log.commit()
        log.seal()
        append(log, [1], [8])
    segments = read_folder(tmp_path / "second")
    assert sampled_again(segments, {"a": 5, "b": 5}) == 0
    assert sampled_again(segments, {"a": 7, "b": 5}) == 2
    assert sampled_again(segments, {"a": 20, "b": 20}) == 3 + 4
    assert sampled_again(segments, {}) == 0


@pytest.mark.slow
def test_kills_change_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "bench", "kill", "--quick", "--kills", "5", "--json"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["bench"] == "kill"
    figures = result["figures"]
    assert figures["kills"]["value"] == 5
    assert figures["same_bytes"]["value"] in (48, 96, 144)  # a fast machine needs another round
    assert figures["acknowledged_tokens"]["value"] > 0
    for name in ("acknowledged_lost", "acknowledged_sampled_again"):
        assert (figures[name]["value"], figures[name]["holds"]) == (0, True)
