"""`opd export RUN`: a trained student as a Hugging Face folder, with a model card that says where it comes from.

bf16    what a server takes: each linear holds the values that rollout samples with, for an MXFP4 student those
        of its MXFP4 weights; embedding, head and norms are rounded
fp32    the trained parameters themselves: what further training starts from
mxfp4   linears as packed MXFP4, a quarter of bf16; opd reads it, transformers does not
"""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.stores import open_store
from ml.whole_folder import whole_folder
from schemas.errors import ContractError
from tasks.runs.finished import StageResult, past_stage
from tasks.runs.records import History, read_history
from tasks.runs.students import copy_objects

DTYPES = ("bf16", "fp32", "mxfp4")
CARD = "README.md"


@dataclass(frozen=True)
class Exported:
    """folder: where the student stands now; size_bytes: of its files."""

    folder: Path
    iteration: int
    version: str
    size_bytes: int


def export(root: str, run_id: str, to: str | Path, *, iteration: int | None = None, dtype: str = "bf16") -> Exported:
    """Write the student that `iteration` trained, by default the newest one, as the folder `to`.

    Raises ContractError for an unknown run, one without a trained student and a folder that exists, FormatError for
    damaged objects, StoreError.
    """
    folder, store = Path(to), open_store(root)
    if folder.exists():
        raise ContractError(str(folder), expected="a new folder", found="one that exists", safe="what is in it",
                            next_command=f"opd export {run_id} --to ANOTHER")  # fmt: skip
    history = read_history(store, run_id)
    if not history.records:
        raise ContractError(f"run {run_id} in {root}", expected="a run", found="none of that name",
                            next_command=f"opd show --data {root}")  # fmt: skip
    trained = _trained(store, history, run_id, iteration)
    record = dict(history.records)[history.in_force(trained.iteration)]
    student = trained.manifest.student()
    with tempfile.TemporaryDirectory(prefix="opd-export-", dir=_existing_parent(folder)) as scratch:
        source = Path(scratch) / "fp32"
        source.mkdir()
        copy_objects(store, student.export, source, run_id)
        staged = source if dtype == "fp32" else Path(scratch) / dtype
        if dtype != "fp32":
            _convert(staged, source, dtype, record.config["student"]["precision"])
        (staged / CARD).write_text(card(store, history, run_id, trained, dtype))
        with whole_folder(folder, what="the student", safe="its objects") as partial:
            for path in sorted(staged.iterdir()):
                path.rename(partial / path.name)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return Exported(folder, trained.iteration, student.version, size)


def _convert(folder: Path, source: Path, dtype: str, precision: Any) -> None:
    from ml import checkpoint  # torch

    if dtype == "bf16":
        checkpoint.export_bf16(folder, source, precision)
    else:
        checkpoint.export_mxfp4(folder, source)


def _existing_parent(folder: Path) -> Path:
    """On the disk that the folder will be on, so that files move and are not copied again."""
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    return folder.absolute().parent


def _trained(store: Any, history: History, run_id: str, iteration: int | None) -> StageResult:
    """The train stage of an iteration, or of the newest one: iterations finish in order."""
    found = past_stage(store, history, run_id, iteration or 0, "train")
    while found is not None and iteration is None:
        following = past_stage(store, history, run_id, found.iteration + 1, "train")
        if following is None:
            break
        found = following
    if found is not None:
        return found
    what = "of an iteration" if iteration is None else f"of iteration {iteration}"
    raise ContractError(f"run {run_id}", expected=f"a trained student {what}", found="none so far",
                        next_command="opd run CONFIG")  # fmt: skip


def card(store: Any, history: History, run_id: str, trained: StageResult, dtype: str) -> str:
    """The model card: sources, data, training and figures, from the run's records and manifests alone."""
    record = dict(history.records)[history.in_force(trained.iteration)]
    config = record.config
    base, licence = record.student_path, _licence(Path(record.student_path))
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags: [on-policy-distillation]",
             *([f"license: {licence}"] if licence else []), "---"]  # fmt: skip
    teachers = [
        f"- `{t['id']}`, weight {t['weight']:g}, model digest `{record.models['teacher:' + t['id']][:16]}`"
        for t in config["teachers"]
    ]
    return "\n".join([
        *front, "", f"# Student of run `{run_id}`, iteration {trained.iteration}", "",
        f"Trained from `{Path(base).name}` (model digest `{record.models['student'][:16]}`) by on-policy",
        f"distillation with opd {importlib.metadata.version('opd')}. Version of the student:",
        f"`{trained.manifest.student().version}`. Weights: {_weights(dtype, config['student']['precision'])}",
        "" if licence else "\nThe folder of the model that it was trained from names no licence.", "",
        "## Teachers", "", *teachers, "",
        "## Prompts", "", *_prompts(config["prompts"], record.prompt_files), "",
        "## Figures", "",
        "| iteration | trajectories | reward, training | reward, held-out | held-out KL, before | after |",
        "|---|---|---|---|---|---|",
        *_figures(store, history, run_id, trained.iteration), "",
        "The KL to all teachers is exact, over the full vocabulary, in nats a token.", "",
        "## Settings", "", "```json", json.dumps({n: config[n] for n in ("rollout", "dispatch", "train")}, indent=1),
        "```", "",
    ])  # fmt: skip


def _weights(dtype: str, precision: str) -> str:
    if dtype == "fp32":
        return "the trained parameters in fp32."
    if dtype == "mxfp4":
        return "linears in packed MXFP4, which opd reads, everything else in bf16."
    return "bf16; linears hold the values of their MXFP4 weights." if precision == "mxfp4" else "bf16."


def _licence(folder: Path) -> str:
    """What the front matter of the folder's own model card says; "" where there is none."""
    path = folder / CARD
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    if not lines or lines[0] != "---":
        return ""
    for line in lines[1:]:
        if line == "---":
            break
        name, _, value = line.partition(":")
        if name == "license":
            return value.strip()
    return ""


def _prompts(prompts: Mapping[str, Any], files: Iterable[str]) -> list[str]:
    lines = [f"- generated `{d['name']}`, {d['size']} prompts" for d in prompts["datasets"]]
    lines += [f"- file `{Path(name).name}`" for name in files]
    return [*lines, f"- {prompts['per_iteration']} prompts an iteration, {prompts['heldout']} held out"]


def _figures(store: Any, history: History, run_id: str, last: int) -> list[str]:
    def number(value: Any) -> str:
        return "-" if value is None else f"{value:.4f}"

    lines = []
    for iteration in range(last + 1):
        rolled = past_stage(store, history, run_id, iteration, "rollout")
        trained = past_stage(store, history, run_id, iteration, "train")
        if rolled is None or trained is None:
            continue
        r, t = rolled.stats, trained.stats
        before, after = (t[f"heldout_kl_{when}"]["all"] for when in ("before", "after"))
        values = (r.get("train_reward"), r.get("heldout_reward"), before, after)
        lines.append(f"| {iteration} | {int(r['trajectories'])} | {' | '.join(map(number, values))} |")
    return lines
