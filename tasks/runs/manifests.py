"""Reading the JSON objects that a run's truth rests on: its record, its stages' manifests, its partitions' manifests.

They are checked when they are read. So an object that is damaged but still JSON raises a FormatError that names it, and
not another error later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from infra import leases
from infra.leases import FinishedEpoch
from infra.store import ObjectStore
from schemas import keys
from schemas.errors import FormatError

#: A shape is a type; or a list of one shape, that of every item; or a dictionary of the fields that must be there.
#: The field "*" gives the shape of every value.
_RECORD = {"config": dict, "models": {"*": str}, "prompt_files": [str], "student_path": str}
_TABLE = {"slice": dict, "row_keys": [str], "num_rows": int, "digest": str, "whole_digest": str}
_STAGE = {
    "stage": str, "iteration": int, "fingerprint": str, "inputs": {"*": str}, "partitions": {"*": int},
    "tables": {"*": _TABLE}, "stats": dict, "output_digest": str,
}  # fmt: skip
_PARTITION = {
    "objects": [{"key": str, "digest": str, "bytes": int}], "rows_key": str, "rows_digest": str, "num_rows": int,
    "stats": dict,
}  # fmt: skip
_IDENTITY = {"fingerprint": str, "facts": {"config": dict, "inputs": {"*": str}, "scoring": {"*": str}, "given": str}}
_FILES = [{"name": str, "key": str, "digest": str}]
#: What later parts read of one stage alone.
_STAGE_OF = {"train": {"stats": {"checkpoint": {"version": str, "export": _FILES, "optimizer": _FILES}}}}
_PARTITION_OF = {
    "rollout": {"given_up": {"*": str}, "stats": {"verifier_failures": int}},
    "train": {"objects": [{"group": str, "name": str}], "checkpoint": {"version": str}, "fp8_inexact": [str]},
}


def read_record(store: ObjectStore, key: str) -> dict[str, Any]:
    """A run record. Raises FormatError for another object, StoreError for a missing one; so do the others here."""
    return _read(store, key, _RECORD)


def read_stage(store: ObjectStore, key: str) -> dict[str, Any]:
    """The manifest of a finished stage."""
    manifest = _read(store, key, _STAGE)
    check(manifest, _STAGE_OF.get(manifest["stage"], {}), f"{store.root}/{key}")
    for name in manifest["partitions"]:
        if not name.isdecimal():
            raise FormatError(f"{store.root}/{key}, partitions", expected="numbers of partitions", found=repr(name))
    for files in manifest["stats"].get("checkpoint", {}).values() if manifest["stage"] == "train" else ():
        for entry in files if isinstance(files, list) else ():
            _check_name(entry["name"], f"{store.root}/{key}, stats, checkpoint")
    return manifest


def _check_name(name: str, where: str) -> None:
    """Whoever may write to the store must not write files of whoever reads it: a name is one part of a path."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise FormatError(where, expected="names of files in one folder", found=repr(name)[:100])


def read_partition(store: ObjectStore, stage_prefix: str, partition: int) -> FinishedEpoch | None:
    """A finished partition with its manifest; None for one that is not finished."""
    owned = keys.partition_prefix(stage_prefix, partition)
    found = leases.finished(store, owned)
    if found is not None:
        stage = stage_prefix.split("/")[-2]
        for shape in (_PARTITION, _PARTITION_OF.get(stage, {})):
            check(found.manifest, shape, f"{store.root}/{keys.epoch(owned, found.epoch)}, manifest")
    return found


def read_revoked(store: ObjectStore, stage_prefix: str) -> dict[str, dict[str, Any]]:
    """Partition -> {"epoch" of its manifest, "reason"}: what `opd repair` has found lost; empty for a whole stage."""
    key = keys.revoked(stage_prefix)
    return _read(store, key, {"*": {"epoch": int, "reason": str}}) if store.head(key) is not None else {}


def read_identity(store: ObjectStore, key: str) -> dict[str, Any]:
    """What a stage of an iteration is under a run record."""
    return _read(store, key, _IDENTITY)


def read_flow_run(store: ObjectStore, key: str) -> str:
    """The run that a scheduled flow run drives."""
    return _read(store, key, {"run_id": str})["run_id"]


def check(value: Any, shape: Any, where: str) -> None:
    """Raises FormatError, naming the field, for a JSON value that has not the shape."""
    kind = type(shape) if isinstance(shape, dict | list) else shape
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(where, expected=f"a JSON value of type {kind.__name__}", found=repr(value)[:100])
    if isinstance(shape, list):
        for index, item in enumerate(value):
            check(item, shape[0], f"{where}, item {index}")
    elif isinstance(shape, Mapping):
        for name in value if "*" in shape else shape:
            if name not in value:
                raise FormatError(where, expected=f"a field {name!r}", found=f"fields {sorted(value)}"[:300])
            check(value[name], shape.get("*", shape.get(name)), f"{where}, {name}")


def _read(store: ObjectStore, key: str, shape: dict[str, Any]) -> dict[str, Any]:
    where = f"{store.root}/{key}"
    try:
        value = json.loads(store.get(key))
    except (ValueError, RecursionError) as error:
        raise FormatError(
            where, expected="a JSON object", found=str(error), safe="every other object",
            next_command="take the object from a backup; or another run_id",
        ) from error  # fmt: skip
    check(value, shape, where)
    return value
