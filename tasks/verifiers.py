"""Verifiers, and the process that calls them: `python -m tasks.verifiers`, one a rollout worker (tasks.rewards).

A verifier is a shipped name or `package.module:function`, called with (response text, prompt row) and returning a
number. It runs apart from the worker because nothing else can end a call that never returns.

    stdin   {"load": NAME} or {"call": NAME, "text": ..., "prompt": {...}}, one a line
    stdout  {"value": x}, {"missing": why} or {"failed": why}, one a line; what a verifier prints goes to stderr
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import math
import os
import random
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from schemas.errors import ConfigError, OpdError

GYM_VERIFIER = "reasoning_gym"
_PR_SET_PDEATHSIG = 1
Verifier = Callable[[str, dict[str, Any]], float]
#: The last number or word-like token after an answer phrase; small models rarely answer with the bare answer.
_FINAL = re.compile(r"(?:answer is|answer:|=|is)\s*[\"'*$]*(-?[A-Za-z0-9][A-Za-z0-9./-]*)", re.IGNORECASE)


@functools.cache
def gym() -> ModuleType:
    """reasoning-gym, without the syntax warnings of what it imports. Raises ConfigError when it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError("prompts", expected="package reasoning-gym (extra: demo)", found=str(error)) from error


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


def load(name: str) -> Verifier:
    """The function behind a verifier's name. Raises LookupError that says what is missing; user code may raise too."""
    if name in SHIPPED:
        gym()
        return SHIPPED[name]
    module, _, function = name.partition(":")
    if not module or not function:
        raise LookupError(f"{name!r}")
    try:
        found: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"{type(error).__name__}: {error}") from error
    if callable(found):
        return cast(Verifier, found)
    raise LookupError(f"{name!r} is a {type(found).__name__}")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "load" in request:
            load(request["load"])
            return {"value": 0.0}
        # A verifier that draws lots draws the same ones when the response is scored again.
        random.seed(request["prompt"]["prompt_id"])
        value = float(load(request["call"])(request["text"], request["prompt"]))
    except (LookupError, OpdError) as error:
        if "load" in request:
            return {"missing": str(error).replace("\n", "; ")}
        return {"failed": repr(error)}
    except Exception as error:
        if "call" in request:
            traceback.print_exc()  # into the worker's log, where the user's code can be found at fault
        return {"failed": repr(error)[:300]}
    return {"value": value} if math.isfinite(value) else {"failed": f"{value}, which is not finite"}


def main() -> None:
    if sys.platform == "linux":
        # The end of stdin is not enough: a verifier that never returns would outlive its worker.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
