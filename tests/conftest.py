"""Fixtures shared by all folders: the object store under test, the S3 server and the one Spark session."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store import ObjectStore
from infra.stores import open_store
from tests.support import s3_server
from tests.support.spark_session import spark, spark_root

__all__ = ["s3", "s3_process", "spark", "spark_root", "store"]


#: Fixture -> the marker of every test that asks for it, so that `-m "not spark and not s3"` needs no JVM and no server.
_SERVERS = {"spark": "spark", "spark_root": "spark", "s3": "s3", "s3_process": "s3"}
#: Folders and files whose tests start rank processes, campaigns or servers, train, or interpret Triton on the CPU.
_SLOW = (
    "e2e/", "faults/", "kernels/", "flows/test_hangup", "flows/test_deployments", "flows/test_preemption",
    "infra/test_doctor", "infra/test_jars", "infra/test_launch", "infra/test_leases", "infra/test_owners",
    "infra/test_promises", "infra/test_spark", "infra/test_table", "infra/test_threads", "ml/test_engine",
    "ml/test_fp8_loop", "ml/test_loader", "ml/test_mxfp4_loop", "ml/test_rollout_bench", "ml/test_spill",
    "ml/test_teacher", "ml/test_tensor_parallel", "ml/test_together", "ml/test_train", "ml/test_wal", "tasks/bench/",
    "tasks/operate/", "tasks/ranks/", "tasks/rewards/test_child", "tasks/rewards/test_confinement",
    "tasks/rewards/test_gym_scores", "tasks/teachers/",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(Path(__file__).parent).as_posix().startswith(_SLOW):
            item.add_marker("slow")
        for name in {_SERVERS[name] for name in getattr(item, "fixturenames", ()) if name in _SERVERS}:
            item.add_marker(name)


@pytest.fixture(autouse=True)
def _patience_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session in this process says to it and its children how long the store is waited for: to no other test."""
    monkeypatch.delenv("OPD_STORE_PATIENCE_SECONDS", raising=False)
    monkeypatch.setenv("OPD_STORE_PATIENCE_SECONDS", "300")


@pytest.fixture(scope="session")
def s3_process() -> Iterator[s3_server.S3Server]:
    """The S3 server of this test run."""
    with tempfile.TemporaryDirectory(prefix="s3-") as folder, s3_server.running(Path(folder)) as server:
        yield server


@pytest.fixture
def s3(s3_process: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty root on the S3 server, whose address and keys are in the environment, for child processes too."""
    for name, value in s3_process.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind."""
    return open_store(request.getfixturevalue("s3") if request.param == "s3" else str(tmp_path / "store"))
