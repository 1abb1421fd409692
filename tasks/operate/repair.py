"""`opd repair RUN`: make whole again what finished stages have made, from what is left of it.

    tables    what no reader can read is set aside; slices of every run of the root are filled from the objects that
              their manifests name, prompts from prompts/*.jsonl. Needs neither models nor prompt files.
    objects   of RUN: each is hashed. Rows that the tables still hold are written again; a partition with other objects
              lost or damaged is revoked, and the next `opd run CONFIG` makes it anew and compares it with what it was.

Nothing is deleted. It may be killed at any point and run again. It owns the run while it works, and every other run of
the root while it changes tables: one that is live keeps its slices, and is named.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from infra import leases, tables
from infra.row_objects import read_jsonl
from infra.spark import SparkChild
from infra.store import ObjectStore
from infra.stores import open_store
from schemas import keys
from schemas.errors import ContractError, FormatError, OpdError, StageError, StoreError
from schemas.rows import PROMPTS, TABLES, content_digest, json_lines
from schemas.typed_json import encode
from schemas.work.manifest import Lost, PartitionManifest, StageManifest, TableSlice
from tasks.operate.objects import digest_of
from tasks.runs.finished import past_stage
from tasks.runs.manifests import read_partition, read_revoked
from tasks.runs.records import read_history
from tasks.runs.session import RUN_LEASE_DEAD_AFTER_SECONDS, Progress, silent
from tasks.runs.stage import table_entry

REMAKE = "opd run CONFIG makes it anew, and compares it with what it was"
_STAGE_MANIFEST = re.compile(r"runs/[^/]+/(\d{5})/([^/]+)/[^/]+/manifest\.json")


@dataclass(frozen=True)
class Finding:
    """Something that was not whole. done: what was made of it, or would be; broken: it stays as it is."""

    what: str
    found: str
    done: str
    broken: bool = False


def repair(
    root: str, run_id: str, spark: SparkChild, *, dry_run: bool = False, progress: Progress = silent
) -> list[Finding]:
    """What was not whole, and what was done about it; an empty list for a whole run.

    Raises ContractError for a run that does not exist or is live, StoreError when the store does not answer.
    """
    store = open_store(root)
    runs = sorted({key.split("/")[1] for key in store.list("runs/")})
    if run_id not in runs:
        raise ContractError(f"run {run_id} in {root}", expected="a run", found=f"none; runs are {runs}",
                            safe="everything", next_command="opd show")  # fmt: skip
    with contextlib.ExitStack() as held:
        live = {} if dry_run else _take(store, [run_id, *(r for r in runs if r != run_id)], held)
        repairing = _Repair(root, run_id, store, spark, dry_run, progress, live)
        manifests = {run: list(repairing.in_force(run)) for run in runs}
        repairing.tables(manifests)
        repairing.slices(manifests)
        repairing.objects(manifests[run_id])
    return repairing.findings


def _take(store: ObjectStore, runs: list[str], held: contextlib.ExitStack) -> dict[str, str]:
    """Own the runs, the first of them in any case; run -> owner of those that are live."""
    live = {}
    for run in runs:
        try:
            lease = leases.acquire(
                store, keys.run_lease(run), owner={"repairs": run}, wait=False,
                dead_after_seconds=RUN_LEASE_DEAD_AFTER_SECONDS,
            )  # fmt: skip
        except ContractError as error:
            if run == runs[0]:
                raise
            live[run] = error.found
            continue
        if isinstance(lease, leases.Lease):
            held.enter_context(lease)
    return live


def _proves_itself(key: str, rows: list[dict[str, Any]]) -> bool:
    """No manifest names an object of prompts: ids are digests of content, and its name holds that of all ids, but for
    objects of version 0.1."""
    name, _, mark = key.removesuffix(".jsonl").rpartition(".")
    ids = [row["prompt_id"] for row in rows]
    return all(map(keys.is_prompt_id_of, rows)) and (not name or keys.digest(ids)[:16] == mark)


@dataclass
class _Repair:
    root: str
    run_id: str
    store: ObjectStore
    spark: SparkChild
    dry_run: bool
    progress: Progress
    live: dict[str, str]

    def __post_init__(self) -> None:
        self.findings: list[Finding] = []
        self.to_be_set_aside: set[str] = set()

    def found(self, what: str, found: str, done: str, *, broken: bool = False) -> None:
        would = "would be " if self.dry_run and not broken else ""
        self.findings.append(Finding(what, found, would + done, broken))

    def broken(self, what: str, error: OpdError) -> None:
        self.found(what, f"{error.where}: expected {error.expected}, found {error.found}", error.next_command,
                   broken=True)  # fmt: skip

    # --- manifests

    def in_force(self, run: str) -> Iterator[tuple[str, StageManifest]]:
        """(prefix, manifest) of each stage that counts as finished. One that cannot be read is broken for good."""
        try:
            history = read_history(self.store, run)
        except FormatError as error:
            self.broken(f"run {run}", error)
            return
        found = map(_STAGE_MANIFEST.fullmatch, self.store.list(keys.run_prefix(run) + "/"))
        for iteration, stage in sorted({(int(place[1]), place[2]) for place in found if place}):
            try:
                result = past_stage(self.store, history, run, iteration, stage)
            except (FormatError, ContractError) as error:
                self.broken(f"{stage} of iteration {iteration}, run {run}", error)
                continue
            if result is not None:
                yield keys.stage_prefix(run, iteration, stage, result.fingerprint), result.manifest

    # --- tables

    def tables(self, manifests: dict[str, list[tuple[str, StageManifest]]]) -> None:
        """Set aside what cannot be read, say what is missing."""
        named = {table for found in manifests.values() for _, m in found for table in m.tables}
        if self.store.list("prompts/"):
            named.add("prompts")
        refused, there = {}, []
        for index, table in enumerate(sorted(named)):
            self.progress("tables", index, len(named), "tables")
            try:
                if not tables.table_exists(self.root, table):
                    self.found(f"table opd.{table}", "no such table", "made anew")
                    continue
                tables.read_whole(self.root, table)
                there.append(table)
                if tables.is_ahead_of_its_lease(self.root, table):
                    refused[table] = f"its lease, {keys.table_lease(table)}, has lost objects: nobody could commit"
            except FormatError as error:
                refused[table] = f"{error.where}: {error.found}"
        refused |= self.spark.call(tables.probe, root=self.root, tables=there) if there else {}
        self.progress("tables", len(named), len(named), "tables")
        for table, why in sorted(refused.items()):
            if self.live:
                owners = "; ".join(f"run {run} is live: {owner}" for run, owner in sorted(self.live.items()))
                self.found(f"table opd.{table}", f"{why}; {owners}", "stop them, then opd repair again", broken=True)
            elif self.dry_run:
                self.to_be_set_aside.add(table)
                self.found(f"table opd.{table}", why, "set aside and made anew")
            else:
                kept = tables.set_aside(self.root, table)
                self.found(f"table opd.{table}", why, f"set aside as {self.root}/{kept}, and made anew")
        if refused and not self.dry_run:
            self.spark.close()  # a session goes on with what it knows of a table

    # --- slices

    def slices(self, manifests: dict[str, list[tuple[str, StageManifest]]]) -> None:
        todo = [(run, table, entry) for run, found in manifests.items() for _, manifest in found
                for table, entry in manifest.tables.items()]  # fmt: skip
        prompts = [key for key in self.store.list("prompts/") if key.endswith(".jsonl")]
        total = len(prompts) + len(todo)
        for index, key in enumerate(prompts):
            self.progress("slices", index, total, "slices")
            self._prompts(key)
        for index, (run, table, entry) in enumerate(todo, len(prompts)):
            self.progress("slices", index, total, "slices")
            what = f"opd.{table}, " + ", ".join(f"{name} {value}" for name, value in entry.slice.items())
            if run in self.live:
                if not self._holds(table, entry):
                    self.found(what, f"rows are missing; run {run} is live: {self.live[run]}",
                               f"opd repair {run}, once it has ended", broken=True)  # fmt: skip
                continue
            self._refill(what, table, entry)
        self.progress("slices", total, total, "slices")

    def _prompts(self, key: str) -> None:
        """Rows of one source."""
        try:
            rows = read_jsonl(self.store, PROMPTS, key)
            sources = {row["source"] for row in rows}
            if len(sources) != 1 or not _proves_itself(key, rows):
                raise FormatError(
                    key, expected="prompts of one source, each with the id of its content, all that its name counts",
                    found=f"{len(rows)} rows of {len(sources)} sources, or another id",
                    next_command="opd run CONFIG of a run with these prompts writes them again",
                )  # fmt: skip
        except FormatError as error:
            self.broken(key, error)
            return
        source = sources.pop()
        self._refill(
            f"opd.prompts, source {source}", "prompts", table_entry("prompts", {"source": source}, [key], rows)
        )

    def _refill(self, what: str, table: str, entry: TableSlice) -> None:
        if self._holds(table, entry):
            return
        if self.dry_run:
            self.found(what, "other rows than those of its manifest, or none", f"filled with {entry.num_rows} rows")
            return
        try:
            self.spark.call(
                tables.commit_slice, root=self.root, table=table, slice=entry.slice,
                row_keys=list(entry.row_keys), num_rows=entry.num_rows, content_digest=entry.digest,
            )  # fmt: skip
        except (FormatError, ContractError, StoreError, StageError) as error:
            self.broken(what, error)
            return
        self.found(what, "other rows than those of its manifest, or none", f"filled with {entry.num_rows} rows")

    def _holds(self, table: str, entry: TableSlice) -> bool:
        if table in self.to_be_set_aside:
            return False
        try:
            rows = tables.read_rows(self.root, table, entry.slice)
        except FormatError:  # said once, of the table
            return False
        whole = content_digest(TABLES[table], rows, observed=True)
        return len(rows) == entry.num_rows and whole == entry.whole_digest

    # --- objects

    def objects(self, manifests: list[tuple[str, StageManifest]]) -> None:
        """Hash what the run's partitions have written, and the rows that their stages have derived."""
        todo = [(prefix, manifest, int(partition)) for prefix, manifest in manifests
                for partition in sorted(manifest.partitions, key=int)]  # fmt: skip
        for index, (prefix, manifest, partition) in enumerate(todo):
            self.progress("objects", index, len(todo), "partitions")
            self._partition(prefix, manifest, partition)
        self.progress("objects", len(todo), len(todo), "partitions")
        for prefix, manifest in manifests:
            for table, entry in manifest.tables.items():
                if len(entry.row_keys) == 1 and entry.row_keys[0].startswith(f"{prefix}/tables/"):
                    self._derived(table, entry)

    def _partition(self, prefix: str, manifest: StageManifest, partition: int) -> None:
        owned = keys.partition_prefix(prefix, partition)
        try:
            found = read_partition(self.store, prefix, partition)
        except FormatError as error:
            self.broken(owned, error)
            return
        if found is None:
            self.found(owned, "revoked before, and not made anew since", REMAKE, broken=True)
            return
        rows_key, lost = found.manifest.rows_key, []
        for key, expected in ((e.key, e.digest) for e in found.manifest.objects):
            if (is_now := digest_of(self.store, key)) != expected:
                lost.append(f"{key}: {is_now} instead of SHA-256 {expected}")
        if not lost and (is_now := digest_of(self.store, rows_key)) != found.manifest.rows_digest:
            if self._rows_again(owned, manifest, partition, found.manifest):
                return
            lost.append(f"{rows_key}: {is_now} instead of SHA-256 {found.manifest.rows_digest}")
        if lost:
            self._revoke(prefix, manifest, partition, found.epoch, "; ".join(lost))

    def _rows_again(
        self, owned: str, manifest: StageManifest, partition: int, of_partition: PartitionManifest
    ) -> bool:  # fmt: skip
        """Write a partition's rows from the table, when it holds them to the byte."""
        key = of_partition.rows_key
        for table, entry in manifest.tables.items():
            if key in entry.row_keys and self._holds(table, entry):
                rows = tables.read_rows(self.root, table, entry.slice)
                added = TABLES[table].added_columns  # a row has them where they say something
                own = [
                    {n: v for n, v in row.items() if v is not None or n not in added} for row in rows
                    if row.get("partition", partition) == partition
                    and row.get("object_key", owned + "/").startswith(owned + "/")
                ]  # fmt: skip
                data = json_lines(own)
                if keys.digest_bytes(data) == of_partition.rows_digest:
                    if not self.dry_run:
                        self.store.put(key, data)
                    self.found(key, "lost or damaged", f"written from opd.{table}")
                    return True
        return False

    def _derived(self, table: str, entry: TableSlice) -> None:
        """Rows that a stage derived stand in the table as well: either makes the other good."""
        (key,) = entry.row_keys
        try:
            rows = read_jsonl(self.store, TABLES[table], key)
            if content_digest(TABLES[table], rows, observed=True) == entry.whole_digest:
                return
            found = "other rows than its manifest has"
        except (FormatError, StoreError) as error:
            found = error.found
        if not self._holds(table, entry):
            self.found(key, found, "neither the object nor the table holds its rows", broken=True)
            return
        if not self.dry_run:
            rows = tables.read_rows(self.root, table, entry.slice)
            self.store.put(key, json_lines(rows))
        self.found(key, found, f"written from opd.{table}")

    def _revoke(self, prefix: str, manifest: StageManifest, partition: int, epoch: int, why: str) -> None:
        owned = keys.partition_prefix(prefix, partition)
        history = read_history(self.store, self.run_id)
        if history.is_past(manifest.iteration):
            self.found(
                owned, why, "it belongs to an older record of the run, which nothing executes any more: take the "
                f"objects from a backup, or opd run CONFIG --from-iteration {manifest.iteration}", broken=True,
            )  # fmt: skip
            return
        if not self.dry_run:
            # The note first: who finishes the stage revokes what a killed repair has not.
            noted = read_revoked(self.store, prefix) | {str(partition): Lost(epoch, why)}
            self.store.put(keys.revoked(prefix), encode(noted))
            leases.revoke(self.store, owned, epoch, why)
        self.found(owned, why, f"revoked: {REMAKE}", broken=True)
