"""Which student an iteration samples with: the configured model, or the checkpoint of the iteration before.

Checkpoints are objects; ranks read folders. So a version is copied once into the run's scratch folder, under its
digest, and the copy is complete when its marker is there.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas import keys
from schemas.errors import FormatError
from tasks.models import resolve_model
from tasks.session import Session
from tasks.stage import StageResult

_MARKER = ".complete"


@dataclass(frozen=True)
class Student:
    """folder: a local Hugging Face folder; version: digest of its weights; optimizer: local folder or None."""

    folder: Path
    version: str
    optimizer: Path | None


def _copy_objects(session: Session, objects: list[dict[str, Any]], folder: Path) -> Path:
    """Objects {name, key, digest} as files of a folder, all or nothing."""
    if (folder / _MARKER).exists():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)

    def copy(entry: dict[str, Any]) -> None:
        data = session.store.get(entry["key"])
        if keys.digest_bytes(data) != entry["digest"]:
            raise FormatError(
                entry["key"], expected=f"SHA-256 {entry['digest']}", found=keys.digest_bytes(data),
                safe="earlier checkpoints", next_command=f"opd verify {session.run_id}",
            )  # fmt: skip
        target = partial / entry["name"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(copy, objects))
    (partial / _MARKER).touch()
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)
    return folder


def student_of(session: Session, trained: StageResult | None) -> Student:
    """The sampler of an iteration. trained: the train stage of the iteration before, None for iteration 0.

    Raises FormatError when a checkpoint object is damaged.
    """
    if trained is None:
        return Student(resolve_model(session.config.student.path), session.model_digests["student"], None)
    checkpoint = trained.stats["checkpoint"]
    base = session.scratch / "models"
    export = _copy_objects(session, checkpoint["export"], base / checkpoint["version"][:16])
    optimizer = _copy_objects(session, checkpoint["optimizer"], base / f"{checkpoint['version'][:16]}-optimizer")
    return Student(export, checkpoint["version"], optimizer)
