"""Damage to the token log: every acknowledged token comes back or recovery refuses, and no token ever changes.

One writer makes a log with known groups; `history` holds what the log says after each record, from the list of what
was appended. Whatever is done to the bytes, a recovery that succeeds must equal one of those states.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from ml.rollout.wal import Disk, LogHeader, TokenLog
from ml.rollout.wal_recovery import Recovered, base_segment, read_folder, recover
from schemas.errors import FormatError, StoreError

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
        entries = []
        for name in names:
            ids, logprobs, _ = self.state[name]
            new = [token_of(name, len(ids) + i) for i in range(count)]
            entries.append(
                (self.numbers[name], len(ids), [t for t, _ in new], [p for _, p in new], [p for _, p in new])
            )
            ids.extend(t for t, _ in new)
            logprobs.extend(p for _, p in new)
        sequence = self.log.append_step(entries)
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


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> tuple[Segments, dict[int, State], int]:
    """(segments, history, offset in the last segment where its last group starts): base, one sealed, one open."""
    folder = tmp_path_factory.mktemp("wal") / "log"
    writer = Writer(TokenLog(folder, HEADER, seal_seconds=600))
    for name in ("a", "b", "c"):
        writer.admit(name)
    for _ in range(3):
        writer.commit(writer.step("a", "b", "c"))
    writer.log.seal()
    for _ in range(2):
        writer.commit(writer.step("a", "b", "c"))
    writer.step("a", "c", count=2)
    writer.commit(writer.finish("b"))
    last_group_at = len(read_folder(folder)[-1][1])
    writer.step("a", count=30)
    writer.step("c", count=40)
    writer.step("a", "c", count=25)
    writer.commit(writer.finish("a"))
    writer.log.abandon()
    segments = read_folder(folder)
    assert len(segments) == 3
    assert len(segments[2][1]) - last_group_at > 3 * 512
    return segments, writer.history, last_group_at


def changed(segments: Segments, index: int, data: bytes) -> Segments:
    return [(n, data if i == index else d) for i, (n, d) in enumerate(segments)]


def durable(segments: Segments, last_group_at: int) -> int:
    """Last sequence before the last group, from a recovery of the log cut there."""
    return recover(changed(segments, 2, segments[2][1][:last_group_at]), "log").last_sequence


def test_undamaged_log_is_whole(log):
    segments, history, _ = log
    assert outcome(segments, history) == "whole"


def test_truncation_at_every_byte(log):
    segments, history, last_group_at = log
    before = durable(segments, last_group_at)
    acknowledged = {name: len(ids) for name, (ids, _, _) in history[max(history)].items()}
    num_tokens = sum(acknowledged.values())
    counts: Counter[str] = Counter()
    for index, (_, data) in enumerate(segments):
        for length in range(len(data)):
            cut = changed(segments, index, data[:length])
            at_least = before if index == 2 and length >= last_group_at else 0
            result = outcome(cut, history, at_least)
            # Only the open segment may end early; a sealed one that does has lost what was durable.
            assert (result == "prefix") == (index == 2)
            counts[result] += 1
            tokens = recover(cut, "log").num_tokens if index == 2 else num_tokens
            if tokens < num_tokens:
                with pytest.raises(FormatError, match="acknowledged tokens"):
                    recover(cut, "log").require(acknowledged)
    assert counts["prefix"] == len(segments[2][1])


@pytest.mark.parametrize("pattern", [0x01, 0x80, 0xFF])
def test_flip_of_every_byte(log, pattern):
    segments, history, last_group_at = log
    for index, (_, data) in enumerate(segments):
        for offset in range(len(data)):
            flipped = bytearray(data)
            flipped[offset] ^= pattern
            result = outcome(changed(segments, index, bytes(flipped)), history)
            # A bad byte in the last group alone cannot be told from a torn write.
            assert result == ("prefix" if index == 2 and offset >= last_group_at else "refused")


@pytest.mark.parametrize("kind", ["zero", "garbage", "stale"])
@pytest.mark.parametrize("sector_bytes", [512, 128])
def test_any_subset_of_the_unsynced_sectors(log, kind, sector_bytes):
    """A power cut writes any of the sectors that were not synced; what was synced before them always comes back."""
    segments, history, last_group_at = log
    data = segments[2][1]
    before = durable(segments, last_group_at)
    starts = [last_group_at, *range((last_group_at // sector_bytes + 1) * sector_bytes, len(data), sector_bytes)]
    sectors = list(itertools.pairwise([*starts, len(data)]))
    rng = random.Random(7)
    subsets = itertools.product([False, True], repeat=len(sectors)) if len(sectors) <= 8 else (
        [rng.random() < 0.5 for _ in sectors] for _ in range(300))  # fmt: skip
    for lost in subsets:
        damaged = bytearray(data)
        for (start, end), gone in zip(sectors, lost, strict=True):
            if gone:
                stale_at = rng.randrange(512, last_group_at)
                fill = {"zero": bytes(end - start), "garbage": rng.randbytes(end - start),
                        "stale": (data[stale_at:last_group_at] * 8)[: end - start]}[kind]  # fmt: skip
                damaged[start:end] = fill
        result = outcome(changed(segments, 2, bytes(damaged)), history, before)
        assert result == ("prefix" if any(lost) else "whole")
        # The file may also be shorter than what was handed to write.
        short = bytes(damaged[: rng.randrange(last_group_at, len(data) + 1)])
        assert outcome(changed(segments, 2, short), history, before) != "refused"


def test_damage_is_reported_at_its_offset(log):
    segments, _, _ = log
    data = bytearray(segments[2][1])
    data[512 + 21] ^= 1  # the payload of this segment's first record
    with pytest.raises(FormatError) as caught:
        recover(changed(segments, 2, bytes(data)), "log")
    assert caught.value.where == f"{segments[2][0]}, offset 512"
    assert "valid record at offset" in caught.value.found


def test_records_after_a_torn_tail_are_refused(log, tmp_path):
    """Nobody appends to a torn log, so a group behind a hole means that the hole was once written."""
    segments, history, last_group_at = log
    data = segments[2][1]
    first_group_end = _frame_end(data, 512)
    for hole in (b"", b"\0" * 7, data[512 : 512 + 30]):
        damaged = data[:512] + hole + data[first_group_end:]
        assert outcome(changed(segments, 2, damaged), history) == "refused"
    torn = changed(segments, 2, data[: last_group_at + 5])
    assert outcome(torn, history) == "prefix"
    assert outcome([*torn, ("000003.seg", data)], history) == "refused"


def _frame_end(data: bytes, offset: int) -> int:
    return offset + 21 + int.from_bytes(data[offset : offset + 4], "little")


def test_bytes_after_a_seal_are_refused(log):
    segments, history, _ = log
    assert outcome(changed(segments[:2], 1, segments[1][1] + b"\0"), history) == "refused"
    assert outcome(changed(segments[:2], 1, segments[1][1] * 2), history) == "refused"


def test_segments_missing_doubled_or_swapped_are_refused(log):
    segments, history, _ = log
    (n0, base), (n1, one), (n2, two) = segments
    for wrong in ([(n0, base), (n2, two)], [(n1, one), (n2, two)], [(n0, base), (n1, one), (n1, one), (n2, two)],
                  [(n0, base), (n1, two), (n2, one)], [(n0, b""), (n1, one)]):  # fmt: skip
        assert outcome(wrong, history) == "refused"
    # A lost tail of whole segments looks like an older log; only the acknowledged counts tell.
    assert outcome(segments[:2], history) == "prefix"
    with pytest.raises(FormatError, match="acknowledged tokens"):
        recover(segments[:2], "log").require({"a": 4})


def test_recovery_is_repeatable_and_changes_nothing(log, tmp_path):
    segments, _, last_group_at = log
    folder = tmp_path / "torn"
    folder.mkdir()
    for name, data in changed(segments, 2, segments[2][1][: last_group_at + 9]):
        (folder / Path(name).name).write_bytes(data)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    first, second = (recover(read_folder(folder), "log") for _ in range(2))
    heir = LogHeader("run", 0, 4, 2, "student")
    assert base_segment(first, heir, bytes(8)) == base_segment(second, heir, bytes(8))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


# --- a disk that fails, and a disk that forgets


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

    def write(self, fd, data):
        if self._fails("write"):
            if self._how == "short":
                return super().write(fd, data[: max(1, len(data) // 2)])
            if self._how == "full":
                # A full disk takes what fits; the call for the rest fails.
                self._k, self._how = self._k + 1, "eio"
                return super().write(fd, data[: max(1, len(data) // 2)])
            if self._how == "nothing":
                return 0
            raise OSError(errno.EIO, "input/output error")
        return super().write(fd, data)

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
    [("create", ""), ("write", "eio"), ("write", "full"), ("write", "nothing"), ("write", "short"), ("sync", ""),
     ("rename", ""), ("sync_folder", "")],
)  # fmt: skip
def test_kth_call_fails(tmp_path, clean_history, operation, how):
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
        for segments in (read_folder(tmp_path / str(k)), [(str(n), d) for n, d in sorted(uploads.items())]):
            if segments:
                at_least = acknowledged[-1] if segments[0][0].endswith("seg") else 0
                assert outcome(segments, clean_history, at_least) != "refused"
            else:
                assert acknowledged == [0]
    assert k > {"rename": 0, "create": 3, "write": 9, "sync": 9, "sync_folder": 4}[operation]


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

    def write(self, fd, data):
        written = super().write(fd, data)
        self.operations.append(("write", self._paths[fd], bytes(data[:written])))
        return written

    def sync(self, fd):
        super().sync(fd)
        self.operations.append(("sync", self._paths[fd]))

    def rename(self, source, target):
        super().rename(source, target)
        self.operations.append(("rename", source, target))

    def sync_folder(self, path):
        super().sync_folder(path)
        self.operations.append(("sync_folder", path))


def after_power_cut(operations: list[tuple], kept: float, names_kept: bool) -> dict[str, bytes]:
    """Files as a disk may hold them after these operations: of what was not synced, the share `kept` of each file.

    names_kept: creations and renames that the folder was not synced after took effect nevertheless.
    """
    synced: dict[Path, bytes] = {}
    written: dict[Path, bytes] = {}
    pending: list[tuple[Path, Path | None]] = []
    names: dict[Path, Path] = {}  # name in the folder -> file, files being called by the name they were created under

    def settle() -> None:
        for target, source in pending:
            if source is None:
                names[target] = target
            else:
                names[target] = names.pop(source)
        pending.clear()

    for operation, path, *rest in operations:
        if operation == "create":
            pending.append((path, None))
            synced[path] = written[path] = b""
        elif operation == "write":
            written[path] += rest[0]
        elif operation == "sync":
            synced[path] = written[path]
        elif operation == "rename":
            pending.append((rest[0], path))
        elif operation == "sync_folder":
            settle()
    if names_kept:
        settle()
    out = {}
    for name, file in names.items():
        tail = written[file][len(synced[file]) :]
        out[name.name] = synced[file] + tail[: int(len(tail) * kept)]
    return out


@pytest.mark.parametrize("names_kept", [False, True])
@pytest.mark.parametrize("kept", [0.0, 0.4, 1.0])
def test_power_cut_after_every_operation(tmp_path, clean_history, kept, names_kept):
    disk, told = ForgetfulDisk(), []
    told_at: list[tuple[int, int]] = []

    class Telling(list):
        def append(self, sequence):  # remembers how many operations preceded the acknowledgement
            told_at.append((len(disk.operations), sequence))

    workload(tmp_path / "log", disk, Telling(), {})
    for cut in range(len(disk.operations) + 1):
        files = after_power_cut(disk.operations[:cut], kept, names_kept)
        segments = sorted((n, d) for n, d in files.items() if n.endswith(".seg"))
        at_least = max((sequence for at, sequence in told_at if at <= cut), default=0)
        if segments:
            assert outcome(segments, clean_history, at_least) != "refused"
        else:
            assert at_least == 0
        told.append(at_least)
    assert told[-1] == max(clean_history)


# --- a process that dies

WRITER = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}, {here!r}]
import test_wal_damage as t
t.write_until_killed(Path(sys.argv[1]), int(sys.argv[2]))
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
    code = WRITER.format(root=str(Path(__file__).parents[2]), here=str(Path(__file__).parent))
    total = 0
    for epoch in range(1, 7):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(epoch)], stderr=subprocess.PIPE)
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
