"""Large objects on S3, which are sent in parts: killed writers, lost answers, what fails or is superseded."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import boto3
import pytest

from infra import store_s3
from infra.store import ObjectStore
from infra.threads import at_once
from schemas.errors import StoreError
from tasks.operate import upkeep
from tests.support import s3_server
from tests.support.s3_proxy import Proxy

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("short_pauses")]
MIB = 1 << 20
KEY = "runs/r/00000/teach/0123456789abcdef/p00000/e000001/large"
_UPLOADER = """
import sys
from infra import store_s3
from infra.stores import open_store
store_s3._SINGLE_BYTES, store_s3.PART_BYTES, store_s3.PARTS_AT_ONCE = 6 << 20, 5 << 20, 1
store = open_store(sys.argv[1])
client = store._client()
send = client.upload_part
def sending(**arguments):
    answer = send(**arguments)
    print(flush=True)
    if arguments["PartNumber"] == int(sys.argv[2]):
        sys.stdin.read()
    return answer
client.upload_part = sending
complete = client.complete_multipart_upload
def completing(**arguments):
    print(flush=True)
    sys.stdin.read()
    return complete(**arguments)
client.complete_multipart_upload = completing
store.put("runs/r/00000/teach/0123456789abcdef/p00000/e000001/large", bytes(17 << 20))
"""


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_s3, "_SINGLE_BYTES", 6 * MIB)
    monkeypatch.setattr(store_s3, "PART_BYTES", 5 * MIB)


@pytest.mark.parametrize("parts", [1, 3, 4, 5])
def test_a_writer_that_is_killed_leaves_an_upload_that_upkeep_ends(direct: ObjectStore, parts: int):
    """After `parts` of its four parts, or before the object is complete."""
    direct.put(KEY, b"old")
    uploader = subprocess.Popen([sys.executable, "-c", _UPLOADER, direct.root, str(parts)],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert uploader.stdout is not None
    for _ in range(parts):
        assert uploader.stdout.readline()
    uploader.kill()
    uploader.wait()
    assert direct.get(KEY) == b"old"
    assert direct.list("") == [KEY]
    sent = min(17, 5 * min(parts, 4)) * MIB
    (left,) = direct.unfinished_writes(0.0)
    assert left.size_bytes == sent
    assert KEY in left.where
    assert direct.unfinished_writes(3600.0) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upkeep, "STALE_SECONDS", 0.0)
        for dry_run in (True, False):
            (line,) = (x for x in upkeep.upkeep(direct.root, dry_run=dry_run) if x.what == "unfinished writes")
            assert (line.num_objects, line.num_bytes) == (1, sent)
    assert direct.unfinished_writes(0.0) == []
    direct.discard(left)
    assert direct.get(KEY) == b"old"


@pytest.mark.usefixtures("small_parts")
def test_unfinished_writes_of_another_root_are_not_seen(direct: ObjectStore):
    client, prefix = boto3.client("s3"), direct.root.removeprefix(f"s3://{s3_server.BUCKET}/")
    uploads = [
        client.create_multipart_upload(Bucket=s3_server.BUCKET, Key=key)
        for key in (f"{prefix}x/k", f"{prefix}/b", f"{prefix}/a")
    ]
    assert [write.name[0] for write in direct.unfinished_writes(0.0)] == ["a", "b"]
    for upload in uploads:
        client.abort_multipart_upload(Bucket=s3_server.BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])


def test_more_unfinished_writes_than_a_page_are_all_seen(direct: ObjectStore):
    """Two of one key at the page's end, and parts of another."""
    client, prefix = boto3.client("s3"), direct.root.removeprefix(f"s3://{s3_server.BUCKET}/")
    names = sorted([f"k{number:04}" for number in range(1003)] + ["k0999"])
    for name in names:
        upload = client.create_multipart_upload(Bucket=s3_server.BUCKET, Key=f"{prefix}/{name}")
    for number in (1, 2):
        client.upload_part(
            Bucket=s3_server.BUCKET, Key=upload["Key"], UploadId=upload["UploadId"], PartNumber=number, Body=b"abc"
        )
    found = direct.unfinished_writes(0.0)
    assert [write.name[0] for write in found] == names
    assert [write.size_bytes for write in found] == [0] * 1003 + [6]
    at_once(direct.discard, found, 8)
    assert direct.unfinished_writes(0.0) == []


