"""What stages call in the Spark child, done by delta-rs in this process: milliseconds, and no JVM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deltalake
import pyarrow as pa

from infra import tables
from infra.stores import open_store
from schemas.rows import TABLES


class FakeSpark:
    """calls: names of the functions that were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def call(self, function: Callable[..., Any], **kwargs: Any) -> Any:
        name = function.__name__
        self.calls.append(name)
        return getattr(self, name)(**kwargs)

    def commit_slice(self, root: str, table: str, slice: dict[str, Any], row_keys: list[str], **_: Any) -> None:
        spec, store = TABLES[table], open_store(root)
        rows = [row for key in row_keys for row in tables.read_jsonl(store, spec, key)]
        self._write(root, table, pa.Table.from_pylist(rows, tables.arrow_schema(spec)), self._where(slice))

    def delete_slices_from(self, root: str, run_id: str, iteration: int) -> dict[str, int]:
        deleted = {}
        for name, spec in TABLES.items():
            if "iteration" in spec.slice_key and tables.table_exists(root, name):
                place = f"{self._where({'run_id': run_id})} AND iteration >= {iteration}"
                found = deltalake.DeltaTable(tables.table_uri(root, name)).delete(place)
                deleted[name] = int(found["num_deleted_rows"] or 0)
        return deleted

    @staticmethod
    def _where(slice: dict[str, Any]) -> str:
        return " AND ".join(f"{n} = '{v}'" if isinstance(v, str) else f"{n} = {v}" for n, v in slice.items())

    @staticmethod
    def _write(root: str, table: str, rows: pa.Table, where: str) -> None:
        place, key = tables.table_uri(root, table), list(TABLES[table].slice_key)
        if tables.table_exists(root, table):
            deltalake.write_deltalake(place, rows, mode="overwrite", partition_by=key, predicate=where)
        else:
            deltalake.write_deltalake(place, rows, partition_by=key)
