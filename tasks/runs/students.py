"""Which student an iteration samples with: the configured model, or the checkpoint of the iteration before.

A student is a reference to objects of the store, but ranks read folders. So before a stage is executed, the version is
copied into the run's scratch folder, under its digest; the copy appears when all of it is checked and durable. The
copies of the student in use and of the one from which it was trained stay there; older copies are deleted.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from infra.store import ObjectStore
from ml.whole_folder import whole_folder
from schemas import keys
from schemas.errors import FormatError
from schemas.work.manifest import StoredFile
from tasks.inputs.models import model_digest, resolve_model
from tasks.runs.finished import StageResult
from tasks.runs.session import Session

_KEPT = 2


@dataclass(frozen=True)
class Student:
    """version: digest of the model folder. export, optimizer: empty for a configured model, which lies at `path`."""

    version: str
    path: Path | None = None
    export: tuple[StoredFile, ...] = ()
    optimizer: tuple[StoredFile, ...] = ()

    def folder(self, session: Session) -> Path:
        """A local Hugging Face folder. Raises FormatError when a checkpoint object is damaged."""
        if self.path is not None:
            return self.path
        return _copied(session, self.export, self.version[:16])

    def optimizer_folder(self, session: Session) -> Path | None:
        """A local folder of the optimizer's moments; None for a student that nobody has trained."""
        return _copied(session, self.optimizer, f"{self.version[:16]}-optimizer") if self.optimizer else None


def _copied(session: Session, objects: tuple[StoredFile, ...], name: str) -> Path:
    folder = session.scratch / "models" / name
    if folder.is_dir():
        folder.touch()
        return folder
    with whole_folder(folder, what="a copy of a student", safe="its objects") as partial:
        copy_objects(session.store, objects, partial, session.run_id)
    _drop_older(folder)
    return folder


def copy_objects(store: ObjectStore, objects: Iterable[StoredFile], folder: Path, run_id: str) -> None:
    """Objects of a checkpoint as files of `folder`. FormatError for one that is damaged."""

    def copy(entry: StoredFile) -> None:
        data = store.get(entry.key)
        if keys.digest_bytes(data) != entry.digest:
            raise FormatError(
                entry.key, expected=f"SHA-256 {entry.digest}", found=keys.digest_bytes(data),
                safe="earlier checkpoints", next_command=f"opd repair {run_id}",
            )  # fmt: skip
        (folder / entry.name).write_bytes(data)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(copy, objects))


def _drop_older(folder: Path) -> None:
    """Copies of the same kind other than the last used ones; a name that begins with a dot is a copy in the making."""
    optimizer = folder.name.endswith("-optimizer")
    kind = [f for f in folder.parent.iterdir() if f.name.endswith("-optimizer") == optimizer and f.name[0] != "."]
    for old in sorted(kind, key=lambda f: f.stat().st_mtime)[:-_KEPT]:
        shutil.rmtree(old)


def student_of(session: Session, trained: StageResult | None) -> Student:
    """The sampler of an iteration. trained: the train stage of the iteration before, None for iteration 0."""
    if trained is None:
        return Student(session.model_digests["student"], resolve_model(session.config.student.path))
    made = trained.manifest.student()
    student = Student(made.version, None, made.export, made.optimizer)
    if trained.manifest.scoring is not None:
        return student
    # Version 0.1 named students by their tensors alone.
    return Student(model_digest(student.folder(session)), None, student.export, student.optimizer)
