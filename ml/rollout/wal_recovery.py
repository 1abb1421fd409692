"""What a token log says: its segments replayed into trajectories, and written again as an heir's first segment.

Recovery only reads. The heir of an epoch writes everything that it recovered into a base segment of its own log and
never touches the old one, so a crash in the middle of recovery leaves nothing to repair.
Invariant: tokens of a trajectory are exactly those appended, in order, without a gap.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path

import numpy as np

from ml.rollout import wal_format as fmt
from ml.rollout import wal_records
from schemas.errors import FormatError, StoreError

_BASE_RECORD_TOKENS = 1 << 16
_SORTED_TOKENS = 1 << 20
_REPLAYED_RECORDS = 1 << 14
_ROW = np.dtype([("ids", "i4"), ("raw", "f4"), ("sampled", "f4"), ("mask", "u1")])


@dataclass
class LoggedTrajectory:
    """ids int32, logprobs_raw and logprobs_sampled float32, sampled_mask uint8, each [response tokens so far].

    An observation's tokens have mask 0 and log-probabilities 0. finish_reason is None while it runs.
    """

    admit: wal_records.Admit
    ids: np.ndarray
    logprobs_raw: np.ndarray
    logprobs_sampled: np.ndarray
    sampled_mask: np.ndarray
    finish_reason: str | None = None
    spill: wal_records.Spill | None = None
    intents: list[wal_records.Intent] = field(default_factory=list)

    @property
    def trajectory_id(self) -> str:
        return self.admit.trajectory_id


@dataclass
class Recovered:
    """A replayed log. trajectories: in order of admission, so that index = trajectory number."""

    name: str
    header: fmt.LogHeader
    trajectories: list[LoggedTrajectory]
    last_sequence: int
    num_segments: int
    torn_bytes: int

    def by_id(self) -> dict[str, LoggedTrajectory]:
        return {t.trajectory_id: t for t in self.trajectories}

    @property
    def num_tokens(self) -> int:
        return sum(len(t.ids) for t in self.trajectories)

    def require(self, acknowledged: Mapping[str, int]) -> None:
        """FormatError unless each trajectory has the response tokens that were acknowledged from this copy."""
        have = {t.trajectory_id: len(t.ids) for t in self.trajectories}
        for trajectory_id, tokens in acknowledged.items():
            found = have.get(trajectory_id, 0)
            if found < tokens:
                raise FormatError(
                    f"{self.name}, trajectory {trajectory_id}", expected=f"{tokens} acknowledged tokens",
                    found=f"{found}; {self.torn_bytes} bytes at the end of segment {self.num_segments - 1} do not hold",
                    safe=f"the {found} tokens, and the segments in the store", next_command=fmt.SET_ASIDE,
                )  # fmt: skip


class _Replay:
    """Collects records. Their token columns are sorted by trajectory once there are _SORTED_TOKENS of them, since there
    may be millions of records, and tens of millions of tokens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.admits: list[wal_records.Admit] = []
        self.finishes: dict[int, tuple[int, str, str]] = {}
        self.spills: dict[int, wal_records.Spill] = {}
        self.intents: dict[int, list[wal_records.Intent]] = {}
        self._ids: set[str] = set()
        self._columns: list[tuple[np.ndarray, ...]] = []
        self._unsorted_tokens = 0
        self._parts: list[list[np.ndarray]] = []  # of each trajectory, rows of type _ROW
        self._lengths: list[int] = []

    def add(self, records: Sequence[fmt.Record]) -> None:
        """Consecutive records of one shape."""
        if records[0].type == fmt.STEP:
            self._steps(records)
        else:
            for record in records:
                self._add(record)

    def _steps(self, records: Sequence[fmt.Record]) -> None:
        numbers, firsts, counts, *columns = wal_records.decode_steps(records)
        self._known(records, numbers)
        ids, raw, sampled = (column.ravel() for column in columns)
        counts, indices = counts.ravel(), firsts.ravel()
        numbers = numbers.ravel()
        if len(numbers) != len(ids) or (counts != 1).any():
            starts = np.repeat(np.cumsum(counts) - counts, counts)
            indices = np.arange(len(ids)) - starts + np.repeat(indices, counts)
            numbers = np.repeat(numbers, counts)
        self._append(numbers, indices, ids, raw, sampled, np.ones(len(ids), np.uint8))

    def _add(self, record: fmt.Record) -> None:
        if record.type == fmt.ADMIT:
            admit = wal_records.decode_admit(record)
            if admit.number != len(self.admits) or admit.trajectory_id in self._ids:
                raise FormatError(record.where, expected=f"trajectory number {len(self.admits)}, a new id",
                                  found=f"number {admit.number}, id {admit.trajectory_id}")  # fmt: skip
            self.admits.append(admit)
            self._ids.add(admit.trajectory_id)
            self._parts.append([])
            self._lengths.append(0)
        elif record.type == fmt.OBSERVATION:
            number, first, ids = wal_records.decode_observation(record)
            zeros = np.zeros(len(ids), np.float32)
            numbers = np.full(len(ids), self._known_number(record, number), np.uint32)
            indices, mask = first + np.arange(len(ids)), np.zeros(len(ids), np.uint8)
            self._append(numbers, indices, ids.copy(), zeros, zeros, mask)
        elif record.type == fmt.INTENT:
            number, intent = wal_records.decode_intent(record)
            self.intents.setdefault(self._known_number(record, number), []).append(intent)
        elif record.type == fmt.SPILL:
            number, spill = wal_records.decode_spill(record)
            self.spills[self._known_number(record, number)] = spill
        else:
            number, response_tokens, reason = wal_records.decode_finish(record)
            if self._known_number(record, number) in self.finishes:
                raise FormatError(record.where, expected="one finish a trajectory", found=f"another of number {number}")
            self.finishes[number] = (response_tokens, reason, record.where)

    def _known(self, records: Sequence[fmt.Record], numbers: np.ndarray) -> None:
        """numbers [records, entries]"""
        strange = np.argwhere(numbers >= len(self.admits))
        if len(strange):
            record, entry = strange[0]
            expected = f"a number below {len(self.admits)}"
            raise FormatError(records[record].where, expected=expected, found=str(numbers[record, entry]))

    def _known_number(self, record: fmt.Record, number: int) -> int:
        self._known([record], np.array([[number]]))
        return number

    def _append(self, numbers: np.ndarray, *columns: np.ndarray) -> None:
        self._columns.append((numbers, *columns))
        self._unsorted_tokens += len(numbers)
        if self._unsorted_tokens >= _SORTED_TOKENS:
            self._sort()

    def _sort(self) -> None:
        """Columns (trajectory numbers, indices, ids, two log-probabilities, mask) into `_parts`."""
        if not self._columns:
            return
        numbers, indices, *columns = (np.concatenate(parts) for parts in zip(*self._columns, strict=True))
        self._columns, self._unsorted_tokens = [], 0
        order = np.argsort(numbers, kind="stable")
        lengths = np.bincount(numbers, minlength=len(self.admits))
        ends = np.cumsum(lengths)
        places = np.arange(len(order)) + np.repeat(np.array(self._lengths) - ends + lengths, lengths)
        out_of_place = np.flatnonzero(indices[order] != places)
        if len(out_of_place):
            at = order[out_of_place[0]]
            admit = self.admits[numbers[at]]
            raise FormatError(f"{self.name}, trajectory {admit.trajectory_id}", expected="its tokens one after another",
                              found=f"a gap or a repetition at token {indices[at]}")  # fmt: skip
        rows = np.empty(len(order), _ROW)
        for field_name, column in zip(_ROW.names or (), columns, strict=True):
            rows[field_name] = column[order]
        for number in np.flatnonzero(lengths).tolist():
            length = int(lengths[number])
            self._parts[number].append(rows[ends[number] - length : ends[number]].copy())
            self._lengths[number] += length

    def trajectories(self) -> list[LoggedTrajectory]:
        """To be called once: the parts of a trajectory are given up as it is put together."""
        self._sort()
        out = []
        for admit, parts, length in zip(self.admits, self._parts, self._lengths, strict=True):
            tokens, reason, where = self.finishes.get(admit.number, (length, None, ""))
            if tokens != length:
                raise FormatError(where, expected=f"{tokens} response tokens", found=f"{length} in the log")
            rows = np.concatenate(parts) if parts else np.empty(0, _ROW)
            parts.clear()
            ids, raw, sampled, mask = (np.ascontiguousarray(rows[field_name]) for field_name in _ROW.names or ())
            out.append(LoggedTrajectory(admit, ids, raw, sampled, mask, reason, self.spills.get(admit.number),
                                        self.intents.get(admit.number, [])))  # fmt: skip
        return out


