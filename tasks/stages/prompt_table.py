"""The run's prompts in opd.prompts, which all runs of a root share: each prompt once, whoever brings it.

    prompts/NAME.DIGEST.jsonl    rows that came together, from one source; never changed

A run adds the prompts that no object holds yet, under a lease, as one object and one slice a source. So slices are
disjoint, a join by prompt_id gives one row, and the objects alone make the table anew.
"""

from __future__ import annotations

import re
from typing import Any

from infra import leases
from infra.row_objects import read_jsonl
from infra.store import ObjectStore
from schemas import keys
from schemas.errors import ContractError, FormatError
from schemas.rows import PROMPTS
from schemas.work.manifest import TableSlice
from tasks.runs.session import Session
from tasks.runs.stage import commit, table_entry

_PREFIX = "prompts/"
_DEAD_AFTER_SECONDS = 30.0
#: What a slice's name keeps of a source: the file's name, or generator, version and data set.
_PLACE = re.compile(r", (?:line|row) \d+$")
_NAME_CHARACTERS = 60


def prompt_entries(store: ObjectStore, prompts: list[dict[str, Any]]) -> list[TableSlice]:
    """The slices of opd.prompts that hold the prompts, as a manifest's entries; their objects are in the store.

    They may hold prompts of other runs too. Raises FormatError for a damaged object that may hold one of these.
    """
    wanted = {prompt["prompt_id"]: prompt for prompt in prompts}
    held, damaged = _held(store)
    if not wanted.keys() <= held.keys():
        _add(store, wanted)
        held, damaged = _held(store)
    if missing := sorted(wanted.keys() - held.keys()):
        raise damaged or ContractError(
            f"prompts, {missing[0]}", expected="an object of the store with it", found="none, after it was put"
        )
    needed = sorted({held[prompt_id] for prompt_id in wanted})
    return [_entry(key, _rows(store, key)) for key in needed]


def commit_prompts(session: Session, prompts: list[dict[str, Any]]) -> None:
    """The run's prompts into opd.prompts; nothing happens when they are there."""
    for entry in prompt_entries(session.store, prompts):
        commit(session, "prompts", entry)


def _held(store: ObjectStore) -> tuple[dict[str, str], FormatError | None]:
    """prompt_id -> key of the object that holds it; and what is wrong with a damaged one, which holds none."""
    held: dict[str, str] = {}
    damaged = None
    for key in store.list(_PREFIX):
        try:
            held |= {row["prompt_id"]: key for row in _rows(store, key)}
        except FormatError as error:
            damaged = error
    return held, damaged


def _rows(store: ObjectStore, key: str) -> list[dict[str, Any]]:
    """Raises FormatError for bytes that are not rows, and for a row whose id is not that of its content."""
    rows = read_jsonl(store, PROMPTS, key)
    for row in rows:
        if not keys.is_prompt_id_of(row):
            raise FormatError(f"{key}, prompt {row['prompt_id']}", expected="the id of its content", found="another")
    return rows


def _add(store: ObjectStore, wanted: dict[str, dict[str, Any]]) -> None:
    """Put what no object holds. Two runs that add at once would both add what they share, hence the lease."""
    lease = leases.acquire(
        store, keys.table_lease("prompts-added"), owner={"adds": "prompts"}, dead_after_seconds=_DEAD_AFTER_SECONDS
    )
    if isinstance(lease, leases.FinishedEpoch):
        raise ContractError(keys.table_lease("prompts-added"), expected="leases only", found="a manifest")
    with lease:
        held, damaged = _held(store)
        batches: dict[str, list[dict[str, Any]]] = {}
        for prompt_id in sorted(wanted.keys() - held.keys()):
            batches.setdefault(_PLACE.sub("", wanted[prompt_id]["source"]), []).append(wanted[prompt_id])
        for source, rows in batches.items():
            key, data = _batch(source, rows)
            lease.check()
            if damaged is not None and damaged.where.startswith(key):
                store.put(key, data)  # the name says what it held: these very rows
            elif damaged is not None:
                raise damaged
            else:
                store.put_if_absent(key, data)


def _batch(source: str, rows: list[dict[str, Any]]) -> tuple[str, bytes]:
    """(key, bytes) of rows that are added together: both follow from source and rows."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", source.rpartition("/")[2])[-_NAME_CHARACTERS:]
    name = f"{name}.{keys.digest([row['prompt_id'] for row in rows])[:16]}"
    lines = [keys.canonical_json(row | {"source": name}) + b"\n" for row in rows]
    return f"{_PREFIX}{name}.jsonl", b"".join(lines)


def _entry(key: str, rows: list[dict[str, Any]]) -> TableSlice:
    return table_entry("prompts", {"source": rows[0]["source"]}, [key], rows)
