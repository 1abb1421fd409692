"""The process that calls verifiers: `python -m tasks.verifier_calls`, one a rollout worker (tasks.rewards).

It runs apart from the worker because nothing else can end a call that never returns.

    stdin   {"load": NAME} or {"call": NAME, "text": ..., "prompt": {...}}, one a line
    stdout  {"value": x}, {"missing": why} or {"failed": why}, one a line; what a verifier prints goes to stderr
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import signal
import sys
import traceback
from typing import Any

from schemas.errors import OpdError
from tasks.verifiers import load

_PR_SET_PDEATHSIG = 1


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
