"""The token log on a disk that fails, on one that forgets what was not synced, and in a process that is killed.

Every acknowledged token comes back; nothing is acknowledged after the first failure. With -s the cases are counted.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_recovery import read_folder, recover
from ml.rollout.wal_segment import Disk
from schemas.errors import StoreError
from tests.faults.wal_writer import HEADER, DamageTable, Segments, State, Writer, state_of, token_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table() -> Iterator[DamageTable]:
    table = DamageTable()
    yield table
    table.print()


class FailingDisk(Disk):
    """The k-th call (from 0) of the named operation fails as told; counts calls."""

    def __init__(self, operation: str, k: int, how: str) -> None:
        self._operation, self._k, self._how, self.calls = operation, k, how, Counter()

    def _fails(self, operation: str) -> bool:
        self.calls[operation] += 1
        return operation == self._operation and self.calls[operation] == self._k + 1

    def create(self, path):
        if self._fails("create"):
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().create(path)

    def write(self, fd, data, offset):
        if self._fails("write"):
            if self._how == "short":
                return super().write(fd, data[: max(1, len(data) // 2)], offset)
            if self._how == "full":
                # A full disk takes what fits; the call for the rest fails.
                self._k, self._how = self._k + 1, "eio"
                return super().write(fd, data[: max(1, len(data) // 2)], offset)
            if self._how == "nothing":
                return 0
            raise OSError(errno.EIO, "input/output error")
        return super().write(fd, data, offset)

    def truncate(self, fd, size):
        if self._fails("truncate"):
            raise OSError(errno.EIO, "input/output error")
        super().truncate(fd, size)

    def sync(self, fd):
        if self._fails("sync"):
            raise OSError(errno.EIO, "input/output error")
        super().sync(fd)

    def rename(self, source, target):
        if self._fails("rename"):
            raise OSError(errno.EIO, "input/output error")
        super().rename(source, target)

    def sync_folder(self, path):
        if self._fails("sync_folder"):
            raise OSError(errno.EIO, "input/output error")
        super().sync_folder(path)


def workload(folder: Path, disk: Disk, acknowledged: list[int], uploads: dict[int, bytes]) -> Writer:
    """Two segments of two groups behind the base; `acknowledged` grows as the log says so."""
    log = TokenLog(folder, HEADER, seal_seconds=600, upload=uploads.__setitem__, disk=disk)
    writer = Writer(log)
    try:
        for name in ("a", "b"):
            writer.admit(name)
        for _ in range(2):
            for _ in range(2):
                writer.step("a")
                writer.commit(writer.step("a", "b", count=3))
                acknowledged.append(log.acknowledged)
            log.seal()
        writer.commit(writer.step("b"))
        acknowledged.append(log.acknowledged)
        return writer
    finally:
        log.abandon()


@pytest.fixture(scope="module")
def clean_history(tmp_path_factory) -> dict[int, State]:
    return workload(tmp_path_factory.mktemp("clean") / "log", Disk(), [], {}).history


@pytest.mark.parametrize(
    ("operation", "how"),
    [("create", ""), ("truncate", ""), ("write", "eio"), ("write", "full"), ("write", "nothing"), ("write", "short"),
     ("sync", ""), ("rename", ""), ("sync_folder", "")],
)  # fmt: skip
def test_kth_call_fails(tmp_path, clean_history, table, operation, how):
    name = f"k-th {operation} {({'short': 'is short', 'nothing': 'takes nothing'}.get(how) or 'fails ' + how).strip()}"
    for k in range(1000):
        acknowledged, uploads = [0], {}
        disk = FailingDisk(operation, k, how)
        failures: list[StoreError] = []
        try:
            workload(tmp_path / str(k), disk, acknowledged, uploads)
        except StoreError as error:
            failures.append(error)
        if disk.calls[operation] <= k:
            assert failures == []
            break
        assert len(failures) == (how != "short")
        assert all(error.safe and error.next_command for error in failures)
        copies: list[tuple[str, Segments, int]] = [
            ("on the disk", read_folder(tmp_path / str(k)), acknowledged[-1]),
            ("in the store", [(str(n), d) for n, d in sorted(uploads.items())], 0),
        ]
        for place, segments, told in copies:
            if segments:
                assert table.judge(f"{name}, {place}", segments, clean_history, told) in ("whole", "tail dropped")
            else:
                assert acknowledged == [0]
    assert k > {"rename": 0, "truncate": 1, "create": 3, "write": 9, "sync": 9, "sync_folder": 4}[operation]


def test_nothing_is_acknowledged_or_written_after_a_failure(tmp_path):
    """A sync that fails once and then works again must not be believed."""
    disk = FailingDisk("sync", 3, "")
    log = TokenLog(tmp_path / "log", HEADER, seal_seconds=600, disk=disk)
    writer = Writer(log)
    writer.admit("a")
    writer.commit(writer.step("a"))
    told = log.acknowledged
    with pytest.raises(StoreError, match="input/output error"):
        writer.commit(writer.step("a"))
    calls = Counter(disk.calls)
    for call in (lambda: writer.step("a"), log.commit, log.seal, lambda: log.wait_local(told + 1), log.close):
        with pytest.raises(StoreError, match="input/output error"):
            call()
    assert log.acknowledged == told
    assert disk.calls == calls


class ForgetfulDisk(Disk):
    """Writes for real and keeps a list of what reached which file, so that a power cut can be replayed at any point."""

    def __init__(self) -> None:
        self.operations: list[tuple] = []
        self._paths: dict[int, Path] = {}

    def create(self, path):
        fd = super().create(path)
        self._paths[fd] = path
        self.operations.append(("create", path))
        return fd

    def write(self, fd, data, offset):
        written = super().write(fd, data, offset)
        self.operations.append(("write", self._paths[fd], offset, bytes(data[:written])))
        return written

    def truncate(self, fd, size):
        super().truncate(fd, size)
        self.operations.append(("truncate", self._paths[fd], size))

    def sync(self, fd):
        super().sync(fd)
        self.operations.append(("sync", self._paths[fd]))

    def rename(self, source, target):
        super().rename(source, target)
        self.operations.append(("rename", source, target))

    def sync_folder(self, path):
        super().sync_folder(path)
        self.operations.append(("sync_folder", path))


def after_power_cut(operations: list[tuple], kept: float, metadata_kept: bool) -> dict[str, bytes]:
    """Files as a disk may hold them after these operations: of the bytes that were not synced, the share `kept`.

    metadata_kept: creations, renames and cuts that were not synced took effect nevertheless.
    """
    synced: dict[Path, bytearray] = {}
    unsynced: dict[Path, list[tuple]] = {}
    pending: list[tuple[Path, Path | None]] = []
    names: dict[Path, Path] = {}  # name in the folder -> file, files being called by the name they were created under

    def settle() -> None:
        for target, source in pending:
            if source is None:
                names[target] = target
            else:
                names[target] = names.pop(source)
        pending.clear()

    def applied(path: Path, share: float, cuts: bool) -> bytearray:
        data = synced[path].copy()
        budget = int(share * sum(len(o[2]) for o in unsynced[path] if o[0] == "write"))
        for kind, *rest in unsynced[path]:
            if kind == "write":
                offset, new = rest[0], rest[1][:budget]
                budget -= len(new)
                data[len(data) :] = bytes(max(0, offset - len(data))) if new else b""
                data[offset : offset + len(new)] = new
            elif cuts:
                del data[rest[0] :]
        return data

    for operation, path, *rest in operations:
        if operation == "create":
            pending.append((path, None))
            synced[path], unsynced[path] = bytearray(), []
        elif operation in ("write", "truncate"):
            unsynced[path].append((operation, *rest))
        elif operation == "sync":
            synced[path] = applied(path, 1.0, True)
            unsynced[path] = []
        elif operation == "rename":
            pending.append((rest[0], path))
        elif operation == "sync_folder":
            settle()
    if metadata_kept:
        settle()
    return {name.name: bytes(applied(file, kept, metadata_kept)) for name, file in names.items()}


@pytest.mark.parametrize("metadata_kept", [False, True])
@pytest.mark.parametrize("kept", [0.0, 0.0002, 0.4, 1.0])
def test_power_cut_after_every_operation(tmp_path, clean_history, table, kept, metadata_kept):
    name = f"power cut, {kept:.2%} of unsynced bytes, names and cuts {'kept' if metadata_kept else 'lost'}"
    disk, told = ForgetfulDisk(), []
    told_at: list[tuple[int, int]] = []

    class Telling(list):
        def append(self, sequence):  # remembers how many operations preceded the acknowledgement
            told_at.append((len(disk.operations), sequence))

    workload(tmp_path / "log", disk, Telling(), {})
    for cut in range(len(disk.operations) + 1):
        files = after_power_cut(disk.operations[:cut], kept, metadata_kept)
        segments = sorted((n, d) for n, d in files.items() if n.endswith(".seg"))
        at_least = max((sequence for at, sequence in told_at if at <= cut), default=0)
        if segments:
            assert table.judge(name, segments, clean_history, at_least) in ("whole", "tail dropped")
        else:
            assert at_least == 0
        told.append(at_least)
    assert told[-1] == max(clean_history)


# --- a process that dies

WRITER = """
import sys
from pathlib import Path
from tests.faults.test_wal_disk import write_until_killed
write_until_killed(Path(sys.argv[1]), int(sys.argv[2]))
"""


def write_until_killed(folder: Path, epoch: int) -> None:
    """Continues the newest log and tells, in a file of its own, how many tokens are acknowledged."""
    header = LogHeader("run", 0, 4, epoch, "student")
    base = recover(read_folder(folder / str(epoch - 1)), "log") if epoch > 1 else None
    names = [f"t{i}" for i in range(5)]
    told = os.open(folder / "acknowledged", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    log = TokenLog(folder / str(epoch), header, base=base, seal_seconds=0.02)
    os.write(told, f"{epoch} open 0\n".encode())
    writer = Writer(log, state_of(base) if base else None)
    for name in names:
        if name not in writer.state:
            writer.admit(name)
    for _ in range(100_000):
        sequence = writer.step(*names)
        log.commit()
        log.wait_local(sequence)
        lines = "".join(f"{epoch} {name} {len(writer.state[name][0])}\n" for name in names)
        os.write(told, lines.encode())


def test_killed_writers_lose_nothing_that_they_told(tmp_path):
    rng = random.Random(3)
    total = 0
    for epoch in range(1, 7):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(epoch)], cwd=ROOT, stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + 60
        told = tmp_path / "acknowledged"
        while not (told.exists() and f"{epoch} t4" in told.read_text()):
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        acknowledged: dict[str, int] = {}
        for line in told.read_text().splitlines():
            _, name, count = line.split()
            if name != "open":
                acknowledged[name] = max(acknowledged.get(name, 0), int(count))
        recovered = recover(read_folder(tmp_path / str(epoch)), "log")
        recovered.require(acknowledged)
        for t in recovered.trajectories:
            want = [token_of(t.trajectory_id, i) for i in range(len(t.ids))]
            assert list(zip(t.ids.tolist(), t.logprobs_raw.tolist(), strict=True)) == want
            assert len(t.ids) - acknowledged[t.trajectory_id] in (0, 1)
        assert recovered.num_tokens > total
        total = recovered.num_tokens
