"""Delta tables: one commit replaces exactly one slice, and is read back before it counts.

    ROOT/tables/NAME    a Delta table, partitioned by its slice key, registered as opd.NAME

Spark is the only writer. Commits to one table are serialised by a lease on the table. A holder that was paused cannot
overwrite its heir's commit: each carries its epoch as Delta's transaction version, and Delta takes none that is not
higher than the last; log entries are created once, on S3 by a conditional PUT, locally under a lock file. Reading
needs no JVM: stages and ranks go through delta-rs, and so does the read-back of a commit, which so is checked by a
second reader.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa
from deltalake.exceptions import DeltaError

from infra import leases
from infra.store import ObjectStore, open_store
from schemas import keys
from schemas import rows as rows_schema
from schemas.errors import ConfigError, ContractError, FormatError, StoreError
from schemas.rows import TABLES, Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DATABASE = "opd"
_LEASE_SECONDS = 30.0
_LOCK_SECONDS = 300.0
_TEACHERS = pa.list_(pa.struct([pa.field("teacher_id", pa.string()), pa.field("weight", pa.float64())]))
_ARROW = {
    "string": pa.string(), "int": pa.int32(), "bigint": pa.int64(), "float": pa.float32(), "double": pa.float64(),
    "boolean": pa.bool_(), "array<bigint>": pa.list_(pa.int64()),
    "array<struct<teacher_id:string,weight:double>>": _TEACHERS,
}  # fmt: skip
_PYTHON = {"string": str, "int": int, "bigint": int, "float": float, "double": float, "boolean": bool}


def table_uri(root: str, table: str, *, for_spark: bool = False) -> str:
    """Where a table lies under a local or s3:// root, as delta-rs spells it, or as Spark does (s3a://)."""
    scheme, separator, rest = root.partition("://")
    if not separator:
        return str(Path(root).resolve() / "tables" / table)
    if scheme != "s3":
        raise ConfigError(f"data root {root}", expected="a local folder or s3://BUCKET/PREFIX", found=f"{scheme}://")
    return f"{'s3a' if for_spark else 's3'}://{rest.rstrip('/')}/tables/{table}"


def arrow_schema(table: Table) -> pa.Schema:
    return pa.schema([pa.field(c.name, _ARROW[c.type]) for c in table.columns])


def table_exists(root: str, table: str) -> bool:
    try:
        return deltalake.DeltaTable.is_deltatable(table_uri(root, table), _storage_options(root))
    except (OSError, DeltaError) as error:
        raise _unreadable(root, table, error) from error


def _storage_options(root: str) -> dict[str, str] | None:
    """delta-rs knows neither profiles nor boto3's settings: it is told what boto3 found."""
    if "://" not in root:
        return None
    from infra.store_s3 import client_settings  # boto3 costs a third of a second, which local runs need not pay

    return client_settings()


def _delta_table(root: str, table: str) -> deltalake.DeltaTable:
    return deltalake.DeltaTable(table_uri(root, table), storage_options=_storage_options(root))


def _unreadable(root: str, table: str, error: Exception) -> StoreError:
    plain = " ".join(re.sub(r"\x1b\[[0-9;]*m|↳", "", str(error)).split())
    return StoreError(
        f"table {table_uri(root, table)}", expected="a readable Delta table", found=plain[:500],
        next_command="opd doctor; if the store is well, opd verify RUN",
    )  # fmt: skip


def create_tables(spark: SparkSession, root: str) -> None:
    """Create and register every table that is not there yet; safe to race and to repeat."""
    for table in TABLES.values():
        if not table_exists(root, table.name):
            with _commit_lock(open_store(root), root, table.name):
                _create(spark, root, table)
    register_tables(spark, root)


def register_tables(spark: SparkSession, root: str) -> None:
    """Make the existing tables of root known as opd.NAME in this session."""
    spark.sql(f"CREATE DATABASE IF NOT EXISTS {DATABASE}")
    for name in TABLES:
        if table_exists(root, name):
            location = _literal(table_uri(root, name, for_spark=True))
            spark.sql(f"CREATE TABLE IF NOT EXISTS {DATABASE}.{name} USING DELTA LOCATION {location}")


def _create(spark: SparkSession, root: str, table: Table) -> None:
    columns = ", ".join(f"`{c.name}` {c.type} COMMENT {_literal(c.note)}" for c in table.columns)
    spark.sql(
        f"CREATE TABLE IF NOT EXISTS delta.`{table_uri(root, table.name, for_spark=True)}` ({columns}) USING DELTA "
        f"PARTITIONED BY ({', '.join(table.slice_key)})"
    )


