"""Delta tables: one commit replaces exactly one slice, and is read back before it counts.

    ROOT/tables/NAME    a Delta table, partitioned by its slice key, registered as opd.NAME

Spark is the only writer. Commits to one table are serialised by a lease on the table. A holder that was paused cannot
overwrite its heir's commit: each carries its epoch as Delta's transaction version, and Delta takes none that is not
higher than the last; log entries are created once, on S3 by a conditional PUT, locally under a lock file. Reading
needs no JVM: stages and ranks go through delta-rs, and so does the read-back of a commit, which so is checked by a
second reader. What delta-rs raises becomes an error of the family that names table and file.

A table's Delta properties name the version of its schema (schemas.rows). A table of an older version reads as if its
missing columns were null, and gets them at the next commit; one of a newer version is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa

from infra import epochs, leases, owners, table_files
from infra.row_objects import check_announced, read_jsonl
from infra.sql_text import column_list, equals, literal
from infra.store import ObjectStore
from infra.stores import open_store, place
from schemas import keys
from schemas import rows as rows_schema
from schemas.errors import ContractError, OpdError, StoreError
from schemas.root import DataRoot
from schemas.rows import TABLES, Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DATABASE = "opd"
VERSION_PROPERTY = "opd.schemaVersion"
_LOG_ENDS = (".json", ".checkpoint.parquet")
_LEASE_SECONDS = 30.0
_LOCK_SECONDS = 300.0
#: Who waits for a lock says so as often.
_WORD_SECONDS = 5.0
#: Commits that a superseded committer tries in all.
_TRIES = 3
_TEACHERS = pa.list_(pa.struct([pa.field("teacher_id", pa.string()), pa.field("weight", pa.float64())]))
_ARROW = {
    "string": pa.string(), "int": pa.int32(), "bigint": pa.int64(), "float": pa.float32(), "double": pa.float64(),
    "boolean": pa.bool_(), "array<bigint>": pa.list_(pa.int64()),
    "array<struct<teacher_id:string,weight:double>>": _TEACHERS,
}  # fmt: skip
_log = logging.getLogger(__name__)
#: Is told what a commit waits for. The process that commits for a flow passes it on to the flow's (infra.spark).
on_wait: Callable[[str], object] = _log.warning


def table_uri(root: str, table: str, *, for_spark: bool = False) -> str:
    """Where a table lies under a local or s3:// root, as delta-rs spells it, or as Spark does (s3a://)."""
    parsed, name = DataRoot.parse(root), f"tables/{table}"
    return parsed.for_spark(name) if for_spark else parsed.for_delta(name)


def arrow_schema(table: Table) -> pa.Schema:
    return pa.schema([pa.field(c.name, _ARROW[c.type]) for c in table.columns])


def table_exists(root: str, table: str) -> bool:
    # Not asked of delta-rs, which would stop all threads of this process, heartbeats too, until the store answers.
    return any(key.endswith(_LOG_ENDS) for key in open_store(root).list(f"tables/{table}/_delta_log/"))


def _delta_table(root: str, table: str, version: int | None = None) -> deltalake.DeltaTable:
    """The table, the newest version by default. Raises ContractError for a schema that this software does not know."""
    with _readable(root, table):
        location = table_uri(root, table)
        found = deltalake.DeltaTable(location, version=version, storage_options=place(root).delta_options())
        table_files.check_log(open_store(root), table, found.version(), len(found.file_uris()))
        schema_version, columns = _schema(found)
    spec = TABLES[table]
    unknown = sorted(columns - set(spec.column_names()))
    missing = sorted(set(spec.column_names()) - set(spec.added_columns) - columns)
    if schema_version > spec.version or unknown or missing:
        raise ContractError(
            f"table {table_uri(root, table)}", expected=f"the columns of schema version {spec.version} or older",
            found=f"version {schema_version}, unknown columns {unknown}, missing columns {missing}",
            safe="the table: nothing was written", next_command="the same command with the opd that wrote it, or newer",
        )  # fmt: skip
    return found


