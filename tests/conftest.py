"""Fixtures shared by all folders: the object store under test, and the one Spark session."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.store import ObjectStore, open_store
from tests.spark_session import spark, spark_root

__all__ = ["spark", "spark_root", "store"]


@pytest.fixture(params=["local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind."""
    return open_store(str(tmp_path / "store"))
