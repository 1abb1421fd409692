"""Damage to the bytes of a token log: an exact prefix comes back or recovery refuses, and no token ever changes.

One writer makes a log with known groups; its history holds what the log says after each record, from the list of
what was appended. Whatever is done to the bytes, a recovery that succeeds must equal one of those states. With -s the
counts are printed as a table; "told by acknowledgement" counts what the bytes cannot show and a caller who knows the
acknowledged counts is told: the loss of a whole durable tail of the last, unsealed segment.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_recovery import base_segment, read_folder, recover
from schemas.errors import FormatError
from tests.faults.wal_writer import HEADER, DamageTable, Segments, State, Writer, outcome

ROOM = 48  # zeros after the last record that the tests keep, of the megabyte that a writer prepares


@dataclass(frozen=True)
class Log:
    """A base, a sealed segment, an open one. The last group lies at [last_group_at, end) of the open segment."""

    segments: Segments
    history: dict[int, State]
    last_group_at: int
    end: int
    before_last_group: int  # last sequence number before the last group
    last: int

    def changed(self, index: int, data: bytes) -> Segments:
        return [(n, data if i == index else d) for i, (n, d) in enumerate(self.segments)]


@pytest.fixture(scope="module")
def table() -> Iterator[DamageTable]:
    table = DamageTable()
    yield table
    table.print()


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Log:
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
    before = writer.finish("b")
    writer.commit(before)
    # A finish ends with its reason, so that the first zero after it is the first that no record wrote.
    last_group_at = len(read_folder(folder)[-1][1].rstrip(b"\0"))
    writer.step("a", count=30)
    writer.step("c", count=40)
    writer.step("a", "c", count=25)
    last = writer.finish("a")
    writer.commit(last)
    writer.log.abandon()
    *sealed, (name, data) = read_folder(folder)
    end = len(data.rstrip(b"\0"))
    assert len(data) == 1 << 20
    assert len(sealed) == 2
    assert end - last_group_at > 3 * 512
    return Log([*sealed, (name, data[: end + ROOM])], writer.history, last_group_at, end, before, last)


def test_undamaged_log_is_whole(log):
    assert outcome(log.segments, log.history) == "whole"
    assert recover(log.segments, "log").torn_bytes == 0
    without_room = log.changed(2, log.segments[2][1][: log.end])
    assert outcome(without_room, log.history) == "whole"


def test_truncation_at_every_byte(log, table):
    for index, (_, data) in enumerate(log.segments):
        for length in range(len(data)):
            cut = log.changed(index, data[:length])
            if index < 2:
                # Only the open segment may end early; a sealed one that does has lost what was durable.
                assert table.judge("truncation of a sealed segment, each byte", cut, log.history, log.last) == "refused"
                continue
            synced = "truncation of the open segment, each byte, all of it synced"
            found = table.judge(synced, cut, log.history, log.last)
            assert found == ("whole" if length >= log.end else "told by acknowledgement")
            unsynced = "truncation of the open segment, each byte of its unsynced group"
            if length >= log.last_group_at:
                found = table.judge(unsynced, cut, log.history, log.before_last_group)
                assert found == ("whole" if length >= log.end else "tail dropped")


@pytest.mark.parametrize("pattern", [0x01, 0x80, 0xFF])
def test_flip_of_every_byte(log, table, pattern):
    for index, (_, data) in enumerate(log.segments):
        for offset in range(len(data)):
            flipped = bytearray(data)
            flipped[offset] ^= pattern
            damaged = log.changed(index, bytes(flipped))
            if index == 2 and offset >= log.end:
                found = table.judge("flip of a byte that no record wrote", damaged, log.history, log.last)
                assert found == "whole"
            elif index == 2 and offset >= log.last_group_at:
                # A bad byte in the last group alone cannot be told from a torn write.
                found = table.judge("flip of each byte of the last group, synced", damaged, log.history, log.last)
                assert found == "told by acknowledgement"
            else:
                found = table.judge("flip of each byte that a later group follows", damaged, log.history, log.last)
                assert found == "refused"


@pytest.mark.parametrize("kind", ["zero", "garbled", "stale"])
@pytest.mark.parametrize("sector_bytes", [512, 128])
def test_any_subset_of_the_unsynced_sectors(log, table, kind, sector_bytes):
    """A power cut writes any of the sectors that were not synced; what was synced before them always comes back."""
    data = log.segments[2][1][: log.end]
    starts = range((log.last_group_at // sector_bytes + 1) * sector_bytes, len(data), sector_bytes)
    sectors = list(itertools.pairwise([log.last_group_at, *starts, len(data)]))
    rng = random.Random(7)
    subsets = itertools.product([False, True], repeat=len(sectors)) if len(sectors) <= 8 else (
        [rng.random() < 0.5 for _ in sectors] for _ in range(300))  # fmt: skip
    for lost in subsets:
        damaged = bytearray(data)
        for (start, end), gone in zip(sectors, lost, strict=True):
            if gone:
                stale_at = rng.randrange(512, log.last_group_at)
                fill = {"zero": bytes(end - start), "garbled": rng.randbytes(end - start),
                        "stale": (data[stale_at : log.last_group_at] * 8)[: end - start]}[kind]  # fmt: skip
                damaged[start:end] = fill
        name = f"{kind} sectors of {sector_bytes} bytes in the unsynced group"
        found = table.judge(name, log.changed(2, bytes(damaged)), log.history, log.before_last_group)
        assert found == ("tail dropped" if any(lost) else "whole")
        # The file may also be shorter than what was handed to write, or end in the room prepared for it.
        for tail in (bytes(damaged[: rng.randrange(log.last_group_at, len(data) + 1)]), bytes(damaged) + bytes(ROOM)):
            name = f"{kind} sectors, the file shorter or longer"
            found = table.judge(name, log.changed(2, tail), log.history, log.before_last_group)
            assert found in ("tail dropped", "whole")


def test_damage_is_reported_at_its_offset(log):
    data = bytearray(log.segments[2][1])
    data[512 + 21] ^= 1  # the payload of this segment's first record
    with pytest.raises(FormatError) as caught:
        recover(log.changed(2, bytes(data)), "log")
    assert caught.value.where == f"{log.segments[2][0]}, offset 512"
    assert "valid record at offset" in caught.value.found


def test_records_after_a_torn_tail_are_refused(log, table):
    """Nobody appends to a torn log, so a group behind a hole means that the hole was once written."""
    name, data = "records after a torn tail", log.segments[2][1]
    first_group_end = _frame_end(data, 512)
    for hole in (b"", b"\0" * 7, bytes(first_group_end - 512), data[512 : 512 + 30]):
        damaged = log.changed(2, data[:512] + hole + data[first_group_end:])
        assert table.judge(name, damaged, log.history, log.last) == "refused"
    torn = log.changed(2, data[: log.last_group_at + 5])
    assert outcome(torn, log.history) == "prefix"
    assert table.judge(name, [*torn, ("000003.seg", data)], log.history, log.last) == "refused"


def _frame_end(data: bytes, offset: int) -> int:
    return offset + 21 + int.from_bytes(data[offset : offset + 4], "little")


def test_bytes_after_a_seal(log, table):
    """Zeros after the last seal are room whose cut a power failure undid; anything else there is damage."""
    base, (_, sealed), _ = log.segments
    history = {s: state for s, state in log.history.items() if s <= recover(log.segments[:2], "log").last_sequence}
    name = "bytes after the last seal"
    for tail, column in ((b"\0", "whole"), (bytes(4096), "whole"), (b"\0\1", "refused"), (sealed, "refused")):
        damaged = [base, ("000001.seg", sealed + tail)]
        assert table.judge(name, damaged, history, max(history)) == column
    followed = log.changed(1, sealed + b"\0")
    assert table.judge("zeros after a seal that a segment follows", followed, log.history, log.last) == "refused"


def test_segments_missing_doubled_or_swapped_are_refused(log, table):
    (n0, base), (n1, one), (n2, two) = log.segments
    for wrong in ([(n0, base), (n2, two)], [(n1, one), (n2, two)], [(n0, base), (n1, one), (n1, one), (n2, two)],
                  [(n0, base), (n1, two), (n2, one)], [(n0, b""), (n1, one)]):  # fmt: skip
        found = table.judge("segments missing, doubled or swapped", wrong, log.history, log.last)
        assert found == "refused"
    # A lost tail of whole segments looks like an older log; only the acknowledged counts tell.
    for kept in (1, 2):
        found = table.judge("last segments lost whole", log.segments[:kept], log.history, log.last)
        assert found == "told by acknowledgement"


def test_recovery_is_repeatable_and_changes_nothing(log, tmp_path):
    folder = tmp_path / "torn"
    folder.mkdir()
    for name, data in log.changed(2, log.segments[2][1][: log.last_group_at + 9]):
        (folder / Path(name).name).write_bytes(data)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    first, second = (recover(read_folder(folder), "log") for _ in range(2))
    heir = LogHeader("run", 0, 4, 2, "student")
    assert base_segment(first, heir, bytes(8)) == base_segment(second, heir, bytes(8))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
