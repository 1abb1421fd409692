"""What MXFP4 costs each model of a run: `python -m tasks.ranks.report WORK.json`; see tasks.teachers for the fields.

stdout: {"event": "started" | "row" | "error", ...}, one a line
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ml.fidelity import fidelity
from schemas.errors import OpdError


def run(work: dict[str, Any]) -> None:
    """A row for each model of the work, in order. Raises OpdError."""
    torch.set_num_threads(work["threads"])
    for entry in work["models"]:
        print(json.dumps({"event": "started", "model": entry["model"]}), flush=True)
        found = fidelity(Path(entry["folder"]), entry["contexts"], vocab_size=work["vocab_size"])
        row = {"model": entry["model"], "precision": entry["precision"], "prompts": len(entry["contexts"])}
        print(json.dumps({"event": "row", "row": row | asdict(found)}), flush=True)


def main(arguments: list[str]) -> int:
    """Exit status: 0, or that of the OpdError, which is also printed as an event."""
    try:
        run(json.loads(Path(arguments[0]).read_text()))
    except OpdError as error:
        print(json.dumps({"event": "error", "kind": error.kind, "text": str(error)}), flush=True)
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
