"""Rewards: a prompt's verifier applied to a response, computed in rollout before its row is committed.

A verifier is a shipped name or `package.module:function`, called with (response text, prompt row) and returning
a number. A verifier that raises is the user's bug or a poisoned response: it fails the worker with the prompt's id.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
from collections.abc import Callable
from typing import Any

from schemas.errors import ConfigError, StageError
from tasks.prompts import GYM_VERIFIER, gym
from tasks.text import Tokenizer

Verifier = Callable[[str, dict[str, Any]], float]
#: The last number or word-like token after an answer phrase; small models rarely answer with the bare answer.
_FINAL = re.compile(r"(?:answer is|answer:|=|is)\s*[\"'*$]*(-?[A-Za-z0-9][A-Za-z0-9./-]*)", re.IGNORECASE)


@functools.cache
def _gym_dataset(name: str):
    return gym().create_dataset(name, size=1, seed=0)


def _reasoning_gym(text: str, prompt: dict[str, Any]) -> float:
    """Best score over the whole text, its last line and the token after the last answer phrase."""
    context = json.loads(prompt["context"])
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    candidates = [text.strip(), *lines[-1:]]
    candidates += [match.group(1).rstrip(".") for match in _FINAL.finditer(text)][-1:]
    dataset = _gym_dataset(context["dataset"])
    return max(float(dataset.score_answer(candidate, context["entry"])) for candidate in candidates)


SHIPPED: dict[str, Verifier] = {GYM_VERIFIER: _reasoning_gym}


def verifier(name: str) -> Verifier:
    """The function behind a verifier's name. Raises ConfigError that says what was looked for."""
    if name in SHIPPED:
        return SHIPPED[name]
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"verifier {name!r}", expected=f"one of {sorted(SHIPPED)} or package.module:function", found=str(error)
        ) from error
    return found


def score(name: str, text: str, prompt: dict[str, Any]) -> float:
    """One verifier call. Raises StageError for a verifier that raises or does not return a finite number."""
    try:
        value = float(verifier(name)(text, prompt))
    except ConfigError:
        raise
    except Exception as error:
        raise StageError(
            f"verifier {name!r}, prompt {prompt['prompt_id']}", expected="a number", found=repr(error)[:300],
            safe="the response is in the log; a rerun scores it again without sampling",
        ) from error  # fmt: skip
    if not math.isfinite(value):
        raise StageError(
            f"verifier {name!r}, prompt {prompt['prompt_id']}", expected="a finite number", found=str(value)
        )
    return value


def load_rewarder(work: dict[str, Any]) -> Callable[[dict[str, Any], list[int]], float | None]:
    """reward(request, response_ids) for a rollout worker's work file (`student.folder`, requests with `prompt`)."""
    tokenizer = Tokenizer.load(work["student"]["folder"])

    def reward(request: dict[str, Any], response_ids: list[int]) -> float | None:
        prompt = request["prompt"]
        if prompt.get("verifier") is None:
            return None
        return score(prompt["verifier"], tokenizer.decode(response_ids), prompt)

    return reward
