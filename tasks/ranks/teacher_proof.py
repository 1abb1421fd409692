"""Teachers loaded one after another, to prove that they can teach: `python -m tasks.ranks.teacher_proof WORK.json`, a
ProofWork."""

from __future__ import annotations

import sys

import torch

from ml.device import rank_device
from schemas.work.messages import Working
from schemas.work.teach import ProofWork
from tasks.ranks.process import run_rank, say
from tasks.teachers import kinds


def run(work: ProofWork) -> None:
    """Raises the error of the first teacher that cannot be loaded or is not what the loss would rebuild."""
    torch.set_num_threads(work.threads)
    for teacher in work.teachers:
        say(Working(f"teacher {teacher.teacher_id}"))
        kinds.of(teacher.kind).load(teacher.model, rank_device())


def main(arguments: list[str]) -> int:
    return run_rank(arguments, ProofWork, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
