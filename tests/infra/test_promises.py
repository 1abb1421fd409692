"""The promises of a root are tried at its first run, once; and whose uploads upkeep may end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest

from infra import doctor
from infra.store import ObjectStore
from infra.store_local import LocalStore
from infra.stores import open_store
from schemas import config, keys
from schemas.errors import ContractError, StoreError
from tasks.operate.upkeep import upkeep
from tasks.runs.session import open_session
from tests.support import s3_server
from tests.support.tiny import tiny_model


class Overwrites(LocalStore):
    """What a service does that does not know If-None-Match."""

    def put_if_absent(self, key, data):
        self.put(key, data)
        return True


def test_promises_are_tried_once_and_noted(store: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    started = time.monotonic()
    doctor.rely_on(store)
    assert time.monotonic() - started < 20.0
    assert store.list("") == [keys.promises()]
    note = json.loads(store.get(keys.promises()))
    assert "create once" in note["kept"]
    monkeypatch.setattr(doctor, "check_store", lambda *_, **__: pytest.fail("tried again"))
    doctor.rely_on(store)


def test_a_root_that_breaks_a_promise_is_refused_before_the_run_owns_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tiny_model(tmp_path / "model", seed=0)
    (tmp_path / "own.jsonl").write_text('{"text": "one"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tasks.runs.session.open_store", lambda root: Overwrites(Path(root)))
    settings = {
        "run_id": "r", "student": {"path": "model"}, "teachers": [{"id": "t", "path": "model"}],
        "prompts": {"files": [{"path": "own.jsonl", "teachers": ["t"]}]},
    }  # fmt: skip
    for _ in range(2):
        with pytest.raises(ContractError, match="create once"), open_session(config.parse(settings)):
            pass
        assert LocalStore(Path("data")).list("") == []


def test_a_lock_that_two_get_is_a_broken_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert {p.name: p.kept for p in doctor.check_store(LocalStore(tmp_path))}["file locks"]
    monkeypatch.setattr(doctor.fcntl, "flock", lambda *_: None)
    found = {p.name: p for p in doctor.check_store(LocalStore(tmp_path))}["file locks"]
    assert (found.kept, found.found) == (False, "a lock was given to two")
    assert LocalStore(tmp_path).list("") == []


class Framing(BaseHTTPRequestHandler):
    """A service that keeps the frame and the checksum of an upload inside the object."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, tuple[bytes, dict[str, str]]] = {}  # noqa: RUF012 - one server a test process

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if any(name.lower().startswith("x-amz-checksum") for name in self.headers):
            body = b"%x\r\n%s\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n" % (len(body), body)
        metadata = {k: v for k, v in self.headers.items() if k.lower().startswith("x-amz-meta")}
        self.objects[self.path] = body, metadata
        self._answer(200, headers={"ETag": '"e"'})

    def do_GET(self) -> None:
        if "list-type=2" in self.path:
            self._answer(200, b"<ListBucketResult></ListBucketResult>")
            return
        if self.path not in self.objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        body, metadata = self.objects[self.path]
        self._answer(200, body, {"ETag": '"e"', **metadata})

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self.objects.pop(self.path, None)
        self._answer(204)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def framing(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Framing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in s3_server.environment(f"http://127.0.0.1:{server.server_port}").items():
        monkeypatch.setenv(name, value)
    yield "s3://b/x"
    server.shutdown()
    server.server_close()


def test_a_service_that_keeps_checksums_inside_objects_is_told_and_the_advice_works(
    framing: str, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(StoreError) as caught:
        doctor.rely_on(open_store(framing))
    assert "request_checksum_calculation=when_required" in caught.value.next_command
    name, _, value = caught.value.next_command.split()[0].rstrip(",").partition("=")
    monkeypatch.setenv(name, value)
    store = open_store(framing)
    store.put("k", b"v")
    assert store.get("k") == b"v"


OWNED = keys.partition_prefix(keys.stage_prefix("night.1", 3, "rollout", "f" * 64), 7)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        (keys.owned_object(OWNED, 12, "tokens.safetensors"), True),
        (keys.owned_object(OWNED, 12, "spill/a.kv"), True),
        (keys.derived_rows(keys.stage_prefix("r", 0, "train", "a" * 64), "metrics", "b" * 64), True),
        ("tables/plan/part-00000.parquet", True),
        ("backup.tar", False),
        ("runs/backup.tar", False),
        ("runs/r/00000/rollout/x.bin", False),
        ("other/" + keys.owned_object(OWNED, 12, "x"), False),
        ("tables/others/part-00000.parquet", False),
    ],
)
def test_keys_of_ours(key: str, ours: bool):
    assert keys.is_ours(key) == ours


@pytest.mark.s3
def test_upkeep_leaves_the_uploads_of_others(s3: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasks.operate.upkeep.STALE_SECONDS", 0.0)
    client, prefix = boto3.client("s3"), s3.removeprefix(f"s3://{s3_server.BUCKET}/")
    mine = keys.owned_object(OWNED, 1, "tokens.safetensors")
    for key in ("backup.tar", mine):
        client.create_multipart_upload(Bucket=s3_server.BUCKET, Key=f"{prefix}/{key}")
    (line,) = [line for line in upkeep(s3) if line.what == "unfinished writes"]
    assert line.num_objects == 1
    (left,) = open_store(s3).unfinished_writes(0.0)
    assert left.name[0] == "backup.tar"
