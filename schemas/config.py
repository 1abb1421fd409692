"""The run's configuration: frozen models read from TOML, the only place where a default is written.

Every field has a description, and `docs/settings.md` is made from them (`schemas/reference.py`). A field marked
`operational` (worker counts, timeouts, paths) changes how a stage runs, never what it produces; fingerprints leave it
out. Unknown keys are refused with the nearest valid name.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from schemas import objectives
from schemas.config_teachers import TEACHER_KINDS, AnyTeacher, OpdTeacher, TransformersTeacher
from schemas.errors import ConfigError
from schemas.keys import check_run_id
from schemas.objectives import KLObjective, Objective
from schemas.root import DataRoot
from schemas.section import Decay, NotNegative, Positive, Section, Temperature, location, operational
from schemas.work.model import WeightPrecision


def compute_dtype(precision: WeightPrecision) -> Literal["fp32", "bf16"]:
    """dtype of the products of an inference forward over weights of this precision."""
    return "fp32" if precision == "fp32" else "bf16"


class Student(Section):
    """The model that is trained, and that samples."""

    path: str = location("Hugging Face model folder with tokenizer (safetensors)")
    precision: WeightPrecision = Field("bf16", description="values of the linear weights, in rollout and in training")


class GymDataset(Section):
    """Prompts that a generator of reasoning-gym makes; each row gets its verifier."""

    name: str = Field(description="a data set of reasoning-gym")
    domain: str = Field("", description="domain of the rows in tables and reports; empty: the name of the data set")
    size: int = Field(gt=0, description="entries to generate; equal ones count once")
    teachers: tuple[str, ...] = Field((), description="ids of the teachers that teach these prompts")
    suffix: str = Field("", description="text appended to each question")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of the generator")

    @model_validator(mode="after")
    def _domain(self):
        if not self.domain:
            object.__setattr__(self, "domain", self.name)
        return self


class PromptFile(Section):
    """A file of prompts. A setting here fills in what a row leaves out."""

    path: str = location("JSONL or Parquet file of prompts, told by .jsonl or .parquet")
    domain: str = Field("", description="domain of rows that name none; empty: the file's name without its ending")
    teachers: tuple[str, ...] = Field((), description="ids of the teachers of rows that name none")
    verifier: str = Field("", description="verifier of rows that name none, package.module:function; empty: no reward")

    @model_validator(mode="after")
    def _domain(self):
        if not self.domain:
            object.__setattr__(self, "domain", Path(self.path).stem)
        return self


class Prompts(Section):
    """Where prompts come from, how many an iteration takes, and how rewards are computed."""

    datasets: tuple[GymDataset, ...] = Field((), description="generated prompts")
    files: tuple[PromptFile, ...] = Field((), description="prompts of your own")
    per_iteration: int = Field(24, gt=0, description="training prompts that one iteration takes")
    heldout: int = Field(8, ge=0, description="prompts set apart: sampled each iteration, never trained on")
    verifiers: tuple[str, ...] = operational(
        (), description="package.module:function that rows may name, beside those of prompts.files and shipped ones"
    )
    verifier_env: tuple[str, ...] = operational((), description="environment variables that verifiers see, by name")
    verifier_memory_bytes: int = operational(
        4 << 30, gt=0, description="address space of a verifier's process, in bytes"
    )
    verifier_network: bool = operational(False, description="let verifiers reach the network, a judge for example")
    verifier_timeout_seconds: float = operational(
        10.0, gt=0, description="a call of a verifier is killed after this time, in seconds"
    )
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
    """How the student samples, and how the work is shared among rollout workers."""

    samples_per_prompt: int = Field(2, gt=0, description="trajectories of one prompt")
    max_response_tokens: int = Field(64, gt=0, description="a response ends here at the latest, in tokens")
    temperature: Temperature = Field(1.0, gt=0, description="logits are divided by it before sampling, 1e-30 to 1e30")
    top_k: int = Field(0, ge=0, description="sample among this many likeliest tokens only; 0: no cut")
    top_p: Positive = Field(
        1.0, gt=0, le=1, description="sample among the likeliest tokens that reach this probability together; 1: no cut"
    )
    prompts_per_partition: int = Field(8, gt=0, description="prompts of one partition, the unit of work of a worker")
    max_sequences: int = operational(32, gt=0, description="sequences that one worker samples at once")
    page_tokens: int = Field(64, gt=0, description="tokens of a KV page, a power of two; a GPU wants 64 at least")
    kv_bytes: int = operational(1 << 30, gt=0, description="KV cache of one worker, in bytes")
    workers: int = operational(1, gt=0, description="rollout workers, processes of their own")
    tensor_parallel: int = operational(
        1, gt=0, description="ranks that share one worker's model, each on a GPU of its own; they divide its KV heads"
    )
    threads: int = operational(0, ge=0, description="CPU threads of one worker; 0: cores divided by workers")
    seal_seconds: float = operational(
        2.0, gt=0, description="a segment of the token log is sealed and uploaded at this age at the latest, in seconds"
    )
    grace_seconds: float = operational(
        20.0,
        gt=0,
        description="time from SIGTERM to the end of a worker, in seconds; KV is spilled as long as it lasts",
    )
    stuck_seconds: float = operational(
        600.0,
        gt=0,
        description="a worker whose oldest trajectory makes no progress for this long is killed, in seconds",
    )
    max_given_up: int = operational(
        0, ge=0, description="trajectories of an iteration that may be given up because they keep killing workers"
    )
    dead_after_seconds: float = operational(
        20.0, gt=0, description="an owner of a partition that is silent for this long is taken for dead, in seconds"
    )
    max_attempts: int = operational(
        4, gt=0, description="starts of one partition in a row without a new token, after which the stage fails"
    )

    @field_validator("page_tokens")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        # Attention cuts keys at powers of two, and a page must not straddle a cut.
        if value & (value - 1):
            raise ConfigError("rollout.page_tokens", expected="a power of two", found=str(value))
        return value


class Teach(Section):
    """How teachers read trajectories."""

    trajectories_per_partition: int = Field(64, gt=0, description="trajectories of one teacher in one partition")
    batch_tokens: int = operational(4096, gt=0, description="tokens of one forward pass")
    workers: int = operational(1, gt=0, description="teacher workers, processes of their own")
    threads: int = operational(0, ge=0, description="CPU threads of one worker; 0: cores divided by workers")
    stuck_seconds: float = operational(
        1800.0,
        gt=0,
        description="a worker that finishes no trajectory for this long is killed, in seconds; it has four times as "
        "long for its first one",
    )
    dead_after_seconds: float = operational(
        20.0, gt=0, description="an owner of a partition that is silent for this long is taken for dead, in seconds"
    )
    max_attempts: int = operational(
        3,
        gt=0,
        description="starts of one partition in a row without a further trajectory, after which the stage fails",
    )


class Dispatch(Section):
    """How trajectories are shuffled, cut into mini-batches and packed into training rows."""

    mini_batch_trajectories: int = Field(16, gt=0, description="trajectories of one optimizer step")
    pack_tokens: int = Field(2048, gt=0, description="tokens that one pack, a training row, holds at most")
    slots: int = Field(2, gt=0, description="virtual ranks; a run may use any number of ranks up to this")


class Train(Section):
    """The optimizer (AdamW), the loss, and the ranks that train."""

    learning_rate: Positive = Field(2e-5, gt=0, description="learning rate after the warm-up")
    beta1: Decay = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: Decay = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    weight_decay: NotNegative = Field(0.0, ge=0, description="decoupled weight decay, a factor of the learning rate")
    gradient_clip: Positive = Field(1.0, gt=0, description="the gradient's global L2 norm is cut to this")
    warmup_steps: int = Field(0, ge=0, description="the learning rate rises linearly over the run's first steps")
    objective: Objective = KLObjective.model_validate({})
    compute: Literal["fp32", "bf16", "fp8"] = Field(
        "bf16", description="dtype of the linears' products; fp8, of an mxfp4 student, leaves all else in bf16"
    )
    zero_stage: Literal[1, 3] = operational(
        1, description="ZeRO of DeepSpeed. 1: shard the optimizer's state; 3: shard the student too"
    )
    ranks: int = operational(1, gt=0, description="training processes, at most dispatch.slots; each takes a GPU")
    threads: int = operational(0, ge=0, description="CPU threads of one rank; 0: cores divided by ranks")
    chunk_bytes: int = operational(
        0, ge=0, description="logits of one chunk of the loss, in bytes; 0: what suits the kind of device"
    )
    recompute_layers: bool = operational(
        True, description="keep only each layer's input and recompute the rest in backward: less memory, a third slower"
    )
    loader_bytes: int = operational(256 << 20, gt=0, description="shared memory of a node's loader, in bytes")
    save_every_steps: int = operational(
        16, ge=0, description="steps between checkpoints in the middle of a plan; 0: none for their number of steps"
    )
    save_every_seconds: float = operational(
        900.0, ge=0, description="seconds between checkpoints in the middle of a plan; 0: none for their age"
    )
    grace_seconds: float = operational(
        60.0,
        gt=0,
        description="time from SIGTERM to the end of the ranks, in seconds, in which the last step's state is uploaded",
    )
    stuck_seconds: float = operational(
        1800.0,
        gt=0,
        description="ranks that finish no micro-batch for this long are killed, in seconds; they have four times as "
        "long for their first one",
    )
    dead_after_seconds: float = operational(
        60.0, gt=0, description="an owner of the training that is silent for this long is taken for dead, in seconds"
    )
    max_attempts: int = operational(
        3, gt=0, description="starts of the ranks in a row that come no further, after which the stage fails"
    )

    @model_validator(mode="before")
    @classmethod
    def _in_objective(cls, values: Any):
        return objectives.moved(values) if isinstance(values, dict) else values

    def content(self, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return objectives.in_words_of(known, super().content(known), self.objective)


class Spark(Section):
    """The one Spark process of a run."""

    cores: int = operational(2, gt=0, description="cores that Spark uses")
    driver_memory: str = operational("2g", pattern=r"^[0-9]+[gm]$", description="heap of the JVM, 2g or 512m")
    shuffle_partitions: int = operational(4, gt=0, description="partitions of a shuffle")
    call_seconds: float = operational(
        3600.0,
        gt=0,
        description="a call of the Spark process that takes longer, in seconds, is killed and tried once more",
    )
    jars: str = operational("jars", description="folder of the pinned Delta jars")


class Drill(Section):
    """A rehearsal of failure, for demonstrations."""

    kill_rollout_worker_after_tokens: int = operational(
        0, ge=0, description="SIGKILL one rollout worker once it has acknowledged this many tokens; 0: never"
    )


class RunConfig(Section):
    """One run. Paths are relative to the folder in which opd is started."""

    run_id: str = Field(description="name of the run, which its keys and rows carry")
    seed: int = Field(0, ge=-(1 << 63), lt=1 << 63, description="of prompts, shuffles and sampling")
    iterations: int = operational(1, gt=0, description="iterations to run; raise it to go on")
    data: str = operational(
        "data", min_length=1, description="root of objects and tables: folder or s3://BUCKET/PREFIX"
    )
    scratch: str = operational("scratch", min_length=1, description="local folder: logs, work files, model copies")
    store_patience_seconds: float = operational(
        300.0, gt=0, description="a call is tried again for this long when the store does not answer, in seconds"
    )
    student: Student
    teachers: tuple[AnyTeacher, ...] = ()
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
        self._check_teachers(ids)
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
        return self

    def _check_teachers(self, ids: list[str]) -> None:
        objective = self.train.objective
        by = f"train.objective.type = {objective.type!r}"
        if bool(ids) != objective.needs_teacher:
            expected = f"at least one, for {by}" if objective.needs_teacher else f"none, which {by} would not read"
            raise ConfigError("teachers", expected=expected, found=repr(ids)[:200])
        named = [(f"prompts.datasets, {d.name}, teachers", d.teachers) for d in self.prompts.datasets]
        for where, teachers in named:
            if not teachers and objective.needs_teacher:
                raise ConfigError(where, expected=f"at least one of {sorted(ids)}, for {by}", found="none")
        named += [(f"prompts.files, {f.path}, teachers", f.teachers) for f in self.prompts.files]
        for where, teachers in named:
            for teacher_id in teachers:
                if teacher_id not in ids:
                    raise ConfigError(
                        where, expected=f"one of {sorted(ids)}", found=repr(teacher_id) + nearest(teacher_id, ids)
                    )

    @property
    def teacher_ids(self) -> tuple[str, ...]:
        """teacher_index -> teacher_id."""
        return tuple(sorted(t.id for t in self.teachers))

    def teacher(self, teacher_index: int) -> OpdTeacher | TransformersTeacher:
        return next(t for t in self.teachers if t.id == self.teacher_ids[teacher_index])


def nearest(word: str, words: Sequence[str]) -> str:
    """A hint to append to what was found, empty when no word is near."""
    near = difflib.get_close_matches(word, words, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def sections_of(annotation: Any) -> list[type[Section]]:
    """The sections that a field's annotation names, those of a union in its order."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_of(argument)]