def recover(segments: Iterable[tuple[str, bytes]], name: str) -> Recovered:
    """Replays one log from (file name, bytes) of its segments in order of their numbers, two of them at a time.

    Raises FormatError, naming file and offset, for damage before the last durable record and for a log without its
    whole first segment.
    """
    replay = _Replay(name)
    header, last_sequence, num_segments, torn_bytes = None, 0, 0, 0
    for segment in fmt.chained(_scanned(segments), name):
        for _, run in groupby(segment.records, wal_records.shape):
            while records := list(islice(run, _REPLAYED_RECORDS)):
                replay.add(records)
                last_sequence = records[-1].sequence
        header = header or segment.header
        num_segments, torn_bytes = num_segments + 1, segment.torn_bytes
    assert header is not None  # segment 0 was scanned as one that must be whole
    return Recovered(name, header.log, replay.trajectories(), last_sequence, num_segments, torn_bytes)


def _scanned(segments: Iterable[tuple[str, bytes]]) -> Iterator[fmt.Segment]:
    """Each when the next one is there: the last alone may end early, and never the first."""
    held = None
    for index, (segment_name, data) in enumerate(segments):
        if held is not None:
            yield fmt.scan_segment(held[1], held[0], is_last=False)
        held = segment_name, data, index
    if held is not None:
        yield fmt.scan_segment(held[1], held[0], is_last=held[2] > 0)


