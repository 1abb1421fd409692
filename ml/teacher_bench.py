"""Figures of a teacher's forward pass: tokens read a second and peak memory of a 1.24 B Llama, random weights.

Check: a trajectory's states have the same bits whatever shares its pass.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from kernels.testing import check, environment, figure
from ml.bench_models import LLAMA_1B, SMALL, random_model
from ml.device import forget_peak, observed, rank_device
from ml.model import Transformer
from ml.teacher import Reading, hidden_states


def run(quick: bool) -> dict[str, Any]:
    """Raises CheckFailed when company changes a state."""
    device = rank_device()
    on_card = torch.cuda.is_available()
    shape, scale = (LLAMA_1B, 1) if on_card else (SMALL, 64)
    packs = {
        "16 x 2048": [2048 // scale] * 16,
        "1 x 32768": [32768 // scale],
        "256 x 128": [128 // min(scale, 16)] * 256,
    }
    figures = {}
    for precision in ("bf16",) if quick else ("bf16", "mxfp4"):
        forget_peak(device)
        model = random_model(shape, precision, device)
        check_company(model, [length // scale + 1 for length in (1, 300, 64, 2300, 64)])
        for name, lengths in packs.items():
            tokens, seconds = sum(lengths), _seconds(model, lengths)
            figures[f"{precision}, {name}"] = figure(tokens / seconds, "tokens/s", "")
        figures[f"{precision}, peak"] = figure(observed(device)["device_peak_bytes"] / 2**30, "GiB", "")
        del model
    shape_text = f"Llama of {shape['hidden_size']} x {shape['num_hidden_layers']}, V{shape['vocab_size']}"
    return {
        "figures": figures,
        "peers": {},
        "env": environment(f"{shape_text}, 32768 tokens a pass, states copied to the host"),
    }


def check_company(model: Transformer, lengths: list[int]) -> None:
    readings = _readings(model, lengths)
    alone = [next(hidden_states(model, [r], batch_tokens=1)) for r in readings]
    for batch_tokens in (500, 1 << 20):
        together = hidden_states(model, readings, batch_tokens=batch_tokens)
        same = all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
        check(same, "a trajectory's states do not depend on its company")


def _readings(model: Transformer, lengths: list[int]) -> list[Reading]:
    """A quarter of each is context; one more token than is read, since the last predicts nothing."""
    generator = torch.Generator().manual_seed(1)
    out = []
    for length in lengths:
        ids = torch.randint(0, model.config.vocab_rows, (length + 1,), generator=generator).tolist()
        cut = max(1, length // 4)
        out.append(Reading(ids[:cut], ids[cut:]))
    return out


def _seconds(model: Transformer, lengths: list[int]) -> float:
    readings = _readings(model, lengths)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        for _ in hidden_states(model, readings, batch_tokens=1 << 20):  # the states arrive on the host
            pass
        times.append(time.perf_counter() - started)
    return sorted(times)[1]
