"""What MXFP4 costs each model of a run: `python -m tasks.ranks.report WORK.json`, a ReportWork."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ml.device import rank_device
from ml.fidelity import fidelity
from schemas.work.messages import ReportRow, ReportStarted
from schemas.work.report import ReportWork
from tasks.ranks.process import run_rank, say


def run(work: ReportWork) -> None:
    """A row for each model of the work, in order. Raises OpdError."""
    torch.set_num_threads(work.threads)
    device = rank_device()
    for entry in work.models:
        say(ReportStarted(entry.model))
        found = fidelity(Path(entry.folder), entry.contexts, vocab_size=work.vocab_size, device=device)
        row = {"model": entry.model, "precision": entry.precision, "prompts": len(entry.contexts)}
        say(ReportRow(row | asdict(found)))


def main(arguments: list[str]) -> int:
    return run_rank(arguments, ReportWork, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
