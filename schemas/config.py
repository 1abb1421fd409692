"""The run's configuration: frozen models read from TOML, the only place where a default is written.

A field marked `operational` (worker counts, timeouts, paths) changes how a stage runs, never what it produces;
fingerprints leave it out. Unknown keys are refused with the nearest valid name.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from schemas.errors import ConfigError
from schemas.keys import check_run_id
from schemas.root import DataRoot

Precision = Literal["fp32", "bf16", "mxfp4"]


def operational(default: Any, **constraints: Any) -> Any:
    """A field that does not change what a stage produces."""
    return Field(default, json_schema_extra={"operational": True}, **constraints)


def location(description: str) -> Any:
    """A required path. What is found there enters fingerprints by its digest, the path itself does not."""
    return Field(min_length=1, description=description, json_schema_extra={"operational": True})


#: Normal numbers of fp32, which sampling, loss and optimizer compute in: below, kernels may take a number for 0.
FP32_SMALLEST, FP32_LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def is_positive_fp32(value: float) -> bool:
    return FP32_SMALLEST <= value <= FP32_LARGEST


def _positive_fp32(value: float) -> float:
    if not is_positive_fp32(value):
        raise ValueError(f"a number above 0 that fp32 holds, {FP32_SMALLEST:.3g} to {FP32_LARGEST:.3g}")
    return value


def _fp32(value: float) -> float:
    return value if value == 0 else _positive_fp32(value)


def _share(value: float) -> float:
    # What is nearer to 1 than fp32 can say becomes 1, and an average that never moves.
    if value > 1 - 2.0**-24:
        raise ValueError("a number below 1 in fp32")
    return _fp32(value)


def _temperature(value: float) -> float:
    # Logits of up to 1e8, divided by it or multiplied with its inverse, stay numbers of fp32.
    if not 1e-30 <= value <= 1e30:
        raise ValueError("a temperature from 1e-30 to 1e30, so that fp32 holds logits divided by it")
    return value


Positive = Annotated[float, AfterValidator(_positive_fp32)]
NotNegative = Annotated[float, AfterValidator(_fp32)]
Decay = Annotated[float, AfterValidator(_share)]
Temperature = Annotated[float, AfterValidator(_temperature)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    def content(self, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The values that change what is produced, JSON-ready, nested sections included.

        known: content of an older record. A setting that it lacks and that is at its default is left out, so that a
        version of the software that adds a setting does not change what older runs are. None: everything.
        """
        out: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("operational"):
                continue
            value = getattr(self, name)
            if known is not None and name not in known and value == field.get_default(call_default_factory=True):
                continue
            out[name] = _content(value, None if known is None else known.get(name))
        return out


def _content(value: Any, known: Any) -> Any:
    """known: None where everything counts as known."""
    if isinstance(value, Section):
        return value.content(known if isinstance(known, Mapping) else None)
    if isinstance(value, tuple):
        items = known if isinstance(known, list) else []
        return [_content(v, items[i] if i < len(items) else None) for i, v in enumerate(value)]
    return value


def compute_dtype(precision: Precision) -> Literal["fp32", "bf16"]:
    """dtype of the products of an inference forward over weights of this precision."""
    return "fp32" if precision == "fp32" else "bf16"


class Student(Section):
    path: str = location("Hugging Face model folder with tokenizer (safetensors)")
    precision: Precision = Field("bf16", description="values of the linear weights, in rollout and in training")


class Teacher(Section):
    id: str = Field(min_length=1, description="opaque; the order of ids gives teacher_index")
    path: str = location("Hugging Face model folder")
    weight: Positive = Field(1.0, gt=0, description="weight of this teacher's KL, never normalised")
    precision: Precision = Field("bf16", description="values of the linear weights")
    template: str = Field(
        "",
        description="Jinja template of an extra system message that only this teacher reads; sees the prompt's "
        "columns (answer, domain, context). Empty: the teacher reads what the student reads",
    )


class GymDataset(Section):
    name: str = Field(description="a data set of reasoning-gym")
    domain: str = Field("", description="defaults to the name")
    size: int = Field(gt=0)
    teachers: tuple[str, ...] = Field(min_length=1, description="teacher ids")
    suffix: str = Field("", description="appended to the question")
    params: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _domain(self):
        if not self.domain:
            object.__setattr__(self, "domain", self.name)
        return self


