"""Views whose calls end in time: a file system that hangs, connections that are forgotten, a service that is away."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from infra.store import ObjectStore
from infra.store_local import LocalStore
from infra.stores import open_store
from schemas.errors import ConfigError, StoreError
from tests.support.s3_proxy import Proxy

BUDGET = 2.0


def test_a_view_is_the_same_store(store: ObjectStore):
    view = store.within(60.0)
    assert view.root == store.root
    view.put("a", [b"one", b"two"])
    assert store.get("a") == view.get("a") == b"onetwo"
    assert view.get_range("a", 1, 3) == b"net"
    assert view.put_if_absent("b", b"")
    assert not view.put_if_absent("b", b"x")
    assert view.list("") == ["a", "b"]
    assert view.head("a") == store.head("a")
    view.delete("b")
    assert view.head("b") is None
    assert view.within(5.0).get("a") == b"onetwo"
    assert view.unfinished_writes(0.0) == []
    with pytest.raises(StoreError, match="none"):
        view.get("no/such")
    with pytest.raises(ConfigError):
        view.get("../x")


def test_a_file_system_that_hangs_is_given_up_every_time(tmp_path: Path):
    """A named pipe that nobody writes to holds its reader for ever, as a dead NFS server does."""
    os.mkfifo(tmp_path / "hangs")
    view = LocalStore(tmp_path).within(0.1)
    for _ in range(12):
        started = time.monotonic()
        with pytest.raises(StoreError) as caught:
            view.get("hangs")
        assert 0.1 <= time.monotonic() - started < 1.0
        assert "within 0.1 s" in caught.value.expected
    hanging = [thread for thread in threading.enumerate() if thread.name == "store call in 0.1 s"]
    assert len(hanging) == 8
    with open(tmp_path / "hangs", "wb"):
        pass  # all of them come back
    for thread in hanging:
        thread.join(10)
    LocalStore(tmp_path).put("k", b"v")
    assert view.get("k") == b"v"


@pytest.mark.s3
def test_forgotten_connections_cost_one_try(direct: ObjectStore, lossy: ObjectStore, proxy: Proxy):
    view = lossy.within(BUDGET)
    view.put("beat", b"1")
    assert lossy.get("beat") == b"1"
    proxy.forget()
    started = time.monotonic()
    view.put("beat", b"2")
    assert time.monotonic() - started < BUDGET
    assert direct.get("beat") == b"2"


@pytest.mark.s3
def test_a_view_shares_no_connection_with_its_store(lossy: ObjectStore, proxy: Proxy):
    before = proxy.num_connections
    lossy.within(BUDGET).put("k", b"v")
    assert proxy.num_connections == before + 1


@pytest.mark.s3
@pytest.mark.parametrize("fault", ["refused", "silent"])
def test_a_service_that_is_away_is_given_up_in_time(s3: str, monkeypatch: pytest.MonkeyPatch, fault: str):
    with socket.create_server(("127.0.0.1", 0)) as listener:  # silent: connects, and nobody reads
        port = 9 if fault == "refused" else listener.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        view = open_store(s3).within(BUDGET)
        for call in (lambda: view.put("k", b"v"), lambda: view.put_if_absent("k", b"v"), lambda: view.list("")):
            started = time.monotonic()
            with pytest.raises(StoreError):
                call()
            assert time.monotonic() - started < BUDGET + 0.5
