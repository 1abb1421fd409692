"""What a run is: its numbered records, and which one each iteration belongs to.

A record holds the configuration's content, the models' digests and the prompt files' names, and from_iteration: K.
Iteration i belongs to the newest of the records whose K is at most i. So iterations below the newest K stay what they
were made as: they are read by their stage manifests through their own record, never executed and never committed anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.store import ObjectStore
from schemas import keys
from schemas.work.record import RunRecord
from tasks.runs.manifests import read_record


@dataclass(frozen=True)
class History:
    """A run's records by number, oldest first."""

    records: tuple[tuple[int, RunRecord], ...] = ()

    @property
    def newest(self) -> tuple[int, RunRecord]:
        return self.records[-1]

    def in_force(self, iteration: int) -> int:
        """Number of the record that an iteration belongs to; 1 for a run that has none yet."""
        found = [n for n, record in self.records if record.from_iteration <= iteration]
        return found[-1] if found else 1

    def is_past(self, iteration: int) -> bool:
        """Does the iteration belong to an older record than the newest?"""
        return bool(self.records) and self.in_force(iteration) != self.newest[0]

    def and_next(self, record: RunRecord) -> History:
        number = self.newest[0] + 1 if self.records else 1
        return History((*self.records, (number, record)))


def read_history(store: ObjectStore, run_id: str) -> History:
    """Raises FormatError for a record that is damaged or missing between others."""
    found = store.list(keys.run_records(run_id))
    return History(tuple((int(Path(key).stem), read_record(store, key)) for key in found))


def newest_record(store: ObjectStore, run_id: str) -> tuple[int, RunRecord] | None:
    """(number, record) of the newest run record, or None for a run that never started."""
    history = read_history(store, run_id)
    return history.newest if history.records else None


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """A line for each value of nested JSON objects that is not the same in both, by its path."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in sorted({*old, *new})
            for line in differences(old.get(name), new.get(name), f"{path}.{name}" if path else name)
        ]
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"[:300]]
