"""The object store in an S3 bucket, for any service with conditional PUT (If-None-Match).

`put_if_absent` is one PutObject: conditional multipart uploads have had two winners on real servers. A large `put`,
which has no condition, is a multipart upload, whose object appears when it is complete. The SDK's own retries are off,
since this module must know that a request was sent twice: the second 412 may be the answer to its own first try.
Every object carries two entries of user metadata,

    opd-sha256   of its bytes, checked by every whole read
    opd-write    a random name of the call that wrote it: tells a lost answer from a lost race

Invariant: a read returns exactly the bytes asked for, of one version of the object, or raises.
"""

from __future__ import annotations

import email.utils
import hashlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import botocore.exceptions as aws
from boto3.session import Session
from botocore.config import Config
from urllib3.exceptions import HTTPError

from infra.s3_errors import BROKEN_BODY, CHECKSUM_ADVICE, Refused, Replaced, explained, passes
from infra.s3_settings import s3_endpoint
from infra.store import (
    PART_BYTES,
    PARTS_AT_ONCE,
    Data,
    InTime,
    ObjectInfo,
    ObjectStore,
    UnfinishedWrite,
    check_key,
)  # fmt: skip
from infra.threads import at_once
from infra.waiting import waiting
from schemas.errors import ConfigError, FormatError, StoreError
from schemas.keys import digest_bytes

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_CONNECT_SECONDS, _READ_SECONDS = 10.0, 60.0
#: Of the time that a call within so many seconds has: what one try may wait, so that there is a second one.
_SHARE_OF_A_TRY = 0.45
_CHUNK_BYTES = 1 << 16
#: Of an object's end: more than the trailers of an upload in chunks (aws-chunked) take.
_TRAILER_BYTES = 512
#: The largest object that is one PutObject, which the service limits to 5 GB.
_SINGLE_BYTES = 128 << 20
#: The service's limit; parts of larger objects are larger.
_MOST_PARTS = 10_000
#: Parts of all objects that are on their way at once: each is a copy in memory.
_PARTS_IN_MEMORY = 16