def table_version(root: str, table: str) -> int | None:
    """Newest version of a table; None for one that was never created. Raises like `read_rows`."""
    return _delta_table(root, table).version() if table_exists(root, table) else None


def _schema(table: deltalake.DeltaTable) -> tuple[int, set[str]]:
    """(version, names of columns); tables made before there were versions have the first."""
    version = table.metadata().configuration.get(VERSION_PROPERTY) or "1"
    return int(version), {field.name for field in table.schema().fields}


@contextlib.contextmanager
def _readable(root: str, table: str) -> Iterator[None]:
    """Whatever delta-rs raises in the block (bare Exception, or a panic, among others) as an error of the family."""
    try:
        yield
    except OpdError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        told = " ".join(re.sub(r"\x1b\[[0-9;]*m|↳", "", str(error)).split())[:500]
        try:
            damage = table_files.find_damage(open_store(root), table, told)
        except StoreError:  # the store itself does not answer: what delta-rs said of it is the news
            raise StoreError(
                f"table {table_uri(root, table)}", expected="a readable Delta table", found=told,
                next_command="opd doctor; if the store is well, opd repair RUN",
            ) from error  # fmt: skip
        raise damage from error


def create_tables(spark: SparkSession, root: str) -> None:
    """Create and register every table that is not there yet; safe to race and to repeat."""
    for table in TABLES.values():
        if not table_exists(root, table.name):
            with _commit_lock(open_store(root), root, table.name):
                _forget_durable(root, table.name)
                _create(spark, root, table)
    register_tables(spark, root)


def register_tables(spark: SparkSession, root: str) -> None:
    """Make the existing tables of root known as opd.NAME in this session."""
    spark.sql(f"CREATE DATABASE IF NOT EXISTS {DATABASE}")
    for name in TABLES:
        if table_exists(root, name):
            location = literal(table_uri(root, name, for_spark=True))
            spark.sql(f"CREATE TABLE IF NOT EXISTS {DATABASE}.{name} USING DELTA LOCATION {location}")


def _create(spark: SparkSession, root: str, table: Table) -> None:
    spark.sql(
        f"CREATE TABLE IF NOT EXISTS delta.`{table_uri(root, table.name, for_spark=True)}` "
        f"({column_list(table.columns)}) USING DELTA PARTITIONED BY ({', '.join(table.slice_key)}) "
        f"TBLPROPERTIES ('{VERSION_PROPERTY}' = '{table.version}')"
    )


def _upgrade(spark: SparkSession, root: str, table: Table) -> None:
    """Give a table of an older version the columns that were added since; the version last, so that a crash between
    leaves a table that the next call finishes."""
    version, columns = _schema(_delta_table(root, table.name))
    location = f"delta.`{table_uri(root, table.name, for_spark=True)}`"
    if added := [c for c in table.columns if c.name not in columns]:
        spark.sql(f"ALTER TABLE {location} ADD COLUMNS ({column_list(added)})")
    if version < table.version:
        spark.sql(f"ALTER TABLE {location} SET TBLPROPERTIES ('{VERSION_PROPERTY}' = '{table.version}')")


