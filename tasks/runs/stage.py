"""A stage as a function of (configuration, iteration, committed rows), idempotent by its fingerprint.

    identity put -> partitions finish by manifest -> table slices committed and read back -> stage manifest put

A finished stage is a no-op as long as its table slices match the manifest; otherwise it recommits them from the
partition manifests. An unfinished one continues: only partitions without a manifest are executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from infra import leases, tables
from schemas import keys
from schemas.errors import ContractError, FormatError, StageError
from schemas.rows import TABLES, content_digest, json_lines
from schemas.typed_json import encode, to_json
from schemas.work.manifest import Lost, PartitionManifest, StageManifest, TableSlice
from schemas.work.record import StageFacts, StageIdentity
from tasks.runs.finished import STAGES, StageResult, identity_at, past_stage
from tasks.runs.manifests import FinishedPartition, read_identity, read_partition, read_revoked, read_stage
from tasks.runs.records import differences
from tasks.runs.session import Session

#: Raised by one when the bytes that a stage writes change their meaning.
FORMAT_VERSIONS: dict[str, int] = dict.fromkeys(STAGES, 2)


@dataclass(frozen=True)
class Stage:
    """What the runner needs to know of one stage in one iteration.

    config, inputs: what shapes the result and is cheap to tell. partitions: index -> what each is given, built from
    content alone. given: what of one partition's work enters the fingerprint. execute(prefix, work of the unfinished)
    returns when all have finished or raises. derive(partition manifests, their rows) gives the rows of further tables
    and a JSON-ready summary. scoring: sources of verifiers, which may be cured while the stage is unfinished.
    """

    name: str
    iteration: int
    table: str
    config: dict[str, Any]
    inputs: dict[str, str]
    partitions: Callable[[], dict[int, Any]]
    execute: Callable[[str, dict[int, Any]], None]
    derive: Callable[
        [dict[int, PartitionManifest], list[dict[str, Any]]], tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]
    ]
    given: Callable[[Any], Any] = lambda work: work
    scoring: dict[str, str] = field(default_factory=dict)


def identity(session: Session, stage: Stage, partitions: Mapping[int, Any]) -> StageFacts:
    """All that a stage's result is a function of. Its digest is the fingerprint."""
    given = hashlib.sha256()
    for index, work in sorted(partitions.items()):
        given.update(keys.canonical_json([index, stage.given(work)]))
    return StageFacts(
        run_id=session.run_id,
        iteration=stage.iteration,
        stage=stage.name,
        format=FORMAT_VERSIONS[stage.name],
        config=json.loads(keys.canonical_json(stage.config)),
        inputs=stage.inputs,
        scoring=stage.scoring,
        given=given.hexdigest(),
    )


def run_stage(session: Session, stage: Stage) -> StageResult:
    """Bring a stage to its end, from wherever it stands. Raises StageError, ContractError or StoreError.

    What the stage is under the run's record is written down before anything is made. A start that finds other facts
    there is refused with their names, whether the stage is finished or not; `--from-iteration` begins another record.
    """
    number = session.history.in_force(stage.iteration)
    key = keys.stage_identity(session.run_id, stage.iteration, stage.name, number)
    known = identity_at(session.store, key)
    if known is not None:
        prefix = keys.stage_prefix(session.run_id, stage.iteration, stage.name, known.fingerprint)
        if session.store.head(keys.stage_manifest(prefix)) is not None:
            return _read_finished(session, stage, prefix, known.facts)
    partitions = stage.partitions()
    now = identity(session, stage, partitions)
    if known is not None:
        # A verifier that failed may be cured: what it scores is in the log, and is scored again.
        _refuse(session, stage, to_json(known.facts), to_json(replace(now, scoring=known.facts.scoring)))
    else:
        known = StageIdentity(now, keys.digest(to_json(now)))
    prefix = keys.stage_prefix(session.run_id, stage.iteration, stage.name, known.fingerprint)
    if session.store.head(keys.stage_manifest(prefix)) is not None:  # of an older record, whose facts are the same
        _put_identity(session, key, known)
        return _read_finished(session, stage, prefix, now)
    _refuse_unless_target(session, stage, "a finished stage", "no manifest")
    _put_identity(session, key, known)
    manifest = _execute(session, stage, prefix, known.fingerprint, partitions)
    return _committed(session, stage, prefix, manifest)


