"""Bytes of the token log: segment header, frames, and the rule that tells torn from damaged.

What the payloads of records hold is `wal_records`.

    segment: 512-byte header | frame | frame | ... | seal frame, or zeros while it is being written
    frame:   u32 length | u32 CRC-32 | u8 type | u32 place | u64 sequence | payload

All integers are little-endian. `place` counts a record inside its group, the records of one commit. A group is
written only after the one before it is durable, so whatever a power cut leaves of the last group is a torn tail,
while damage that a later group follows was durable once and is refused.
Invariant: what `scan_segment` yields is an exact prefix of what was appended, or FormatError is raised.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from schemas.errors import ContractError, FormatError

MAGIC = b"OPDTLOG\n"
VERSION = 1
HEADER_BYTES = 512
MAX_PAYLOAD_BYTES = 16 << 20

ADMIT, STEP, OBSERVATION, INTENT, SPILL, FINISH, SEAL = range(1, 8)
_TYPES = frozenset(range(ADMIT, SEAL + 1))

_HEADER = struct.Struct("<8s6IQ8s32sH126sH126s")
_FRAME = struct.Struct("<IIBIQ")
_COVERED = struct.Struct("<IBIQ")  # a frame's head without its CRC
FRAME_BYTES = _FRAME.size
_SEAL = struct.Struct("<Q32s")

SET_ASIDE = (
    "move this segment and the later ones of its epoch away, then start the worker again: what they held is sampled "
    "again and comes out the same"
)


@dataclass(frozen=True)
class LogHeader:
    """Whose log it is; the same in each of its segments."""

    run_id: str
    iteration: int
    partition: int
    epoch: int
    student_digest: str


@dataclass(frozen=True)
class SegmentHeader:
    log: LogHeader
    segment: int
    first_sequence: int
    salt: bytes
    previous_digest: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """segment, offset: the file, and where in it the frame begins. There may be millions, so nothing is kept twice."""

    type: int
    sequence: int
    payload: memoryview
    segment: str
    offset: int

    @property
    def where(self) -> str:
        return f"{self.segment}, offset {self.offset}"


@dataclass(frozen=True)
class Segment:
    """One scanned segment; one of which nothing holds has no header.

    torn_bytes: length of the dropped tail without the zeros at its end, which were room for later records.
    """

    name: str
    header: SegmentHeader | None
    records: list[Record]
    sealed: bool
    torn_bytes: int
    digest: bytes


# --- writing


def encoded_text(value: str, what: str, limit: int) -> bytes:
    data = value.encode()
    if len(data) > limit:
        raise ContractError(f"token log, {what}", expected=f"at most {limit} bytes", found=f"{len(data)} bytes")
    return data


def encode_header(header: SegmentHeader) -> bytes:
    log = header.log
    run, student = encoded_text(log.run_id, "run_id", 126), encoded_text(log.student_digest, "student_digest", 126)
    body = _HEADER.pack(
        MAGIC, VERSION, log.iteration, log.partition, log.epoch, header.segment, 0, header.first_sequence,
        header.salt, header.previous_digest, len(run), run, len(student), student,
    ).ljust(HEADER_BYTES - 4, b"\0")  # fmt: skip
    return body + struct.pack("<I", zlib.crc32(body))


def encode_frame(salt_crc: int, record_type: int, sequence: int, payload: bytes, place: int = 0) -> bytes:
    """salt_crc: CRC-32 of the segment's salt. place: how many records of the same group stand before this one."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ContractError(
            f"token log, record {sequence}", expected=f"at most {MAX_PAYLOAD_BYTES} bytes", found=f"{len(payload)}"
        )
    covered = _COVERED.pack(len(payload), record_type, place, sequence)
    crc = zlib.crc32(payload, zlib.crc32(covered, salt_crc))
    return _FRAME.pack(len(payload), crc, record_type, place, sequence) + payload


def encode_seal(num_records: int, digest: bytes) -> bytes:
    """digest: SHA-256 of the segment's bytes before the seal's frame."""
    return _SEAL.pack(num_records, digest)


# --- reading


def bad(where: str, expected: str, found: str) -> FormatError:
    return FormatError(where, expected=expected, found=found, safe="the segments before it", next_command=SET_ASIDE)


def decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise bad(where, "UTF-8 text", str(error)) from error


def decode_header(data: bytes, name: str) -> SegmentHeader:
    body, crc = data[: HEADER_BYTES - 4], data[HEADER_BYTES - 4 : HEADER_BYTES]
    if len(crc) < 4 or struct.unpack("<I", crc)[0] != zlib.crc32(body):
        raise bad(f"{name}, offset 0", "a segment header with its CRC", f"{len(data)} bytes without it")
    (magic, version, iteration, partition, epoch, segment, _, first_sequence, salt, previous, run_length, run,
     student_length, student) = _HEADER.unpack_from(body)  # fmt: skip
    if magic != MAGIC or version != VERSION or run_length > 126 or student_length > 126:
        raise bad(f"{name}, offset 0", f"{MAGIC!r} version {VERSION}", f"{magic!r} version {version}")
    run_id, student_digest = (
        decoded(text, f"{name}, offset 0") for text in (run[:run_length], student[:student_length])
    )
    log = LogHeader(run_id, iteration, partition, epoch, student_digest)
    return SegmentHeader(log, segment, first_sequence, salt, previous)


