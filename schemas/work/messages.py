"""What a rank tells its parent: one JSON object a line on its stdout, {"event": NAME, ...}.

write(CheckpointStored(steps=16)) -> the line          read(its object, "rank 0") -> CheckpointStored(steps=16)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from schemas import typed_json
from schemas.errors import FormatError, OpdError


@dataclass(frozen=True)
class Message:
    """event: its name on the line."""

    event: ClassVar[str]


@dataclass(frozen=True)
class Failed(Message):
    """The rank ends with an error of the family, whose parts these are; text: all of them."""

    event: ClassVar[str] = "error"
    text: str
    kind: str
    where: str
    expected: str
    found: str
    safe: str
    next_command: str

    @classmethod
    def of(cls, error: OpdError) -> Failed:
        return cls(text=str(error), **error.to_json())


@dataclass(frozen=True)
class Waiting(Message):
    """For whom or what, which is no fault of the rank."""

    event: ClassVar[str] = "waiting"
    text: str


@dataclass(frozen=True)
class Notice(Message):
    """Something for the user to know."""

    event: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True)
class Working(Message):
    """A long part of the work goes on that has no count."""

    event: ClassVar[str] = "working"
    on: str


@dataclass(frozen=True)
class Progress(Message):
    """done of total units. partition: None of a stage that has one alone."""

    event: ClassVar[str] = "progress"
    done: int
    total: int
    unit: str
    partition: int | None = None


@dataclass(frozen=True)
class Finished(Message):
    """The partition has its manifest, under this epoch. partition: as of Progress."""

    event: ClassVar[str] = "finished"
    epoch: int
    partition: int | None = None


@dataclass(frozen=True)
class Resumed(Message):
    """A rollout worker begins a partition on the log of the owner before.

    recovered: trajectory_id -> response tokens in that log. given_up: trajectory_id -> why, of all so far. kv_restored,
    prefill_rebuilt: unfinished trajectories whose KV was read, and computed again.
    """

    event: ClassVar[str] = "resumed"
    partition: int
    epoch: int
    recovered: dict[str, int]
    given_up: dict[str, str]
    kv_restored: int
    prefill_rebuilt: int


@dataclass(frozen=True)
class KvRefused(Message):
    """Spilled KV of a trajectory cannot be used, or could not be written; its tokens are in the log."""

    event: ClassVar[str] = "kv_refused"
    partition: int
    trajectory_id: str
    text: str


@dataclass(frozen=True)
class Sampled(Message):
    """tokens: durable on this node, of each trajectory that has any. running: those that may be in the cache, the
    oldest first; positions: of that one."""

    event: ClassVar[str] = "ack"
    partition: int
    epoch: int
    tokens: dict[str, int]
    running: tuple[str, ...]
    positions: int


@dataclass(frozen=True)
class ResumedAt(Message):
    """Training goes on from a checkpoint of so many steps."""

    event: ClassVar[str] = "resumed_at"
    steps: int


@dataclass(frozen=True)
class CheckpointSaved(Message):
    """A checkpoint of so many steps is whole on this node."""

    event: ClassVar[str] = "checkpoint"
    steps: int


@dataclass(frozen=True)
class CheckpointStored(Message):
    """A checkpoint of so many steps is whole in the store."""

    event: ClassVar[str] = "stored"
    steps: int


@dataclass(frozen=True)
class Stopped(Message):
    """Training leaves after so many steps. saved, stored: steps of the newest checkpoint here, and in the store."""

    event: ClassVar[str] = "stopped"
    steps: int
    saved: int
    stored: int


@dataclass(frozen=True)
class Metrics(Message):
    """New rows of opd.metrics."""

    event: ClassVar[str] = "metrics"
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class ReportStarted(Message):
    """The turn of a model of the report has come."""

    event: ClassVar[str] = "started"
    model: str


@dataclass(frozen=True)
class ReportRow(Message):
    """A row of the report: model, precision, prompts and the columns of ml.fidelity.Fidelity."""

    event: ClassVar[str] = "row"
    row: dict[str, str | int | float]


_KINDS: dict[str, type[Message]] = {
    kind.event: kind
    for kind in (
        Failed, Waiting, Notice, Working, Progress, Finished, Resumed, KvRefused, Sampled, ResumedAt, CheckpointSaved,
        CheckpointStored, Stopped, Metrics, ReportStarted, ReportRow,
    )
}  # fmt: skip


def write(message: Message) -> str:
    """The message's line, fields that are None left out; ASCII, whatever the encoding of stdout."""
    told = {name: value for name, value in typed_json.to_json(message).items() if value is not None}
    return json.dumps({"event": message.event} | told, allow_nan=False) + "\n"


def read(line: dict[str, Any], where: str) -> Message:
    """The message of a line's object. Raises FormatError, with `where`, for none that this program knows."""
    event = line.get("event")
    kind = _KINDS.get(event) if isinstance(event, str) else None
    if kind is None:
        raise FormatError(where, expected=f"a message, one of {sorted(_KINDS)}", found=repr(line)[:300])
    fields = {name: value for name, value in line.items() if name != "event"}
    return typed_json.from_json(kind, fields, f"{where}, message {event!r}")
