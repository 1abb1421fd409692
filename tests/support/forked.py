"""Processes of the real entry points, forked from a server that has done their imports: starts in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import sys

FORKS = multiprocessing.get_context("forkserver")
# deepspeed.initialize imports the last one, which has torch import its compiler: most of the start of a rank.
FORKS.set_forkserver_preload(
    ["tasks.ranks.rollout", "tasks.ranks.train", "deepspeed", "deepspeed.runtime.zero.muon.original_muon"]
)


def redirect(said: str, errors: str) -> None:
    """In the forked process: stdout and stderr are appended to files."""
    for path, fd in ((said, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w")


def leave(status: int) -> None:
    """End the forked process like one that was started by itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
