"""`python -m ml.bench NAME [--quick]`: figures of the token log and the rollout engine on this machine."""

from __future__ import annotations

import argparse
import sys

from kernels.bench import main

BENCHES = {
    "wal": "ml.rollout.wal_bench",
    "rollout": "ml.rollout.engine_bench",
    "teacher": "ml.teacher_bench",
    "train": "ml.train.bench",
}
#: Of ml.rollout.engine_bench_gpu, which only a GPU machine should have to import.
ROLLOUT_PARTS = (
    "decode", "prefill", "staggered", "log", "mxfp4", "bits", "resume", "partitions", "spill", "million",
    "sizes", "speculation",
)  # fmt: skip


def parts(text: str) -> tuple[str, ...]:
    """Names of ROLLOUT_PARTS, with commas between them. Raises ArgumentTypeError for another name."""
    names = tuple(text.split(","))
    for name in names:
        if name not in ROLLOUT_PARTS:
            raise argparse.ArgumentTypeError(f"no part {name!r}; there are {', '.join(ROLLOUT_PARTS)}")
    return names


OPTIONS = {"parts": ("rollout", parts, f"of {','.join(ROLLOUT_PARTS)} only these; without a GPU: speculation")}

if __name__ == "__main__":
    sys.exit(main(None, BENCHES, "python -m ml.bench", OPTIONS))
