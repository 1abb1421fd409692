"""Data under s3://BUCKET/PREFIX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from infra import jars
from infra.s3_settings import client_settings, s3a_options
from infra.store import ObjectStore, patience_seconds
from infra.store_s3 import S3Store
from schemas.root import DataRoot


class S3Place:
    """See `infra.stores.Place`. Settings come from the AWS_* environment."""

    folder = None

    def __init__(self, root: DataRoot) -> None:
        self._root = root

    def open(self) -> ObjectStore:
        """Nothing is touched yet: a wrong bucket or key shows at the first call, as a StoreError."""
        return S3Store(self._root.bucket, self._root.prefix, patience_seconds())

    def delta_options(self) -> dict[str, str] | None:
        return client_settings()

    def spark_options(self) -> dict[str, str]:
        return s3a_options()

    def spark_jars(self, folder: Path, progress: Callable[[str], None]) -> list[Path]:
        return jars.fetch(folder, progress, s3=True)
