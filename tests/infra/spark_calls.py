"""What tests/infra/test_spark.py calls inside the Spark child."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra import tables
from schemas.errors import StoreError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def count(spark: SparkSession, *, rows: int) -> dict[str, Any]:
    """Prints on every stream that an answer could be mixed up with."""
    print('{"result": "not the answer"}', flush=True)
    os.write(1, b'{"result": "nor this"}\n')
    print("chatter on stderr", file=sys.stderr, flush=True)
    return {"count": spark.range(rows).count(), "text": "\u2028\n\ud800", "pid": os.getpid()}


def jvm_pid(spark: SparkSession) -> int:
    return spark.sparkContext._gateway.proc.pid  # pyright: ignore[reportOptionalMemberAccess]


def fail(spark: SparkSession, *, kind: str) -> None:
    if kind == "opd":
        raise StoreError("disk", expected="room", found="none", safe="all", next_command="df -h")
    if kind == "sql":
        spark.sql("SELECT * FROM opd.nothing")
    raise RuntimeError("a bug of ours")


def unserialisable(spark: SparkSession) -> object:
    return object()


def die(spark: SparkSession, *, marker: str, times: int) -> str:
    """Ends the process in the middle of a call, as often as told."""
    deaths = Path(marker)
    so_far = len(deaths.read_bytes()) if deaths.exists() else 0
    if so_far < times:
        deaths.write_bytes(b"x" * (so_far + 1))
        print("about to die", flush=True)
        os._exit(9)
    return f"alive after {so_far}"


def commit_and_die(spark: SparkSession, *, marker: str, commit: dict[str, Any]) -> dict[str, Any]:
    """commit_slice in a process that ends, the first time, between the Delta commit and its read-back."""
    if not Path(marker).exists():
        replace = tables._replace

        def replace_and_die(*arguments: Any) -> None:
            replace(*arguments)
            Path(marker).touch()
            os._exit(9)

        tables._replace = replace_and_die
    return tables.commit_slice(spark, **commit)


def commit_stopped(spark: SparkSession, *, commit: dict[str, Any]) -> dict[str, Any]:
    """commit_slice by a process that is stopped, JVM and all, between its last look at the lease and the commit."""
    replace = tables._replace

    def stop_and_replace(*arguments: Any) -> None:
        os.killpg(0, signal.SIGSTOP)
        replace(*arguments)

    tables._replace = stop_and_replace
    try:
        return tables.commit_slice(spark, **commit)
    finally:
        tables._replace = replace


def commit_impatiently(spark: SparkSession, *, commit: dict[str, Any]) -> dict[str, Any]:
    """commit_slice by a process that takes another for dead, or its lock for kept, after a second."""
    patient = tables._LEASE_SECONDS, tables._LOCK_SECONDS
    tables._LEASE_SECONDS = tables._LOCK_SECONDS = 1.0
    try:
        return tables.commit_slice(spark, **commit)
    finally:
        tables._LEASE_SECONDS, tables._LOCK_SECONDS = patient


def wait(spark: SparkSession, *, seconds: float, text: str) -> None:
    tables.on_wait(text)
    time.sleep(seconds)


def sleep(spark: SparkSession, *, seconds: float) -> None:
    time.sleep(seconds)
