"""Prompts: rows of the prompts table from a run's configuration, and which of them an iteration takes.

Rows are a function of the configuration alone. Two rows of equal content are one prompt, wherever they come from. The
held-out prompts are the first ones of a seeded permutation. The other prompts are walked slice by slice, and permuted
again when all are used, so every prompt is used once before any is used twice.
"""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

from schemas import keys
from schemas.config import GymDataset, RunConfig
from schemas.errors import ConfigError
from schemas.section import is_positive_fp32
from tasks.inputs.prompt_files import file_rows
from tasks.rewards.gym_scores import gym
from tasks.rewards.verifiers import GYM_VERIFIER, SHIPPED


def _gym_rows(dataset: GymDataset, seed: int) -> list[dict[str, Any]]:
    try:
        entries = gym().create_dataset(dataset.name, size=dataset.size, seed=seed, **dataset.params)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"prompts.datasets, {dataset.name}", expected="a data set of reasoning-gym and its parameters",
            found=str(error)[:300],
        ) from error  # fmt: skip
    # Another version of the generator makes other prompts of the same name.
    made = keys.digest([dataset.content(), seed])[:8]
    source = f"reasoning-gym {metadata.version('reasoning-gym')}, {dataset.name} {made}"
    rows = []
    for entry in entries:
        row = {
            "source": source,
            "domain": dataset.domain,
            "teachers": [{"teacher_id": t, "weight": 1.0} for t in sorted(dataset.teachers)],
            "messages": json.dumps([{"role": "user", "content": entry["question"] + dataset.suffix}]),
            "answer": str(entry["answer"]),
            "verifier": GYM_VERIFIER,
            "context": json.dumps({"dataset": dataset.name, "entry": entry}, sort_keys=True, default=str),
        }
        rows.append(row)
    return rows


def _what_it_asks(row: dict[str, Any]) -> str:
    """Equal for rows that one run takes for one prompt: the domain, which each file has its own of, is no part."""
    return keys.digest([row[name] for name in ("messages", "answer", "context", "teachers", "verifier")])


def read_prompts(config: RunConfig) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Rows of the prompts table, each prompt once, and how many rows of each of the user's files repeat an earlier one.

    A prompt that several sources bring has domain and source of the first, in order of the configuration. In these rows
    a source is file and line, or generator, version and data set. Raises ConfigError (fewer prompts than one iteration
    takes, a file or teacher that is not there) and FormatError (a file's row, with its line).
    """
    rows: dict[str, dict[str, Any]] = {}
    repeated: dict[str, int] = {}
    verifiers = config.prompts.named_verifiers | set(SHIPPED)
    for file in config.prompts.files:
        for row in file_rows(file, config.teacher_ids, verifiers):
            first = rows.setdefault(_what_it_asks(row), row)
            if first is not row:
                repeated[file.path] = repeated.get(file.path, 0) + 1
    for dataset in config.prompts.datasets:
        for row in _gym_rows(dataset, config.seed):
            rows.setdefault(
                _what_it_asks(row), row
            )  # generators repeat themselves by chance, which is not worth a note
    weights = {teacher.id: teacher.weight for teacher in config.teachers}
    for row in rows.values():
        row["prompt_id"] = keys.prompt_id(row)
        for entry in row["teachers"]:
            if not is_positive_fp32(entry["weight"] * weights[entry["teacher_id"]]):
                raise ConfigError(
                    f"{row['source']}, teachers, {entry['teacher_id']}",
                    expected="a weight whose product with the teacher's own is a number of fp32",
                    found=f"{entry['weight']!r} x {weights[entry['teacher_id']]!r}",
                )
    found = sorted(rows.values(), key=lambda row: row["prompt_id"])
    _check_number(config, found)
    return found, repeated


def _check_number(config: RunConfig, rows: list[dict[str, Any]]) -> None:
    per_iteration, heldout = config.prompts.per_iteration, config.prompts.heldout
    found = f"{len(rows)}"
    if len(rows) >= per_iteration + heldout:
        train, _ = split_prompts(rows, config.seed, heldout)
        if len(train) >= per_iteration:
            return
        found += f", {len(rows) - heldout - len(train)} of which ask what a held-out one asks"
    raise ConfigError(
        "prompts",
        expected=f"at least {per_iteration + heldout} distinct prompts (per_iteration + heldout)",
        found=found,
    )


def load_prompts(config: RunConfig) -> list[dict[str, Any]]:
    """The rows of `read_prompts` alone."""
    return read_prompts(config)[0]


def split_prompts(prompts: list[dict[str, Any]], seed: int, heldout: int) -> tuple[list[dict], list[dict]]:
    """(train, heldout): held out are an equal share of each domain, taken in seeded order.

    A prompt whose messages are those of a held-out one, with another answer or other teachers, is in neither.
    """
    by_id = {p["prompt_id"]: p for p in prompts}
    order = [by_id[i] for i in keys.seeded_order(seed, "heldout", sorted(by_id))]
    domains = sorted({p["domain"] for p in prompts})
    apart: dict[str, dict] = {}
    queues = {d: [p for p in order if p["domain"] == d] for d in domains}
    while len(apart) < heldout:
        for domain in domains:
            if queues[domain] and len(apart) < heldout:
                prompt = queues[domain].pop(0)
                apart[prompt["prompt_id"]] = prompt
    asked = {prompt["messages"] for prompt in apart.values()}
    return [p for p in prompts if p["messages"] not in asked], list(apart.values())


def prompts_of_iteration(train: list[dict[str, Any]], seed: int, per_iteration: int, iteration: int) -> list[dict]:
    """Slice `iteration` of the endless sequence of epochs, each a seeded permutation of all training prompts."""
    by_id = {p["prompt_id"]: p for p in train}
    first = iteration * per_iteration
    taken, epoch = [], first // len(train)
    skip = first % len(train)
    while len(taken) < per_iteration:
        order = keys.seeded_order(seed, f"epoch {epoch}", sorted(by_id))
        for prompt in order[skip : skip + per_iteration - len(taken)]:
            taken.append(by_id[prompt])
        epoch, skip = epoch + 1, 0
    return taken
