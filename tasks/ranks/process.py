"""The two ends of a rank process: the work file it is given, and what it tells its parent.

stdout: {"event": NAME, ...}, one a line; {"event": "error", "text", and the parts of the OpdError}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra import waiting
from schemas.errors import OpdError

Say = Callable[..., None]


def say(event: str, **facts: Any) -> None:
    """One message to the parent."""
    print(json.dumps({"event": event, **facts}), flush=True)


def _say_wait(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    say("waiting", text=text)


def run_rank(arguments: list[str], run: Callable[[dict[str, Any]], None]) -> int:
    """Runs `run` on the work of the file named by the only argument.

    Exit status: 0, or that of the OpdError, which the parent is told and the log shows.
    """
    waiting.speak_through(_say_wait)
    try:
        run(json.loads(Path(arguments[0]).read_bytes()))
    except OpdError as error:
        say("error", text=str(error), **error.to_json())
        print(error, file=sys.stderr)
        return error.exit_status
    return 0