class PromptFile(Section):
    path: str = location("JSONL or Parquet file of prompts, told by .jsonl or .parquet")
    domain: str = Field("", description="of rows that name none; defaults to the file's name without its ending")
    teachers: tuple[str, ...] = Field((), description="teacher ids of rows that name none")
    verifier: str = Field("", description="of rows that name none: package.module:function; empty: no reward")

    @model_validator(mode="after")
    def _domain(self):
        if not self.domain:
            object.__setattr__(self, "domain", Path(self.path).stem)
        return self


class Prompts(Section):
    datasets: tuple[GymDataset, ...] = ()
    files: tuple[PromptFile, ...] = ()
    per_iteration: int = Field(24, gt=0)
    heldout: int = Field(8, ge=0, description="prompts set apart: sampled each iteration, never trained on")
    verifiers: tuple[str, ...] = operational(
        (), description="package.module:function that rows may name, beside those of prompts.files and shipped ones"
    )
    verifier_env: tuple[str, ...] = operational((), description="environment variables that verifiers see, by name")
    verifier_memory_bytes: int = operational(4 << 30, gt=0, description="address space of a verifier's process")
    verifier_network: bool = operational(False, description="let verifiers reach the network, a judge for example")
    verifier_timeout_seconds: float = operational(10.0, gt=0, description="a verifier call is killed after this time")
    max_verifier_failures: int = operational(
        0, ge=0, description="failed verifier calls that a rollout partition may have; their rewards are null"
    )

    @property
    def named_verifiers(self) -> frozenset[str]:
        """Verifiers of the user's that may be imported: rows name these or shipped ones, or are refused."""
        return frozenset(self.verifiers) | {file.verifier for file in self.files if file.verifier}

    @model_validator(mode="after")
    def _some(self):
        if not self.datasets and not self.files:
            raise ConfigError("prompts", expected="at least one of datasets and files", found="neither")
        return self


class Rollout(Section):
    samples_per_prompt: int = Field(2, gt=0)
    max_response_tokens: int = Field(64, gt=0)
    temperature: Temperature = Field(1.0, gt=0)
    top_k: int = Field(0, ge=0, description="0: no cut")
    top_p: Positive = Field(1.0, gt=0, le=1)
    prompts_per_partition: int = Field(8, gt=0)
    max_sequences: int = operational(32, gt=0, description="sequences in flight in one worker")
    page_tokens: int = Field(64, gt=0, description="tokens of a KV page, a power of two; a GPU wants 64 at least")
    kv_bytes: int = operational(1 << 30, gt=0, description="KV cache of one worker")
    workers: int = operational(1, gt=0)
    tensor_parallel: int = operational(
        1, gt=0, description="ranks that share one worker's model, each on a GPU of its own; they divide its KV heads"
    )
    threads: int = operational(0, ge=0, description="CPU threads of one worker; 0: cores divided by workers")
    seal_seconds: float = operational(
        2.0, gt=0, description="a segment is sealed and uploaded at this age at the latest"
    )
    grace_seconds: float = operational(
        20.0, gt=0, description="from SIGTERM to the end of a worker; KV is spilled as long as it lasts"
    )
    stuck_seconds: float = operational(
        600.0, gt=0, description="a worker whose oldest trajectory does not go on for so long is killed"
    )
    max_given_up: int = operational(
        0, ge=0, description="trajectories of an iteration that may be given up because they keep killing workers"
    )
    dead_after_seconds: float = operational(20.0, gt=0, description="a silent owner is taken for dead")
    max_attempts: int = operational(
        4, gt=0, description="starts of one partition in a row that bring no token before the stage fails"
    )

    @field_validator("page_tokens")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        # Attention cuts keys at powers of two, and a page must not straddle a cut.
        if value & (value - 1):
            raise ConfigError("rollout.page_tokens", expected="a power of two", found=str(value))
        return value


class Teach(Section):
    trajectories_per_partition: int = Field(64, gt=0)
    batch_tokens: int = operational(4096, gt=0, description="tokens of one forward pass")
    workers: int = operational(1, gt=0)
    threads: int = operational(0, ge=0)
    stuck_seconds: float = operational(
        1800.0, gt=0, description="a worker without a further trajectory for so long is killed; four times at its start"
    )
    dead_after_seconds: float = operational(20.0, gt=0)
    max_attempts: int = operational(3, gt=0)


