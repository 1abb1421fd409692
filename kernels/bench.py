"""`python -m kernels.bench NAME [--quick]`: a kernel's figures on this machine, the last line one JSON object.

Needs torch and triton only. Exit status 0 when the bench ran and its results were right, whatever the targets say;
1 when a result was wrong. Each kernels/*/bench.py offers `run(quick) -> {"figures", "peers", "env"}`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

from kernels.testing import CheckFailed

BENCHES = {
    "kl": "kernels.linear_kl.bench",
    "quant": "kernels.quant.bench",
    "gemm": "kernels.scaled_mm.bench",
    "attention": "kernels.paged_attention.bench",
    "sampling": "kernels.sampling.bench",
    "step": "kernels.rows.bench",
}


def main(
    arguments: list[str] | None = None,
    benches: Mapping[str, str] = BENCHES,
    prog: str = "python -m kernels.bench",
    extra: Mapping[str, tuple[str, Callable[[str], object], str]] = MappingProxyType({}),
) -> int:
    """benches: name -> module with `run(quick)`. extra: option -> (its bench, type, help), a keyword of that `run`."""
    parser = argparse.ArgumentParser(prog=prog, description="Measure; the last line is one JSON object.")
    parser.add_argument("name", choices=benches)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repeats, under a minute")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    for name, (bench, kind, text) in extra.items():
        parser.add_argument(f"--{name}", type=kind, help=f"{bench}: {text}")
    options = parser.parse_args(arguments)
    given = {name: value for name in extra if (value := getattr(options, name)) is not None}
    for name in given:
        if extra[name][0] != options.name:
            parser.error(f"--{name} is an option of {extra[name][0]}")
    try:
        result = importlib.import_module(benches[options.name]).run(options.quick, **given)
    except CheckFailed as failure:
        print(f"{options.name}: wrong result: {failure}", file=sys.stderr)
        return 1
    result["env"]["quick"] = options.quick
    if not options.json:
        for name, entry in (*result["figures"].items(), *result["peers"].items()):
            value = "not run" if entry["value"] is None else f"{entry['value']:.4g} {entry['unit']}"
            verdict = {True: "holds", False: "MISSED", None: ""}[entry.get("holds")]
            print(f"{name:40} {value:>20}   {entry.get('target', entry.get('version', '')):12} {verdict}")
    print(json.dumps({"bench": options.name, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
