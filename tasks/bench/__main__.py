"""`python -m tasks.bench NAME [--quick]`: figures of real rank processes under their parent, on this CPU."""

from __future__ import annotations

import sys

from kernels.bench import main

BENCHES = {"kill": "tasks.bench.kill", "length-bias": "tasks.bench.length_bias"}
OPTIONS = {
    "kills": ("kill", int, "SIGKILLs (default: 200)"),
    "plot": ("length-bias", str, "write the picture of lengths there, an SVG"),
}

if __name__ == "__main__":
    sys.exit(main(None, BENCHES, "python -m tasks.bench", OPTIONS))