def commit_slice(
    spark: SparkSession, root: str, table: str, slice: dict[str, Any], row_keys: list[str], num_rows: int,
    content_digest: str,
) -> dict[str, Any]:  # fmt: skip
    """Make the rows of the objects `row_keys` (JSONL under root) the whole of one slice, and read it back.

    Returns {"version", "num_rows", "digest", "written"}; written is False, and no version is added, when the slice
    holds these very rows already. Raises FormatError for a line that is not a row, ContractError when the rows are
    not the ones announced by num_rows and content_digest, repeat a key, lie outside the slice, or read back
    differently.
    """
    spec = TABLES[table]
    if set(slice) != set(spec.slice_key):
        raise ContractError(f"slice of {table}", expected=", ".join(spec.slice_key), found=", ".join(slice))
    store = open_store(root)
    new_rows = [row for key in row_keys for row in read_jsonl(store, spec, key)]
    _check_announced(spec, new_rows, slice, num_rows, content_digest)
    if not table_exists(root, table):
        create_tables(spark, root)
    with _commit_lock(store, root, table) as lease:
        written = not _same(spec, read_rows(root, table, slice), new_rows)
        if written:
            with _fenced(spark, root, table, lease):
                _replace(spark, root, spec, slice, new_rows)
        version = _delta_table(root, table).version()
        found = read_rows(root, table, slice)
    if len(found) != num_rows or rows_schema.content_digest(spec, found) != content_digest:
        raise ContractError(
            f"table {table}, version {version}, {slice}", expected=f"{num_rows} rows of digest {content_digest}",
            found=f"{len(found)} rows of digest {rows_schema.content_digest(spec, found)}",
            safe="every other slice, and the objects that the rows came from", next_command="run the stage again",
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
                    f"WHERE run_id = {_literal(run_id)} AND iteration >= {int(iteration)}"
                ).collect()
            deleted[name] = int(result[0]["num_affected_rows"])
    return deleted


def _has_slice_from(root: str, table: str, run_id: str, iteration: int) -> bool:
    if not table_exists(root, table):
        return False
    parts = _delta_table(root, table).partitions()
    return any(part["run_id"] == run_id and int(part["iteration"]) >= iteration for part in parts)


