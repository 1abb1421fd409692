"""Where the token log of a partition's epoch lies: on the node that writes it, and in the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from infra.store import ObjectStore
from schemas import keys


def local_log(scratch: Path, owned: str, epoch: int) -> Path:
    """The folder of a log on the node that writes it. owned: the partition's prefix."""
    return (scratch / keys.wal_segment(owned, epoch, 0)).parent


def stored_segments(store: ObjectStore, owned: str, epoch: int) -> Iterator[tuple[str, bytes]]:
    """(key, bytes) of a log's segments in the store, in order."""
    for key in store.list(keys.owned_object(owned, epoch, "wal/")):
        yield key, store.get(key)


def stored_log(store: ObjectStore, owned: str, epoch: int) -> list[tuple[str, bytes]]:
    """All of `stored_segments` at once."""
    return list(stored_segments(store, owned, epoch))
