"""S3 that loses answers, breaks bodies off, refuses, changes under the reader or cannot do what is needed.

Faults of the network come from a proxy in front of the real server (tests/support/s3_proxy.py); faults of a service
come from a small server that answers as told. Objects that are sent in parts have a file of their own.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import pytest

from infra.leases import FinishedEpoch, Lease, acquire, finished
from infra.store import ObjectStore
from infra.stores import open_store
from schemas.errors import ConfigError, FormatError, StoreError
from tests.support import s3_server
from tests.support.s3_proxy import Proxy

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("short_pauses")]
BODY = bytes(range(256)) * 4096


@pytest.mark.parametrize("lost", [1, 3])
def test_a_winner_whose_answer_was_lost_knows_that_it_won(
    lossy: ObjectStore, direct: ObjectStore, proxy: Proxy, lost: int
):
    proxy.faults = [0] * lost
    assert lossy.put_if_absent("k", b"mine")
    assert proxy.faults == []
    assert direct.get("k") == b"mine"
    assert not lossy.put_if_absent("k", b"mine")


def test_a_loser_whose_answer_was_lost_does_not_think_that_it_won(
    lossy: ObjectStore, direct: ObjectStore, proxy: Proxy
):
    assert direct.put_if_absent("k", b"same")
    proxy.faults = [0, 0]
    assert not lossy.put_if_absent("k", b"same")


def test_eight_racers_who_all_lose_answers_have_one_winner(lossy: ObjectStore, proxy: Proxy):
    won: list[int] = []

    def contend(index: int) -> None:
        if lossy.put_if_absent("race", b"%d" % index):
            won.append(index)

    proxy.faults = [0] * 6
    threads = [threading.Thread(target=contend, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert lossy.get("race") == b"%d" % won[0]


def test_every_call_survives_a_lost_answer(lossy: ObjectStore, proxy: Proxy):
    def with_loss(call: Callable[[], object]) -> object:
        proxy.faults = [0]
        answer = call()
        assert proxy.faults == []
        return answer

    with_loss(lambda: lossy.put("k", b"value"))
    assert with_loss(lambda: lossy.get("k")) == b"value"
    assert with_loss(lambda: lossy.get_range("k", 1, 3)) == b"alu"
    assert with_loss(lambda: lossy.list("")) == ["k"]
    head = with_loss(lambda: lossy.head("k"))
    assert head is not None
    assert with_loss(lambda: lossy.head("missing")) is None
    with_loss(lambda: lossy.delete("k"))
    assert lossy.list("") == []


@pytest.mark.parametrize("faults", [[1], [200], [2000], [700_000], [400_000, 300_000, 1, 200_000], [66_000] * 12])
def test_a_body_that_breaks_off_is_continued(lossy: ObjectStore, direct: ObjectStore, proxy: Proxy, faults: list[int]):
    direct.put("big", BODY)
    proxy.faults = list(faults)
    assert lossy.get("big") == BODY
    proxy.faults = list(faults)
    assert lossy.get_range("big", 12_345, 1_000_000) == BODY[12_345:1_012_345]


def test_an_object_that_is_replaced_in_the_middle_of_a_read_is_never_mixed(
    lossy: ObjectStore, direct: ObjectStore, proxy: Proxy
):
    old, new = b"o" * 1_000_000, b"n" * 900_000
    for read, expected in [
        (lambda: lossy.get("k"), new),
        (lambda: lossy.get_range("k", 100, 500_000), new[100:500_100]),
    ]:
        direct.put("k", old)
        proxy.faults, proxy.before_cut = [300_000], lambda: direct.put("k", new)
        assert read() == expected


def test_a_network_that_stays_broken_ends_in_one_error(
    direct: ObjectStore, lossy: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPD_STORE_PATIENCE_SECONDS", "0.5")
    proxy.faults = [0] * 1000
    with pytest.raises(StoreError) as caught:
        open_store(direct.root).get("k")
    assert proxy.endpoint in caught.value.expected
    assert 990 < len(proxy.faults) < 998
    assert "tried for 0 s" in caught.value.found
    assert pickle.loads(pickle.dumps(caught.value)).found == caught.value.found


def test_leases_hold_when_every_answer_is_lost_once(lossy: ObjectStore, direct: ObjectStore, proxy: Proxy):
    for operation in range(8):
        owned = f"runs/r/p{operation:05d}"
        # The answer of one request after another is lost: large faults let whole answers through.
        proxy.faults = [10**9] * operation + [0]
        lease = acquire(lossy, owned, owner={}, dead_after_seconds=60.0)
        assert isinstance(lease, Lease)
        lease.heartbeat()
        lease.check()
        lease.finish({"rows": operation})
        assert finished(direct, owned) == FinishedEpoch(2, {"rows": operation})
        proxy.faults = []


def every_call(store: ObjectStore) -> list[Callable[[], object]]:
    return [
        lambda: store.get("k"), lambda: store.get_range("k", 0, 1), lambda: store.put("k", b"v"),
        lambda: store.put_if_absent("k", b"v"), lambda: store.list(""), lambda: store.head("k"),
        lambda: store.delete("k"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "root", "word"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, None, "AWS_"),
        ({"AWS_ACCESS_KEY_ID": "wrong"}, None, "AWS_ACCESS_KEY_ID"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, None, "AWS_ACCESS_KEY_ID"),
        ({}, "s3://no-such-bucket/x", "s3://no-such-bucket"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, None, "http://127.0.0.1:9"),
    ],
    ids=["secret", "key id", "none", "bucket", "endpoint"],
)
def test_wrong_settings_are_named_by_every_call(s3, monkeypatch: pytest.MonkeyPatch, settings, root, word):
    monkeypatch.setenv("OPD_STORE_PATIENCE_SECONDS", "0.1")
    for name, value in settings.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    for call in every_call(open_store(root or s3)):
        with pytest.raises(StoreError) as caught:
            call()
        assert word in str(caught.value)
        assert caught.value.next_command


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_PROFILE"])
def test_malformed_settings_are_config_errors(s3: str, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(name, "no scheme:80")
    for call in every_call(open_store(s3)):
        with pytest.raises(ConfigError):
            call()


def test_bytes_that_are_not_those_written_are_refused(direct: ObjectStore, s3_process: s3_server.S3Server):
    direct.put("k", b"as written")
    client = boto3.client("s3")
    key = direct.root.removeprefix(f"s3://{s3_server.BUCKET}/") + "/k"
    metadata = client.head_object(Bucket=s3_server.BUCKET, Key=key)["Metadata"]
    client.put_object(Bucket=s3_server.BUCKET, Key=key, Body=b"As written", Metadata=metadata)
    with pytest.raises(FormatError) as caught:
        direct.get("k")
    assert caught.value.where.endswith("/k")


def test_an_object_of_another_tool_reads_without_its_digest(direct: ObjectStore):
    key = direct.root.removeprefix(f"s3://{s3_server.BUCKET}/") + "/foreign"
    boto3.client("s3").put_object(Bucket=s3_server.BUCKET, Key=key, Body=b"abc")
    assert direct.get("foreign") == b"abc"
    info = direct.head("foreign")
    assert info is not None
    assert (info.size_bytes, info.digest) == (3, None)


def test_a_client_is_not_carried_over_a_fork(direct: ObjectStore):
    direct.put("k", b"parent")
    child = os.fork()
    if child == 0:
        os._exit(0 if direct.get("k") == b"parent" and direct.put_if_absent("child", b"c") else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert direct.get("child") == b"c"


class Told(BaseHTTPRequestHandler):
    """A service that keeps objects and answers as its server's `script` and `habits` say."""

    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode())

    def _told(self) -> bool:
        told = self.server
        assert isinstance(told, ToldServer)
        told.requests += 1
        if told.script:
            self._refuse(*told.script.pop(0))
            return True
        return False

    def do_PUT(self) -> None:
        told = self.server
        assert isinstance(told, ToldServer)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._told():
            return
        if "no checksums" in told.habits and any("checksum" in name.lower() for name in self.headers):
            self._refuse(501, "NotImplemented")
        elif self.headers.get("If-None-Match") and self.path in told.objects:
            self._refuse(412, "PreconditionFailed")
        else:
            told.objects[self.path] = (
                body,
                {k: v for k, v in self.headers.items() if k.lower().startswith("x-amz-meta")},
            )
            self._answer(200, headers={"ETag": '"e"'})

    def do_GET(self) -> None:
        told = self.server
        assert isinstance(told, ToldServer)
        if self._told():
            return
        if self.path not in told.objects:
            self._refuse(404, "NoSuchKey")
            return
        body, metadata = told.objects[self.path]
        self._answer(200, body, {"ETag": '"e"', **metadata})  # a Range header is ignored

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


class ToldServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Told)
        self.script: list[tuple[int, str]] = []
        self.habits: set[str] = set()
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.requests = 0


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToldServer]:
    server = ToldServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in s3_server.environment(f"http://127.0.0.1:{server.server_port}").items():
        monkeypatch.setenv(name, value)
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "answer", [(503, "SlowDown"), (500, "InternalError"), (409, "ConditionalRequestConflict"), (429, "TooManyRequests"),
               (400, "RequestTimeout"), (400, "BadDigest")], ids=lambda answer: answer[1],
)  # fmt: skip
def test_what_passes_by_itself_is_tried_again(told: ToldServer, answer: tuple[int, str]):
    store = open_store("s3://b/x")
    told.script = [answer] * 3
    assert store.put_if_absent("k", b"v")
    told.script = [answer] * 3
    assert store.get("k") == b"v"


@pytest.mark.parametrize("answer", [(400, "InvalidArgument"), (403, "AccessDenied"), (501, "NotImplemented")])
def test_what_does_not_pass_is_not_tried_again(told: ToldServer, answer: tuple[int, str]):
    told.script = [answer] * 3
    with pytest.raises(StoreError) as caught:
        open_store("s3://b/x").put("k", b"v")
    assert told.requests == 1
    assert answer[1] in caught.value.found


def test_a_service_without_checksums_is_explained_and_the_advice_works(
    told: ToldServer, monkeypatch: pytest.MonkeyPatch
):
    told.habits = {"no checksums"}
    with pytest.raises(StoreError) as caught:
        open_store("s3://b/x").put("k", b"v")
    assert "request_checksum_calculation=when_required" in caught.value.next_command
    name, _, value = caught.value.next_command.split()[0].partition("=")
    monkeypatch.setenv(name, value)
    store = open_store("s3://b/x")
    store.put("k", b"v")
    assert store.get("k") == b"v"


def test_a_service_that_ignores_ranges_is_refused(told: ToldServer):
    store = open_store("s3://b/x")
    store.put("k", b"0123456789")
    assert store.get("k") == b"0123456789"
    with pytest.raises(StoreError) as caught:
        store.get_range("k", 2, 3)
    assert "ignores ranges" in caught.value.found