def _fields_at(path: tuple[int | str, ...]) -> list[str]:
    """Valid names beside the key at `path`, in which a teacher's kind stands before the fields of its section."""
    choices: list[type[Section]] = [RunConfig]
    for part in path[:-1]:
        if len(choices) > 1 and isinstance(part, str):
            choices = [TEACHER_KINDS[part]]
        elif isinstance(part, str):
            choices = sections_of(choices[0].model_fields[part].annotation)
    return list(choices[0].model_fields)


def _explain(error: ValidationError, source: str) -> ConfigError:
    first = error.errors(include_url=False)[0]
    path = tuple(first["loc"])
    spoken = path[:2] + path[3:] if path[0] == "teachers" else path  # the user writes no kind into a path
    where = f"{source}, {'.'.join(str(p) for p in spoken)}"
    if first["type"] == "extra_forbidden":
        names = _fields_at(path)
        return ConfigError(
            where, expected=f"one of {', '.join(names)}", found=repr(path[-1]) + nearest(str(path[-1]), names)
        )
    if first["type"] == "union_tag_invalid":
        kind = str(first["input"].get("kind"))
        return ConfigError(
            f"{where}.kind", expected=f"one of {', '.join(TEACHER_KINDS)}",
            found=repr(kind) + nearest(kind, list(TEACHER_KINDS)),
        )  # fmt: skip
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
