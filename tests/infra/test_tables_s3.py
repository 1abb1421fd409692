"""Tables on a real S3 server, and a committer that is stopped with the lease in its hands, there and locally."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from infra import tables
from infra.spark import SparkChild, check_log
from infra.stores import open_store
from schemas import keys
from schemas.errors import ConfigError, ContractError, StoreError
from schemas.rows import METRICS, content_digest
from tests.infra import spark_calls
from tests.support import s3_server
from tests.support.spark_session import SETTINGS

pytestmark = [pytest.mark.spark, pytest.mark.s3, pytest.mark.slow]

SETTINGS_ONE_CORE = {**SETTINGS.model_dump(), "cores": 1, "driver_memory": "1g"}


@pytest.fixture
def children(s3: str, tmp_path: Path) -> Iterator[tuple[SparkChild, SparkChild]]:
    """Two committers, each a process with a JVM that can reach the S3 server and the local disk."""
    with (
        SparkChild(s3, SETTINGS_ONE_CORE, tmp_path / "first.log") as first,
        SparkChild(s3, SETTINGS_ONE_CORE, tmp_path / "second.log") as second,
    ):
        yield first, second


def commit_of(root: str, value: float, run_id: str = "r") -> dict[str, Any]:
    """Arguments of commit_slice for one metric, whose row object is put."""
    row = {
        "run_id": run_id, "iteration": 0, "stage": "train", "step": 0, "name": "kl", "teacher_index": None,
        "value": value,
    }  # fmt: skip
    key = f"rows/{run_id}-{value}.jsonl"
    open_store(root).put(key, keys.canonical_json(row) + b"\n")
    return {
        "root": root, "table": "metrics", "slice": {"run_id": run_id, "iteration": 0, "stage": "train"},
        "row_keys": [key], "num_rows": 1, "content_digest": content_digest(METRICS, [row]),
    }  # fmt: skip


def test_tables_are_read_with_a_profile_and_wrong_keys_are_named(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    profile = tmp_path / "credentials"
    profile.write_text(
        f"[here]\naws_access_key_id={s3_server.ACCESS_KEY}\naws_secret_access_key={s3_server.SECRET_KEY}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_PROFILE", "here")
    assert tables.read_rows(s3, "metrics", {}) == []
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        tables.read_rows(s3, "metrics", {})
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stranger")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-a-stranger")
    with pytest.raises(StoreError, match="InvalidAccessKeyId") as caught:
        tables.read_rows(s3, "metrics", {})
    assert "secret-of-a-stranger" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 5
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.SECRET_KEY)
    with pytest.raises(StoreError, match="NoSuchBucket"):
        tables.read_rows("s3://no-such-bucket/here", "metrics", {})


def values(root: str) -> list[float]:
    return [row["value"] for row in tables.read_rows(root, "metrics", {})]


def wait_until_stopped(child: SparkChild) -> int:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if child.pid and Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return child.pid
        time.sleep(0.05)
    raise AssertionError("the committer never stopped")


def test_a_stopped_committer_overwrites_nothing(
    children: tuple[SparkChild, SparkChild], s3: str, tmp_path: Path
) -> None:
    zombie, heir = children
    local = str(tmp_path / "data")
    with ThreadPoolExecutor(1) as pool:
        # On S3 the heir takes over and commits; what the zombie then does is not taken.
        assert heir.call(tables.commit_slice, **commit_of(s3, 0.0))["version"] == 1
        late = pool.submit(zombie.call, spark_calls.commit_stopped, commit=commit_of(s3, 1.0))
        pid = wait_until_stopped(zombie)
        done = heir.call(spark_calls.commit_impatiently, commit=commit_of(s3, 2.0))
        assert (done["version"], values(s3)) == (2, [2.0])
        os.killpg(pid, signal.SIGCONT)
        with pytest.raises(ContractError, match="commits metrics") as caught:
            late.result()
        assert f"process {heir.pid} on" in caught.value.found
        assert values(s3) == [2.0]
        assert tables._delta_table(s3, "metrics").version() == 2

        # On a disk the lock file keeps the heir out for as long as the zombie may still write.
        late = pool.submit(zombie.call, spark_calls.commit_stopped, commit=commit_of(local, 1.0))
        assert wait_until_stopped(zombie) == pid
        with pytest.raises(StoreError, match="another process holds it"):
            heir.call(spark_calls.commit_impatiently, commit=commit_of(local, 2.0))
        assert values(local) == []
        os.killpg(pid, signal.SIGCONT)
        with pytest.raises(ContractError, match="commits metrics"):
            late.result()
        heir.call(spark_calls.commit_impatiently, commit=commit_of(local, 2.0))
        assert values(local) == [2.0]

    # Another's entry is never overwritten, nor is ours by another.
    open_store(s3).put("log/taken.json", b"another's")
    assert heir.call(check_log, root=s3, key="log/taken.json") == "a new entry counts as taken"
    assert open_store(s3).get("log/taken.json") == b"another's"
    assert heir.call(check_log, root=s3, key="log/new.json") == ""
    assert open_store(s3).get("log/new.json") == b"first\n"

    # Slices of two runs, committed by both at once, are both there, and a deletion takes only what it names.
    with ThreadPoolExecutor(2) as pool:
        for call in [
            pool.submit(child.call, tables.commit_slice, **commit_of(s3, value, run_id))
            for child, run_id, value in ((zombie, "a", 3.0), (heir, "b", 4.0))
        ]:
            assert call.result()["written"]
    assert values(s3) == [3.0, 4.0, 2.0]
    assert zombie.call(tables.delete_slices_from, root=s3, run_id="a", iteration=0) == {"metrics": 1}
    assert values(s3) == [4.0, 2.0]
