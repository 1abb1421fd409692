"""A stage as a function of (configuration, iteration, committed rows), idempotent by its fingerprint.

    partitions finish by manifest -> table slices committed and read back -> stage manifest put

A finished stage is a no-op as long as its table slices match the manifest; otherwise it recommits them from the
partition manifests. An unfinished one continues: only partitions without a manifest are executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from infra import leases, tables
from schemas import keys
from schemas.errors import ContractError, FormatError, StageError
from schemas.rows import TABLES, content_digest
from tasks.manifests import read_partition, read_stage
from tasks.session import Session

#: Raised by one when the bytes that a stage writes change their meaning.
FORMAT_VERSIONS = {"rollout": 1, "teach": 1, "dispatch": 1, "train": 1}


@dataclass(frozen=True)
class StageResult:
    """A small reference to what a stage made: the manifest, and a digest of content for the next fingerprint."""

    stage: str
    iteration: int
    fingerprint: str
    output_digest: str
    manifest: dict[str, Any]

    @property
    def stats(self) -> dict[str, Any]:
        return self.manifest["stats"]

    def reference(self) -> dict[str, Any]:
        """What a flow passes on: a few strings and numbers."""
        return {
            "stage": self.stage,
            "iteration": self.iteration,
            "fingerprint": self.fingerprint,
            "output_digest": self.output_digest,
            "rows": {name: entry["num_rows"] for name, entry in self.manifest["tables"].items()},
        }


@dataclass(frozen=True)
class Stage:
    """What the runner needs to know of one stage in one iteration.

    partitions: index -> work, built from content alone. execute(work of the unfinished) returns when all have
    finished or raises. derive(partition manifests, their rows) gives the rows of further tables and a JSON-ready
    summary.
    """

    name: str
    iteration: int
    table: str
    config: dict[str, Any]
    inputs: dict[str, str]
    partitions: Callable[[str], dict[int, Any]]
    execute: Callable[[str, dict[int, Any]], None]
    derive: Callable[
        [dict[int, dict[str, Any]], list[dict[str, Any]]], tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]
    ]


def fingerprint(stage: Stage, run_id: str) -> str:
    return keys.digest(
        {
            "run_id": run_id,
            "iteration": stage.iteration,
            "stage": stage.name,
            "format": FORMAT_VERSIONS[stage.name],
            "config": stage.config,
            "inputs": stage.inputs,
        }
    )


def run_stage(session: Session, stage: Stage) -> StageResult:
    """Bring a stage to its end, from wherever it stands. Raises StageError, ContractError or StoreError."""
    mark = fingerprint(stage, session.run_id)
    prefix = keys.stage_prefix(session.run_id, stage.iteration, stage.name, mark)
    manifest_key = keys.stage_manifest(prefix)
    if session.store.head(manifest_key) is not None:
        manifest = read_stage(session.store, manifest_key)
        session.progress(stage.name, 1, 1, "already finished")
    elif session.target not in (None, (stage.iteration, stage.name)):
        raise StageError(
            f"{stage.name} of iteration {stage.iteration}", expected="a finished stage", found="no manifest",
            safe="everything that the run has made",
            next_command=f"opd {stage.name} CONFIG --iteration {stage.iteration}",
        )  # fmt: skip
    else:
        manifest = _execute(session, stage, prefix, mark)
    for table, entry in manifest["tables"].items():
        commit(session, table, entry)
    if session.store.put_if_absent(manifest_key, keys.canonical_json(manifest)) is False:
        stored = read_stage(session.store, manifest_key)
        if stored["output_digest"] != manifest["output_digest"]:
            raise ContractError(
                manifest_key, expected=f"output {manifest['output_digest']}", found=stored["output_digest"],
                safe="the stored manifest", next_command=f"opd verify {session.run_id}",
            )  # fmt: skip
    return StageResult(stage.name, stage.iteration, mark, manifest["output_digest"], manifest)


def _execute(session: Session, stage: Stage, prefix: str, mark: str) -> dict[str, Any]:
    partitions = stage.partitions(prefix)
    done = _finished(session, prefix, partitions)
    todo = {index: work for index, work in partitions.items() if index not in done}
    if todo:
        stage.execute(prefix, todo)
        done = _finished(session, prefix, partitions)
    missing = sorted(set(partitions) - set(done))
    if missing:
        raise StageError(
            f"{stage.name} of iteration {stage.iteration}", expected=f"{len(partitions)} finished partitions",
            found=f"{len(missing)} unfinished, first {missing[0]}", safe="the finished ones and every log",
            next_command=f"opd {stage.name} CONFIG --iteration {stage.iteration}",
        )  # fmt: skip
    manifests = {index: found.manifest for index, found in sorted(done.items())}
    rows = [row for m in manifests.values() for row in _read_rows(session, m["rows_key"], m["rows_digest"])]
    further, stats = stage.derive(manifests, rows)
    place = {"run_id": session.run_id, "iteration": stage.iteration, "stage": stage.name}
    primary = [m["rows_key"] for m in manifests.values()]
    entries = {stage.table: table_entry(stage.table, place, primary, rows)}
    further["stage_runs"] = _stage_runs(session, stage, mark, done)
    for table, derived in further.items():
        key = f"{prefix}/tables/{table}.jsonl"
        session.store.put(key, b"".join(keys.canonical_json(row) + b"\n" for row in derived))
        entries[table] = table_entry(table, place, [key], derived)
    objects = [[o["digest"] for o in m["objects"]] for m in manifests.values()]
    content = {table: entry["digest"] for table, entry in entries.items()}
    return {
        "stage": stage.name,
        "iteration": stage.iteration,
        "fingerprint": mark,
        "inputs": stage.inputs,
        "partitions": {str(index): found.epoch for index, found in sorted(done.items())},
        "tables": entries,
        "stats": stats,
        "output_digest": keys.digest({"objects": objects, "tables": content}),
    }


def _finished(session: Session, prefix: str, partitions: Iterable[int]) -> dict[int, leases.Finished]:
    found = {i: read_partition(session.store, prefix, i) for i in partitions}
    return {i: f for i, f in found.items() if f is not None}


def _read_rows(session: Session, key: str, expected_digest: str) -> list[dict[str, Any]]:
    """Rows of one JSONL object. Raises FormatError when its digest or a line is not what it should be."""
    data = session.store.get(key)
    if keys.digest_bytes(data) != expected_digest:
        raise FormatError(
            key, expected=f"SHA-256 {expected_digest}", found=keys.digest_bytes(data), safe="every other object",
            next_command=f"opd verify {session.run_id}",
        )  # fmt: skip
    try:
        return [json.loads(line) for line in data.decode("utf-8", "surrogatepass").split("\n") if line]
    except ValueError as error:
        raise FormatError(key, expected="one JSON object a line", found=str(error)) from error


def table_entry(table: str, place: dict[str, Any], row_keys: list[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a stage manifest keeps of one table's slice; place gives at least the values of the table's slice key."""
    return {
        "slice": {name: place[name] for name in TABLES[table].slice_key},
        "row_keys": row_keys,
        "num_rows": len(rows),
        "digest": content_digest(TABLES[table], rows),
        "whole_digest": content_digest(TABLES[table], rows, observed=True),
    }


