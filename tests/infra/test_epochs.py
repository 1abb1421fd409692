"""Epoch objects: revoked manifests, and names that a failing disk has not made durable."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from infra import epochs, leases
from infra import store_local as stores
from infra.leases import FinishedEpoch, Lease, acquire, finished, revoke
from infra.store import ObjectStore
from infra.store_local import LocalStore
from schemas import keys
from schemas.errors import ContractError, StoreError

OWNED = "runs/r/00000/rollout/abc/p00000"


def take(store: ObjectStore) -> Lease:
    lease = acquire(store, OWNED, owner={"name": "owner"}, dead_after_seconds=3600.0)
    assert isinstance(lease, Lease)
    return lease


def test_what_is_revoked_is_unfinished_and_is_made_again(store: ObjectStore):
    take(store).finish({"rows": 1})
    assert finished(store, OWNED) == FinishedEpoch(2, {"rows": 1})
    assert revoke(store, OWNED, 2, "object hidden-00000 is lost")
    assert finished(store, OWNED) is None
    body = json.loads(store.get(keys.epoch(OWNED, 3)))
    assert (body["kind"], body["epoch"], body["reason"]) == ("revoked", 3, "object hidden-00000 is lost")
    assert body["owner"]["process"]["pid"]

    heir = take(store)
    assert heir.epoch == 4
    heir.check()
    heir.finish({"rows": 2})
    assert finished(store, OWNED) == FinishedEpoch(5, {"rows": 2})
    assert acquire(store, OWNED, owner={}, dead_after_seconds=0.0) == FinishedEpoch(5, {"rows": 2})


def test_only_a_manifest_can_be_revoked_and_only_once(store: ObjectStore):
    with pytest.raises(ContractError, match="no object"):
        revoke(store, OWNED, 1, "never there")
    lease = take(store)
    with pytest.raises(ContractError, match="found: a lease"):
        revoke(store, OWNED, 1, "in work")
    lease.finish({})
    assert revoke(store, OWNED, 2, "first")
    assert not revoke(store, OWNED, 2, "second")
    assert json.loads(store.get(keys.epoch(OWNED, 3)))["reason"] == "first"
    # Whoever comes late to the same repair takes nothing back from the heir.
    take(store).finish({"by": "heir"})
    assert not revoke(store, OWNED, 2, "late")
    assert finished(store, OWNED) == FinishedEpoch(5, {"by": "heir"})
    with pytest.raises(ContractError, match="found: a revocation"):
        revoke(store, OWNED, 3, "not a manifest")


def test_repairs_and_heirs_of_one_moment_revoke_once(store: ObjectStore):
    take(store).finish({})
    barrier = threading.Barrier(6)
    revoked: list[bool] = []

    def repair() -> None:
        barrier.wait()
        revoked.append(revoke(store, OWNED, 2, "damaged"))

    threads = [threading.Thread(target=repair) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(revoked) == [False] * 5 + [True]


def test_the_superseded_owner_is_told_of_a_revocation(store: ObjectStore):
    lease = take(store)
    # Another process finished under this epoch's number and was then revoked: for the old owner both are news.
    assert epochs.put(store, OWNED, 2, epochs.body("manifest", 2, "other", {"name": "other"}, manifest={}))
    assert revoke(store, OWNED, 2, "damaged")
    with pytest.raises(leases.Superseded, match="epoch 2, a manifest of name other"):
        lease.check()
    with pytest.raises(leases.Superseded):
        lease.finish({})


def test_an_epoch_whose_name_is_not_durable_is_not_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = LocalStore(tmp_path)
    failures = [1, 2]
    sync = stores._fsync_folder

    def failing(folder: Path) -> None:
        if folder.name == "epochs" and failures:
            failures.pop()
            raise OSError(5, "Input/output error")
        sync(folder)

    monkeypatch.setattr(stores, "_fsync_folder", failing)
    with pytest.raises(StoreError, match="Input/output error"):
        take(store)
    assert not failures
    # The object may be there or not after a power cut; this process's next try does not wait for itself.
    lease = take(store)
    assert lease.epoch == 2

    failures.append(1)
    lease.finish({"rows": 1})  # the second sync made the name durable
    assert not failures
    assert finished(store, OWNED) == FinishedEpoch(3, {"rows": 1})
