"""Measuring instruments of tests and benches: error, time and memory on the device at hand.

Invariant: nothing here is imported by an op.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence

import torch


class CheckFailed(Exception):
    """A bench found a wrong result: its figures are worth nothing."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; NaN where either holds one."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return float((actual - expected).norm() / expected.norm())


def check(condition: bool, what: str) -> None:
    """Raise CheckFailed, naming what is wrong, unless the condition holds."""
    if not condition:
        raise CheckFailed(what)


def median_ms(call: Callable[[], object], *, repeats: int = 20, warmup: int = 3) -> float:
    """Median time of one call in ms, by CUDA events around each; the device queue never drains between."""
    for _ in range(warmup):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def graph_us(calls: Sequence[Callable[[], object]], repeats: int = 4, settle_s: float = 0.0) -> float:
    """Median microseconds of one of the calls, which follow each other in one captured graph.

    settle_s: how long they run beforehand. At its power limit a card's clock is what the last tenths of a second made
    it, so that without this the next contestant pays for the one before.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    settled = time.monotonic() + settle_s
    while time.monotonic() < settled:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(9):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (repeats * len(calls)))
    return statistics.median(times)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most device memory that was allocated during the call, above what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def copy_gb_per_s(num_bytes: int = 2 << 30) -> float:
    """Read plus written GB/s of a device-to-device copy: the ceiling of everything that only moves bytes."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / median_ms(lambda: target.copy_(source)) / 1e6


def environment(shape: str) -> dict:
    """Where a figure comes from: device, cores, versions, commit."""
    commit = os.environ.get("OPD_COMMIT")
    if commit is None:
        answer = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
        commit = answer.stdout.strip() or "unknown"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    cores = len(os.sched_getaffinity(0))
    return {"device": device, "cores": cores, "torch": torch.__version__, "commit": commit, "shape": shape}


def figure(value: float | None, unit: str, target: str = "", holds: bool | None = None) -> dict:
    """One entry of a bench's `figures`; `holds` follows from a target such as ">= 0.8" or "<= 2 %", null with no value.

    holds: of a target without a comparison ("", "all").
    """
    compare = {">=": float.__ge__, "<=": float.__le__}.get(target[:2])
    if compare is not None:
        holds = None if value is None else compare(float(value), float(target.split()[1]))
    return {"value": value, "unit": unit, "target": target, "holds": holds}