def past_iteration(session: Session, iteration: int) -> dict[str, StageResult]:
    """The stages of an iteration that belongs to an older record: read, never executed or committed anew."""
    found = {}
    for stage in STAGES:
        result = past_stage(session.store, session.history, session.run_id, iteration, stage)
        if result is None:
            raise ContractError(
                f"{stage} of iteration {iteration}", expected="a finished stage, as an older record has it",
                found="no manifest", safe="everything else that the run has made",
                next_command=f"opd repair {session.run_id}",
            )  # fmt: skip
        session.progress(stage, 1, 1, "already finished")
        found[stage] = result
    return found


def _put_identity(session: Session, key: str, known: StageIdentity) -> None:
    session.check_owner()
    if not session.store.put_if_absent(key, encode(known)):
        stored = read_identity(session.store, key)
        if stored.fingerprint != known.fingerprint:
            raise ContractError(
                key, expected=f"fingerprint {known.fingerprint}", found=stored.fingerprint,
                safe="everything that the run has made", next_command="the same command again",
            )  # fmt: skip


def _refuse(session: Session, stage: Stage, old: dict[str, Any], new: dict[str, Any]) -> None:
    """ContractError that names what of a stage is not what it was begun with."""
    found = differences(old, new)
    if not found:
        return
    if any(line.startswith("given:") for line in found):
        found.append("given is what the ranks read: ids of prompts or teachers' contexts, stop ids")
    raise ContractError(
        f"{stage.name} of iteration {stage.iteration}, run {session.run_id}",
        expected="what it was begun with", found="; ".join(found[:6]), safe="everything that the run has made",
        next_command=f"undo that; or, to make it anew: opd run CONFIG --from-iteration {stage.iteration}",
    )  # fmt: skip


def _read_finished(session: Session, stage: Stage, prefix: str, facts: StageFacts) -> StageResult:
    """Its format, and what its ranks were given, are those of the code that made it: history, and not compared."""
    manifest = read_stage(session.store, keys.stage_manifest(prefix))
    scoring = facts.scoring if manifest.scoring is None else manifest.scoring
    made = {"config": facts.config, "inputs": facts.inputs, "scoring": scoring}
    now = {"config": stage.config, "inputs": stage.inputs, "scoring": stage.scoring}
    _refuse(session, stage, made, json.loads(keys.canonical_json(now)))
    if lost := read_revoked(session.store, prefix):
        manifest = _made_anew(session, stage, prefix, manifest, lost)
    session.progress(stage.name, 1, 1, "already finished")
    return _committed(session, stage, prefix, manifest)


def _made_anew(
    session: Session, stage: Stage, prefix: str, manifest: StageManifest, lost: Mapping[str, Lost]
) -> StageManifest:
    """The manifest of a finished stage after its revoked partitions were executed again: the same content, other keys.

    Raises ContractError when another content came out; then the old manifest stays, and the partitions stay revoked.
    """
    _refuse_unless_target(session, stage, "objects that are whole", f"{len(lost)} partitions of which some are lost")
    for index, found in lost.items():  # what a repair that was killed has noted and not come to
        session.check_owner()
        leases.revoke(session.store, keys.partition_prefix(prefix, int(index)), found.epoch, found.reason)
    again = _execute(session, stage, prefix, manifest.fingerprint, stage.partitions())
    if again.output_digest != manifest.output_digest:
        for index in lost:
            partition = read_partition(session.store, prefix, int(index))
            if partition is not None:
                owned = keys.partition_prefix(prefix, int(index))
                leases.revoke(session.store, owned, partition.epoch, "made anew with another content")
        raise ContractError(
            f"{stage.name} of iteration {stage.iteration}, partitions {', '.join(sorted(lost, key=int))}",
            expected=f"the content that was lost: output {manifest.output_digest}", found=again.output_digest,
            safe="the manifest and every other partition; what was made anew is revoked again",
            next_command="the same command on the kind of device, and with the packages, that made it; or, to make it "
            f"and all that follows anew: opd run CONFIG --from-iteration {stage.iteration}",
        )  # fmt: skip
    session.check_owner()
    session.store.put(keys.stage_manifest(prefix), encode(again))
    for table, entry in again.tables.items():
        commit(session, table, entry)
    session.store.delete(keys.revoked(prefix))
    session.notes[f"{stage.name} of iteration {stage.iteration}"] = f"{len(lost)} lost partitions were made anew, equal"
    return again