def segments_of(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Segments of a local log in order, none when the folder holds no whole first one. Raises StoreError."""
    try:
        for path in sorted(folder.glob("*.seg")):
            yield str(path), path.read_bytes()
    except OSError as error:
        raise StoreError(str(folder), expected="a readable log", found=str(error)) from error


def read_folder(folder: Path) -> list[tuple[str, bytes]]:
    """All of `segments_of` at once."""
    return list(segments_of(folder))


def base_segment(recovered: Recovered | None, header: fmt.LogHeader, salt: bytes) -> tuple[bytes, int]:
    """An heir's segment 0, sealed: everything recovered (nothing: an empty log), and its last sequence number."""
    head = fmt.SegmentHeader(header, 0, 1, salt, bytes(32))
    out = bytearray(fmt.encode_header(head))
    sequence, salt_crc = 0, zlib.crc32(salt)
    for record_type, payload in _base_records(recovered.trajectories if recovered else []):
        sequence += 1
        out += fmt.encode_frame(salt_crc, record_type, sequence, payload)
    seal = fmt.encode_seal(sequence, hashlib.sha256(out).digest())
    out += fmt.encode_frame(salt_crc, fmt.SEAL, sequence, seal)
    return bytes(out), sequence


def _base_records(trajectories: list[LoggedTrajectory]):
    for number, t in enumerate(trajectories):
        yield fmt.ADMIT, wal_records.encode_admit(t.admit)
        # Runs of equal mask: a step record holds sampled tokens, an observation the others.
        edges = np.flatnonzero(np.diff(t.sampled_mask)) + 1
        for start, end in zip([0, *edges], [*edges, len(t.ids)], strict=True):
            for first in range(start, end, _BASE_RECORD_TOKENS):
                rows = slice(first, min(first + _BASE_RECORD_TOKENS, end))
                if t.sampled_mask[first]:
                    ids, raw, sampled = t.ids[rows], t.logprobs_raw[rows], t.logprobs_sampled[rows]
                    yield fmt.STEP, wal_records.encode_step([number], [first], [len(ids)], ids, raw, sampled)
                else:
                    yield fmt.OBSERVATION, wal_records.encode_observation(number, first, t.ids[rows])
        for intent in t.intents:
            yield fmt.INTENT, wal_records.encode_intent(number, intent)
        if t.spill is not None:
            yield fmt.SPILL, wal_records.encode_spill(number, t.spill)
        if t.finish_reason is not None:
            yield fmt.FINISH, wal_records.encode_finish(number, len(t.ids), t.finish_reason)