@pytest.mark.usefixtures("small_parts")
def test_lost_answers_of_a_large_put_cost_neither_the_object_nor_a_part(
    lossy: ObjectStore, direct: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
):
    """Of the first request, each part, and the one that makes the object."""
    monkeypatch.setattr(store_s3, "PARTS_AT_ONCE", 1)
    data = os.urandom(12 * MIB)
    for operation in range(5):
        proxy.faults = [10**9] * operation + [0]
        lossy.put(f"k{operation}", data)
        assert proxy.faults == []
        assert direct.get(f"k{operation}") == data
    left = direct.unfinished_writes(0.0)
    assert [write.name[0] for write in left] in ([], ["k0"])  # its first name was never heard
    for write in left:
        direct.discard(write)


@pytest.mark.usefixtures("small_parts")
def test_a_large_put_that_is_superseded_does_not_pass_for_its_own(direct: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    """Its upload is ended from outside, as upkeep would, after another wrote the key."""
    assert isinstance(direct, store_s3.S3Store)
    client = direct._client()
    complete = client.complete_multipart_upload

    def completing(**arguments):
        client.put_object(Bucket=arguments["Bucket"], Key=arguments["Key"], Body=b"other", Metadata={"opd-write": "x"})
        for write in direct.unfinished_writes(0.0):
            direct.discard(write)
        return complete(**arguments)

    monkeypatch.setattr(client, "complete_multipart_upload", completing)
    with pytest.raises(StoreError, match="NoSuchUpload"):
        direct.put("k", bytes(12 * MIB))
    assert direct.get("k") == b"other"


@pytest.mark.usefixtures("small_parts")
def test_a_large_put_that_fails_leaves_nothing(direct: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(direct, store_s3.S3Store)
    client = direct._client()
    send = client.upload_part

    def sending(**arguments):
        return send(**arguments | ({"UploadId": "none"} if arguments["PartNumber"] == 3 else {}))

    monkeypatch.setattr(client, "upload_part", sending)
    with pytest.raises(StoreError, match="NoSuchUpload"):
        direct.put("k", bytes(22 * MIB))
    assert direct.list("") == []
    assert direct.unfinished_writes(0.0) == []


@pytest.mark.usefixtures("small_parts")
def test_only_put_without_a_condition_is_sent_in_parts(direct: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(direct, store_s3.S3Store)
    monkeypatch.setattr(direct._client(), "create_multipart_upload", None)
    assert direct.put_if_absent("k", bytes(12 * MIB))
    assert not direct.put_if_absent("k", bytes(12 * MIB))
    with pytest.raises(TypeError):
        direct.put("k", bytes(12 * MIB))


@pytest.mark.usefixtures("small_parts")
def test_parts_in_memory_are_few_whatever_is_written_at_once(direct: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(direct, store_s3.S3Store)
    monkeypatch.setattr(direct, "_sending", threading.BoundedSemaphore(2))
    cut, lock, counts = store_s3._cut, threading.Lock(), [0, 0]
    client = direct._client()
    send = client.upload_part

    def cutting(*arguments):
        with lock:
            counts[0] += 1
            counts[1] = max(counts)
        return cut(*arguments)

    def sending(**arguments):
        answer = send(**arguments)
        with lock:
            counts[0] -= 1
        return answer

    monkeypatch.setattr(store_s3, "_cut", cutting)
    monkeypatch.setattr(client, "upload_part", sending)
    data = os.urandom(12 * MIB)
    at_once(lambda i: direct.put(f"k{i}", data), range(4), 4)
    assert counts == [0, 2]
    assert all(direct.get(f"k{i}") == data for i in range(4))
