"""The process that calls verifiers: `python -m tasks.rewards.calls SETTINGS`, one a worker (tasks.rewards.child).

It runs apart from the worker because nothing else can end a call that never returns, and confined (infra.confine),
because a verifier may run what a model wrote.

    SETTINGS {"memory_bytes": n, "network": bool, "namespaces": bool}
    stdin    {"load": NAME} or {"call": NAME, "text": ..., "prompt": {...}}, one a line
    stdout   {"value": x}, {"missing": why} or {"failed": why}, one a line; what a verifier prints goes to stderr
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import traceback
from typing import Any

from infra.confine import run_confined
from schemas.errors import OpdError
from tasks.rewards.verifiers import load


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


def _serve() -> None:
    # A process that a verifier starts must neither read requests nor write answers.
    requests = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    for line in requests:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    run_confined(_serve, **json.loads(sys.argv[1]))
