"""Records of the token log whose bytes are whole but whose content cannot be."""

from __future__ import annotations

import hashlib
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml.rollout import wal_format as fmt
from ml.rollout import wal_records
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_recovery import base_segment, recover
from schemas.errors import FormatError
from tests.ml.test_wal import HEADER, as_plain

SALT = b"12345678"


def segment_of(*records: tuple[int, bytes], log=HEADER, segment=0, previous_digest=bytes(32)) -> bytes:
    out = bytearray(fmt.encode_header(fmt.SegmentHeader(log, segment, 1, SALT, previous_digest)))
    for sequence, (kind, payload) in enumerate(records, 1):
        out += fmt.encode_frame(zlib.crc32(SALT), kind, sequence, payload)
    seal = fmt.encode_seal(len(records), hashlib.sha256(out).digest())
    return bytes(out + fmt.encode_frame(zlib.crc32(SALT), fmt.SEAL, len(records), seal))


ADMIT = (fmt.ADMIT, wal_records.encode_admit(wal_records.Admit(0, "t", bytes(32), 1)))


def step(number: int, first: int, count: int = 1) -> tuple[int, bytes]:
    return fmt.STEP, wal_records.encode_step([number], [first], [count], [1] * count, [0.0] * count, [0.0] * count)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([step(0, 0)], "a number below 0"),
        ([ADMIT, step(1, 0)], "a number below 1"),
        ([ADMIT, step(0, 1)], "one after another"),
        ([ADMIT, step(0, 0, 2), step(0, 1)], "one after another"),
        ([ADMIT, step(0, 0), step(0, 2)], "one after another"),
        ([ADMIT, ADMIT], "trajectory number 1"),
        ([ADMIT, (fmt.ADMIT, wal_records.encode_admit(wal_records.Admit(1, "t", bytes(32), 1)))], "a new id"),
        ([ADMIT, (fmt.FINISH, wal_records.encode_finish(0, 3, "stop"))], "3 response tokens"),
        ([ADMIT, *[(fmt.FINISH, wal_records.encode_finish(0, 0, "stop"))] * 2], "one finish"),
        ([ADMIT, (fmt.STEP, step(0, 0)[1][:-1])], "more bytes in the record"),
        ([ADMIT, (fmt.STEP, step(0, 0)[1] + b"x")], "a record of"),
        ([ADMIT, (fmt.STEP, struct.pack("<II", 2**32 - 1, 2**32 - 1))], "more bytes in the record"),
        ([(fmt.ADMIT, ADMIT[1][:-1] + b"\xff")], "UTF-8"),
        ([ADMIT, (9, b"")], "another version"),
        ([ADMIT, (0, b"")], "another version"),
    ],
)
def test_impossible_content_is_refused(records, message):
    with pytest.raises(FormatError, match=message):
        recover([("000000.seg", segment_of(*records))], "log")


STEP = step(0, 0)[1]
PAYLOADS = st.one_of(
    st.tuples(st.integers(1, 6), st.binary(max_size=80)),
    # Nearly right: a record with one of its words replaced.
    st.builds(
        lambda record, at, word: (record[0], record[1][: 4 * at] + word + record[1][4 * at + 4 :]),
        st.sampled_from([ADMIT, (fmt.STEP, STEP), (fmt.STEP, step(0, 1, 3)[1]),
                         (fmt.OBSERVATION, wal_records.encode_observation(0, 1, [5, 6])),
                         (fmt.FINISH, wal_records.encode_finish(0, 1, "stop")),
                         (fmt.SPILL, wal_records.encode_spill(0, wal_records.Spill(1, 2, bytes(32), "k"))),
                         (fmt.INTENT, wal_records.encode_intent(0, wal_records.Intent(1, b"act")))]),
        st.integers(0, 12), st.sampled_from([bytes(4), b"\1\0\0\0", b"\2\0\0\0", b"\xff" * 4, b"\xff\xff\xff\x7f"]),
    ),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(PAYLOADS, max_size=4))
def test_any_content_is_read_or_refused(records):
    """Whatever stands in frames whose CRC holds: FormatError, or trajectories whose base says the same."""
    try:
        found = recover([("000000.seg", segment_of(ADMIT, (fmt.STEP, STEP), *records))], "log")
    except FormatError:
        return
    base, _ = base_segment(found, HEADER, SALT)
    assert repr(as_plain(recover([("base", base)], "log"))) == repr(as_plain(found))


def test_chain_is_checked():
    base = segment_of()
    digest = hashlib.sha256(base).digest()
    good = segment_of(ADMIT, segment=1, previous_digest=digest)
    assert recover([("0", base), ("1", good)], "log").trajectories[0].trajectory_id == "t"
    other = LogHeader("other", 3, 11, 2, "s")
    for wrong in (
        segment_of(ADMIT, segment=2, previous_digest=digest),
        segment_of(ADMIT, segment=1, previous_digest=bytes(32)),
        segment_of(ADMIT, segment=1, previous_digest=digest, log=other),
    ):
        with pytest.raises(FormatError, match="segment 1 of"):
            recover([("0", base), ("1", wrong)], "log")
    with pytest.raises(FormatError, match="at least one segment"):
        recover([], "log")
    with pytest.raises(FormatError, match="segment 0 of"):
        recover([("1", good)], "log")
