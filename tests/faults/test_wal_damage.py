"""Damage to the bytes of a token log: an exact prefix comes back or recovery refuses, and no token ever changes.

One writer makes a log with known groups; its history holds what the log says after each record, from the list of
what was appended. Whatever is done to the bytes, a recovery that succeeds must equal one of those states.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from ml.rollout.wal import LogHeader, TokenLog
from ml.rollout.wal_recovery import base_segment, read_folder, recover
from schemas.errors import FormatError
from tests.faults.wal_writer import HEADER, Segments, State, Writer, outcome


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