def _stage_runs(session: Session, stage: Stage, mark: str, done: dict[int, leases.Finished]) -> list[dict[str, Any]]:
    return [
        {
            "run_id": session.run_id, "iteration": stage.iteration, "stage": stage.name, "partition": index,
            "epoch": found.epoch, "status": "finished", "fingerprint": mark, "rows": found.manifest["num_rows"],
            "bytes": sum(o["bytes"] for o in found.manifest["objects"]),
            "seconds": float(found.manifest["stats"].get("seconds", 0.0)), "error": _error(found.manifest),
        }
        for index, found in done.items()
    ]  # fmt: skip


def _error(manifest: Mapping[str, Any]) -> str | None:
    """What went wrong in a partition that finished all the same: trajectories that were given up."""
    return "; ".join(f"{i}: {text}" for i, text in manifest.get("given_up", {}).items()) or None


def slice_matches(session: Session, table: str, entry: Mapping[str, Any]) -> bool:
    """Does the table hold exactly the rows of the manifest's entry, keys included? Read without a JVM."""
    rows = tables.read_rows(session.config.data, table, entry["slice"])
    return (
        len(rows) == entry["num_rows"] and content_digest(TABLES[table], rows, observed=True) == entry["whole_digest"]
    )


def commit(session: Session, table: str, entry: Mapping[str, Any]) -> None:
    """Make the table hold exactly the entry's rows in its slice; Spark starts only when it does not already."""
    if slice_matches(session, table, entry):
        return
    session.spark.call(
        "infra.tables:commit_slice",
        root=session.config.data,
        table=table,
        slice=entry["slice"],
        row_keys=entry["row_keys"],
        num_rows=entry["num_rows"],
        content_digest=entry["digest"],
    )
