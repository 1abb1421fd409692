"""The doctor against stores that keep their promises, and against one that breaks each in turn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from infra.doctor import check_store, require_promises
from infra.store import LocalStore, ObjectInfo, ObjectStore
from schemas.errors import ContractError, StoreError


def test_real_stores_keep_every_promise_and_stay_clean(store: ObjectStore):
    promises = check_store(store)
    assert [(p.name, p.found) for p in promises if not p.kept] == []
    assert len({p.name for p in promises}) == 5
    require_promises(store)
    assert store.list("") == []


class Unconditional(LocalStore):
    """What a service does that does not know If-None-Match."""

    def put_if_absent(self, key: str, data: Any) -> bool:
        self.put(key, data)
        return True


class CheckThenWrite(LocalStore):
    def put_if_absent(self, key: str, data: Any) -> bool:
        if self.head(key) is not None:
            return False
        time.sleep(0.05)
        self.put(key, data)
        return True


class StaleListing(LocalStore):
    def list(self, prefix: str) -> list[str]:
        return super().list(prefix)[:-1]


class WholeForRange(LocalStore):
    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)


class WrongHead(LocalStore):
    def head(self, key: str) -> ObjectInfo | None:
        info = super().head(key)
        return info and ObjectInfo(info.size_bytes + 1, None)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (Unconditional, {"create once", "one winner of a race"}),
        (CheckThenWrite, {"one winner of a race"}),
        (StaleListing, {"list after write"}),
        (WholeForRange, {"byte ranges"}),
        (WrongHead, {"read after write"}),
    ],
)
def test_each_broken_promise_is_named(kind: type[LocalStore], broken: set[str], tmp_path: Path):
    store = kind(tmp_path)
    assert {p.name for p in check_store(store) if not p.kept} == broken
    with pytest.raises(ContractError) as caught:
        require_promises(store)
    assert all(name in caught.value.found for name in broken)


def test_a_store_that_cannot_be_written_is_its_own_error(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError):
        check_store(LocalStore(tmp_path / "file"))