def _refuse_unless_target(session: Session, stage: Stage, expected: str, found: str) -> None:
    if session.target not in (None, (stage.iteration, stage.name)):
        raise StageError(
            f"{stage.name} of iteration {stage.iteration}", expected=expected, found=found,
            safe="everything that the run has made",
            next_command=f"opd {stage.name} CONFIG --iteration {stage.iteration}",
        )  # fmt: skip


def _committed(session: Session, stage: Stage, prefix: str, manifest: StageManifest) -> StageResult:
    """The stage's slices in the tables, then its manifest, which the first of two drivers puts."""
    manifest_key = keys.stage_manifest(prefix)
    for table, entry in manifest.tables.items():
        commit(session, table, entry)
    session.check_owner()
    if session.store.put_if_absent(manifest_key, encode(manifest)) is False:
        stored = read_stage(session.store, manifest_key)
        if stored.output_digest != manifest.output_digest:
            raise ContractError(
                manifest_key, expected=f"output {manifest.output_digest}", found=stored.output_digest,
                safe="the stored manifest", next_command=f"opd repair {session.run_id}",
            )  # fmt: skip
        manifest = stored
    return StageResult(stage.name, stage.iteration, manifest.fingerprint, manifest.output_digest, manifest)


def _execute(session: Session, stage: Stage, prefix: str, mark: str, partitions: dict[int, Any]) -> StageManifest:
    """mark: the stage's fingerprint."""
    done = _finished(session, stage, prefix, partitions)
    todo = {index: work for index, work in partitions.items() if index not in done}
    if todo:
        session.check_owner()
        stage.execute(prefix, todo)
        done = _finished(session, stage, prefix, partitions)
    missing = sorted(set(partitions) - set(done))
    if missing:
        raise StageError(
            f"{stage.name} of iteration {stage.iteration}", expected=f"{len(partitions)} finished partitions",
            found=f"{len(missing)} unfinished, first {missing[0]}", safe="the finished ones and every log",
            next_command=f"opd {stage.name} CONFIG --iteration {stage.iteration}",
        )  # fmt: skip
    manifests = {index: found.manifest for index, found in sorted(done.items())}
    rows = [row for m in manifests.values() for row in _read_rows(session, m.rows_key, m.rows_digest)]
    further, stats = stage.derive(manifests, rows)
    place = {"run_id": session.run_id, "iteration": stage.iteration, "stage": stage.name}
    primary = [m.rows_key for m in manifests.values()]
    entries = {stage.table: table_entry(stage.table, place, primary, rows)}
    further["stage_runs"] = _stage_runs(session, stage, mark, done)
    for table, derived in further.items():
        key = keys.derived_rows(prefix, table, content_digest(TABLES[table], derived, observed=True))
        session.store.put(key, json_lines(derived))
        entries[table] = table_entry(table, place, [key], derived)
    objects = [[o.digest for o in m.objects] for m in manifests.values()]
    content = {table: entry.digest for table, entry in entries.items()}
    return StageManifest(
        stage=stage.name,
        iteration=stage.iteration,
        fingerprint=mark,
        inputs=stage.inputs,
        scoring=stage.scoring,
        partitions={str(index): found.epoch for index, found in sorted(done.items())},
        tables=entries,
        stats=to_json(stats),
        output_digest=keys.digest({"objects": objects, "tables": content}),
    )


def _finished(session: Session, stage: Stage, prefix: str, partitions: Iterable[int]) -> dict[int, FinishedPartition]:
    """Finished partitions. One that an older source of a verifier has scored is revoked: its log is scored again."""
    found = {}
    for index in partitions:
        partition = read_partition(session.store, prefix, index)
        if partition is None:
            continue
        if partition.manifest.scored_by != stage.scoring:
            session.check_owner()
            changed = "; ".join(differences(partition.manifest.scored_by, stage.scoring))
            owned = keys.partition_prefix(prefix, index)
            leases.revoke(session.store, owned, partition.epoch, f"verifiers changed: {changed}")
            session.notes["scored again, as its verifier was changed"] = changed
            continue
        found[index] = partition
    return found


