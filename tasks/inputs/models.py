"""Model folders before anything runs: where they are, and whether student and teachers fit together.

Reads headers and JSON only: no torch, and no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ml.model_config import ModelConfig
from ml.model_files import CONFIG, FP8_ROWS, ModelDigests, linear_shapes, model_digest, model_digests, read_config
from ml.teacher_facts import TeacherFacts
from ml.train.batches import largest_frame_bytes
from schemas.config import RunConfig
from schemas.errors import ConfigError, ContractError, FormatError
from schemas.work.model import HeadSource
from tasks.inputs.text import Tokenizer
from tasks.teachers import kinds
from tasks.teachers.kinds import AnyTeacher
from tasks.teachers.opd import head_source

__all__ = [
    "ModelDigests", "check_models", "context_tokens", "model_digest", "model_digests", "resolve_model",
    "teacher_checks", "teacher_facts",
]  # fmt: skip


def resolve_model(path: str | Path) -> Path:
    """Absolute path of a model folder. Raises ConfigError when it is not one."""
    folder = Path(path).expanduser().absolute()
    if not (folder / CONFIG).is_file():
        found = "a folder without config.json" if folder.is_dir() else "no such folder"
        raise ConfigError(f"model {path}", expected="a Hugging Face model folder (safetensors)", found=found)
    return folder


def context_tokens(folder: Path) -> int:
    """How many positions the student knows. Raises FormatError for a config.json that does not say."""
    value = read_config(folder).get("max_position_embeddings")
    if not isinstance(value, int) or value < 1:
        raise FormatError(f"{folder / CONFIG}, max_position_embeddings", expected="a count", found=repr(value))
    return value


def teacher_facts(teacher: AnyTeacher) -> TeacherFacts:
    """Raises as the kind's `facts` does, and ConfigError for a path that is no model folder."""
    return kinds.of(teacher.kind).facts(resolve_model(teacher.path))


def teacher_checks(student: Path, teachers: Iterable[AnyTeacher]) -> int:
    """Checks that every teacher can teach the student; gives V, the shared vocabulary size.

    V is the size of the student's tokenizer. Raises ContractError naming both sides when a tokenizer differs or a
    head has fewer rows than V, FormatError when a head's shape is not what its own config.json says, and as
    `teacher_facts` does.
    """
    tokenizer = Tokenizer.load(student)
    _check_rows_of_head(head_source(student), tokenizer.vocab_size)
    for teacher in sorted(teachers, key=lambda teacher: teacher.id):
        folder = resolve_model(teacher.path)
        other = Tokenizer.load(folder)
        if other.fingerprint != tokenizer.fingerprint:
            raise ContractError(
                f"teacher {teacher.id}, tokenizer of {folder}",
                expected=f"the student's ({student}): {tokenizer.vocab_size} tokens, {tokenizer.fingerprint[:16]}",
                found=f"{other.vocab_size} tokens, {other.fingerprint[:16]}",
                safe="nothing was sampled",
            )
        _check_rows_of_head(teacher_facts(teacher).head, tokenizer.vocab_size)
    return tokenizer.vocab_size


def check_models(student: Path, config: RunConfig) -> None:
    """Refuses, before anything is sampled, what the shapes of the models say that a later stage could not do.

    Raises ConfigError, naming the setting: an architecture or a setting of config.json that is not supported; linears
    that cannot have the values that they are asked for, or that FP8 cannot multiply where training or the KL asks for
    it; a student that is stored in MXFP4, since training needs float masters; responses that fit no context;
    tensor-parallel ranks that cannot share the student; a loader without room for full packs.
    """
    shape = read_model_config(student)
    _check_student(student, config)
    facts = {f"teachers, {t.id}": teacher_facts(t) for t in config.teachers}
    for teacher in config.teachers:
        where = f"teachers, {teacher.id}, precision"
        kinds.of(teacher.kind).refuse(resolve_model(teacher.path), teacher.precision, where)
    limits = {"student": (shape.max_positions, shape.width)}
    limits |= {where: (found.context_tokens, found.stored_width) for where, found in facts.items()}
    for where, (positions, width) in limits.items():
        if config.rollout.max_response_tokens >= positions:
            raise ConfigError(
                "rollout.max_response_tokens", expected=f"less than {positions} positions of {where}",
                found=str(config.rollout.max_response_tokens),
            )  # fmt: skip
        if config.train.objective.fp8_products and width % FP8_ROWS:
            raise ConfigError(
                "train.objective.precision", expected=f"models whose width is a multiple of {FP8_ROWS}, for FP8",
                found=f"width {width} of {where}", next_command='train.objective.precision = "exact"',
            )  # fmt: skip
    for where, found in facts.items():
        if config.train.objective.fp8_logits and found.head.bias is not None:
            # Its bias lies in three columns, of which FP8 would keep three bits each.
            raise ConfigError(
                "train.objective.precision", expected='"exact" or "fp8_gradients" with a teacher whose head has a bias',
                found=f"'fp8' with {where}", next_command='train.objective.precision = "fp8_gradients"',
            )  # fmt: skip
    _check_tensor_parallel(shape, config.rollout.tensor_parallel)
    _check_loader(config, {where: found.stored_width for where, found in facts.items()})


def read_model_config(folder: Path) -> ModelConfig:
    """Shape of the model in a folder. Raises as `ModelConfig.from_hf`."""
    return ModelConfig.from_hf(read_config(folder), str(folder / CONFIG))


def _check_student(student: Path, config: RunConfig) -> None:
    if "quantization_config" in read_config(student):
        raise ConfigError(
            f"student.path {student}", expected="float weights to train on", found="MXFP4 weights",
            next_command="use the folder that it was made from",
        )  # fmt: skip
    kinds.of("opd").refuse(student, config.student.precision, "student, precision")
    if config.train.compute == "fp8":
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
    where, width = max(teacher_widths.items(), key=lambda item: item[1], default=("no teacher", 0))
    behaviour = "behaviour_logprobs" in config.train.objective.needs
    frame_bytes = largest_frame_bytes(config.dispatch.pack_tokens, width, len(teacher_widths), behaviour=behaviour)
    needed = (config.train.ranks + 1) * frame_bytes
    if config.train.loader_bytes < needed:
        raise ConfigError(
            "train.loader_bytes",
            expected=f"at least {needed} bytes: {config.train.ranks + 1} packs of {config.dispatch.pack_tokens} tokens "
            f"of width {width} ({where})",
            found=str(config.train.loader_bytes), next_command="raise train.loader_bytes",
        )  # fmt: skip


def _check_rows(folder: Path, where: str) -> None:
    for name, (rows, _) in linear_shapes(folder):
        if rows % FP8_ROWS:
            raise ConfigError(
                where, expected=f"a multiple of {FP8_ROWS} rows in every linear, for products in FP8",
                found=f"{rows} in {name} of {folder}", next_command='train.compute = "bf16"',
            )  # fmt: skip


def _check_rows_of_head(head: HeadSource, vocab_size: int) -> None:
    if head.rows < vocab_size:
        raise ContractError(
            f"{head.folder}, tensor {head.weight}", expected=f"a row for each of {vocab_size} tokens",
            found=f"{head.rows}",
        )  # fmt: skip