class Dispatch(Section):
    mini_batch_trajectories: int = Field(16, gt=0, description="trajectories of one optimizer step")
    pack_tokens: int = Field(2048, gt=0, description="token budget of one pack")
    slots: int = Field(2, gt=0, description="virtual ranks; a run may use any number of ranks up to this")


class Train(Section):
    learning_rate: Positive = Field(2e-5, gt=0)
    beta1: Decay = Field(0.9, ge=0, lt=1)
    beta2: Decay = Field(0.95, ge=0, lt=1)
    weight_decay: NotNegative = Field(0.0, ge=0)
    gradient_clip: Positive = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)
    divergence: Literal["reverse", "forward"] = "reverse"
    temperature: Temperature = Field(1.0, gt=0)
    kl_precision: Literal["exact", "fp8_gradients", "fp8"] = Field(
        "exact", description="which products of the KL are FP8: fp8_gradients keeps the loss exact, fp8 does not"
    )
    compute: Literal["fp32", "bf16", "fp8"] = Field(
        "bf16", description="dtype of the linears' products; fp8, of an mxfp4 student, leaves all else in bf16"
    )
    zero_stage: Literal[1, 3] = operational(1)
    ranks: int = operational(1, gt=0)
    threads: int = operational(0, ge=0)
    chunk_bytes: int = operational(0, ge=0, description="logits of one chunk of the KL; 0: by kind of device")
    recompute_layers: bool = operational(
        True, description="keep only each layer's input and recompute the rest in backward: less memory, a third slower"
    )
    loader_bytes: int = operational(256 << 20, gt=0, description="shared memory of a node's loader")
    save_every_steps: int = operational(
        16, ge=0, description="steps between checkpoints in the middle of a plan; 0: none for their number"
    )
    save_every_seconds: float = operational(
        900.0, ge=0, description="such a checkpoint, too, at the end of a step so long after the last; 0: none for time"
    )
    grace_seconds: float = operational(
        60.0, gt=0, description="from SIGTERM to the end of the ranks; the last step's state is saved and uploaded"
    )
    stuck_seconds: float = operational(
        1800.0,
        gt=0,
        description="ranks without a further micro-batch for so long are killed; four times at their start",
    )
    dead_after_seconds: float = operational(60.0, gt=0)
    max_attempts: int = operational(
        3, gt=0, description="starts of the ranks in a row that come no further before the stage fails"
    )


class Spark(Section):
    cores: int = operational(2, gt=0)
    driver_memory: str = operational("2g", pattern=r"^[0-9]+[gm]$")
    shuffle_partitions: int = operational(4, gt=0)
    call_seconds: float = operational(
        3600.0, gt=0, description="one call of the Spark process; then it is killed, and the call tried once more"
    )
    jars: str = operational("jars", description="folder of the pinned Delta jars")


class Drill(Section):
    kill_rollout_worker_after_tokens: int = operational(
        0, ge=0, description="SIGKILL one rollout worker once it has acknowledged this many tokens; 0: never"
    )


