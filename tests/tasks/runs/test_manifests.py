"""Manifests that are JSON and yet not whole: every missing field, every field of another type, is named."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from infra import leases
from infra.store_local import LocalStore
from schemas.errors import FormatError, StoreError
from schemas.typed_json import to_json
from schemas.work.manifest import StoredFile, TrainedStudent
from tasks.runs import manifests

RECORD = {"config": {}, "models": {"student": "d"}, "prompt_files": ["file:1"], "student_path": "models/x"}
TABLE = {"slice": {"run_id": "r"}, "row_keys": ["k"], "num_rows": 1, "digest": "d", "whole_digest": "w"}
STAGE = {
    "stage": "rollout", "iteration": 0, "fingerprint": "f", "inputs": {"student": "v"}, "partitions": {"0": 2},
    "tables": {"trajectories": TABLE}, "stats": {}, "output_digest": "o",
}  # fmt: skip
PARTITION = {
    "objects": [{"key": "k", "digest": "d", "bytes": 1}], "rows_key": "k", "rows_digest": "d", "num_rows": 1,
    "stats": {},
}  # fmt: skip


def spoiled(value: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(field, a copy without it or with another type there), for the fields of every level."""
    for name, inner in value.items():
        without, other = copy.deepcopy(value), copy.deepcopy(value)
        del without[name]
        other[name] = None
        # Objects by name may have any names.
        if name not in ("student", "0", "trajectories", "run_id"):
            yield name, without
        yield name, other
        for place in (inner, inner[0] if isinstance(inner, list) else None):
            if isinstance(place, dict) and name != "slice":
                for field, changed in spoiled(place):
                    copied = copy.deepcopy(value)
                    copied[name] = [changed] if isinstance(inner, list) else changed
                    yield field, copied


@pytest.mark.parametrize(("read", "good"), [(manifests.read_record, RECORD), (manifests.read_stage, STAGE)])
def test_every_field_is_needed_and_has_its_type(tmp_path, read, good):
    store = LocalStore(tmp_path)
    store.put("key", json.dumps(good | {"more": 1}).encode())
    assert to_json(read(store, "key")).items() >= good.items()
    cases = list(spoiled(good))
    assert len(cases) > 7
    for field, bad in cases:
        store.put("key", json.dumps(bad).encode())
        with pytest.raises(FormatError) as error:
            read(store, "key")
        assert f"{store.root}/key" in error.value.where
        assert field in str(error.value)


def test_a_partition_manifest_is_checked_too(tmp_path):
    store = LocalStore(tmp_path)
    assert manifests.read_partition(store, "runs/r/00000/teach/f", 7) is None
    for number, (field, bad) in enumerate([("", PARTITION), *spoiled(PARTITION)]):
        lease = leases.acquire(store, f"runs/r/00000/teach/f/p{number:05d}", owner={}, dead_after_seconds=5)
        assert isinstance(lease, leases.Lease)
        lease.finish(bad)
        if not field:
            found = manifests.read_partition(store, "runs/r/00000/teach/f", number)
            assert found is not None
            assert to_json(found.manifest) == PARTITION
            continue
        with pytest.raises(FormatError) as error:
            manifests.read_partition(store, "runs/r/00000/teach/f", number)
        assert "epochs/000002.json" in error.value.where
        assert field in str(error.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b"null", b"{", b"\xff{}", b"[" * 100_000, b'{"a": NaN'], ids=repr)
def test_other_bytes_are_named(tmp_path, data):
    store = LocalStore(tmp_path)
    store.put("key", data)
    with pytest.raises(FormatError, match="key"):
        manifests.read_stage(store, "key")
    with pytest.raises(StoreError):
        manifests.read_stage(store, "other")


def test_partitions_are_numbers(tmp_path):
    store = LocalStore(tmp_path)
    store.put("key", json.dumps(STAGE | {"partitions": {"-1": 2}}).encode())
    with pytest.raises(FormatError, match="partitions"):
        manifests.read_stage(store, "key")


def test_what_one_stage_alone_needs_is_checked_there(tmp_path):
    store = LocalStore(tmp_path)
    files = [{"name": "n", "key": "k", "digest": "d"}]
    checkpoint = {"version": "v", "export": files, "optimizer": []}
    trained = STAGE | {"stage": "train", "stats": {"checkpoint": checkpoint}}
    store.put("good", json.dumps(trained).encode())
    assert manifests.read_stage(store, "good").student() == TrainedStudent("v", (StoredFile("n", "k", "d"),), ())
    for bad in ({}, {"checkpoint": {}}, {"checkpoint": checkpoint | {"export": [{"name": "n"}]}}):
        store.put("bad", json.dumps(trained | {"stats": bad}).encode())
        with pytest.raises(FormatError, match="bad, stats"):
            manifests.read_stage(store, "bad")
    rolled = PARTITION | {"given_up": {"t": "why"}, "stats": {"verifier_failures": 0}}
    for number, (field, manifest) in enumerate([("", rolled), ("given_up", PARTITION), *spoiled(rolled)]):
        lease = leases.acquire(store, f"runs/r/00000/rollout/f/p{number:05d}", owner={}, dead_after_seconds=5)
        assert isinstance(lease, leases.Lease)
        lease.finish(manifest)
        if field and field != "t":
            with pytest.raises(FormatError, match=field):
                manifests.read_partition(store, "runs/r/00000/rollout/f", number)
        elif not field:
            assert manifests.read_partition(store, "runs/r/00000/rollout/f", number) is not None


@pytest.mark.parametrize("data", [b"{}", b'{"run_id": 3}', b"[]"], ids=repr)
def test_which_run_a_flow_run_drives_is_checked(tmp_path, data):
    store = LocalStore(tmp_path)
    store.put("flow-runs/x.json", data)
    with pytest.raises(FormatError, match=re.escape("flow-runs/x.json")):
        manifests.read_flow_run(store, "flow-runs/x.json")