def commit_slice(
    spark: SparkSession, root: str, table: str, slice: dict[str, Any], row_keys: Sequence[str], num_rows: int,
    content_digest: str, run_lease: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Make the rows of the objects `row_keys` (JSONL under root) the whole of one slice, and read it back.

    Returns {"version", "num_rows", "digest", "written"}; written is False, and no version is added, when the slice
    holds these very rows already. Raises FormatError for a line that is not a row, ContractError when the rows are
    not the ones announced by num_rows and content_digest, repeat a key, lie outside the slice, or read back
    differently.
    run_lease: {"owned", "epoch"} of the lease of the run that the rows are of. ContractError, with nothing written,
    once that has another owner; as long as it has not, a committer that lost the table to another one tries again.
    """
    spec = TABLES[table]
    if set(slice) != set(spec.slice_key):
        raise ContractError(f"slice of {table}", expected=", ".join(spec.slice_key), found=", ".join(slice))
    store = open_store(root)
    new_rows = [row for key in row_keys for row in read_jsonl(store, spec, key)]
    check_announced(spec, new_rows, slice, num_rows, content_digest)
    if not table_exists(root, table):
        create_tables(spark, root)
    for tries_left in reversed(range(_TRIES)):
        try:
            with _commit_lock(store, root, table) as lease:
                written = not _same(spec, read_rows(root, table, slice), new_rows)
                lease.progress()
                if written:
                    _check_run(store, run_lease)
                    lease.check()
                    _upgrade(spark, root, spec)
                    with _fenced(spark, root, table, lease):
                        _replace(spark, root, spec, slice, new_rows)
                _make_durable(root, table)
                version = _delta_table(root, table).version()
                found = read_rows(root, table, slice)
            break
        except leases.Superseded as error:
            # Without a run to ask, the heir may be of the same run, with rows of its own in this slice.
            if run_lease is None or not tries_left:
                raise
            _log.warning("%s: the commit is tried again: %s", table, error)
    if len(found) != num_rows or rows_schema.content_digest(spec, found) != content_digest:
        raise ContractError(
            f"table {table}, version {version}, {slice}", expected=f"{num_rows} rows of digest {content_digest}",
            found=f"{len(found)} rows of digest {rows_schema.content_digest(spec, found)}",
            safe="every other slice, and the objects that the rows came from", next_command="opd repair RUN",
        )  # fmt: skip
    return {"version": version, "num_rows": num_rows, "digest": content_digest, "written": written}


def delete_slices_from(spark: SparkSession, root: str, run_id: str, iteration: int) -> dict[str, int]:
    """Delete the rows of a run from an iteration on, in every table that has some. Table name -> rows deleted."""
    deleted = {}
    for name, spec in TABLES.items():
        if "iteration" not in spec.slice_key or not _has_slice_from(root, name, run_id, iteration):
            continue
        with _commit_lock(open_store(root), root, name) as lease:
            with _fenced(spark, root, name, lease):
                result = spark.sql(
                    f"DELETE FROM delta.`{table_uri(root, name, for_spark=True)}` "
                    f"WHERE run_id = {literal(run_id)} AND iteration >= {int(iteration)}"
                ).collect()
            _make_durable(root, name)
            deleted[name] = int(result[0]["num_affected_rows"])
    return deleted


def _has_slice_from(root: str, table: str, run_id: str, iteration: int) -> bool:
    return table_exists(root, table) and max(iterations(root, table, run_id), default=-1) >= iteration


def iterations(root: str, table: str, run_id: str) -> set[int]:
    """Iterations of which an existing table has rows of the run, by its log alone."""
    parts = _delta_table(root, table).partitions()
    return {int(part["iteration"]) for part in parts if part["run_id"] == run_id}


def read_whole(root: str, table: str) -> None:
    """Read every row of a table and drop it; raises like `read_rows`."""
    source = _delta_table(root, table)
    with _readable(root, table):
        for _ in deltalake.QueryBuilder().register("rows", source).execute("SELECT * FROM rows"):
            pass


def probe(spark: SparkSession, root: str, tables: list[str]) -> dict[str, str]:
    """What Spark says of each table that it cannot read whole: it also reads the checksums that Hadoop keeps."""
    refused = {}
    for table in tables:
        frame = spark.read.format("delta").load(table_uri(root, table, for_spark=True))
        try:
            frame.write.format("noop").mode("overwrite").save()
        except Exception as error:
            refused[table] = " ".join(str(error).split())[:500]
    return refused


def is_ahead_of_its_lease(root: str, table: str) -> bool:
    """Has the table's last commit an epoch that the objects of its lease do not have? Then nobody can commit to it."""
    owned = keys.table_lease(table)
    last = _delta_table(root, table).transaction_version(owned)
    return last is not None and last > _newest_epoch(open_store(root), owned)


def _newest_epoch(store: ObjectStore, owned: str) -> int:
    """Number of the newest epoch object; 0 where there is none."""
    return max((int(key.rpartition("/")[2].removesuffix(".json")) for key in store.list(keys.epochs(owned))), default=0)


def set_aside(root: str, table: str) -> str:
    """Move what stands in a table's place to tables/.broken/NAME-TIME, and say where that is; nothing is lost.

    For a table that cannot be read, and only while nobody commits to any table of the root: a Spark session that has
    read the table goes on counting its versions. On S3 each object is copied before any is deleted.
    """
    store = open_store(root)
    kept = f"tables/.broken/{table}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:4]}"
    with _commit_lock(store, root, table):
        if (folder := place(root).folder) is not None:
            _forget_durable(root, table)
            table_files.move(Path(table_uri(root, table)), folder.resolve() / kept)
        else:
            names = store.list(f"tables/{table}/")
            for key in names:
                store.put(kept + key.removeprefix(f"tables/{table}"), store.get(key))
            # The log first and its oldest entry before the others: what a crash leaves is no older table.
            for key in sorted(names, key=lambda key: ("/_delta_log/" not in key, key)):
                store.delete(key)
    return kept


def read_rows(
    root: str, table: str, where: Mapping[str, Any], columns: Sequence[str] | None = None, *,
    version: int | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows whose columns equal the values of `where`, in order of slice key and sort key, without a JVM.

    columns: a subset of the table's, all by default. version: of the table, the newest by default. A table that was
    never created has no rows. Raises ContractError for an unknown column or a newer schema, FormatError for a damaged
    table, StoreError when the store does not answer.
    """
    spec = TABLES[table]
    wanted = list(columns) if columns is not None else list(spec.column_names())
    unknown = sorted({*wanted, *where} - set(spec.column_names()))
    if unknown:
        raise ContractError(f"table {table}", expected=f"columns of {spec.column_names()}", found=unknown[0])
    if not table_exists(root, table):
        return []
    source = _delta_table(root, table, version)
    there = _schema(source)[1]
    sources = {c: f'"{c}"' if c in there else "NULL" for c in spec.column_names()}
    order = ", ".join(f'"{c}" NULLS FIRST' for c in (*spec.slice_key, *spec.sort_key))
    condition = " AND ".join(equals(sources[c], v) for c, v in where.items()) or "true"
    names = ", ".join(f'{sources[c]} AS "{c}"' for c in wanted)
    query = f"SELECT {names} FROM rows WHERE {condition} ORDER BY {order}"
    with _readable(root, table):
        return pa.table(deltalake.QueryBuilder().register("rows", source).execute(query).read_all()).to_pylist()


def _same(table: Table, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> bool:
    """Equal in every column: observed ones too, since a key that went stale must be replaced."""
    return len(old) == len(new) and old == rows_schema.sort_rows(table, new)


def _replace(spark: SparkSession, root: str, table: Table, slice: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    condition = " AND ".join(f"`{c}` = {literal(slice[c])}" for c in table.slice_key)
    location = table_uri(root, table.name, for_spark=True)
    if not rows:
        spark.sql(f"DELETE FROM delta.`{location}` WHERE {condition}")
        return
    frame = spark.createDataFrame(pa.Table.from_pylist(rows, schema=arrow_schema(table)))
    # One file a slice: these are small rows, and one writer task keeps them in order.
    writer = frame.coalesce(1).sortWithinPartitions(*table.sort_key).write.format("delta").mode("overwrite")
    writer.option("replaceWhere", condition).save(location)


def _check_run(store: ObjectStore, run_lease: Mapping[str, Any] | None) -> None:
    """The driver may have lost its run while this process waited for the table."""
    if run_lease is None:
        return
    newest = epochs.newest(store, run_lease["owned"])
    if newest is None or newest["epoch"] != run_lease["epoch"]:
        owner = owners.describe(newest["owner"]) if newest else "nobody"
        raise ContractError(
            keys.epoch(run_lease["owned"], run_lease["epoch"]), expected="to be the newest epoch of the run",
            found=f"epoch {newest['epoch'] if newest else 0}, of {owner}", safe="the table as it was",
        )  # fmt: skip


@contextlib.contextmanager
def _commit_lock(store: ObjectStore, root: str, table: str) -> Iterator[leases.Lease]:
    """The right to commit to one table. Raises StoreError when another process keeps it too long."""
    lease = leases.acquire(
        store, keys.table_lease(table), owner={"commits": table}, dead_after_seconds=_LEASE_SECONDS,
        on_wait=on_wait,
    )  # fmt: skip
    if isinstance(lease, leases.FinishedEpoch):
        raise ContractError(keys.table_lease(table), expected="leases only", found="a manifest")
    with lease, _local_lock(root, table):
        yield lease


@contextlib.contextmanager
def _fenced(spark: SparkSession, root: str, table: str, lease: leases.Lease) -> Iterator[None]:
    """Delta skips or refuses the block's commit once a later epoch of the table has committed.

    Raises ContractError for an owner that was superseded before or meanwhile.
    """
    lease.check()
    last = _delta_table(root, table).transaction_version(lease.owned)
    if last is not None and last >= lease.epoch:
        raise _overtaken(open_store(root), root, table, lease, last)
    fence = {"txnAppId": lease.owned, "txnVersion": str(lease.epoch)}
    for name, value in fence.items():
        spark.conf.set(f"spark.databricks.delta.write.{name}", value)
    try:
        yield
    except Exception:
        lease.check()  # a conflict with the heir's commit is not the news, that there is an heir is
        raise
    finally:
        for name in fence:
            spark.conf.unset(f"spark.databricks.delta.write.{name}")
    lease.check()


def _overtaken(store: ObjectStore, root: str, table: str, lease: leases.Lease, last: int) -> ContractError:
    newest = _newest_epoch(store, lease.owned)
    where, expected = f"table {table_uri(root, table)}", f"a last commit of an epoch before {lease.epoch}"
    if newest > lease.epoch:
        # It slept through so many commits that the epochs after its own are deleted: `check` saw no heir.
        return leases.Superseded(
            where, expected=expected, found=f"epoch {last}; the lease has come to {newest}",
            safe="the table as it was", next_command="the same command again",
        )  # fmt: skip
    return ContractError(
        where, expected=expected, found=f"epoch {last}: objects of {lease.owned} are lost", safe="the table as it was",
        next_command="put them back; or opd repair RUN, which makes the table anew",
    )  # fmt: skip


@contextlib.contextmanager
def _local_lock(root: str, table: str) -> Iterator[None]:
    if place(root).folder is None:
        yield
        return
    path = _lock_path(root, table)
    path.parent.mkdir(parents=True, exist_ok=True)
    began = told = time.monotonic()
    with open(path, "ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if now - began > _LOCK_SECONDS:
                    raise StoreError(
                        str(path), expected=f"a lock within {_LOCK_SECONDS:.0f} s", found="another process holds it",
                        safe="the table as it was", next_command=f"fuser {path}",
                    ) from None  # fmt: skip
                if now - told > _WORD_SECONDS:
                    told = now
                    left = _LOCK_SECONDS - (now - began)
                    on_wait(f"waiting for {path}, locked by another process (fuser tells which): {left:.0f} s more")
                time.sleep(0.05)
        yield


def _lock_path(root: str, table: str) -> Path:
    return Path(table_uri(root, table)).with_suffix(".lock")


def _forget_durable(root: str, table: str) -> None:
    """What the lock file says of a table that stood here before."""
    if place(root).folder is not None:
        _lock_path(root, table).write_text("")


def _make_durable(root: str, table: str) -> None:
    if place(root).folder is not None:  # elsewhere what was answered is durable
        table_files.sync(Path(table_uri(root, table)), _lock_path(root, table))
