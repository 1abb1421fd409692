"""Invariants of the rows that a run's stages have made, each counted from rows and shards alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra.store import ObjectStore
from schemas import shards
from schemas.errors import OpdError


@dataclass(frozen=True)
class Check:
    """One line of the report: what was checked, how many times, the breaches found, and what is said besides.

    skipped: why it could not be made.
    """

    name: str
    count: int
    breaches: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    skipped: str = ""

    def and_also(self, other: Check) -> Check:
        """The same check of a further part."""
        return Check(self.name, self.count + other.count, self.breaches + other.breaches, self.notes + other.notes,
                     self.skipped or other.skipped)  # fmt: skip


def in_a_line(error: Exception, key: str = "") -> str:
    """key: the object that was read, for errors that do not know it: a tensor is missing, or bytes are."""
    if isinstance(error, OpdError):
        return f"{error.where}: expected {error.expected}, found {error.found}"
    return f"{key}: {error!r}"


def tensor_at(store: ObjectStore, key: str, name: str) -> shards.TensorSpec:
    """Where a tensor lies in a shard, of which its head alone is read. Raises FormatError, StoreError or KeyError."""
    return shards.decode_header(shards.read_head(store, key), key)[name]


def check_trajectories(store: ObjectStore, rows: list[dict[str, Any]], known_prompts: set[str]) -> list[Check]:
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
    key, mask_of_shard = "", np.zeros(0, np.uint8)
    for row in sorted(rows, key=lambda r: (r["shard_key"], r["first_row"])):  # one shard's mask in memory at a time
        if row["shard_key"] != key:
            key = row["shard_key"]
            try:
                spec = tensor_at(store, key, "sampled_mask")
                mask_of_shard = np.frombuffer(store.get_range(key, spec.start, spec.length), np.uint8)
            except (OpdError, KeyError, ValueError) as error:
                tokens.append(in_a_line(error, key))
                mask_of_shard = np.zeros(0, np.uint8)
        mask = mask_of_shard[row["first_row"] : row["first_row"] + row["response_tokens"]]
        if len(mask) != row["response_tokens"] or int(np.sum(mask)) != row["sampled_tokens"]:
            tokens.append(f"{row['trajectory_id']}: {row['sampled_tokens']} sampled, mask has {int(np.sum(mask))}")
    return [
        Check("every prompt exactly once a sample index", len(samples), tuple(once)),
        Check("every trajectory's prompt is in opd.prompts", len(rows), tuple(unknown)),
        Check("token shards hold each trajectory's tokens", len(rows), tuple(tokens)),
    ]


def check_hidden(store: ObjectStore, rows: list[dict[str, Any]], tokens_of: dict[str, int]) -> list[Check]:
    orphans = [r["trajectory_id"] for r in rows if r["trajectory_id"] not in tokens_of]
    covered: Counter[tuple[str, int]] = Counter()
    damaged = []
    headers: dict[str, shards.TensorSpec] = {}
    for row in rows:
        covered[row["trajectory_id"], row["teacher_index"]] += row["rows"]
        key = row["object_key"]
        try:
            if key not in headers:
                headers[key] = tensor_at(store, key, "hidden")
            spec = headers[key]
            data = store.get_range(key, spec.start + row["first_object_row"] * spec.row_bytes,
                                   row["rows"] * spec.row_bytes)  # fmt: skip
            block = np.frombuffer(data, np.uint8).reshape(row["rows"], spec.row_bytes)
            shards.check_block_crcs(block, row["block_crcs"], f"{key}, {row['trajectory_id']}")
        except (OpdError, KeyError, ValueError) as error:
            damaged.append(in_a_line(error, key))
    short = [
        f"{t}, teacher {i}: {n} rows of {tokens_of[t]}" for (t, i), n in covered.items() if tokens_of.get(t, n) != n
    ]
    return [
        Check("no hidden state without a trajectory", len(rows), tuple(orphans)),
        Check("one hidden row a response token and teacher", len(covered), tuple(short)),
        Check("hidden-state blocks match their CRCs", len(rows), tuple(damaged)),
    ]


def check_taught(
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


def check_steps(iteration: int, plan: list[dict[str, Any]], checkpoints: list[dict[str, Any]]) -> Check:
    """Of an iteration whose train stage has finished: its student has made each step of the plan."""
    planned = len({row["step"] for row in plan if row["split"] == "train"})
    breaches = [
        f"iteration {iteration}, student {row['version'][:16]}: {row['steps']} steps of {planned} in the plan"
        for row in checkpoints
        if row["steps"] != planned
    ]
    if len(checkpoints) != 1:
        breaches.append(f"iteration {iteration}: {len(checkpoints)} students")
    return Check("each student made every step of its plan", len(checkpoints), tuple(breaches))


def check_plan(
    plan: list[dict[str, Any]], trajectories: dict[str, dict[str, Any]], hidden: list[dict[str, Any]]
) -> list[Check]:
    """Of an iteration whose dispatch stage has finished. trajectories: by trajectory_id."""
    times = Counter((r["iteration"], r["trajectory_id"], r["teacher_index"]) for r in plan)
    wanted = {(r["iteration"], r["trajectory_id"], r["teacher_index"]) for r in hidden}
    taught = {key for key in times if key[2] is not None}
    missing: set[tuple[int, str, int | None]] = wanted - taught
    if len(taught) < len(times):  # no teacher is needed: hidden states do not say which trajectories belong in it
        finished = {(r["iteration"], i, None) for i, r in trajectories.items() if r["status"] == "finished"}
        missing |= finished - set(times)
    exactly_once = [f"{k}: in {n} packs" for k, n in times.items() if n != 1]
    exactly_once += [f"{k}: in no pack" for k in sorted(missing, key=str)]
    exactly_once += [f"{k}: planned, but without hidden states" for k in sorted(taught - wanted)]
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