def _valid_frame(data: bytes, offset: int, salt_crc: int) -> tuple[int, int, int, int] | None:
    """(payload length, type, place, sequence) of a frame whose CRC holds, else None."""
    if offset + FRAME_BYTES > len(data):
        return None
    length, crc, record_type, place, sequence = _FRAME.unpack_from(data, offset)
    end = offset + FRAME_BYTES + length
    if length > MAX_PAYLOAD_BYTES or end > len(data):
        return None
    view = memoryview(data)
    if zlib.crc32(view[offset + 8 : end], zlib.crc32(view[offset : offset + 4], salt_crc)) != crc:
        return None
    return length, record_type, place, sequence


def _later_group(data: bytes, offset: int, salt_crc: int, last_sequence: int) -> int | None:
    """Offset of a valid frame at or after `offset` whose group began after the record that is missing here.

    Looks at every byte position, since damage may have hit a length; the sequence number, which cannot run ahead
    by more than the frames that fit, leaves few positions to check.
    """
    span = len(data) - offset
    sequence_at = FRAME_BYTES - 8
    for shift in range(8):
        start = offset + sequence_at + shift
        count = (len(data) - start) // 8
        if count <= 0:
            break
        sequences = np.frombuffer(data, "<u8", count, start)
        likely = (sequences > last_sequence) & (sequences <= last_sequence + 1 + span // FRAME_BYTES)
        for index in np.flatnonzero(likely).tolist():
            at = offset + shift + 8 * index
            frame = _valid_frame(data, at, salt_crc)
            if frame is not None and frame[3] - frame[2] > last_sequence + 1:
                return at
            if frame is not None and frame[1] == SEAL:
                return at
    return None


def scan_segment(data: bytes, name: str, *, is_last: bool) -> Segment:
    """Header and records of one segment's bytes; `is_last`: nothing was written to the log after it.

    Raises FormatError, with offset, for damage that a later group, a seal or a later segment follows, and for
    bytes of another version. What remains of an unfinished last group is counted in torn_bytes.
    """
    if len(data) <= HEADER_BYTES and is_last:
        # No record is written before the header is durable, so a file that ends with it may hold half of it.
        try:
            header = decode_header(data, name)
        except FormatError:
            return Segment(name, None, [], False, len(data), b"")
    else:
        header = decode_header(data, name)
    salt_crc = zlib.crc32(header.salt)
    records: list[Record] = []
    offset, last, first_of_group = HEADER_BYTES, header.first_sequence - 1, header.first_sequence
    while offset < len(data):
        frame = _valid_frame(data, offset, salt_crc)
        sealing = frame is not None and frame[1] == SEAL
        if frame is None or frame[3] != last + (not sealing) or (frame[2] and frame[3] - frame[2] != first_of_group):
            torn_bytes = len(data[offset:].rstrip(b"\0"))
            later = _later_group(data, offset, salt_crc, last) if torn_bytes else None
            if later is not None or not is_last:
                found = "damage" + ("" if later is None else f", and a valid record at offset {later}")
                raise bad(f"{name}, offset {offset}", f"record {last + 1}", found)
            return Segment(name, header, records, False, torn_bytes, b"")
        length, record_type, place, sequence = frame
        if record_type not in _TYPES:
            where = f"{name}, offset {offset}"
            raise bad(where, f"record types 1..{SEAL}", f"type {record_type}: another version wrote this log")
        payload = memoryview(data)[offset + FRAME_BYTES : offset + FRAME_BYTES + length]
        if sealing:
            digest = _check_seal(data, offset, len(records), f"{name}, offset {offset}", is_last)
            return Segment(name, header, records, True, 0, digest)
        records.append(Record(record_type, sequence, payload, name, offset))
        offset += FRAME_BYTES + length
        last, first_of_group = sequence, sequence - place
    if not is_last:
        raise bad(f"{name}, offset {offset}", "a seal, since a later segment exists", "the end of the file")
    return Segment(name, header, records, False, 0, b"")


def _check_seal(data: bytes, offset: int, num_records: int, where: str, is_last: bool) -> bytes:
    """SHA-256 of the segment, whose last frame is the seal at `offset`.

    Zeros may follow it in a last segment: room for records that a power cut has brought back.
    """
    payload_at, end = offset + FRAME_BYTES, offset + FRAME_BYTES + _SEAL.size
    if len(data) < end or (data[end:].strip(b"\0") if is_last else end != len(data)):
        raise bad(where, "the end of the segment after its seal", f"{len(data)} bytes in all")
    digest = hashlib.sha256(memoryview(data)[:offset])
    counted, found = _SEAL.unpack_from(data, payload_at)
    if counted != num_records or found != digest.digest():
        raise bad(where, f"a seal over {num_records} records and these bytes", f"a seal over {counted} records")
    digest.update(memoryview(data)[offset:end])
    return digest.digest()


def chained(segments: Iterable[Segment], name: str) -> Iterator[Segment]:
    """Segments of a whole log in order, each after checking that they are one unbroken chain so far.

    Raises FormatError when segments are missing, out of order, of different logs, or when a segment does not name
    its predecessor's digest.
    """
    previous, last, log = bytes(32), 0, None
    for index, segment in enumerate(segments):
        header = segment.header
        if header is None:
            yield segment
            return
        log = log or header.log
        found = (header.segment, header.log, header.previous_digest, header.first_sequence)
        if found != (index, log, previous, last + 1):
            raise bad(segment.name, f"segment {index} of {log}, from record {last + 1}", str(header))
        yield segment
        last += len(segment.records)
        previous = segment.digest
    if log is None:
        raise bad(name, "a log of at least one segment", "none")