def read_rows(
    root: str, table: str, where: Mapping[str, Any], columns: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Rows whose columns equal the values of `where`, in order of slice key and sort key, without a JVM.

    columns: a subset of the table's, all by default. A table that was never created has no rows. Raises ContractError
    for an unknown column, StoreError when the table cannot be read.
    """
    spec = TABLES[table]
    wanted = list(columns) if columns is not None else list(spec.column_names())
    unknown = sorted({*wanted, *where} - set(spec.column_names()))
    if unknown:
        raise ContractError(f"table {table}", expected=f"columns of {spec.column_names()}", found=unknown[0])
    if not table_exists(root, table):
        return []
    order = ", ".join(f'"{c}" NULLS FIRST' for c in (*spec.slice_key, *spec.sort_key))
    condition = " AND ".join(_equals(c, v) for c, v in where.items()) or "true"
    names = ", ".join(f'"{c}"' for c in wanted)
    query = f"SELECT {names} FROM rows WHERE {condition} ORDER BY {order}"
    try:
        source = _delta_table(root, table)
        return pa.table(deltalake.QueryBuilder().register("rows", source).execute(query).read_all()).to_pylist()
    except (OSError, DeltaError, ValueError) as error:
        raise _unreadable(root, table, error) from error


def read_jsonl(store: ObjectStore, table: Table, key: str) -> list[dict[str, Any]]:
    """Rows of one JSONL object, each checked: exactly the table's columns, of their types, null where allowed.

    Raises FormatError naming object, line and column.
    """
    rows = []
    for number, line in enumerate(store.get(key).split(b"\n"), 1):
        if not line:
            continue
        where = f"{key}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        except ValueError as error:
            raise FormatError(where, expected="a JSON object in UTF-8", found=str(error)) from error
        _check_row(table, row, where)
        rows.append(row)
    return rows


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_row(table: Table, row: Any, where: str) -> None:
    if not isinstance(row, dict) or set(row) != set(table.column_names()):
        names = set(row) if isinstance(row, dict) else set()
        missing, unknown = sorted(set(table.column_names()) - names), sorted(names - set(table.column_names()))
        raise FormatError(
            where, expected=f"the columns of {table.name}", found=f"missing {missing}, unknown {unknown}"
        )  # fmt: skip
    for column in table.columns:
        value = row[column.name]
        if value is None:
            if not column.nullable:
                raise FormatError(f"{where}, {column.name}", expected=column.type, found="null")
        elif not _fits(column.type, value):
            raise FormatError(f"{where}, {column.name}", expected=column.type, found=repr(value)[:200])


def _fits(type_name: str, value: Any) -> bool:
    if type_name == "array<bigint>":
        return isinstance(value, list) and all(_fits("bigint", v) for v in value)
    if type_name.startswith("array<struct"):
        return isinstance(value, list) and all(
            isinstance(v, dict) and set(v) == {"teacher_id", "weight"}
            and _fits("string", v["teacher_id"]) and _fits("double", v["weight"]) for v in value
        )  # fmt: skip
    if type(value) is not _PYTHON[type_name]:
        return False
    if type_name == "string":
        # JSON can spell half a surrogate pair; UTF-8, and so a table, cannot hold it.
        return not any("\ud800" <= c <= "\udfff" for c in value)
    if type_name in ("int", "bigint"):
        bits = 31 if type_name == "int" else 63
        return -(1 << bits) <= value < 1 << bits
    return True


def _check_announced(
    table: Table, rows: list[dict[str, Any]], slice: dict[str, Any], num_rows: int, content_digest: str
) -> None:
    for row in rows:
        outside = [c for c in table.slice_key if row[c] != slice[c]]
        if outside:
            raise ContractError(
                f"table {table.name}, column {outside[0]}", expected=f"slice {slice}", found=repr(row[outside[0]]),
                safe="the table as it was",
            )  # fmt: skip
    seen: set[tuple[Any, ...]] = set()
    for row in rows:
        key = tuple(row[c] for c in table.sort_key)
        if key in seen:
            raise ContractError(
                f"table {table.name}, {slice}", expected=f"each ({', '.join(table.sort_key)}) once",
                found=f"{key} twice", safe="the table as it was",
            )  # fmt: skip
        seen.add(key)
    found = rows_schema.content_digest(table, rows)
    if len(rows) != num_rows or found != content_digest:
        raise ContractError(
            f"rows for table {table.name}, {slice}", expected=f"{num_rows} rows of digest {content_digest}",
            found=f"{len(rows)} rows of digest {found}", safe="the table as it was",
            next_command="run the stage that made them again",
        )  # fmt: skip


def _same(table: Table, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> bool:
    """Equal in every column: observed ones too, since a key that went stale must be replaced."""
    return len(old) == len(new) and old == rows_schema.sort_rows(table, new)


def _replace(spark: SparkSession, root: str, table: Table, slice: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    condition = " AND ".join(f"`{c}` = {_literal(slice[c])}" for c in table.slice_key)
    location = table_uri(root, table.name, for_spark=True)
    if not rows:
        spark.sql(f"DELETE FROM delta.`{location}` WHERE {condition}")
        return
    frame = spark.createDataFrame(pa.Table.from_pylist(rows, schema=arrow_schema(table)))
    # One file a slice: these are small rows, and one writer task keeps them in order.
    writer = frame.coalesce(1).sortWithinPartitions(*table.sort_key).write.format("delta").mode("overwrite")
    writer.option("replaceWhere", condition).save(location)


@contextlib.contextmanager
def _commit_lock(store: ObjectStore, root: str, table: str) -> Iterator[leases.Lease]:
    """The right to commit to one table. Raises StoreError when another process keeps it too long."""
    lease = leases.acquire(store, keys.table_lease(table), owner={"commits": table}, dead_after_seconds=_LEASE_SECONDS)
    if isinstance(lease, leases.Finished):
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
        raise ContractError(
            f"table {table_uri(root, table)}", expected=f"a last commit of an epoch before {lease.epoch}",
            found=f"epoch {last}: objects of {lease.owned} are lost", safe="the table as it was",
            next_command=f"put them back; or drop tables/{table}, and runs continued by opd run fill it again",
        )  # fmt: skip
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


@contextlib.contextmanager
def _local_lock(root: str, table: str) -> Iterator[None]:
    if "://" in root:
        yield
        return
    path = Path(table_uri(root, table)).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_SECONDS
    with open(path, "ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StoreError(
                        str(path), expected=f"a lock within {_LOCK_SECONDS:.0f} s", found="another process holds it",
                        safe="the table as it was", next_command=f"fuser {path}",
                    ) from None  # fmt: skip
                time.sleep(0.05)
        yield


def _equals(column: str, value: Any) -> str:
    if value is None:
        return f'"{column}" IS NULL'
    text = "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)
    return f'"{column}" = {text}'


def _literal(value: Any) -> str:
    """A Spark SQL literal."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(int(value))
