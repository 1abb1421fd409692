"""The one Spark session of a pytest run, over one temporary data root; a test takes its own run_id there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from infra import spark as infra_spark
from infra import tables
from schemas.config import Spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JARS = Path(__file__).resolve().parents[2] / "jars"
SETTINGS = Spark(cores=2, driver_memory="2g", shuffle_partitions=2, jars=str(JARS))


@pytest.fixture(scope="session")
def spark_root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Data root that the shared session is bound to."""
    return str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def spark(spark_root: str) -> Iterator[SparkSession]:
    session = infra_spark.session(spark_root, SETTINGS)
    tables.create_tables(session, spark_root)
    yield session
    session.stop()
