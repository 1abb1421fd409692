"""What stands in the store for anything that is owned: a sequence of numbered objects, each created once.

    OWNED/epochs/000001.json   {"kind": "lease", "epoch": 1, "nonce": ..., "owner": {...}, "run_epoch": 4}
    OWNED/epochs/000002.json   {"kind": "manifest", "epoch": 2, "nonce": ..., "owner": ..., "manifest": {...}}
    OWNED/epochs/000003.json   {"kind": "revoked", "epoch": 3, "nonce": ..., "owner": ..., "reason": "..."}

Numbers have no gaps and no object ever changes. The newest decides: a lease names the owner, a manifest says that the
work is finished, a revocation that it must be made again. `infra.leases` says who may put which.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from infra import owners
from infra.store import ObjectStore
from schemas import keys
from schemas.errors import ContractError, FormatError, StoreError

KINDS = {"lease": "a lease", "manifest": "a manifest", "revoked": "a revocation"}


@dataclass(frozen=True)
class FinishedEpoch:
    """The work is done: the epoch number of its manifest, and the manifest."""

    epoch: int
    manifest: dict[str, Any]


def finished(store: ObjectStore, owned: str) -> FinishedEpoch | None:
    """The manifest of `owned`, or None while there is none, or none that stands."""
    found = newest(store, owned)
    if found is None or found["kind"] != "manifest":
        return None
    return FinishedEpoch(found["epoch"], found["manifest"])


def revoke(store: ObjectStore, owned: str, epoch: int, reason: str) -> bool:
    """Take back the manifest at `epoch`, whose objects are lost or damaged: `owned` counts as unfinished again.

    True if this call did it, False if that manifest had been revoked before. ContractError if no manifest is there.
    """
    stands = read(store, owned, epoch)
    if stands is None or stands["kind"] != "manifest":
        raise ContractError(
            keys.epoch(owned, epoch), expected="the manifest to be revoked",
            found=KINDS[stands["kind"]] if stands else "no object", safe="everything: nothing was revoked",
        )  # fmt: skip
    owner = {"process": owners.this_process()}
    return put(store, owned, epoch + 1, body("revoked", epoch + 1, uuid.uuid4().hex, owner, reason=reason))


def newest(store: ObjectStore, owned: str) -> dict[str, Any] | None:
    """The newest epoch object of `owned`, or None if nobody ever owned it."""
    numbers = []
    for key in store.list(keys.epochs(owned)):
        stem = key.rpartition("/")[2].removesuffix(".json")
        if not stem.isdecimal():
            raise FormatError(key, expected="epoch objects only", found="another name")
        numbers.append(int(stem))
    return read(store, owned, max(numbers)) if numbers else None


def body(kind: str, number: int, nonce: str, owner: dict[str, Any], **facts: Any) -> bytes:
    """Bytes of an epoch object; facts: what its kind holds besides."""
    return keys.canonical_json({"kind": kind, "epoch": number, "nonce": nonce, "owner": owner, **facts})


def put(store: ObjectStore, owned: str, number: int, body: bytes) -> bool:
    """True if this very body stands at the number, durably, also when the answer to an earlier try was lost."""
    key = keys.epoch(owned, number)
    try:
        if store.put_if_absent(key, body):
            return True
    except StoreError:
        if store.head(key) is None:
            raise
        # It is there, but the failed call vouches for nothing: on a disk its name may not be durable. A call that
        # finds the object makes it so, or fails again.
        store.put_if_absent(key, body)
    return store.get(key) == body


def read(store: ObjectStore, owned: str, number: int) -> dict[str, Any] | None:
    """The epoch object of one number, None if there is none. FormatError for anything else."""
    key = keys.epoch(owned, number)
    if store.head(key) is None:
        return None
    try:
        body = json.loads(store.get(key))
        kind = body["kind"] if isinstance(body, dict) else None
        whole = isinstance(kind, str) and kind in KINDS and body["epoch"] == number
        whole = whole and isinstance(body["nonce"], str) and isinstance(body["owner"], dict)
        whole = whole and isinstance(body.get("run_epoch", 0), int)
        whole = whole and (kind != "manifest" or isinstance(body["manifest"], dict))
        whole = whole and (kind != "revoked" or isinstance(body["reason"], str))
    except (ValueError, KeyError) as error:
        raise FormatError(key, expected="an epoch object", found=repr(error)) from error
    if not whole:
        raise FormatError(
            key, expected=f"the lease, manifest or revocation of epoch {number}", found="another JSON value"
        )
    return body
