"""Decode steps of models of five sizes on one GPU, 1 to 1024 rows, bf16 and MXFP4, short contexts and long ones.

A step is the runner's: replayed from a graph, sampled, its results taken on the host while the next one runs; no log.
Sequences share no page, and KV is random. What does not fit on the card is left out. The floor is the time that
memory takes for weights, head and KV at MEMORY_BYTES_PER_S, or the tensor cores for the products at FLOPS, whichever
is longer.

The check: the first row's result has the same bits beside any number of others.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from kernels.testing import check, figure
from ml.bench_models import SIZES, random_model
from ml.device import traits
from ml.linear import Linear, Precision
from ml.model import Transformer
from ml.rollout.pages import pages_for
from ml.rollout.runner import Runner
from ml.rollout.sampling import SamplingParams
from ml.rollout.steps import Placed, StepRows

ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (256, 1024, 32768)
#: Measured on an H200: a device copy, and bf16 products of random numbers.
MEMORY_BYTES_PER_S, FLOPS = 4.2e12, 790e12
PAGE_TOKENS = 64
_WARM, _TIMED = 4, 20
#: Logits, what sampling needs of them, and captured graphs.
_SPARE_BYTES = 8 << 30
_MXFP4_BYTES = 17 / 32
#: (size, precision, most rows): most ms of a step at _TARGET_CONTEXT tokens.
_TARGET_CONTEXT = 1024
_TARGETS = {
    ("1.24 B", "bf16", 32): 0.9, ("1.24 B", "mxfp4", 32): 0.6, ("8 B", "bf16", 16): 4.8, ("8 B", "mxfp4", 16): 1.9,
}  # fmt: skip


def sizes_figures() -> dict[str, Any]:
    """ms of a step by size, precision, rows and context; with each, its share of the floor and tokens a second."""
    figures: dict[str, Any] = {}
    precisions: tuple[Precision, ...] = ("bf16", "mxfp4")
    for size, shape in SIZES.items():
        for precision in precisions:
            _free()  # or weights would lie in the middle of what KV has left
            model = random_model(shape, precision, "cuda")
            model.check_row_invariance()
            for context in CONTEXTS:
                for rows, ms in _step_ms(model, context):
                    share = _floor_ms(model, precision, rows, context) / ms
                    found = figure(ms, "ms", _target(size, precision, rows, context))
                    extra = {"floor_share": share, "tokens_per_s": rows / ms * 1e3}
                    name = f"{size} {precision}, {rows} x {context}"
                    figures[name] = found | extra
                    print(f"{name}: {ms:.3f} ms, {share:.2f} of the floor, {rows / ms * 1e3:.0f} tokens/s",
                          file=sys.stderr, flush=True)  # fmt: skip
            del model
    return figures


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _target(size: str, precision: str, rows: int, context: int) -> str:
    for (of_size, of_precision, most_rows), ms in _TARGETS.items():
        if (size, precision) == (of_size, of_precision) and rows <= most_rows and context == _TARGET_CONTEXT:
            return f"<= {ms}"
    return ""


def _kv_bytes(model: Transformer) -> int:
    """Of one token."""
    c = model.config
    return 2 * c.layers * c.kv_heads * c.head_channels * model.compute.itemsize


def _floor_ms(model: Transformer, precision: str, rows: int, context: int) -> float:
    head = model.head_weight.numel()
    linears = sum(m.num_inputs * m.num_outputs for m in model.modules() if isinstance(m, Linear))
    weight_bytes = linears * (_MXFP4_BYTES if precision == "mxfp4" else 2) + 2 * head
    moved = (weight_bytes + rows * context * _kv_bytes(model)) / MEMORY_BYTES_PER_S
    return 1e3 * max(moved, 2 * rows * (linears + head) / FLOPS)


@torch.no_grad()
def _step_ms(model: Transformer, context: int) -> Iterator[tuple[int, float]]:
    """(rows, ms of a step) for all numbers of rows that fit."""
    _free()
    pages = pages_for(context + _WARM + _TIMED + 1, PAGE_TOKENS)
    room = torch.cuda.mem_get_info()[0] - _SPARE_BYTES
    fitting = [rows for rows in ROWS if rows * pages * PAGE_TOKENS * _kv_bytes(model) <= room]
    runner = Runner(
        model, max_sequences=fitting[-1], num_pages=fitting[-1] * pages, page_tokens=PAGE_TOKENS,
        split_tokens=traits("cuda").split_tokens, vocab_size=model.config.vocab_rows, sampling=SamplingParams(),
        graphs=True,
    )  # fmt: skip
    for cache in (*runner.k_LPTGC, *runner.v_LPTGC):
        cache.normal_()
    slots_A = np.arange(fitting[-1], dtype=np.int64)
    tables_AP = np.arange(fitting[-1] * pages, dtype=np.int32).reshape(-1, pages)
    runner.place(Placed(slots_A, tables_AP, slots_A, np.empty((0, 2), np.int64)))
    firsts = set()
    for rows in fitting:
        waiting = None
        for step in range(_WARM + _TIMED):
            if step == _WARM:
                torch.cuda.synchronize()
                started = time.perf_counter()
            results = runner.run(_rows(tables_AP[:rows], context + step, first=step == 0))
            if waiting is not None:
                waiting()
            waiting = results
            if step == 0:
                firsts.add(results()[:, 0].tobytes())
        torch.cuda.synchronize()
        yield rows, (time.perf_counter() - started) / _TIMED * 1e3
    check(len(firsts) == 1, f"a row beside others, context {context}: {len(firsts)} results")


def _rows(tables_AP: np.ndarray, position: int, *, first: bool) -> StepRows:
    """All sequences at one position, at first with the id of their slot, then with the one last sampled."""
    slots = np.arange(len(tables_AP))
    place = position // PAGE_TOKENS
    ids = slots if first else np.full(len(slots), -1)
    rows_4D = np.stack([ids, np.full(len(slots), position), slots, tables_AP[:, place]]).astype(np.int32)
    return StepRows(rows_4D, place + 1, [])
