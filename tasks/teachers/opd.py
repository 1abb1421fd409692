"""Teachers of kind "opd": this project's own transformer, with weights in fp32, bf16 or MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ml.model_config import ModelConfig
from ml.model_files import (
    CONFIG,
    MXFP4_COLUMNS,
    ModelDigests,
    head_name,
    linear_shapes,
    model_digests,
    read_config,
    stored_tensors,
)
from ml.teacher_facts import TeacherFacts
from schemas.errors import ConfigError, FormatError
from schemas.work.model import HeadSource, ModelSource

if TYPE_CHECKING:
    import torch

    from ml.teacher import OwnTeacher


class OpdKind:
    """See `tasks.teachers.kinds.Kind`."""

    proved_by_loading = False

    def facts(self, folder: Path) -> TeacherFacts:
        """By config.json and headers. Raises as `ModelConfig.from_hf` and `head_source` do."""
        config = ModelConfig.from_hf(read_config(folder), str(folder / CONFIG))
        return TeacherFacts(head_source(folder), config.vocab_rows, config.max_positions)

    def digests(self, folder: Path) -> ModelDigests:
        return model_digests(folder)

    def refuse(self, folder: Path, precision: str, where: str) -> None:
        """MXFP4 wants whole blocks of columns, and a folder that is stored in it has no other values."""
        packed = "quantization_config" in read_config(folder)
        if packed and precision != "mxfp4":
            raise ConfigError(where, expected=f'"mxfp4", as {folder} is stored', found=repr(precision))
        if packed or precision != "mxfp4":
            return
        for name, (_, columns) in linear_shapes(folder):
            if columns % MXFP4_COLUMNS:
                raise ConfigError(
                    where, expected=f"a multiple of {MXFP4_COLUMNS} columns in every linear, for MXFP4",
                    found=f"{columns} in {name} of {folder}", next_command='precision = "bf16"',
                )  # fmt: skip

    def load(self, model: ModelSource, device: torch.device) -> OwnTeacher:
        """Raises as `ml.checkpoint.load_model` does."""
        from ml.checkpoint import load_model
        from ml.teacher import OwnTeacher

        folder = Path(model.folder)
        loaded = load_model(
            folder, precision=model.precision, compute=model.compute, device=device, digest=model.digest
        )
        return OwnTeacher(self.facts(folder), loaded)


def head_source(folder: Path) -> HeadSource:
    """Of a supported architecture. Raises FormatError for a head that is missing or not as its config.json says."""
    config = read_config(folder)
    name = head_name(config)
    tensor = stored_tensors(folder).get(name)
    if tensor is None:
        raise FormatError(f"{folder}, tensor {name}", expected="a head", found="no such tensor")
    own = (config.get("vocab_size"), config.get("hidden_size"))
    if tensor.spec.shape != own:
        raise FormatError(
            f"{tensor.path}, tensor {name}", expected=f"{own}, as config.json says", found=f"{tensor.spec.shape}"
        )
    rows, width = tensor.spec.shape
    return HeadSource(str(folder), name, rows, width)
