"""Recovery that is itself killed, at every call, twice in a row, on the same node and on another one."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from pathlib import Path

import pytest

from infra.store import ObjectStore
from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_recovery import read_folder
from ml.rollout.wal_segment import Disk
from schemas import keys
from tasks.ranks.rollout_log import newest_log
from tasks.workers.logs import local_log
from tests.faults.wal_writer import State, Writer, state_of, token_of

OWNED = "runs/run/00000/rollout/f/p00004"


class Killed(BaseException):
    """The process is gone: nobody handles this."""


class MemoryStore:
    """As much of an object store as a takeover asks for."""

    root = "memory"

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = dict(objects)

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))

    def get(self, key: str) -> bytes:
        return self.objects[key]


class DyingDisk(Disk):
    """Kills the process at its k-th call, before or after it took effect; syncs are counted and not waited for."""

    def __init__(self, k: int, *, after: bool) -> None:
        self.calls, self._k, self._after = 0, k, after

    def dying(self, call, *arguments):
        self.calls += 1
        if self.calls == self._k and not self._after:
            raise Killed
        result = call(*arguments)
        if self.calls == self._k:
            raise Killed
        return result

    def create(self, path):
        return self.dying(super().create, path)

    def write(self, fd, data, offset):
        return self.dying(super().write, fd, data, offset)

    def sync(self, fd):
        self.dying(lambda: None)

    def rename(self, source, target):
        self.dying(super().rename, source, target)

    def sync_folder(self, path):
        self.dying(lambda: None)


def header(epoch: int) -> LogHeader:
    return LogHeader("run", 0, 4, epoch, "student")


def take_over(store: MemoryStore, node: Path, epoch: int, disk: DyingDisk) -> tuple[State, TokenLog | None]:
    """(what the heir recovered, its log, or None when it was killed while it opened it)"""
    found = newest_log(as_store(store), node, OWNED, header(epoch), None)
    assert found is not None

    def put(segment: int, data: bytes) -> None:
        key = keys.wal_segment(OWNED, epoch, segment)
        assert key not in store.objects
        store.objects[key] = data

    def upload(segment: int, data: bytes) -> None:
        disk.dying(put, segment, data)

    try:
        log = TokenLog(local_log(node, OWNED, epoch), header(epoch), base=found, upload=upload, disk=disk)
    except Killed:
        log = None
    return state_of(found), log


def as_store(store: MemoryStore) -> ObjectStore:
    return store  # pyright: ignore[reportReturnType]


@pytest.fixture(scope="module")
def dead(tmp_path_factory) -> tuple[Path, dict[str, bytes], State, State]:
    """(node, objects, state on the node, state in the store) of epoch 1, killed with a torn tail."""
    node, store = tmp_path_factory.mktemp("node"), MemoryStore({})

    def upload(segment: int, data: bytes) -> None:
        store.objects[keys.wal_segment(OWNED, 1, segment)] = data

    writer = Writer(TokenLog(local_log(node, OWNED, 1), header(1), upload=upload, seal_seconds=600))
    for name in ("a", "b"):
        writer.admit(name)
    writer.commit(writer.step("a", "b", count=3))
    writer.log.seal()
    in_store = writer.snapshot()
    writer.commit(writer.step("a"))
    on_node = writer.snapshot()
    writer.log.abandon()
    last = sorted(local_log(node, OWNED, 1).iterdir())[-1]
    content = last.read_bytes().rstrip(b"\0")
    last.write_bytes(content + content[512:560])
    return node, store.objects, on_node, in_store


def num_calls(dead, tmp_path: Path) -> int:
    node, objects, *_ = dead
    disk = DyingDisk(0, after=False)
    shutil.copytree(node, tmp_path / "counted")
    _, log = take_over(MemoryStore(objects), tmp_path / "counted", 2, disk)
    assert log is not None
    log.abandon()
    return disk.calls


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("moves", [(False, False), (True, False), (False, True), (True, True)])
def test_killed_in_recovery_twice(dead, tmp_path, after, moves):
    """moves: whether the second and the third heir start on a node that holds nothing."""
    source, objects, on_node, in_store = dead
    calls = num_calls(dead, tmp_path)
    assert calls >= 6
    seen: Counter[str] = Counter()
    for case, (first, second) in enumerate(itertools.product(range(1, calls + 1), repeat=2)):
        node, store = tmp_path / str(case), MemoryStore(objects)
        shutil.copytree(source, node)
        best = on_node
        for epoch, k, moved in ((2, first, False), (3, second, moves[0]), (4, 0, moves[1])):
            if moved:
                node = tmp_path / f"{case}-{epoch}"
            found, log = take_over(store, node, epoch, DyingDisk(k, after=after))
            # On the node that the log lies on, all of it; elsewhere at least what was in the store.
            assert found in ((on_node, in_store) if any(moves) else (on_node,))
            assert moved or found == best
            best = found
            assert (log is None) == (k > 0)
            if log is not None:
                seen["whole" if found == on_node else "what the store had"] += 1
                writer = Writer(log, found)
                writer.commit(writer.step("a", "b"))
                log.close()
                assert state_of(newest(store, node)) == writer.state
                assert state_of(newest(store, tmp_path / "nowhere")) == writer.state
        shutil.rmtree(tmp_path / str(case))
    print(f"\nkilled in recovery twice ({calls} x {calls} calls, moves {moves}, after {after}): {dict(seen)}")
    assert sum(seen.values()) == calls**2


def newest(store: MemoryStore, node: Path):
    found = newest_log(as_store(store), node, OWNED, header(5), None)
    assert found is not None
    assert found.header.epoch == 4
    for t in found.trajectories:
        assert [token_of(t.trajectory_id, i)[0] for i in range(len(t.ids))] == t.ids.tolist()
    return found


def test_part_of_a_base_is_no_log(dead, tmp_path):
    node, objects, on_node, _ = dead
    shutil.copytree(node, tmp_path / "node")
    folder = local_log(tmp_path / "node", OWNED, 2)
    folder.mkdir(parents=True)
    (folder / "000000.part").write_bytes(objects[keys.wal_segment(OWNED, 1, 0)])
    assert read_folder(folder) == []
    found = newest_log(as_store(MemoryStore(objects)), tmp_path / "node", OWNED, header(3), None)
    assert found is not None
    assert state_of(found) == on_node
