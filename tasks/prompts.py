"""Prompts: rows of the prompts table from a run's configuration, and which of them an iteration takes.

Rows are a function of the configuration alone. Held-out prompts are the first of a seeded permutation; the rest
are walked slice by slice, one new permutation an epoch, so every prompt is used once before any is used twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from schemas import keys
from schemas.config import GymDataset, PromptFile, RunConfig
from schemas.errors import ConfigError
from tasks.gym_scores import gym
from tasks.prompt_files import file_rows, file_source
from tasks.verifiers import GYM_VERIFIER


def _gym_rows(dataset: GymDataset, seed: int) -> list[dict[str, Any]]:
    try:
        entries = gym().create_dataset(dataset.name, size=dataset.size, seed=seed, **dataset.params)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"prompts.datasets, {dataset.name}", expected="a data set of reasoning-gym and its parameters",
            found=str(error)[:300],
        ) from error  # fmt: skip
    # A source's rows never change: whatever shapes them is in its name, so runs can share the table.
    source = f"reasoning-gym:{dataset.name}:{keys.digest([dataset.content(), seed])[:12]}"
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
        row["prompt_id"] = keys.prompt_id(row)
        rows.append(row)
    return rows


def _file_rows(file: PromptFile, teacher_ids: Sequence[str]) -> list[dict[str, Any]]:
    source = file_source(file)
    rows = [{"source": source, **row} for row in file_rows(file, teacher_ids)]
    return [row | {"prompt_id": keys.prompt_id(row)} for row in rows]


def read_prompts(config: RunConfig) -> tuple[list[dict[str, Any]], int]:
    """Rows of the prompts table, each prompt once, and how many rows of the user's files repeat another one.

    Raises ConfigError (fewer prompts than one iteration takes, a file or teacher that is not there) and FormatError
    (a file's row, with its line).
    """
    own = [row for f in config.prompts.files for row in _file_rows(f, config.teacher_ids)]
    rows = {row["prompt_id"]: row for row in own}
    repeated = len(own) - len(rows)
    # Generators repeat themselves by chance, which nobody needs to hear of.
    rows |= {row["prompt_id"]: row for d in config.prompts.datasets for row in _gym_rows(d, config.seed)}
    wanted = config.prompts.per_iteration + config.prompts.heldout
    if len(rows) < wanted:
        raise ConfigError(
            "prompts", expected=f"at least {wanted} distinct prompts (per_iteration + heldout)", found=f"{len(rows)}"
        )
    return [rows[i] for i in sorted(rows)], repeated


def load_prompts(config: RunConfig) -> list[dict[str, Any]]:
    """The rows of `read_prompts` alone."""
    return read_prompts(config)[0]


def split_prompts(prompts: list[dict[str, Any]], seed: int, heldout: int) -> tuple[list[dict], list[dict]]:
    """(train, heldout): held out are an equal share of each domain, taken in seeded order."""
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
    return [p for p in prompts if p["prompt_id"] not in apart], list(apart.values())


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
