"""Payloads of the token log's records: admission, step, observation, intent, spill and finish. Little-endian."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ml.rollout.wal_format import STEP, Record, bad, decoded, encoded_text
from schemas.interruptions import UNINTERRUPTED, Interruptions

_ADMIT = struct.Struct("<II32sIIIH")
_TWO = struct.Struct("<II")
_THREE = struct.Struct("<III")
_SPILL = struct.Struct("<IIQ32sH")
_FINISH = struct.Struct("<IIH")
Ints = Sequence[int] | np.ndarray
Floats = Sequence[float] | np.ndarray


def prompt_digest(prompt_ids: Ints) -> bytes:
    """SHA-256 of the ids as int32, by which an admission names its prompt."""
    return hashlib.sha256(np.asarray(prompt_ids, "<i4").tobytes()).digest()


@dataclass(frozen=True)
class Admit:
    """A trajectory enters the log. interruptions: of its life before this log."""

    number: int
    trajectory_id: str
    prompt_digest: bytes
    prompt_tokens: int
    interruptions: Interruptions = UNINTERRUPTED


@dataclass(frozen=True)
class Spill:
    """KV of the first `positions` tokens of the sequence (prompt included), whole, in one object."""

    positions: int
    size_bytes: int
    digest: bytes
    key: str


@dataclass(frozen=True)
class Intent:
    """An action on the environment that is about to happen; first_token_index: response tokens before it."""

    first_token_index: int
    action: bytes


def encode_admit(admit: Admit) -> bytes:
    name, interruptions = encoded_text(admit.trajectory_id, "trajectory_id", 65535), admit.interruptions
    return (
        _ADMIT.pack(
            admit.number, admit.prompt_tokens, admit.prompt_digest, interruptions.preemptions,
            interruptions.kv_restores, interruptions.prefill_rebuilds, len(name),
        )
        + name
    )  # fmt: skip


def step_bytes(num_tokens: int) -> int:
    """Bytes of a step's payload with one token an entry."""
    return _TWO.size + 24 * num_tokens


def encode_step(numbers: Ints, firsts: Ints, counts: Ints, ids: Ints, raw: Floats, sampled: Floats) -> bytes:
    """Columns as `decode_step` returns them: heads of one length, whose counts add up to that of the others."""
    columns = [*(np.asarray(c, "<u4") for c in (numbers, firsts, counts)), np.asarray(ids, "<i4"),
               *(np.asarray(c, "<f4") for c in (raw, sampled))]  # fmt: skip
    return _TWO.pack(len(numbers), len(ids)) + b"".join([column.tobytes() for column in columns])


def encode_observation(number: int, first_token_index: int, ids: Ints) -> bytes:
    return _THREE.pack(number, first_token_index, len(ids)) + np.asarray(ids, "<i4").tobytes()


def encode_intent(number: int, intent: Intent) -> bytes:
    return _THREE.pack(number, intent.first_token_index, len(intent.action)) + intent.action


def encode_spill(number: int, spill: Spill) -> bytes:
    key = encoded_text(spill.key, "spill key", 65535)
    return _SPILL.pack(number, spill.positions, spill.size_bytes, spill.digest, len(key)) + key


def encode_finish(number: int, response_tokens: int, reason: str) -> bytes:
    data = encoded_text(reason, "finish reason", 65535)
    return _FINISH.pack(number, response_tokens, len(data)) + data


class Reader:
    """Cuts one record's payload into fields; raises FormatError when it is too short or too long."""

    def __init__(self, record: Record) -> None:
        self._record, self._offset = record, 0

    def fields(self, layout: struct.Struct) -> tuple:
        return layout.unpack(self.take(layout.size))

    def take(self, size: int) -> memoryview:
        part = self._record.payload[self._offset : self._offset + size]
        if len(part) != size:
            raise bad(self._record.where, f"{size} more bytes in the record", f"{len(part)}")
        self._offset += size
        return part

    def array(self, dtype: str, count: int) -> np.ndarray:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize * count), dtype)

    def text(self, size: int) -> str:
        return decoded(bytes(self.take(size)), self._record.where)

    def end(self) -> None:
        if self._offset != len(self._record.payload):
            raise bad(self._record.where, f"a record of {self._offset} bytes", f"{len(self._record.payload)}")


def decode_admit(record: Record) -> Admit:
    reader = Reader(record)
    number, prompt_tokens, prompt_digest, preemptions, restores, rebuilds, length = reader.fields(_ADMIT)
    admit = Admit(
        number, reader.text(length), prompt_digest, prompt_tokens, Interruptions(preemptions, restores, rebuilds)
    )
    reader.end()
    return admit


StepColumns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def decode_step(record: Record) -> StepColumns:
    """(numbers, first token indices, counts) u4 [entries], (ids i4, raw f4, sampled f4) [tokens]."""
    numbers, firsts, counts, ids, raw, sampled = decode_steps([record])
    return numbers[0], firsts[0], counts[0], ids[0], raw[0], sampled[0]


def shape(record: Record) -> tuple[int, int, bytes]:
    """Equal for step records of as many entries and tokens, which `decode_steps` takes at once."""
    return record.type, len(record.payload), bytes(record.payload[: _TWO.size]) if record.type == STEP else b""


def decode_steps(records: Sequence[Record]) -> StepColumns:
    """The columns of step records of one shape, as views [records, entries] and [records, tokens]."""
    reader = Reader(records[0])
    num_entries, num_tokens = reader.fields(_TWO)
    reader.take(12 * (num_entries + num_tokens))
    reader.end()
    words = np.frombuffer(b"".join([r.payload for r in records]), "<u4").reshape(len(records), -1)
    ends = np.cumsum([2, *[num_entries] * 3, *[num_tokens] * 3]).tolist()
    numbers, firsts, counts, ids, raw, sampled = (words[:, a:b] for a, b in pairwise(ends))
    wrong = np.flatnonzero(counts.sum(1, dtype=np.int64) != num_tokens)
    if len(wrong):
        where, found = records[wrong[0]].where, str(int(counts[wrong[0]].sum(dtype=np.int64)))
        raise bad(where, f"entries of {num_tokens} tokens in all", found)
    return numbers, firsts, counts, ids.view("<i4"), raw.view("<f4"), sampled.view("<f4")


def decode_observation(record: Record) -> tuple[int, int, np.ndarray]:
    reader = Reader(record)
    number, first, count = reader.fields(_THREE)
    ids = reader.array("<i4", count)
    reader.end()
    return number, first, ids


def decode_intent(record: Record) -> tuple[int, Intent]:
    reader = Reader(record)
    number, first, size = reader.fields(_THREE)
    action = bytes(reader.take(size))
    reader.end()
    return number, Intent(first, action)


def decode_spill(record: Record) -> tuple[int, Spill]:
    reader = Reader(record)
    number, positions, size_bytes, digest, length = reader.fields(_SPILL)
    spill = Spill(positions, size_bytes, digest, reader.text(length))
    reader.end()
    return number, spill


def decode_finish(record: Record) -> tuple[int, int, str]:
    reader = Reader(record)
    number, response_tokens, length = reader.fields(_FINISH)
    reason = reader.text(length)
    reader.end()
    return number, response_tokens, reason
