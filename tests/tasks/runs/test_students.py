"""Copies of trained students: whole, durable, checked, few."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.store_local import LocalStore
from schemas import keys
from schemas.errors import FormatError
from schemas.work.manifest import StoredFile
from tasks.runs.manifests import read_stage
from tasks.runs.students import Student
from tests.tasks.runs.test_stage import open_toy


def student(store: LocalStore, version: str, names: tuple[str, ...] = ("config.json", "model.safetensors")) -> Student:
    def objects(kind: str) -> tuple[StoredFile, ...]:
        found = []
        for name in names:
            data = f"{version} {kind} {name}".encode()
            store.put(f"{version}/{kind}/{name}", data)
            found.append(StoredFile(name, f"{version}/{kind}/{name}", keys.digest_bytes(data)))
        return tuple(found)

    return Student(version * 16, None, objects("export"), objects("optimizer"))


def test_nothing_is_copied_before_it_is_asked_for_and_two_of_a_kind_stay(tmp_path):
    session = open_toy(tmp_path)
    versions = [student(session.store, name) for name in "abcd"]  # type: ignore[arg-type]
    models = session.scratch / "models"
    assert not models.exists()
    for number, version in enumerate(versions):
        folder = version.folder(session)
        assert (folder / "config.json").read_text() == f"{'abcd'[number]} export config.json"
        os.utime(folder, (number, number))
    assert sorted(p.name for p in models.iterdir()) == ["c" * 16, "d" * 16]
    versions[3].optimizer_folder(session)
    assert sorted(p.name for p in models.iterdir()) == ["c" * 16, "d" * 16, f"{'d' * 16}-optimizer"]
    assert Student("v", Path("configured")).folder(session) == Path("configured")
    assert Student("v", Path("configured")).optimizer_folder(session) is None


def test_a_copy_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    session = open_toy(tmp_path)
    one = student(session.store, "a")  # type: ignore[arg-type]
    synced: set[int] = set()
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.fstat(fd).st_ino), sync(fd)))
    folder = one.folder(session)
    assert {p.stat().st_ino for p in (*folder.iterdir(), folder, folder.parent)} <= synced


def test_a_damaged_object_leaves_no_copy(tmp_path):
    session = open_toy(tmp_path)
    one = student(session.store, "a")  # type: ignore[arg-type]
    session.store.put("a/export/config.json", b"other")
    with pytest.raises(FormatError) as raised:
        one.folder(session)
    assert raised.value.next_command == "opd repair toy"
    assert list((session.scratch / "models").iterdir()) == []


@pytest.mark.parametrize("name", ["../../../x", "/etc/x", "a/b", "..", "", "a\\b", "a\nb"])
def test_a_manifest_names_files_of_one_folder(tmp_path, name):
    store = LocalStore(tmp_path)
    files = [{"name": name, "key": "k", "digest": "d"}]
    checkpoint = {"version": "v", "export": [], "optimizer": files}
    manifest = {"stage": "train", "iteration": 0, "fingerprint": "f", "inputs": {}, "partitions": {}, "tables": {},
                "stats": {"checkpoint": checkpoint}, "output_digest": "o"}  # fmt: skip
    store.put("m", keys.canonical_json(manifest))
    with pytest.raises(FormatError, match="names of files in one folder"):
        read_stage(store, "m")