def _read_rows(session: Session, key: str, expected_digest: str) -> list[dict[str, Any]]:
    """Rows of one JSONL object. Raises FormatError when its digest or a line is not what it should be."""
    data = session.store.get(key)
    if keys.digest_bytes(data) != expected_digest:
        raise FormatError(
            key, expected=f"SHA-256 {expected_digest}", found=keys.digest_bytes(data), safe="every other object",
            next_command=f"opd repair {session.run_id}",
        )  # fmt: skip
    try:
        return [json.loads(line) for line in data.decode("utf-8", "surrogatepass").split("\n") if line]
    except ValueError as error:
        raise FormatError(key, expected="one JSON object a line", found=str(error)) from error


def table_entry(table: str, place: dict[str, Any], row_keys: list[str], rows: list[dict[str, Any]]) -> TableSlice:
    """What a stage manifest keeps of one table's slice; place gives at least the values of the table's slice key."""
    return TableSlice(
        slice={name: place[name] for name in TABLES[table].slice_key},
        row_keys=tuple(row_keys),
        num_rows=len(rows),
        digest=content_digest(TABLES[table], rows),
        whole_digest=content_digest(TABLES[table], rows, observed=True),
    )


def _stage_runs(session: Session, stage: Stage, mark: str, done: dict[int, FinishedPartition]) -> list[dict[str, Any]]:
    return [
        {
            "run_id": session.run_id, "iteration": stage.iteration, "stage": stage.name, "partition": index,
            "epoch": found.epoch, "status": "finished", "fingerprint": mark, "rows": found.manifest.num_rows,
            "bytes": sum(o.bytes for o in found.manifest.objects),
            "seconds": found.manifest.seconds, "error": found.manifest.error,
        }
        for index, found in done.items()
    ]  # fmt: skip


def input_rows(session: Session, result: StageResult, table: str) -> list[dict[str, Any]]:
    """Rows that a stage has put into a table, by the digest in its manifest and not by what the table holds.

    A slice that somebody has touched since is committed anew. Raises ContractError when it will not hold still.
    """
    entry = result.manifest.tables[table]
    for _ in range(2):
        rows = tables.read_rows(session.config.data, table, {"run_id": session.run_id, "iteration": result.iteration})
        if _are_those_of(rows, table, entry):
            return rows
        commit(session, table, entry)
    raise ContractError(
        f"opd.{table}, iteration {result.iteration}", expected=f"the {entry.num_rows} rows that {result.stage} made",
        found=f"{len(rows)} rows, or others", safe="the rows' objects, from which the slice comes back",
        next_command=f"opd repair {session.run_id}",
    )  # fmt: skip


def version_of(session: Session, table: str, entries: Iterable[TableSlice]) -> int:
    """A version of the table in which each entry's slice holds exactly its rows, for readers that take a version."""
    entries = list(entries)
    for _ in range(2):
        version = tables.table_version(session.config.data, table)
        if version is not None and all(slice_matches(session, table, entry, version) for entry in entries):
            return version
        for entry in entries:
            commit(session, table, entry)
    raise ContractError(
        f"opd.{table}", expected="the rows that were committed", found="others, after they were committed anew",
        safe="the rows' objects, from which the slices come back", next_command=f"opd repair {session.run_id}",
    )  # fmt: skip


def slice_matches(session: Session, table: str, entry: TableSlice, version: int | None = None) -> bool:
    """Does the table, or one version of it, hold exactly the rows of the manifest's entry, keys included?

    Read without a JVM.
    """
    return _are_those_of(tables.read_rows(session.config.data, table, entry.slice, version=version), table, entry)


def _are_those_of(rows: list[dict[str, Any]], table: str, entry: TableSlice) -> bool:
    return len(rows) == entry.num_rows and content_digest(TABLES[table], rows, observed=True) == entry.whole_digest


def commit(session: Session, table: str, entry: TableSlice) -> None:
    """Make the table hold exactly the entry's rows in its slice; Spark starts only when it does not already."""
    if slice_matches(session, table, entry):
        return
    session.check_owner()
    session.spark.call(
        tables.commit_slice,
        root=session.config.data,
        table=table,
        slice=entry.slice,
        row_keys=list(entry.row_keys),
        num_rows=entry.num_rows,
        content_digest=entry.digest,
        run_lease=session.run_lease,
    )
