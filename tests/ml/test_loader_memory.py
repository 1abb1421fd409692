"""Shared memory of the loader: full, damaged, left behind by a killed owner."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ml.train import loader as loader_module
from ml.train.loader import NodeLoader, RankBatches
from schemas.errors import ContractError, FormatError, StoreError
from tests.ml.test_loader import CPU, ROOT, frames_of, read_all, small_plan, small_world

# --- shared memory itself


def test_full_shared_memory_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    world = small_world()
    with pytest.raises(StoreError, match="shared memory"):
        NodeLoader(frames_of(world, small_plan(world), 1), world.blobs, ranks=1, loader_bytes=1 << 20, job_id="x",
                   root=tmp_path)  # fmt: skip
    assert list(tmp_path.glob("opd-loader-*-*")) == []


_OWNER = """
import sys, time
from pathlib import Path
import torch
from tests.ml.test_loader import frames_of, small_plan, small_world
from ml.train.loader import NodeLoader
world = small_world()
read, reads = world.blobs.get_range, []
def read_the_first_frame(*part):  # two heads, hidden states, four columns
    reads.append(part)
    time.sleep(60 if len(reads) > 7 else 0)
    return read(*part)
world.blobs.get_range = read_the_first_frame
loader = NodeLoader(frames_of(world, small_plan(world), 1), world.blobs, ranks=1, loader_bytes=40_000, job_id="dies",
                    root=Path(sys.argv[1]))
print(loader.folder, flush=True)
time.sleep(60)
"""


def start_owner(tmp_path: Path) -> tuple[subprocess.Popen, Path]:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_a_killed_owner_is_noticed_and_its_memory_reaped_by_the_next(tmp_path):
    world = small_world()
    plan = small_plan(world)
    frames = frames_of(world, plan, 1)
    owner, folder = start_owner(tmp_path)
    batches = RankBatches(folder, frames, rank=0, ranks=1, device=CPU)
    before = batches.mini_batch("before", 0)
    next(before)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert list(before) == []
    # What was not read can never come.
    with pytest.raises(StoreError, match="its lock free"):
        read_all(batches, plan)
    assert folder.exists()
    other, second = start_owner(tmp_path)
    try:
        assert not folder.exists()
        third = NodeLoader(frames, world.blobs, ranks=1, loader_bytes=1 << 20, job_id="b", root=tmp_path)
        assert second.exists(), "a living owner's folder was reaped"
        third.close()
    finally:
        other.kill()
        other.wait()


def test_damage_inside_the_ring_is_refused(tmp_path):
    world = small_world()
    plan = small_plan(world)
    frames = frames_of(world, plan, 1)
    loader = NodeLoader(frames, world.blobs, ranks=1, loader_bytes=1 << 20, job_id="x", root=tmp_path)
    try:
        batches = RankBatches(loader.folder, frames, rank=0, ranks=1, device=CPU)
        deadline = time.monotonic() + 10
        while loader._state(0) == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        with open(loader.folder / "ring", "r+b") as file:
            file.seek(1)
            file.write(b"\xff")
        with pytest.raises(FormatError, match="CRC"):
            list(batches.mini_batch("before", 0))
    finally:
        loader.close()


def test_the_error_file_is_whole_json(tmp_path):
    loader_module._write_error(tmp_path / "error", ContractError("here", expected="\U0001f600" * 99_999, found="b"))
    assert json.loads((tmp_path / "error").read_text())["where"] == "here"
    assert (tmp_path / "error").stat().st_size < loader_module._ERROR_BYTES


def test_shared_memory_that_is_full_has_room_for_the_reason(tmp_path):
    """Else a fetcher that dies of it could tell nobody, and the ranks would wait for ever."""
    world = small_world()
    loader = NodeLoader(frames_of(world, small_plan(world), 1), world.blobs, ranks=1, loader_bytes=1 << 20, job_id="x",
                        root=tmp_path)  # fmt: skip
    reserved = (loader.folder / "error.tmp").stat().st_blocks * 512
    loader.close()
    assert reserved >= loader_module._ERROR_BYTES
