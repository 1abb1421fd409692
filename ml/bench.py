"""`python -m ml.bench NAME [--quick]`: figures of the token log and the rollout engine on this machine."""

from __future__ import annotations

import sys

from kernels.bench import main

BENCHES = {
    "wal": "ml.rollout.wal_bench",
    "rollout": "ml.rollout.engine_bench",
    "teacher": "ml.teacher_bench",
    "train": "ml.train.bench",
}

if __name__ == "__main__":
    sys.exit(main(None, BENCHES, "python -m ml.bench"))
