"""Kinds of teachers: what the stages ask of one, and the list of them by the `kind` of `[[teachers]]`.

    config.kind -> of(kind).facts(folder), .digests(folder), .refuse(...)     headers and settings, in the driver
                -> of(kind).load(model, device)                               in a rank

No kind is known by name anywhere else but in schemas.config_teachers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ml.model_files import ModelDigests
from ml.teacher_facts import TeacherFacts
from schemas.config_teachers import OpdTeacher, TransformersTeacher
from schemas.errors import ContractError
from schemas.work.model import ModelSource
from tasks.teachers.opd import OpdKind
from tasks.teachers.transformers import TransformersKind

if TYPE_CHECKING:
    import torch

    from ml.teacher import Teacher

AnyTeacher = OpdTeacher | TransformersTeacher


class Kind(Protocol):
    """Importing one needs no torch."""

    #: Must a teacher of this kind be loaded once before anything is sampled, since settings alone do not say enough?
    proved_by_loading: bool

    def facts(self, folder: Path) -> TeacherFacts:
        """What the folder's settings and headers say. Raises ConfigError and FormatError for what cannot teach."""
        ...

    def digests(self, folder: Path) -> ModelDigests:
        """Of all that changes what the model computes or reads, and of its head as `HeadSource` has it."""
        ...

    def refuse(self, folder: Path, precision: str, where: str) -> None:
        """Raises ConfigError, naming `where`, for a precision that this folder's weights cannot have."""
        ...

    def load(self, model: ModelSource, device: torch.device) -> Teacher:
        """The teacher on the device, its digest checked. Raises ContractError for another one, and as `facts`."""
        ...


KINDS: dict[str, Kind] = {"opd": OpdKind(), "transformers": TransformersKind()}


def of(kind: str) -> Kind:
    """Raises ContractError for a kind that this version does not have."""
    if kind not in KINDS:
        raise ContractError("kind of a teacher", expected=f"one of {', '.join(KINDS)}", found=repr(kind))
    return KINDS[kind]
