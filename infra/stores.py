"""Where the data of a root lies: opens its object store, and has the options with which Spark and delta-rs reach it.

A kind of place is one module beside this one and one line of `place`; how its root is spelt stands in schemas.root.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from infra.store import ObjectStore
from infra.store_local import LocalPlace
from schemas.root import DataRoot


class Place(Protocol):
    """One root. folder: where it lies in a file system, whose locks and fsync hold there; None elsewhere."""

    @property
    def folder(self) -> Path | None: ...

    def open(self) -> ObjectStore:
        """The object store at the root."""
        ...

    def delta_options(self) -> dict[str, str] | None:
        """Storage options of delta-rs, secrets included: never for a log."""
        ...

    def spark_options(self) -> dict[str, str]:
        """Settings of a Spark session that reads and commits tables there. No secrets."""
        ...

    def spark_jars(self, folder: Path, progress: Callable[[str], None]) -> list[Path]:
        """Pinned jars that such a session needs, kept in `folder`; `progress` is told what is fetched."""
        ...


def place(root: str) -> Place:
    """Raises ConfigError for a root of no known kind."""
    parsed = DataRoot.parse(root)
    if parsed.scheme == "local":
        return LocalPlace(parsed)
    from infra.s3_place import S3Place  # boto3 costs a third of a second, which local runs need not pay

    return S3Place(parsed)


def open_store(root: str) -> ObjectStore:
    """The store at `root`. Raises ConfigError for a root of no known kind."""
    return place(root).open()