class RunConfig(Section):
    """One run. Paths are relative to the working directory."""

    run_id: str
    seed: int = Field(0, ge=-(1 << 63), lt=1 << 63)
    iterations: int = operational(1, gt=0)
    data: str = operational(
        "data", min_length=1, description="root of objects and tables: folder or s3://BUCKET/PREFIX"
    )
    scratch: str = operational("scratch", min_length=1, description="local folder: logs, work files, model copies")
    store_patience_seconds: float = operational(
        300.0, gt=0, description="how long a call is tried again when the store of the data does not answer"
    )
    student: Student
    teachers: tuple[Teacher, ...] = Field(min_length=1)
    prompts: Prompts
    rollout: Rollout = Rollout.model_validate({})
    teach: Teach = Teach.model_validate({})
    dispatch: Dispatch = Dispatch.model_validate({})
    train: Train = Train.model_validate({})
    spark: Spark = Spark.model_validate({})
    drill: Drill = Drill.model_validate({})

    @field_validator("data")
    @classmethod
    def _normal_root(cls, value: str) -> str:
        return str(DataRoot.parse(value))

    @model_validator(mode="after")
    def _check(self):
        check_run_id(self.run_id)
        ids = [t.id for t in self.teachers]
        repeated = sorted({i for i in ids if ids.count(i) > 1})
        if repeated:
            raise ConfigError("teachers", expected="each id once", found=f"{repeated[0]!r} again")
        if self.train.compute == "fp8" and self.student.precision != "mxfp4":
            # FP8 would round other weights, and the trainer would no longer see the sampler's.
            raise ConfigError(
                "train.compute", expected='"fp32" or "bf16", or student.precision = "mxfp4", whose values FP8 holds',
                found=f"'fp8' with student.precision = {self.student.precision!r}",
            )  # fmt: skip
        if self.train.ranks > self.dispatch.slots:
            # The others would have no pack, ever. Slots are part of the plan, ranks are not: so nothing is derived.
            raise ConfigError(
                "train.ranks", expected=f"at most {self.dispatch.slots}, the number of dispatch.slots",
                found=str(self.train.ranks), next_command=f"dispatch.slots = {self.train.ranks}, or fewer ranks",
            )  # fmt: skip
        if self.rollout.max_response_tokens >= self.dispatch.pack_tokens:
            raise ConfigError(
                "dispatch.pack_tokens",
                expected=f"more than rollout.max_response_tokens = {self.rollout.max_response_tokens}: a pack holds "
                "whole trajectories",
                found=str(self.dispatch.pack_tokens),
            )  # fmt: skip
        named = [(f"prompts.datasets, {d.name}, teachers", d.teachers) for d in self.prompts.datasets]
        named += [(f"prompts.files, {f.path}, teachers", f.teachers) for f in self.prompts.files]
        for where, teachers in named:
            for teacher_id in teachers:
                if teacher_id not in ids:
                    raise ConfigError(
                        where, expected=f"one of {sorted(ids)}", found=repr(teacher_id) + nearest(teacher_id, ids)
                    )
        return self

    @property
    def teacher_ids(self) -> tuple[str, ...]:
        """teacher_index -> teacher_id."""
        return tuple(sorted(t.id for t in self.teachers))

    def teacher(self, teacher_index: int) -> Teacher:
        return next(t for t in self.teachers if t.id == self.teacher_ids[teacher_index])


def nearest(word: str, words: Sequence[str]) -> str:
    """A hint to append to what was found, empty when no word is near."""
    near = difflib.get_close_matches(word, words, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _fields_at(path: tuple[int | str, ...]) -> list[str]:
    """Valid names beside the key at `path`."""
    model: Any = RunConfig
    for part in path[:-1]:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        arguments = [a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, Section)]
        model = arguments[0] if arguments else annotation
    return list(model.model_fields)


def _explain(error: ValidationError, source: str) -> ConfigError:
    first = error.errors(include_url=False)[0]
    path = tuple(first["loc"])
    where = f"{source}, {'.'.join(str(p) for p in path)}"
    if first["type"] == "extra_forbidden":
        names = _fields_at(path)
        return ConfigError(
            where, expected=f"one of {', '.join(names)}", found=repr(path[-1]) + nearest(str(path[-1]), names)
        )
    if first["type"] == "missing":
        return ConfigError(where, expected="a value", found="nothing")
    return ConfigError(where, expected=first["msg"].removeprefix("Value error, "), found=repr(first["input"])[:200])


def parse(values: dict[str, Any], source: str = "config") -> RunConfig:
    """Checked configuration. Raises ConfigError that names the setting and the nearest valid name."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _explain(error, source) from error


def _override(values: dict[str, Any], setting: str) -> None:
    name, separator, text = setting.partition("=")
    if not separator or not name.strip():
        example = "SECTION.KEY=VALUE, for example train.learning_rate=1e-5"
        raise ConfigError(f"--set {setting}", expected=example, found="no name before a =")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string: --set run_id=tonight
    *sections, key = name.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {setting}", expected="a path through sections", found=f"{section!r} is a value")
    values[key] = value


def load(path: str | Path, overrides: Annotated[list[str], "SECTION.KEY=VALUE"] | None = None) -> RunConfig:
    """Read a TOML file, apply `--set` overrides, check. Raises ConfigError."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(str(path), expected="a TOML file", found="no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), expected="a readable TOML file in UTF-8", found=str(error)) from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), expected="TOML", found=str(error)) from error
    for setting in overrides or []:
        _override(values, setting)
    return parse(values, str(path))
