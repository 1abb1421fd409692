"""`opd teachers`: models packed in MXFP4, and what that costs the student and each teacher on the run's own prompts.

In the report each model reads what it would read in the run: the student the prompt, a teacher its own rendering of
the prompts that name it (all of them when none does). The answer depends on configuration and models alone, and
needs nothing sampled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra import launch
from ml.model_files import CONFIG, read_config
from schemas import keys, typed_json
from schemas.config import RunConfig
from schemas.errors import ConfigError, StageError, error_from_json
from schemas.work import messages
from schemas.work.model import WeightPrecision
from schemas.work.report import ReportModel, ReportWork
from tasks.inputs.models import resolve_model, teacher_checks
from tasks.inputs.prompts import load_prompts
from tasks.inputs.room import teacher_context
from tasks.inputs.text import Tokenizer


def report(
    config: RunConfig, *, num_prompts: int = 16, on_model: Callable[[str], None] = lambda model: None,
    on_left_out: Callable[[str], None] = lambda model: None,
) -> list[dict[str, str | int | float]]:  # fmt: skip
    """A row for the student, then one for each teacher of kind "opd" in order of teacher_index.

    Columns: model, precision (the configured one), prompts, and those of ml.fidelity.Fidelity. num_prompts: read by
    each model at most. on_model(model) is called when a model's turn comes, on_left_out(model) for each teacher of
    another kind, which has no MXFP4 self. Raises the errors of `teacher_checks` and `load_model`, ConfigError for no
    prompts at all and for a folder that is stored in MXFP4, which has no other self to compare with.
    """
    if num_prompts < 1:
        raise ConfigError("--prompts", expected="1 or more", found=str(num_prompts))
    student = resolve_model(config.student.path)
    vocab_size = teacher_checks(student, config.teachers)
    for teacher_id in config.teacher_ids:
        if _kind(config, teacher_id) != "opd":
            on_left_out(f"teacher {teacher_id}")
    work = ReportWork(_models(config, student, num_prompts), vocab_size, threads=os.cpu_count() or 1)
    folder = Path(config.scratch).absolute() / config.run_id
    path = folder / "work" / "report.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(typed_json.encode(work))
    rows: list[dict[str, str | int | float]] = []

    def heard(rank: int, line: dict[str, Any]) -> None:
        message = messages.read(line, f"teachers report, rank {rank}")
        if isinstance(message, messages.ReportStarted):
            on_model(message.model)
        elif isinstance(message, messages.ReportRow):
            rows.append(message.row)

    commands = launch.group_commands("tasks.ranks.report", path, 1, {"OMP_NUM_THREADS": str(work.threads)})
    (process,) = launch.run_group(
        commands, log_folder=folder / "logs" / "report", on_message=heard, grace_seconds=5.0
    )  # fmt: skip
    if process.error is not None:
        raise error_from_json(process.error)
    if process.status != 0:
        raise StageError("teachers report", expected="to finish", found=process.describe())
    return rows


def pack(source: str, folder: str) -> tuple[int, int]:
    """Write `source`'s model to `folder` in MXFP4, for a teacher with precision "mxfp4"; bytes of both folders.

    Raises ConfigError for a folder that holds anything but an earlier result, and as ml.checkpoint.export_mxfp4 does.
    """
    from ml.checkpoint import export_mxfp4

    before, after = resolve_model(source), Path(folder)
    # What stands there is replaced whole, so it must be nothing that cannot be made again.
    if after.exists() and not ((after / CONFIG).is_file() and "quantization_config" in read_config(after)):
        raise ConfigError(f"--to {folder}", expected="a new folder, or one packed before", found="something else")
    if after.resolve() == before.resolve():
        raise ConfigError(f"--to {folder}", expected="another folder than the model's own", found="the same")
    export_mxfp4(after, before)
    return _bytes(before), _bytes(after)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix == ".safetensors")


def _models(config: RunConfig, student: Path, num_prompts: int) -> tuple[ReportModel, ...]:
    by_id = {prompt["prompt_id"]: prompt for prompt in load_prompts(config)}
    order = [by_id[i] for i in keys.seeded_order(config.seed, "report", sorted(by_id))]
    tokenizer = Tokenizer.load(student)
    student_reads = [tokenizer.render(json.loads(prompt["messages"])) for prompt in order[:num_prompts]]
    models = [_entry("student", student, config.student.precision, student_reads)]
    for teacher_id in [i for i in config.teacher_ids if _kind(config, i) == "opd"]:
        teacher = config.teacher(config.teacher_ids.index(teacher_id))
        folder = resolve_model(teacher.path)
        tokenizer = Tokenizer.load(folder)
        named = [p for p in order if teacher_id in {entry["teacher_id"] for entry in p["teachers"]}]
        contexts = [teacher_context(teacher, tokenizer, prompt) for prompt in (named or order)[:num_prompts]]
        models.append(_entry(f"teacher {teacher_id}", folder, teacher.precision, contexts))
    return tuple(models)


def _kind(config: RunConfig, teacher_id: str) -> str:
    return config.teacher(config.teacher_ids.index(teacher_id)).kind


def _entry(model: str, folder: Path, precision: WeightPrecision, contexts: list[list[int]]) -> ReportModel:
    return ReportModel(model, str(folder), precision, tuple(map(tuple, contexts)))
