"""The student of a rollout worker: whole in its process, or shared with ranks that the worker starts.

    python -m tasks.ranks.shared_student WORK.json     a rank above 0, which does what its worker says

The worker is rank 0. It dies with the first rank that dies, at any moment, as workers may; ranks die with the worker.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import torch

from infra.launch import RankProcess, group_commands
from ml.checkpoint import load_model
from ml.device import rank_device
from ml.model import Transformer
from ml.rollout.together import follow
from ml.tensor_parallel import ALONE, Group, join_group
from schemas.work.model import ModelSource
from schemas.work.rollout import RolloutWork
from tasks.ranks.process import run_rank


def load_student(work: RolloutWork, work_path: Path) -> Transformer:
    """Rank 0's part of the student after the other ranks, where the work asks for any, have theirs.

    GPUs are numbered worker by worker: the ranks of worker i take the ones from i * ranks on.
    """
    ranks = work.ranks
    if ranks == 1:
        return _load(work.student, ALONE)
    first = int(os.environ.get("LOCAL_RANK", "0")) * ranks
    commands = group_commands("tasks.ranks.shared_student", work_path, ranks, {})
    for command in commands:
        command = replace(command, env={**command.env, "LOCAL_RANK": str(first + command.rank)})
        if command.rank == 0:
            os.environ.update(command.env)
            continue
        log = work_path.with_name(f"{work_path.stem}-rank{command.rank}.log")
        process = RankProcess(command, log, lambda rank, message: None)
        threading.Thread(target=_die_with, args=(process,), name=f"rank {command.rank}", daemon=True).start()
    return _load(work.student, join_group(rank_device()))


def _load(student: ModelSource, group: Group) -> Transformer:
    return load_model(Path(student.folder), precision=student.precision, compute=student.compute,
                      device=rank_device(), group=group, digest=student.digest)  # fmt: skip


def _die_with(process: RankProcess) -> None:
    # A rank that fails leaves the others inside a collective, which no exception ends.
    process.wait(threading.TIMEOUT_MAX)
    if process.status:
        if process.error is not None:
            print(json.dumps(process.error), flush=True)
        print(process.describe(), file=sys.stderr, flush=True)
        os._exit(process.status if process.status > 0 else 1)


def _follow(work: RolloutWork) -> None:
    torch.set_num_threads(work.threads)
    follow(_load(work.student, join_group(rank_device())))


def main(arguments: list[str]) -> int:
    return run_rank(arguments, RolloutWork, _follow)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
