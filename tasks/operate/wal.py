"""`opd wal`: what token logs say, and whether every byte of them holds. Changes nothing.

PATH: a folder or store prefix with logs at any depth (a partition has one an epoch), or one segment
log    = the segments of one folder, judged as a whole: each frame's CRC, seals, the chain of digests, the replay
segment alone = its own frames and seal; what stands before it is unknown
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infra.store import ObjectStore
from infra.stores import open_store, place
from ml.rollout import wal_format as fmt
from ml.rollout import wal_records
from ml.rollout.wal_recovery import recover
from schemas.errors import ConfigError, FormatError

_SUFFIX = ".seg"
_NAMES = {
    fmt.ADMIT: "admit", fmt.STEP: "step", fmt.OBSERVATION: "observation", fmt.INTENT: "intent", fmt.SPILL: "spill",
    fmt.FINISH: "finish",
}  # fmt: skip


@dataclass
class SegmentReport:
    """state: "sealed"; "open" (no seal, nothing lost); "torn" (its unfinished last group is dropped); "damaged"."""

    name: str
    size_bytes: int
    state: str
    num_records: int
    first_sequence: int | None
    last_sequence: int | None
    torn_bytes: int


@dataclass
class LogReport:
    """One log, or one segment alone. faults: what is damaged, each with file and offset; empty for a whole log.

    trajectories: JSON-ready rows in order of their numbers; trajectory_id is None where its admission lies in
    another segment.
    """

    where: str
    header: fmt.LogHeader | None
    segments: list[SegmentReport]
    records: dict[str, int]
    trajectories: list[dict[str, Any]]
    faults: list[FormatError] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(t["sampled"] + t["observed"] for t in self.trajectories)

    @property
    def num_bytes(self) -> int:
        return sum(s.size_bytes for s in self.segments)

    @property
    def state(self) -> str:
        """ "damaged", "torn", "open" or "sealed": the worst of its segments."""
        states = [s.state for s in self.segments]
        return "damaged" if self.faults else next((s for s in ("torn", "open") if s in states), "sealed")

    def to_json(self) -> dict[str, Any]:
        return {
            "log": self.where, "state": self.state, **(vars(self.header) if self.header else {}),
            "records": self.records, "tokens": self.num_tokens, "bytes": self.num_bytes,
            "segments": [vars(s) for s in self.segments], "trajectories": self.trajectories,
            "faults": [{"where": f.where, "expected": f.expected, "found": f.found} for f in self.faults],
        }  # fmt: skip


def read_logs(path: str) -> Iterator[LogReport]:
    """A report of each log under `path`, in order of their names. ConfigError where there is none; StoreError."""
    store, logs, alone = _find(path)
    if not logs:
        raise ConfigError(
            path, expected=f"a token log: a folder or store prefix with files *{_SUFFIX}, or one of them",
            found="none", next_command="opd wal show SCRATCH/RUN/wal, or DATA/runs/RUN/ITERATION/rollout",
        )  # fmt: skip
    for folder, names in logs.items():
        found = [f"{folder}/{name}" if folder else name for name in names]
        where = f"{store.root}/{found[0]}" if alone else f"{store.root}/{folder}".rstrip("/")
        yield _report(where, [(f"{store.root}/{key}", store.get(key)) for key in found], alone)


def _find(path: str) -> tuple[ObjectStore, dict[str, list[str]], bool]:
    """(store, segment names by folder, whether `path` is one segment)"""
    if path.endswith(_SUFFIX):
        folder, _, name = path.rpartition("/")
        store = open_store(folder or ".")
        if store.head(name) is not None:
            return store, {"": [name]}, True
    folder = place(path).folder
    if folder is not None and not folder.is_dir():
        return open_store(path), {}, False
    store, logs = open_store(path), {}
    for key in store.list(""):
        folder, _, name = key.rpartition("/")
        if name.endswith(_SUFFIX):
            logs.setdefault(folder, []).append(name)
    return store, logs, False


def _report(where: str, segments: list[tuple[str, bytes]], alone: bool) -> LogReport:
    reports, faults, records = [], [], []
    header = None
    for index, (name, data) in enumerate(segments):
        # The base is whole before it gets its name, so a segment that may end early is never segment 0.
        is_last = index == len(segments) - 1 and not name.endswith(f"/{0:06d}{_SUFFIX}")
        short_name = name.rpartition("/")[2]
        try:
            segment = fmt.scan_segment(data, name, is_last=is_last)
        except FormatError as error:
            faults.append(error)
            reports.append(SegmentReport(short_name, len(data), "damaged", 0, None, None, 0))
            continue
        state = "sealed" if segment.sealed else "torn" if segment.torn_bytes else "open"
        sequences = [r.sequence for r in segment.records]
        reports.append(
            SegmentReport(
                short_name, len(data), state, len(sequences), min(sequences, default=None),
                max(sequences, default=None), segment.torn_bytes,
            )
        )  # fmt: skip
        header = header or (segment.header and segment.header.log)
        records += segment.records
    if not faults and not alone:
        try:
            recover(segments, where)
        except FormatError as error:
            faults.append(error)
    counts = Counter(_NAMES[r.type] for r in records)
    try:
        trajectories = _trajectories(records)
    except FormatError as error:
        faults = faults or [error]
        trajectories = []
    return LogReport(where, header, reports, dict(sorted(counts.items())), trajectories, faults)


def _trajectories(records: list[fmt.Record]) -> list[dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}

    def row(number: int) -> dict[str, Any]:
        return rows.setdefault(
            number,
            {
                "number": number, "trajectory_id": None, "prompt_tokens": None, "sampled": 0, "observed": 0,
                "finish_reason": None, "spilled_positions": 0, "spill_bytes": 0, "spill_key": None, "intents": 0,
                "num_preemptions": None, "num_kv_restores": None, "num_prefill_rebuilds": None,
            },
        )  # fmt: skip

    for record in records:
        if record.type == fmt.STEP:
            numbers, _, counts, *_ = wal_records.decode_step(record)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                row(number)["sampled"] += count
        elif record.type == fmt.ADMIT:
            admit = wal_records.decode_admit(record)
            row(admit.number).update(
                trajectory_id=admit.trajectory_id, prompt_tokens=admit.prompt_tokens,
                num_preemptions=admit.interruptions.preemptions, num_kv_restores=admit.interruptions.kv_restores,
                num_prefill_rebuilds=admit.interruptions.prefill_rebuilds,
            )  # fmt: skip
        elif record.type == fmt.OBSERVATION:
            number, _, ids = wal_records.decode_observation(record)
            row(number)["observed"] += int(np.size(ids))
        elif record.type == fmt.INTENT:
            row(wal_records.decode_intent(record)[0])["intents"] += 1
        elif record.type == fmt.SPILL:
            number, spill = wal_records.decode_spill(record)
            row(number).update(spilled_positions=spill.positions, spill_bytes=spill.size_bytes, spill_key=spill.key)
        else:
            number, _, reason = wal_records.decode_finish(record)
            row(number)["finish_reason"] = reason
    return [rows[number] for number in sorted(rows)]
