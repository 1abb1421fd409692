"""The doctor against stores that keep their promises, and against one that breaks each in turn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from infra import doctor
from infra.doctor import check_store, examine, require_promises
from infra.spark import check_log, version
from infra.store import ObjectInfo, ObjectStore
from infra.store_local import LocalStore
from schemas.config import Spark
from schemas.errors import ConfigError, ContractError, StoreError


def test_real_stores_keep_every_promise_and_stay_clean(store: ObjectStore):
    promises = check_store(store)
    assert [(p.name, p.found) for p in promises if not p.kept] == []
    assert len({p.name for p in promises}) == (5 if store.root.startswith("s3:") else 6)
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


class Session:
    """Stands for SparkChild: answers check_log as told."""

    def __init__(self, root: str, settings: dict[str, Any], log_path: Path) -> None:
        self.root = root

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, function: object, **arguments: str) -> str:
        assert function is (check_log if self.root.startswith("s3://") else version)
        return arguments.get("key", "") and "an entry was overwritten by another"


@pytest.fixture
def doctor_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """(exit status, output) of `opd doctor` on a root, with a stand-in for Spark."""
    monkeypatch.setattr(doctor, "SparkChild", Session)
    monkeypatch.setattr(doctor.jars, "java", lambda: "/usr/bin/java")

    def run(root: str) -> tuple[int, str]:
        status = cli.main(["doctor", "--data", root, "--scratch", str(tmp_path / "scratch")])
        return status, capsys.readouterr().out

    return run


def test_a_healthy_machine_is_said_to_be_one(doctor_says, tmp_path: Path):
    status, said = doctor_says(str(tmp_path / "data"))
    assert (status, said.count("kept  "), said.count("BROKEN")) == (0, 11, 0)
    assert "runs can rely on it" in said
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]


@pytest.mark.s3
def test_log_entries_that_are_overwritten_break_the_contract(doctor_says, s3: str):
    status, said = doctor_says(s3)
    assert (status, said.count("BROKEN")) == (ContractError.exit_status, 1)
    assert "an entry was overwritten by another" in said
    assert "do not start a run here" in said


def test_no_java_is_configuration_and_does_not_hide_the_rest(doctor_says, tmp_path: Path, monkeypatch):
    def missing() -> str:
        raise ConfigError("Java (PATH)", expected="Java 17 or later", found="no java command")

    monkeypatch.setattr(doctor.jars, "java", missing)
    status, said = doctor_says(str(tmp_path / "data"))
    assert (status, said.count("BROKEN")) == (ConfigError.exit_status, 1)
    assert "one winner of a race" in said


@pytest.mark.parametrize("room", ["scratch", "/dev/shm"])
def test_too_little_room_is_named(room: str, doctor_says, tmp_path: Path, monkeypatch):
    class Full:
        free = 1 << 20

    usage = doctor.shutil.disk_usage
    is_full = (lambda path: path == tmp_path) if room == "scratch" else (lambda path: str(path) == room)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Full if is_full(path) else usage(path))
    status, said = doctor_says(str(tmp_path / "data"))
    assert (status, said.count("BROKEN")) == (StoreError.exit_status, 1)
    assert f"BROKEN  room in {tmp_path / 'scratch' if room == 'scratch' else room}" in said


def test_a_service_that_does_not_answer_ends_the_examination(doctor_says, monkeypatch):
    monkeypatch.setenv("OPD_STORE_PATIENCE_SECONDS", "0.2")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    status, said = doctor_says("s3://bucket/prefix")
    assert (status, said.count("BROKEN")) == (StoreError.exit_status, 1)
    assert "expected: an answer from http://127.0.0.1:1" in said
    assert "Spark" not in said


def test_a_store_without_promises_is_examined_to_the_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(doctor, "SparkChild", Session)
    monkeypatch.setattr(doctor, "open_store", lambda _: Unconditional(tmp_path))
    found = {p.name: p for p in examine(str(tmp_path), tmp_path, 1, Spark.model_validate({}))}
    assert {p.name for p in found.values() if not p.kept} == {"create once", "one winner of a race"}
    assert {p.exit_status for p in found.values() if not p.kept} == {ContractError.exit_status}
    assert found["Spark and Delta"].kept
