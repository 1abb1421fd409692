"""A store that goes away and comes back: nothing ends before the patience is over, and nobody waits without a word."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from infra import tables, waiting
from infra.s3_settings import client_settings
from infra.spark import SparkChild
from infra.store import ObjectStore
from infra.store_local import LocalStore
from infra.stores import open_store
from infra.waiting import Wait
from schemas import config, keys
from schemas.errors import StoreError
from tasks.runs.session import open_session
from tests.support import s3_server
from tests.support.rollout_site import OWNED, Site, undisturbed
from tests.support.s3_proxy import Proxy
from tests.support.tiny import tiny_model


@pytest.mark.s3
def test_a_rollout_goes_on_when_the_store_comes_back(direct: ObjectStore, proxy: Proxy, tmp_path: Path):
    """Away for eight times as long as an owner may be silent, in the middle of sampling, with segments to upload."""
    model = tiny_model(tmp_path / "model", seed=3)
    for folder in ("undisturbed", "site"):
        (tmp_path / folder).mkdir()
    reference = undisturbed(tmp_path / "undisturbed", model)
    site = Site(tmp_path / "site", model, direct.root)
    site.store = direct
    site.settings = s3_server.environment(proxy.endpoint)
    worker = site.start()
    worker.until_sampling(60)
    before = len(direct.list(keys.owned_object(OWNED, 1, "wal/")))
    proxy.go_away()
    time.sleep(12.0)
    assert worker.said("waiting"), worker.output()
    assert "trying for" in worker.output()
    assert direct.head(keys.epoch(OWNED, 2)) is None
    proxy.come_back()
    assert worker.status() == 0, worker.output()
    assert site.outcome() == reference
    assert len(direct.list(keys.owned_object(OWNED, 1, "wal/"))) > before
    assert site.finished_epoch() == 2  # one owner, from the first token to the last


@pytest.mark.s3
@pytest.mark.parametrize("fault", ["refuses", "is silent"])
def test_every_wait_has_a_word_and_an_end(
    lossy: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, fault: str
):
    said: list[tuple[float, str]] = []
    monkeypatch.setattr(waiting, "WORD_SECONDS", 1.0)
    monkeypatch.setattr(waiting, "_voice", lambda text: said.append((time.monotonic() - started, text)))
    monkeypatch.setenv("OPD_STORE_PATIENCE_SECONDS", "20")
    store = open_store(lossy.root)
    store.put("k", b"old")
    started = time.monotonic()
    if fault == "refuses":
        proxy.go_away()
        threading.Timer(4.0, proxy.come_back).start()
    else:
        threading.Timer(4.0, lambda: proxy.go_away() or proxy.come_back()).start()  # the connections end
        proxy.forget()
    store.put("k", b"new")
    assert 3.0 < time.monotonic() - started < 20.0
    assert 2 <= len(said) <= 8
    assert said[0][0] < 2.0
    assert f"{lossy.root}/k" in said[0][1]
    assert "s more" in said[0][1]
    assert store.get("k") == b"new"


def test_a_wait_ends_before_its_patience():
    wait = Wait("x", 0.5)
    tries = 0
    while wait.pause("no"):
        tries += 1
    assert 1 <= tries <= 4
    assert wait.seconds <= 0.55


def test_pauses_grow_to_a_quarter_minute():
    pauses = waiting.pauses()
    found = [next(pauses) for _ in range(40)]
    assert found[0] <= 0.2
    assert all(7.5 <= pause <= 15.0 for pause in found[10:])
    assert len(set(found[10:])) > 20


def test_many_waits_of_many_processes_are_one_line(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(waiting, "_voice", said.append)
    monkeypatch.setattr(waiting, "_spoken", -100.0)
    for rank in range(8):
        waiting.pass_on(f"rank {rank} is waiting")
    assert said == ["rank 0 is waiting"]


def test_a_disk_that_is_freed_in_time_takes_the_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, fsync, full_until = LocalStore(tmp_path), os.fsync, time.monotonic() + 1.0

    def full(fd: int) -> None:
        if time.monotonic() < full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr("infra.store_local.os.fsync", full)
    store.put("k", b"whole")
    assert store.put_if_absent("l", b"whole")
    assert not store.put_if_absent("l", b"other")
    assert store.get("k") == store.get("l") == b"whole"
    assert list((tmp_path / ".tmp").iterdir()) == []


@pytest.mark.parametrize(("number", "least"), [(errno.ENOSPC, 0.3), (errno.EIO, 0.0), (errno.EACCES, 0.0)])
def test_a_disk_that_stays_full_or_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, least: float
):
    monkeypatch.setenv("OPD_STORE_PATIENCE_SECONDS", "1")
    store = LocalStore(tmp_path)
    store.put("k", b"old")

    def refuse(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("infra.store_local.os.fsync", refuse)
    for call in (store.put, store.put_if_absent):
        started = time.monotonic()
        with pytest.raises(StoreError):
            call("n", b"new")
        assert least <= time.monotonic() - started < (1.1 if least else 0.3)
    monkeypatch.undo()
    assert store.list("") == ["k"]
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_the_word_comes_on_stderr_and_the_patience_reaches_children(s3: str):
    code = """
import os, subprocess, sys
from infra import store, stores, waiting
waiting.WORD_SECONDS = 0.5
store.set_patience(2.5)
child = "from infra import store; print(store.patience_seconds())"
assert subprocess.run([sys.executable, "-c", child], capture_output=True).stdout == b"2.5\\n"
try:
    stores.open_store(sys.argv[1]).get("k")
except store.StoreError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, s3], capture_output=True, text=True, timeout=60,
        env={**os.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "waiting for the store for 1 s" in done.stderr
    assert "tried for" in done.stdout


def away_for(proxy: Proxy, seconds: float) -> None:
    proxy.go_away()
    threading.Timer(seconds, proxy.come_back).start()


@pytest.mark.s3
def test_tables_are_read_and_a_run_is_opened_when_the_store_comes_back(
    lossy: ObjectStore, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tiny_model(tmp_path / "model", seed=0)
    (tmp_path / "own.jsonl").write_text('{"text": "one"}\n')
    settings = {
        "run_id": "away", "data": lossy.root, "scratch": str(tmp_path / "scratch"), "student": {"path": "model"},
        "teachers": [{"id": "t", "path": "model"}], "prompts": {
            "per_iteration": 1, "heldout": 0, "files": [{"path": "own.jsonl", "teachers": ["t"]}]},
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SparkChild, "start", lambda self: None)
    assert client_settings()["retry_timeout"] == "300s"  # by itself delta-rs gives up after two seconds
    away_for(proxy, 3.0)
    assert not tables.table_exists(lossy.root, "plan")
    away_for(proxy, 3.0)
    with open_session(config.parse(settings)) as session:
        assert session.store.list(keys.run_records("away"))
