"""Model folders before anything runs: where they are, and whether student and teachers fit together.

Reads headers and JSON only: no torch, and no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ml.model_config import ModelConfig
from ml.model_files import (
    CONFIG,
    FP8_ROWS,
    MXFP4_COLUMNS,
    ModelDigests,
    head_name,
    model_digest,
    model_digests,
    read_config,
    stored_tensors,
)
from ml.train.batches import largest_frame_bytes
from schemas.config import RunConfig
from schemas.errors import ConfigError, ContractError, FormatError
from tasks.inputs.text import Tokenizer

__all__ = [
    "ModelDigests", "check_models", "context_tokens", "model_digest", "model_digests", "resolve_model",
    "teacher_checks",
]  # fmt: skip


def resolve_model(path: str | Path) -> Path:
    """Absolute path of a model folder. Raises ConfigError when it is not one."""
    folder = Path(path).expanduser().absolute()
    if not (folder / CONFIG).is_file():
        found = "a folder without config.json" if folder.is_dir() else "no such folder"
        raise ConfigError(f"model {path}", expected="a Hugging Face model folder (safetensors)", found=found)
    return folder


def context_tokens(folder: Path) -> int:
    """How many positions a model knows. Raises FormatError for a config.json that does not say."""
    value = read_config(folder).get("max_position_embeddings")
    if not isinstance(value, int) or value < 1:
        raise FormatError(f"{folder / CONFIG}, max_position_embeddings", expected="a count", found=repr(value))
    return value


def teacher_checks(student: Path, teachers: Mapping[str, Path]) -> int:
    """Checks that every teacher (id -> folder) can teach the student; gives V, the shared vocabulary size.

    V is the size of the student's tokenizer. Raises ContractError naming both sides when a tokenizer differs or a
    head has fewer rows than V, FormatError when a head's shape is not what its own config.json says.
    """
    tokenizer = Tokenizer.load(student)
    _check_head(student, tokenizer.vocab_size)
    for teacher_id, folder in sorted(teachers.items()):
        other = Tokenizer.load(folder)
        if other.fingerprint != tokenizer.fingerprint:
            raise ContractError(
                f"teacher {teacher_id}, tokenizer of {folder}",
                expected=f"the student's ({student}): {tokenizer.vocab_size} tokens, {tokenizer.fingerprint[:16]}",
                found=f"{other.vocab_size} tokens, {other.fingerprint[:16]}",
                safe="nothing was sampled",
            )
        _check_head(folder, tokenizer.vocab_size)
    return tokenizer.vocab_size


def check_models(student: Path, config: RunConfig) -> None:
    """Refuses, before anything is sampled, what the shapes of the models say that a later stage could not do.

    Raises ConfigError, naming the setting: an architecture or a setting of config.json that is not supported; linears
    that cannot have the values that they are asked for, or that FP8 cannot multiply where training or the KL asks for
    it; a student that is stored in MXFP4, since training needs float masters; responses that fit no context;
    tensor-parallel ranks that cannot share the student; a loader without room for full packs.
    """
    models = {"student": (student, config.student.precision)}
    models |= {f"teachers, {t.id}": (resolve_model(t.path), t.precision) for t in config.teachers}
    shapes = {where: read_model_config(folder) for where, (folder, _) in models.items()}
    _check_precisions(models, config.train.compute)
    for where, shape in shapes.items():
        if config.rollout.max_response_tokens >= shape.max_positions:
            raise ConfigError(
                "rollout.max_response_tokens", expected=f"less than {shape.max_positions} positions of {where}",
                found=str(config.rollout.max_response_tokens),
            )  # fmt: skip
        if config.train.kl_precision != "exact" and shape.width % FP8_ROWS:
            raise ConfigError(
                "train.kl_precision", expected=f"models whose width is a multiple of {FP8_ROWS}, for products in FP8",
                found=f"width {shape.width} of {where}", next_command='train.kl_precision = "exact"',
            )  # fmt: skip
    _check_tensor_parallel(shapes["student"], config.rollout.tensor_parallel)
    _check_loader(config, {where: shape.width for where, shape in shapes.items() if where != "student"})


def read_model_config(folder: Path) -> ModelConfig:
    """Shape of the model in a folder. Raises as `ModelConfig.from_hf`."""
    return ModelConfig.from_hf(read_config(folder), str(folder / CONFIG))


def _check_precisions(models: Mapping[str, tuple[Path, str]], train_compute: str) -> None:
    student = models["student"][0]
    if "quantization_config" in read_config(student):
        raise ConfigError(
            f"student.path {student}", expected="float weights to train on", found="MXFP4 weights",
            next_command="use the folder that it was made from",
        )  # fmt: skip
    for where, (folder, precision) in models.items():
        packed = "quantization_config" in read_config(folder)
        if packed and precision != "mxfp4":
            raise ConfigError(f"{where}, precision", expected=f'"mxfp4", as {folder} is stored', found=repr(precision))
        if precision == "mxfp4" and not packed:
            _check_columns(folder, f"{where}, precision")
    if train_compute == "fp8":
        _check_rows(student, "train.compute")


def _check_tensor_parallel(shape: ModelConfig, ranks: int) -> None:
    parts = {"KV heads": shape.kv_heads, "channels": shape.width, "feed-forward channels": shape.feed_forward}
    for name, count in parts.items():
        if count % ranks:
            raise ConfigError(
                "rollout.tensor_parallel", expected=f"a number of ranks that divides the student's {count} {name}",
                found=str(ranks),
            )  # fmt: skip


def _check_loader(config: RunConfig, teacher_widths: Mapping[str, int]) -> None:
    """Room in shared memory for a wave of full packs and one pack more, all response, of the widest teacher."""
    where, width = max(teacher_widths.items(), key=lambda item: item[1])
    needed = (config.train.ranks + 1) * largest_frame_bytes(config.dispatch.pack_tokens, width, len(teacher_widths))
    if config.train.loader_bytes < needed:
        raise ConfigError(
            "train.loader_bytes",
            expected=f"at least {needed} bytes: {config.train.ranks + 1} packs of {config.dispatch.pack_tokens} tokens "
            f"of width {width} ({where})",
            found=str(config.train.loader_bytes), next_command="raise train.loader_bytes",
        )  # fmt: skip


def _check_columns(folder: Path, where: str) -> None:
    for name, (_, columns) in _linears(folder):
        if columns % MXFP4_COLUMNS:
            raise ConfigError(
                where, expected=f"a multiple of {MXFP4_COLUMNS} columns in every linear, for MXFP4",
                found=f"{columns} in {name} of {folder}", next_command='precision = "bf16"',
            )  # fmt: skip


def _check_rows(folder: Path, where: str) -> None:
    for name, (rows, _) in _linears(folder):
        if rows % FP8_ROWS:
            raise ConfigError(
                where, expected=f"a multiple of {FP8_ROWS} rows in every linear, for products in FP8",
                found=f"{rows} in {name} of {folder}", next_command='train.compute = "bf16"',
            )  # fmt: skip


def _linears(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Weight name and [rows, columns] of each linear, by headers."""
    for name, tensor in stored_tensors(folder).items():
        if name.startswith("model.layers.") and len(tensor.spec.shape) == 2:
            yield name, tensor.spec.shape


def _check_head(folder: Path, vocab_size: int) -> None:
    config = read_config(folder)
    name = head_name(config)
    tensor = stored_tensors(folder).get(name)
    if tensor is None:
        raise FormatError(f"{folder}, tensor {name}", expected="a head", found="no such tensor")
    shape, where = tensor.spec.shape, f"{tensor.path}, tensor {name}"
    own = (config.get("vocab_size"), config.get("hidden_size"))
    if shape != own:
        raise FormatError(where, expected=f"{own}, as config.json says", found=f"{shape}")
    if shape[0] < vocab_size:
        raise ContractError(where, expected=f"a row for each of {vocab_size} tokens", found=f"{shape[0]}")
