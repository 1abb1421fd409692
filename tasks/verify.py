"""`opd verify RUN`: recompute every checksum and invariant of a run from the store and the tables, without a JVM.

It trusts nothing that a stage remembered: objects are hashed again, rows are read from the tables, and the
invariants are counted from the rows themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra import tables
from infra.store import ObjectStore, open_store
from schemas import keys, shards
from schemas.errors import ContractError, OpdError
from schemas.rows import TABLES, content_digest
from tasks.manifests import read_partition, read_stage

_MAX_HEADER_BYTES = 1 << 20
STAGES = ("rollout", "teach", "dispatch", "train")


@dataclass(frozen=True)
class Check:
    """One line of the report: what was checked, how many times, and the breaches found."""

    name: str
    count: int
    breaches: tuple[str, ...]


Manifests = dict[tuple[int, str], list[dict[str, Any]]]


def _manifests(store: ObjectStore, run_id: str) -> tuple[Manifests, Check]:
    """Whole stage manifests by iteration and stage, and which ones are not whole."""
    found: Manifests = defaultdict(list)
    breaches, count = [], 0
    for key in store.list(keys.run_prefix(run_id) + "/"):
        parts = key.split("/")
        if len(parts) == 6 and parts[5] == "manifest.json" and parts[3] in STAGES:
            count += 1
            place = (int(parts[2]), parts[3])
            try:
                manifest = read_stage(store, key)
            except OpdError as error:
                found.setdefault(place, [])
                breaches.append(_in_a_line(error))
                continue
            found[place].append(manifest | {"prefix": key.removesuffix("/manifest.json")})
    return found, Check("stage manifests are whole", count, tuple(breaches))


def _in_a_line(error: Exception, key: str = "") -> str:
    """key: the object that was read, for errors that do not know it: a tensor is missing, or bytes are."""
    if isinstance(error, OpdError):
        return f"{error.where}: expected {error.expected}, found {error.found}"
    return f"{key}: {error!r}"


def _matches(root: str, manifest: dict[str, Any]) -> bool:
    for table, entry in manifest["tables"].items():
        try:
            rows = tables.read_rows(root, table, entry["slice"])
        except OpdError:  # said once, by the check of tables
            return False
        if len(rows) != entry["num_rows"] or content_digest(TABLES[table], rows) != entry["digest"]:
            return False
    return True


def _check_partitions(
    store: ObjectStore, manifests: list[dict[str, Any]]
) -> tuple[Check, list[tuple[str, str]]]:  # fmt: skip
    """The check, and (key, digest) of everything that the partitions wrote."""
    breaches, objects, count = [], [], 0
    for manifest in manifests:
        for partition in manifest["partitions"]:
            count += 1
            try:
                found = read_partition(store, manifest["prefix"], int(partition))
            except OpdError as error:
                breaches.append(_in_a_line(error))
                continue
            if found is None:
                breaches.append(f"{keys.partition_prefix(manifest['prefix'], int(partition))}: not finished")
                continue
            objects += [(entry["key"], entry["digest"]) for entry in found.manifest["objects"]]
            objects.append((found.manifest["rows_key"], found.manifest["rows_digest"]))
    return Check("partition manifests are whole", count, tuple(breaches)), objects


def _check_objects(store: ObjectStore, objects: list[tuple[str, str]]) -> Check:
    breaches = []
    for key, digest in objects:
        try:
            found = keys.digest_bytes(store.get(key))
        except OpdError as error:
            found = f"{error.kind}: {error.found or error.where}"
        if found != digest:
            breaches.append(f"{key}: expected SHA-256 {digest}, found {found}")
    return Check("objects hash to their manifest's digest", len(objects), tuple(breaches))


def _check_trajectories(store: ObjectStore, rows: list[dict[str, Any]], known_prompts: set[str]) -> list[Check]:
    samples: dict[tuple[int, str, str], list[int]] = defaultdict(list)
    for row in rows:
        samples[row["iteration"], row["split"], row["prompt_id"]].append(row["sample_index"])
    once = [
        f"iteration {i}, {split} prompt {p}: sample indices {sorted(found)}"
        for (i, split, p), found in samples.items()
        if sorted(found) != list(range(len(found)))
    ]
    shares = Counter((i, split, len(found)) for (i, split, _), found in samples.items())
    uneven = {k[:2] for k in shares if sum(s[:2] == k[:2] for s in shares) > 1}
    once += [f"iteration {i}, {split}: prompts differ in their number of samples" for i, split in sorted(uneven)]
    unknown = [f"{r['trajectory_id']}: prompt {r['prompt_id']}" for r in rows if r["prompt_id"] not in known_prompts]
    tokens: list[str] = []
    masks: dict[str, np.ndarray] = {}
    for row in rows:
        key = row["shard_key"]
        if key not in masks:
            try:
                masks[key] = shards.decode(store.get(key), key)["sampled_mask"]
            except (OpdError, KeyError) as error:
                tokens.append(_in_a_line(error, key))
                masks[key] = np.zeros(0, np.uint8)
        mask = masks[key][row["first_row"] : row["first_row"] + row["response_tokens"]]
        if len(mask) != row["response_tokens"] or int(np.sum(mask)) != row["sampled_tokens"]:
            tokens.append(f"{row['trajectory_id']}: {row['sampled_tokens']} sampled, mask has {int(np.sum(mask))}")
    return [
        Check("every prompt exactly once a sample index", len(samples), tuple(once)),
        Check("every trajectory's prompt is in opd.prompts", len(rows), tuple(unknown)),
        Check("token shards hold each trajectory's tokens", len(rows), tuple(tokens)),
    ]


def _check_hidden(store: ObjectStore, rows: list[dict[str, Any]], tokens_of: dict[str, int]) -> list[Check]:
    orphans = [r["trajectory_id"] for r in rows if r["trajectory_id"] not in tokens_of]
    covered: Counter[tuple[str, int]] = Counter()
    damaged = []
    headers: dict[str, shards.TensorSpec] = {}
    for row in rows:
        covered[row["trajectory_id"], row["teacher_index"]] += row["rows"]
        key = row["object_key"]
        try:
            if key not in headers:
                (length,) = np.frombuffer(store.get_range(key, 0, 8), "<u8")
                head = store.get_range(key, 0, 8 + min(int(length), _MAX_HEADER_BYTES))
                headers[key] = shards.decode_header(head, key)["hidden"]
            spec = headers[key]
            data = store.get_range(key, spec.start + row["first_object_row"] * spec.row_bytes,
                                   row["rows"] * spec.row_bytes)  # fmt: skip
            block = np.frombuffer(data, np.uint8).reshape(row["rows"], spec.row_bytes)
            shards.check_block_crcs(block, row["block_crcs"], f"{key}, {row['trajectory_id']}")
        except (OpdError, KeyError, ValueError) as error:
            damaged.append(_in_a_line(error, key))
    short = [
        f"{t}, teacher {i}: {n} rows of {tokens_of[t]}" for (t, i), n in covered.items() if tokens_of.get(t, n) != n
    ]
    return [
        Check("no hidden state without a trajectory", len(rows), tuple(orphans)),
        Check("one hidden row a response token and teacher", len(covered), tuple(short)),
        Check("hidden-state blocks match their CRCs", len(rows), tuple(damaged)),
    ]


def _check_taught(
    trajectories: list[dict[str, Any]], hidden: list[dict[str, Any]], teachers_of: dict[str, set[str]], taught: set[int]
) -> Check:
    """taught: iterations whose teach stage has finished. Trajectories that were given up are read by nobody."""
    wanted = {
        (row["trajectory_id"], teacher_id)
        for row in trajectories
        if row["iteration"] in taught and row["status"] == "finished"
        for teacher_id in teachers_of.get(row["prompt_id"], ())
    }
    found = {(row["trajectory_id"], row["teacher_id"]) for row in hidden if row["iteration"] in taught}
    breaches = [f"{t}: not read by {teacher}" for t, teacher in sorted(wanted - found)]
    breaches += [f"{t}: read by {teacher}, which it has not" for t, teacher in sorted(found - wanted)]
    return Check("each trajectory was read by its prompt's teachers", len(wanted), tuple(breaches))


def _check_plan(
    plan: list[dict[str, Any]], trajectories: dict[str, dict[str, Any]], hidden: list[dict[str, Any]]
) -> list[Check]:
    times = Counter((r["iteration"], r["trajectory_id"], r["teacher_index"]) for r in plan)
    wanted = {(r["iteration"], r["trajectory_id"], r["teacher_index"]) for r in hidden}
    exactly_once = [f"{k}: in {n} packs" for k, n in times.items() if n != 1]
    exactly_once += [f"{k}: in no pack" for k in sorted(wanted - set(times))]
    exactly_once += [f"{k}: planned, but without hidden states" for k in sorted(set(times) - wanted)]
    packs: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    denominators: dict[tuple, set[int]] = defaultdict(set)
    members: dict[tuple, set[str]] = defaultdict(set)
    for row in plan:
        step = (row["iteration"], row["split"], row["step"])
        packs[(*step, row["pack_id"])].append(row)
        denominators[step].add(row["denominator_tokens"])
        members[step].add(row["trajectory_id"])
    overlaps = []
    for pack, rows in packs.items():
        position = 0
        for row in sorted(rows, key=lambda r: r["offset"]):
            whole = trajectories.get(row["trajectory_id"])
            length = whole["prompt_tokens"] + whole["response_tokens"] if whole else None
            if row["offset"] != position or row["length"] != length:
                overlaps.append(f"pack {pack}: offset {row['offset']}, length {row['length']}")
            position = row["offset"] + row["length"]
    wrong = []
    for step, ids in members.items():
        total = sum(trajectories[i]["sampled_tokens"] for i in ids if i in trajectories)
        if denominators[step] != {total}:
            wrong.append(f"step {step}: {sorted(denominators[step])} instead of {total}")
    return [
        Check("every token in exactly one pack a teacher", len(times), tuple(exactly_once)),
        Check("packs are filled without gap or overlap", len(packs), tuple(overlaps)),
        Check("denominators count each sampled token once", len(members), tuple(wrong)),
    ]


def _read_tables(root: str, run_id: str) -> tuple[dict[str, list[dict[str, Any]]], Check]:
    """Rows of the run by table, none of those that cannot be read; of all prompts, ids and teachers."""
    rows: dict[str, list[dict[str, Any]]] = {}
    breaches = []
    for table in TABLES:
        whose, columns = ({}, ["prompt_id", "teachers"]) if table == "prompts" else ({"run_id": run_id}, None)
        try:
            rows[table] = tables.read_rows(root, table, whose, columns=columns)
        except OpdError as error:
            rows[table] = []
            breaches.append(_in_a_line(error))
    return rows, Check("tables can be read", len(TABLES), tuple(breaches))


def verify(root: str, run_id: str) -> list[Check]:
    """All checks of a run. Raises ContractError for a run that does not exist; breaches are returned."""
    store = open_store(root)
    manifests, whole = _manifests(store, run_id)
    if not manifests:
        runs = sorted({k.split("/")[1] for k in store.list("runs/")}) or "no run"
        raise ContractError(
            f"run {run_id} in {root}", expected="a run with a finished stage", found=f"{runs}",
            next_command="opd run CONFIG",
        )  # fmt: skip
    current, mismatched = [], []
    for (iteration, stage), found in sorted(manifests.items()):
        matching = [m for m in found if _matches(root, m)]
        if matching:
            current += matching[:1]
        elif found:
            mismatched.append(f"{stage} of iteration {iteration}: the tables differ from its manifest")
    rows, unreadable = _read_tables(root, run_id)
    teachers_of = {p["prompt_id"]: {t["teacher_id"] for t in p["teachers"]} for p in rows.pop("prompts")}
    trajectories = {r["trajectory_id"]: r for r in rows["trajectories"]}
    tokens_of = {i: r["response_tokens"] for i, r in trajectories.items()}
    iterations = {i for i, _ in manifests}
    orphans = [
        f"opd.{table}, iteration {row['iteration']}"
        for table, found in rows.items()
        for row in found
        if row["iteration"] not in iterations
    ]
    partitions, objects = _check_partitions(store, current)
    return [
        whole,
        unreadable,
        Check("tables equal their stage manifests", len(manifests), tuple(mismatched)),
        partitions,
        _check_objects(store, objects),
        *_check_trajectories(store, rows["trajectories"], set(teachers_of)),
        *_check_hidden(store, rows["hidden_shards"], tokens_of),
        _check_taught(
            rows["trajectories"], rows["hidden_shards"], teachers_of, {i for i, stage in manifests if stage == "teach"}
        ),
        *_check_plan(rows["plan"], trajectories, rows["hidden_shards"]),
        Check("no row of an iteration without a stage", sum(map(len, rows.values())), tuple(orphans)),
    ]
