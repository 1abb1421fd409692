"""`opd verify RUN`: recompute every checksum and invariant of a run from the store and the tables, without a JVM.

It trusts nothing that a stage remembered: objects are hashed again, rows are read from the tables, and the
invariants are counted from the rows themselves (tasks.operate.invariants). What an unfinished iteration does not have
yet is no breach; the report says how far the run is. Memory holds the rows of one iteration and a part of one object at
a time.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from infra import tables
from infra.store import ObjectStore
from infra.stores import open_store
from schemas import keys
from schemas.errors import ContractError, OpdError
from schemas.rows import TABLES, content_digest
from schemas.work.manifest import StageManifest, TableSlice
from tasks.operate.invariants import (
    Check,
    check_hidden,
    check_plan,
    check_steps,
    check_taught,
    check_trajectories,
    in_a_line,
)
from tasks.operate.objects import digest_of
from tasks.runs.finished import STAGES, past_stage
from tasks.runs.manifests import read_partition, read_stage
from tasks.runs.records import read_history
from tasks.runs.session import Progress, silent

_STAGE_KEY = re.compile(r"(?P<prefix>runs/[^/]+/(?P<iteration>\d{5})/(?P<stage>[^/]+)/[^/]+)/(?P<rest>.+)")
_OWNED = re.compile(r"p(?P<partition>\d{5})/e(?P<epoch>\d{6})/(?P<name>.+)")
_BOOKKEEPING = re.compile(
    r"runs/[^/]+/(record/\d+\.json|lease/(epochs|heartbeats)/\d+\.json|\d{5}/[^/]+/records/\d+\.json|"
    r"\d{5}/[^/]+/[^/]+/(manifest\.json|revoked\.json|p\d{5}/(epochs|heartbeats)/\d+\.json))"
)


@dataclass(frozen=True)
class FinishedStage:
    """prefix: of the keys of all that it wrote."""

    prefix: str
    manifest: StageManifest


Manifests = dict[tuple[int, str], list[FinishedStage]]
#: None for one that stands and cannot be read.
InForce = dict[tuple[int, str], FinishedStage | None]


def verify(root: str, run_id: str, progress: Progress = silent) -> list[Check]:
    """All checks of a run. Raises ContractError for a run that does not exist; breaches are returned."""
    store = open_store(root)
    listed = store.list(keys.run_prefix(run_id) + "/")
    if not listed:
        runs = sorted({k.split("/")[1] for k in store.list("runs/")}) or "no run"
        raise ContractError(
            f"run {run_id} in {root}", expected="a run", found=f"{runs}", next_command="opd run CONFIG"
        )  # fmt: skip
    manifests, whole = _manifests(store, listed)
    current, whole = _in_force(store, run_id, manifests, whole)
    readable, tables_there = _readable_tables(root, manifests)
    mismatched = [
        f"{stage} of iteration {iteration}: {difference}"
        for (iteration, stage), found in current.items()
        if found is not None and (difference := _mismatch(root, found.manifest, readable))
    ]
    partitions, objects = _check_partitions(store, [m for m in current.values() if m is not None])
    return [
        _how_far(listed, current),
        whole,
        tables_there,
        Check("tables equal their stage manifests", len(current), tuple(mismatched)),
        partitions,
        _check_objects(store, objects, progress),
        *_check_iterations(store, root, run_id, current, readable, progress),
        _check_orphans(root, run_id, readable, {int(k.split("/")[2]) for k in listed if _STAGE_KEY.fullmatch(k)}),
        *_unreferenced(listed, manifests, store),
    ]


def _manifests(store: ObjectStore, listed: list[str]) -> tuple[Manifests, Check]:
    """Whole stage manifests by iteration and stage, and which ones are not whole."""
    found: Manifests = defaultdict(list)
    breaches, count = [], 0
    for key in listed:
        parts = key.split("/")
        if len(parts) == 6 and parts[5] == "manifest.json" and parts[3] in STAGES:
            count += 1
            place = (int(parts[2]), parts[3])
            try:
                manifest = read_stage(store, key)
            except OpdError as error:
                found.setdefault(place, [])
                breaches.append(in_a_line(error))
                continue
            found[place].append(FinishedStage(key.removesuffix("/manifest.json"), manifest))
    return found, Check("stage manifests are whole", count, tuple(breaches))


def _in_force(store: ObjectStore, run_id: str, manifests: Manifests, whole: Check) -> tuple[InForce, Check]:
    """The manifest of each finished stage by the record that its iteration belongs to."""
    found: InForce = {}
    breaches = list(whole.breaches)
    try:
        history = read_history(store, run_id)
    except OpdError as error:
        return found, whole.and_also(Check(whole.name, 0, (in_a_line(error),)))
    for (iteration, stage), candidates in sorted(manifests.items()):
        if not candidates:
            found[iteration, stage] = None
            continue
        try:
            result = past_stage(store, history, run_id, iteration, stage)
        except OpdError as error:
            if in_a_line(error) not in breaches:
                breaches.append(in_a_line(error))
            found[iteration, stage] = None
            continue
        if result is not None:
            prefix = keys.stage_prefix(run_id, iteration, stage, result.fingerprint)
            found[iteration, stage] = FinishedStage(prefix, result.manifest)
    return found, Check(whole.name, whole.count, tuple(breaches))


def _how_far(listed: list[str], manifests: InForce) -> Check:
    begun = {int(key["iteration"]) for k in listed if (key := _STAGE_KEY.fullmatch(k))}
    notes = []
    for iteration in sorted(begun):
        finished = [stage for stage in STAGES if (iteration, stage) in manifests]
        if len(finished) < len(STAGES):
            to_come = ", ".join(stage for stage in STAGES if stage not in finished)
            notes.append(f"iteration {iteration}: finished {', '.join(finished) or 'nothing'}; to come: {to_come}")
    if not begun:
        notes.append("no stage has begun")
    return Check("stages finished", len(manifests), notes=tuple(notes))


def _readable_tables(root: str, manifests: Manifests) -> tuple[set[str], Check]:
    """Names of the tables whose rows can be read, and of those that a manifest names the ones that are not there."""
    named = {table for found in manifests.values() for stage in found for table in stage.manifest.tables}
    if any(stage == "rollout" for _, stage in manifests):
        named.add("prompts")
    readable, breaches = set(), []
    for table in TABLES:
        try:
            if tables.table_exists(root, table):
                tables.table_version(root, table)
                readable.add(table)
            elif table in named:
                breaches.append(f"opd.{table}: no such table, and checks of its rows are left out")
        except OpdError as error:
            breaches.append(in_a_line(error))
    return readable, Check("tables can be read", len(named), tuple(breaches))


def _rows(root: str, table: str, where: dict[str, Any], columns: list[str] | None = None) -> list[dict[str, Any]] | str:
    """Rows, or why there are none."""
    try:
        return tables.read_rows(root, table, where, columns=columns)
    except OpdError as error:
        return in_a_line(error)


def _mismatch(root: str, manifest: StageManifest, readable: set[str]) -> str:
    """Which slices differ from the manifest, and how."""
    differences = {
        table: _difference(root, table, entry) for table, entry in manifest.tables.items() if table in readable
    }
    return "; ".join(f"opd.{table} has {text}" for table, text in differences.items() if text)


def _difference(root: str, table: str, entry: TableSlice) -> str:
    rows = _rows(root, table, entry.slice)
    if isinstance(rows, str):
        return f"a slice that cannot be read: {rows}"
    if len(rows) != entry.num_rows:
        return f"{len(rows)} rows where its manifest has {entry.num_rows}"
    same = content_digest(TABLES[table], rows, observed=True) == entry.whole_digest
    return "" if same else "other values than its manifest"


def _check_partitions(
    store: ObjectStore, stages: list[FinishedStage]
) -> tuple[Check, list[tuple[str, str]]]:  # fmt: skip
    """The check, and (key, digest) of everything that the partitions wrote."""
    breaches, objects, count = [], [], 0
    for stage in stages:
        for partition in stage.manifest.partitions:
            count += 1
            try:
                found = read_partition(store, stage.prefix, int(partition))
            except OpdError as error:
                breaches.append(in_a_line(error))
                continue
            if found is None:
                breaches.append(f"{keys.partition_prefix(stage.prefix, int(partition))}: not finished, or revoked")
                continue
            objects += [(entry.key, entry.digest) for entry in found.manifest.objects]
            objects.append((found.manifest.rows_key, found.manifest.rows_digest))
    return Check("partition manifests are whole", count, tuple(breaches)), objects


def _check_objects(store: ObjectStore, objects: list[tuple[str, str]], progress: Progress) -> Check:
    breaches = []
    for index, (key, digest) in enumerate(objects):
        progress("objects", index, len(objects), "objects")
        try:
            found = digest_of(store, key)
        except OpdError as error:
            found = f"{error.kind}: {error.found or error.where}"
        if found != digest:
            breaches.append(f"{key}: expected SHA-256 {digest}, found {found}")
    progress("objects", len(objects), len(objects), "objects")
    return Check("objects hash to their manifest's digest", len(objects), tuple(breaches))


def _check_iterations(
    store: ObjectStore, root: str, run_id: str, manifests: InForce, readable: set[str], progress: Progress
) -> Iterable[Check]:
    """Invariants of rows, iteration by iteration; what the stage that makes them has not finished is not asked for."""
    prompts = _rows(root, "prompts", {}, ["prompt_id", "teachers"]) if "prompts" in readable else []
    teachers_of = {p["prompt_id"]: {t["teacher_id"] for t in p["teachers"]} for p in prompts if isinstance(p, dict)}
    checks: dict[str, Check] = {}
    iterations = sorted({iteration for iteration, _ in manifests}) or [0]
    for index, iteration in enumerate(iterations):
        progress("iterations", index, len(iterations), "iterations")
        lacking = sorted({"prompts", "trajectories", "hidden_shards", "plan", "checkpoints"} - readable)
        rows: dict[str, list[dict[str, Any]]] = {}
        for table in ("trajectories", "hidden_shards", "plan", "checkpoints"):
            made = (iteration, _MADE_BY[table]) in manifests
            found = _rows(root, table, {"run_id": run_id, "iteration": iteration}) if table in readable else []
            if isinstance(found, str):
                lacking.append(table)
            rows[table] = found if made and not isinstance(found, str) else []
        for needed, check in _of_iteration(store, iteration, rows, teachers_of, manifests):
            gone = [f"opd.{table}" for table in needed.split() if table in lacking]
            if gone and any((iteration, _MADE_BY[table]) in manifests for table in needed.split()):
                check = Check(check.name, 0, skipped=f"not checked without {', '.join(gone)}")
            checks[check.name] = checks[check.name].and_also(check) if check.name in checks else check
    progress("iterations", len(iterations), len(iterations), "iterations")
    return checks.values()


_MADE_BY = {
    "prompts": "rollout", "trajectories": "rollout", "hidden_shards": "teach", "plan": "dispatch",
    "checkpoints": "train",
}  # fmt: skip


def _of_iteration(
    store: ObjectStore, iteration: int, rows: dict[str, list[dict[str, Any]]], teachers_of: dict[str, set[str]],
    manifests: InForce,
) -> Iterable[tuple[str, Check]]:  # fmt: skip
    """(tables that it needs, check)."""
    trajectories = {r["trajectory_id"]: r for r in rows["trajectories"]}
    tokens_of = {i: r["response_tokens"] for i, r in trajectories.items()}
    once, known, tokens = check_trajectories(store, rows["trajectories"], set(teachers_of))
    yield from (("trajectories", once), ("trajectories prompts", known), ("trajectories", tokens))
    orphans, covered, crcs = check_hidden(store, rows["hidden_shards"], tokens_of)
    yield from (
        ("trajectories hidden_shards", orphans),
        ("trajectories hidden_shards", covered),
        ("hidden_shards", crcs),
    )
    taught = {iteration} if (iteration, "teach") in manifests else set()
    yield (
        "prompts trajectories hidden_shards",
        check_taught(rows["trajectories"], rows["hidden_shards"], teachers_of, taught),
    )
    planned = (iteration, "dispatch") in manifests
    for check in check_plan(rows["plan"], trajectories, rows["hidden_shards"] if planned else []):
        yield "trajectories hidden_shards plan", check
    if (iteration, "train") in manifests:
        yield "plan checkpoints", check_steps(iteration, rows["plan"], rows["checkpoints"])
    else:
        yield "", Check("each student made every step of its plan", 0)


def _check_orphans(root: str, run_id: str, readable: set[str], begun: set[int]) -> Check:
    count, breaches = 0, []
    for table in sorted(readable - {"prompts"}):
        iterations = tables.iterations(root, table, run_id)
        count += len(iterations)
        breaches += [f"opd.{table}, iteration {i}" for i in sorted(iterations - begun)]
    return Check("no slice of an iteration without a stage", count, tuple(breaches))


def _unreferenced(listed: list[str], manifests: Manifests, store: ObjectStore) -> list[Check]:
    """What takes room and no manifest names: no breach, since nothing reads it."""
    named: set[str] = set()
    finished: dict[str, int] = {}
    for found in manifests.values():
        for stage in found:
            named.update(key for entry in stage.manifest.tables.values() for key in entry.row_keys)
            for partition in stage.manifest.partitions:
                owned = keys.partition_prefix(stage.prefix, int(partition))
                try:
                    done = read_partition(store, stage.prefix, int(partition))
                except OpdError:
                    continue  # said by the check of partitions
                if done is not None:
                    finished[owned] = done.epoch
                    named.add(done.manifest.rows_key)
                    named.update(entry.key for entry in done.manifest.objects)
    leftovers, unknown, unfinished = [], [], Counter()
    for key in listed:
        if key in named or _BOOKKEEPING.fullmatch(key):
            continue
        place = _STAGE_KEY.fullmatch(key)
        owned = _OWNED.fullmatch(place["rest"]) if place else None
        if place is None or owned is None:
            unknown.append(key)
            continue
        partition = keys.partition_prefix(place["prefix"], int(owned["partition"]))
        if partition not in finished:
            unfinished[f"{place['stage']} of iteration {int(place['iteration'])}"] += 1
        elif (
            owned["name"].startswith(("wal/", "spill/", "life.json")) or int(owned["epoch"]) != finished[partition] - 1
        ):
            leftovers.append(key)
        else:
            unknown.append(key)
    return [
        Check("unreferenced: objects that no manifest names", len(unknown), notes=_some(unknown)),
        Check("unreferenced: logs, and what superseded epochs left (opd upkeep deletes them)", len(leftovers)),
        Check("unreferenced: objects of partitions that are not finished", unfinished.total(),
              notes=tuple(f"{stage}: {count}" for stage, count in sorted(unfinished.items()))),
    ]  # fmt: skip


def _some(lines: list[str]) -> tuple[str, ...]:
    return (*lines[:5], f"and {len(lines) - 5} more") if len(lines) > 6 else tuple(lines)