class S3Store:
    """Objects under s3://BUCKET/PREFIX/. Settings come from the AWS_* environment, AWS_ENDPOINT_URL included."""

    def __init__(self, bucket: str, prefix: str, patience_seconds: float, *, try_seconds: float | None = None) -> None:
        """patience_seconds: how long a request that fails in passing is tried again.

        try_seconds: what one try waits for a connection, and then for an answer; None: as suits large objects.
        """
        self.root = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._try_seconds = try_seconds
        self._prefix = f"{prefix}/" if prefix else ""
        self._client_lock = threading.Lock()
        self._client_of: tuple[int, Any] | None = None
        self._bucket_seen = False
        self._patience_seconds = patience_seconds
        self._sending = threading.BoundedSemaphore(_PARTS_IN_MEMORY)

    def get(self, key: str) -> bytes:
        check_key(key)
        data, metadata = self._read(key, 0, None)
        if (expected := metadata.get("opd-sha256", "")) and expected != (found := digest_bytes(data)):
            if b"x-amz-checksum-" in data[-_TRAILER_BYTES:]:
                raise StoreError(
                    self._where(key), expected="the bytes that were put",
                    found="them in a frame, with a checksum after them: this service keeps what only frames an upload",
                    safe="nothing that was put here so: its bytes are not those of any object",
                    next_command=f"{CHECKSUM_ADVICE}, on an empty root",
                )  # fmt: skip
            raise FormatError(self._where(key), expected=f"SHA-256 {expected}, as written", found=found,
                              safe="every other object", next_command="opd repair RUN")  # fmt: skip
        return bytes(data)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_key(key)
        if start < 0 or length < 0:
            raise ValueError(f"range of {length} bytes from {start}")
        if length == 0:
            if self.head(key) is None:
                raise self._missing(key)
            return b""
        return bytes(self._read(key, start, length)[0])

    def put(self, key: str, data: Data | Sequence[Data]) -> None:
        pieces = [memoryview(piece).cast("B") for piece in ([data] if isinstance(data, Data) else data)]
        arguments = self._object(key, pieces)
        if sum(len(piece) for piece in pieces) > _SINGLE_BYTES:
            self._put_parts(key, arguments, pieces)
        else:
            body = b"".join(pieces)
            self._retrying(key, lambda: self._client().put_object(**arguments, Body=body))

    def put_if_absent(self, key: str, data: Data) -> bool:
        arguments = self._object(key, [memoryview(data)])
        body = bytes(data)
        try:
            self._retrying(key, lambda: self._client().put_object(**arguments, Body=body, IfNoneMatch="*"))
        except Refused as failed:
            if failed.status != 412:
                raise
            # An answer to an earlier try of this very call may have been lost: then the object is ours.
            return self._wrote(key, arguments)
        return True

    def list(self, prefix: str) -> list[str]:
        arguments = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        pages = self._pages(prefix, "list_objects_v2", arguments, "ContinuationToken")
        return sorted(entry["Key"].removeprefix(self._prefix) for page in pages for entry in page.get("Contents", ()))

    def head(self, key: str) -> ObjectInfo | None:
        check_key(key)
        head = self._head(key)
        return None if head is None else ObjectInfo(head["ContentLength"], head["Metadata"].get("opd-sha256"))

    def delete(self, key: str) -> None:
        check_key(key)
        try:
            self._retrying(key, lambda: self._client().delete_object(Bucket=self._bucket, Key=self._prefix + key))
        except Refused as failed:
            if failed.code != "NoSuchKey":
                raise

    def unfinished_writes(self, age_seconds: float) -> list[UnfinishedWrite]:
        arguments = {"Bucket": self._bucket, "Prefix": self._prefix}
        found = []
        for page in self._pages("", "list_multipart_uploads", arguments, "KeyMarker", "UploadIdMarker"):
            now = email.utils.parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            for upload in page.get("Uploads", ()):
                if (now - upload["Initiated"]).total_seconds() >= age_seconds:
                    found.append(self._unfinished(upload["Key"].removeprefix(self._prefix), upload["UploadId"]))
        return sorted(found, key=lambda write: write.name)

    def discard(self, write: UnfinishedWrite) -> None:
        key, upload_id = write.name
        try:
            self._retrying(key, lambda: self._client().abort_multipart_upload(**self._upload(key, upload_id)))
        except Refused as failed:
            if failed.code != "NoSuchUpload":
                raise

    def within(self, seconds: float) -> ObjectStore:
        prefix = self._prefix.removesuffix("/")
        return InTime(S3Store(self._bucket, prefix, seconds, try_seconds=seconds * _SHARE_OF_A_TRY), seconds)

    def _unfinished(self, key: str, upload_id: str) -> UnfinishedWrite:
        size = 0
        try:
            for page in self._pages(key, "list_parts", self._upload(key, upload_id), "PartNumberMarker"):
                size += sum(part["Size"] for part in page.get("Parts", ()))
        except Refused as failed:
            if failed.code != "NoSuchUpload":  # it has just ended
                raise
        return UnfinishedWrite(f"{self._where(key)}, upload {upload_id}", size, (key, upload_id))

    def _put_parts(self, key: str, arguments: dict[str, Any], pieces: Sequence[memoryview]) -> None:
        """One object of pieces that are never joined; nothing is there before all of it is."""
        size = sum(len(piece) for piece in pieces)
        part_bytes = max(PART_BYTES, -(-size // _MOST_PARTS))
        client = self._client()
        # A service holds parts to the checksum that it was told of at the start.
        checked = client.meta.config.request_checksum_calculation == "when_supported"
        kind = {"ChecksumAlgorithm": "CRC32"} if checked else {}
        created = self._retrying(key, lambda: client.create_multipart_upload(**arguments, **kind))
        upload = self._upload(key, created["UploadId"])

        def send(number: int) -> dict[str, Any]:
            with self._sending:
                body = _cut(pieces, (number - 1) * part_bytes, part_bytes)
                request = {**upload, **kind, "PartNumber": number, "Body": body}
                sent = self._retrying(key, lambda: client.upload_part(**request))
            return {"PartNumber": number} | {name: sent[name] for name in ("ETag", "ChecksumCRC32") if name in sent}

        try:
            parts = at_once(send, range(1, -(-size // part_bytes) + 1), PARTS_AT_ONCE)
            complete = {"MultipartUpload": {"Parts": parts}}
            self._retrying(key, lambda: client.complete_multipart_upload(**upload, **complete))
        except Refused as failed:
            # An answer to an earlier try of this very call may have been lost: then the object is ours.
            if failed.code == "NoSuchUpload" and self._wrote(key, arguments):
                return
            self._give_up(key, upload)
            raise
        except BaseException:
            self._give_up(key, upload)
            raise

    def _pages(self, where: str, operation: str, arguments: dict[str, Any], *markers: str) -> Iterator[dict[str, Any]]:
        """The answers of a listing; markers: arguments that say where the next one begins."""
        arguments = dict(arguments)

        def ask() -> dict[str, Any]:
            return getattr(self._client(), operation)(**arguments)

        while True:
            page = self._retrying(where, ask)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments.update({marker: page[f"Next{marker}"] for marker in markers})

    def _upload(self, key: str, upload_id: str) -> dict[str, Any]:
        """What names an upload in requests."""
        return {"Bucket": self._bucket, "Key": self._prefix + key, "UploadId": upload_id}

    def _give_up(self, key: str, upload: dict[str, Any]) -> None:
        """What this cannot remove, upkeep will."""
        try:
            self._client().abort_multipart_upload(**upload)
        except (aws.BotoCoreError, aws.ClientError, HTTPError, OSError) as error:
            _log.warning("%s: unfinished upload stays: %s", self._where(key), error)

    def _wrote(self, key: str, arguments: dict[str, Any]) -> bool:
        """Whether the object there is of the call with these arguments."""
        head = self._head(key)
        return head is not None and head["Metadata"].get("opd-write") == arguments["Metadata"]["opd-write"]

    def _client(self) -> Any:
        """This process's client: one may be shared by threads, but not across a fork."""
        with self._client_lock:
            if self._client_of is None or self._client_of[0] != os.getpid():
                connect, read = (min(self._try_seconds or most, most) for most in (_CONNECT_SECONDS, _READ_SECONDS))
                config = Config(
                    retries={"total_max_attempts": 1}, max_pool_connections=64, connect_timeout=connect,
                    read_timeout=read,
                )  # fmt: skip
                s3_endpoint()  # refused before the SDK prints it
                try:
                    client = Session().client("s3", config=config)
                except ValueError as error:  # of a malformed AWS_ENDPOINT_URL
                    raise ConfigError("environment AWS_ENDPOINT_URL", expected="http(s)://HOST[:PORT]",
                                      found=str(error)) from error  # fmt: skip
                except aws.BotoCoreError as error:  # of a profile or setting that is not there
                    raise ConfigError(
                        "AWS settings of the environment", expected="settings that boto3 takes", found=str(error)
                    ) from error
                if self._try_seconds is not None:
                    client.meta.events.register_last("before-call.s3", _without_asking)
                self._client_of = (os.getpid(), client)
            return self._client_of[1]

    def _object(self, key: str, pieces: Sequence[memoryview]) -> dict[str, Any]:
        """What a request that makes an object says beside its bytes."""
        sha256 = hashlib.sha256()
        for piece in pieces:
            sha256.update(piece)
        metadata = {"opd-sha256": sha256.hexdigest(), "opd-write": uuid.uuid4().hex}
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key), "Metadata": metadata}

    def _head(self, key: str) -> dict[str, Any] | None:
        try:
            head = self._retrying(key, lambda: self._client().head_object(Bucket=self._bucket, Key=self._prefix + key))
        except Refused as failed:
            if failed.status != 404:
                raise
            if not self._bucket_seen:  # a HEAD has no body to say which of the two is missing
                self.list("no-such-key")
            return None
        return head

    def _read(self, key: str, start: int, length: int | None) -> tuple[bytearray, dict[str, str]]:
        """Bytes of a range, or of the whole object for length None, and its metadata.

        A body that breaks off is continued at the first missing byte, of the same version of the object.
        """
        reading = _Reading(start, length)
        while not reading.complete:
            try:
                self._retrying(key, lambda: self._read_some(key, reading))
            except Refused as failed:
                if failed.code == "NoSuchKey":
                    raise self._missing(key) from failed
                if failed.status != 416:
                    raise
                raise self._short(key, start, length) from failed
        return reading.data, reading.metadata

    def _read_some(self, key: str, reading: _Reading) -> None:
        """One request; returns with less than all if the body broke off after some bytes."""
        try:
            response = self._client().get_object(Bucket=self._bucket, Key=self._prefix + key, **reading.arguments())
        except aws.ClientError as error:
            if reading.data and error.response["ResponseMetadata"]["HTTPStatusCode"] in (404, 412, 416):
                reading.restart()
                raise Replaced(key) from error
            raise
        had = len(reading.data)
        with response["Body"] as body:
            self._check_range(key, reading, response)
            try:
                while chunk := body.read(_CHUNK_BYTES):
                    reading.data += chunk
            except aws.FlexibleChecksumError:
                reading.restart()  # damaged on the way: none of it can be kept
                raise
            except BROKEN_BODY as error:
                if len(reading.data) == had:
                    raise
                _log.warning("%s: body broke off after %d bytes: %s", self._where(key), len(reading.data), error)

    def _check_range(self, key: str, reading: _Reading, response: dict[str, Any]) -> None:
        """Take total size and version from the first answer; hold every answer to the range that was asked for."""
        content_range = response.get("ContentRange")
        if "Range" in reading.arguments():
            wanted = f"bytes {reading.next_byte}-"
            if content_range is None or not content_range.startswith(wanted):
                raise StoreError(self._where(key), expected=f"an answer to a range request, {wanted}...",
                                 found=content_range or "the whole object: this service ignores ranges",
                                 next_command="opd doctor")  # fmt: skip
            size = int(content_range.rpartition("/")[2])
        else:
            size = response["ContentLength"]
        if reading.length is None:
            reading.length = size
        elif reading.start + reading.length > size:
            raise self._short(key, reading.start, reading.length, size)
        reading.etag, reading.metadata = response["ETag"], response["Metadata"]

    def _retrying(self, key: str, call: Callable[[], _T]) -> _T:
        """The call's answer; what can pass by itself is tried again, with growing random pauses, as patience lasts."""
        with waiting(self._where(key), self._patience_seconds) as wait:
            while True:
                try:
                    answer = call()
                except (aws.BotoCoreError, aws.ClientError, HTTPError, OSError, Replaced) as error:
                    if isinstance(error, (aws.HTTPClientError, HTTPError)):
                        # Connections that were opened together are forgotten together: the next try opens a fresh one.
                        self._client().close()
                    _log.info("%s: %s", self._where(key), error)
                    if not passes(error) or not wait.pause(str(error)):
                        raise explained(
                            error, self._where(key), self._bucket, self._client().meta.endpoint_url, wait.seconds
                        ) from error
                else:
                    self._bucket_seen = True
                    return answer

    def _where(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _missing(self, key: str) -> StoreError:
        return StoreError(self._where(key), expected="an object", found="none", safe="every other object",
                          next_command="opd repair RUN")  # fmt: skip

    def _short(self, key: str, start: int, length: int | None, size: int | None = None) -> StoreError:
        if size is None:
            head = self._head(key)
            size = 0 if head is None else head["ContentLength"]
        return StoreError(f"{self._where(key)}, bytes {start} to {start + (length or 0)}",
                          expected=f"an object of at least {start + (length or 0)} bytes",
                          found=f"{size} bytes")  # fmt: skip


class _Reading:
    """How far a read has come: bytes of [start, start + length), length None until the whole's size is known."""

    def __init__(self, start: int, length: int | None) -> None:
        self.start, self.length = start, length
        self._whole = length is None
        self.data = bytearray()
        self.etag: str | None = None
        self.metadata: dict[str, str] = {}

    @property
    def next_byte(self) -> int:
        return self.start + len(self.data)

    @property
    def complete(self) -> bool:
        return self.etag is not None and len(self.data) == self.length

    def arguments(self) -> dict[str, str]:
        """Of the request for what is missing."""
        if self._whole and not self.data:
            return {}
        assert self.length is not None
        version = {"IfMatch": self.etag} if self.etag else {}
        return {"Range": f"bytes={self.next_byte}-{self.start + self.length - 1}", **version}

    def restart(self) -> None:
        self.data.clear()
        self.etag = None
        if self._whole:
            self.length = None


def _without_asking(params: dict[str, Any], **_: object) -> None:
    """Asking whether a body may come takes a second of its own where nobody answers."""
    params["headers"].pop("Expect", None)


def _cut(pieces: Sequence[memoryview], start: int, length: int) -> bytes:
    """`length` bytes, or what is left, from `start` of all pieces."""
    found = []
    for piece in pieces:
        found.append(piece[max(0, start) : max(0, start + length)])
        start -= len(piece)
    return b"".join(found)
