"""Objects of any size, read part by part."""

from __future__ import annotations

import hashlib

from infra.store import PART_BYTES, ObjectStore


def digest_of(store: ObjectStore, key: str) -> str:
    """SHA-256 of an object; "no object" where there is none."""
    info, whole = store.head(key), hashlib.sha256()
    if info is None:
        return "no object"
    for start in range(0, info.size_bytes, PART_BYTES):
        whole.update(store.get_range(key, start, min(PART_BYTES, info.size_bytes - start)))
    return whole.hexdigest()
