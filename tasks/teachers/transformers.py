"""Teachers of kind "transformers": any causal language model that transformers loads from a local folder.

They keep their own dtype, bf16 or fp32: their linears are not ours, so there is no MXFP4 here. A folder's own code is
never run, and nothing is fetched. What the model does between its output embedding and its logits must be nothing, a
bias, or a factor that is a power of two; all else is refused, by its setting where it has one, and in any case when the
model is loaded (tasks.teachers.transformers_model compares with the model's own logits).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml.model_files import (
    CONFIG,
    ModelDigests,
    StoredTensor,
    companions_of,
    digest_of_parts,
    read_config,
    stored_tensors,
    tensor_digests,
    weights_of,
)
from ml.teacher_facts import TeacherFacts, is_power_of_two
from schemas.errors import ConfigError, FormatError
from schemas.keys import canonical_json, digest
from schemas.work.model import HeadSource, ModelSource

if TYPE_CHECKING:
    import torch

    from tasks.teachers.transformers_model import TransformersTeacher

#: transformers would load another model than the folder's own weights.
_ADAPTER = "adapter_config.json"


class TransformersKind:
    """See `tasks.teachers.kinds.Kind`."""

    proved_by_loading = True

    def facts(self, folder: Path) -> TeacherFacts:
        """By config.json, headers and a model without weights.

        Raises ConfigError for a model that transformers does not know, an adapter, quantised weights, pickles, no
        stated context length, and logits that the loss could not rebuild, naming the setting; FormatError for a head
        that is missing or of another shape.
        """
        _refuse_folder(folder)
        tensors = stored_tensors(folder)
        from tasks.teachers.transformers_model import outline

        where = str(folder / CONFIG)
        found = outline(folder, canonical_json(read_config(folder)).decode())
        scale = _scale(found.settings, where)
        weight = _stored_name(tensors, found.weight_names, found.prefix, folder)
        bias = _stored_name(tensors, found.bias_names, found.prefix, folder) if found.bias_names else None
        for name, shape in ((weight, (found.rows, found.width)), (bias, (found.rows,))):
            if name is not None and tensors[name].spec.shape != shape:
                raise FormatError(
                    f"{tensors[name].path}, tensor {name}", expected=f"{shape}, as config.json says",
                    found=f"{tensors[name].spec.shape}",
                )  # fmt: skip
        head = HeadSource(str(folder), weight, found.rows, found.width, bias, scale)
        return TeacherFacts(head, found.input_rows, _context_tokens(found.settings, where))

    def digests(self, folder: Path) -> ModelDigests:
        """Settings: the whole of config.json, and the version of transformers, whose code the model is."""
        head, hashes = self.facts(folder).head, tensor_digests(folder)
        parts = {
            "kind": "transformers",
            "transformers": importlib.metadata.version("transformers"),
            CONFIG: read_config(folder),
            **companions_of(folder),
        }
        of_head = hashes[head.weight]
        if head.bias is not None:
            of_head = digest([of_head, hashes[head.bias]])
        return ModelDigests(weights_of(hashes), digest_of_parts(folder, parts), of_head)

    def refuse(self, folder: Path, precision: str, where: str) -> None:
        """Any folder of floats has bf16 and fp32 values; the configuration refuses others."""

    def load(self, model: ModelSource, device: torch.device) -> TransformersTeacher:
        """Loaded, proved against its own logits, and of the digest. Raises as `transformers_model.load` does."""
        from tasks.teachers.transformers_model import load

        folder = Path(model.folder)
        return load(folder, self.facts(folder), model, device, lambda: self.digests(folder).model)


def _refuse_folder(folder: Path) -> None:
    config = read_config(folder)
    if (folder / _ADAPTER).exists():
        raise ConfigError(
            str(folder), expected="a whole model", found=_ADAPTER,
            next_command="merge the adapter into its model and save that",
        )  # fmt: skip
    if config.get("quantization_config") is not None:
        raise ConfigError(
            f"{folder / CONFIG}, quantization_config", expected="float weights",
            found=repr(config["quantization_config"])[:200],
            next_command='the folder that it was made from, or kind = "opd" for one of opd teachers pack',
        )  # fmt: skip


def _stored_name(tensors: Mapping[str, StoredTensor], names: tuple[str, ...], prefix: str, folder: Path) -> str:
    """The first of the names that the folder holds; files written by a model's body alone lack its prefix."""
    for name in (*names, *(n.removeprefix(f"{prefix}.") for n in names if prefix)):
        if name in tensors:
            return name
    raise FormatError(str(folder), expected=f"the output embedding as one of {', '.join(names)}", found="none of them")


def _scale(settings: Mapping[str, Any], where: str) -> float:
    """Factor of the logits, as families name it."""
    cap = settings.get("final_logit_softcapping")
    if cap:
        raise ConfigError(
            f"{where}, final_logit_softcapping", expected="none: the loss rebuilds a teacher's logits without a cap",
            found=repr(cap), next_command="a teacher without it, until kernels.linear_kl takes a teacher's cap",
        )  # fmt: skip
    scale = 1.0
    for name, power in (("logit_scale", 1), ("logits_scaling", -1)):
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or not value > 0 or not is_power_of_two(float(value)):
            raise ConfigError(
                f"{where}, {name}", expected="a power of two, which a bf16 head takes in without rounding",
                found=repr(value), next_command="a teacher without it, until kernels.linear_kl takes a teacher's scale",
            )  # fmt: skip
        scale *= float(value) ** power
    return scale


def _context_tokens(settings: Mapping[str, Any], where: str) -> int:
    for name in ("max_position_embeddings", "max_seq_len"):
        value = settings.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ConfigError(
        f"{where}, max_position_embeddings", expected="how many positions the model knows", found="nothing",
        next_command="write it into config.json: the longest sequence that the model was trained on",
    )  # fmt: skip
