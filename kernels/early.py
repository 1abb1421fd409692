"""Launches that overlap: a kernel may be set up while the one before it on the stream still runs (sm_90 and later).

`starts_early` in a kernel's first line lets the next one be set up, and waits for all that ran before. The next one
waits too if it was launched with LAUNCH's options; if it was not, it is set up after the end as ever.

Rule: a kernel with `starts_early` writes no weights, since products fetch those before they wait.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def starts_early(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@cache
def _offered(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_early(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose kernel begins with `starts_early(EARLY)`."""
    if device.type != "cuda" or not _offered(device):  # Triton's interpreter runs on the CPU
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
