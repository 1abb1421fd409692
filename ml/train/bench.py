"""Figures of training on a GPU: whole optimizer steps of a 1.24 B student in DeepSpeed on one 16,384-token pack, random
weights, exact reverse KL to a teacher of width 4096.

Checks: a student that is its own teacher has no KL and no gradient; the loss of the first step is the same twice.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.testing import check, environment, figure
from ml.bench_models import LLAMA_1B, SMALL
from ml.device import forget_peak, observed, rank_device, traits
from ml.linear import COMPUTE_DTYPES, Compute, Precision
from ml.model import ModelConfig, PackedCausal, Transformer
from ml.ranks import join_ranks, leave_ranks
from ml.train.batches import Frame
from ml.train.engine import EngineSettings, TrainEngine
from ml.train.heads import TeacherHeads
from ml.train.loss import LossSettings, Student
from ml.train.micro_batch import MicroBatch, Segment
from ml.train.objectives.kl import KL

#: transformers, DeepSpeed ZeRO-2 in bf16, checkpointing and Liger's chunked reverse KL, the same shape and card.
_PEER = {"4 x 4096": 34_800.0, "1 x 16384": 27_100.0}
_STEPS = 4


@dataclass(frozen=True)
class Setting:
    """What one figure is measured with."""

    name: str
    lengths: list[int]
    precision: Precision = "bf16"
    compute: Compute = "bf16"
    recompute: bool = True
    target: str = ""


def run(quick: bool) -> dict[str, Any]:
    """Raises CheckFailed when a check does not hold."""
    os.environ.setdefault("LOCAL_RANK", "0")
    device = rank_device()
    on_card = torch.cuda.is_available()
    shape, teacher_width = (LLAMA_1B, 4096) if on_card else (SMALL, 256)
    scale = 1 if on_card else 64
    settings = [
        Setting("4 x 4096", [4096 // scale] * 4, target=f">= {_PEER['4 x 4096']:.0f}"),
        Setting("1 x 16384", [16384 // scale], target=f">= {_PEER['1 x 16384']:.0f}"),
        Setting("128 x 128", [128 // min(scale, 16)] * 128),
        Setting("4 x 4096, layers not recomputed", [4096 // scale] * 4, recompute=False),
        Setting("4 x 4096, MXFP4 values", [4096 // scale] * 4, precision="mxfp4"),
        Setting("4 x 4096, FP8", [4096 // scale] * 4, precision="mxfp4", compute="fp8"),
        Setting("1 x 16384, FP8", [16384 // scale], precision="mxfp4", compute="fp8"),
    ]
    join_ranks(device)
    try:
        check_own_teacher(device)
        figures = {}
        for setting in settings[:1] if quick else settings:
            figures |= measure(setting, shape, teacher_width, device, comparable=on_card and not quick)
    finally:
        leave_ranks()
    peers = {f"{n}: DeepSpeed ZeRO-2 bf16 + Liger chunked KL, measured apart": {"value": v, "unit": "tokens/s"}
             for n, v in _PEER.items()}  # fmt: skip
    return {
        "figures": figures,
        "peers": peers,
        "env": environment(f"Llama of {shape['hidden_size']} x {shape['num_hidden_layers']}, "
                           f"V{shape['vocab_size']}, teacher of width {teacher_width}, ZeRO-1, one rank"),
    }  # fmt: skip


def random_student(
    shape: dict[str, Any], device: torch.device, precision: Precision = "bf16", compute: Compute = "bf16"
) -> Transformer:
    """An fp32 master whose logits have a spread of about one."""
    model = Transformer(
        ModelConfig.from_hf(shape, "bench"), precision=precision, compute=COMPUTE_DTYPES[compute], trainable=True,
        fp8=compute == "fp8", device=device,
    )  # fmt: skip
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    return model


def random_batch(lengths: list[int], vocab_size: int, teacher_width: int, device: torch.device) -> MicroBatch:
    """One pack; an eighth of each sequence is its prompt, the rest is sampled and learnt."""
    generator = torch.Generator(device).manual_seed(1)
    cu_tokens, rows = [0], []
    for length in lengths:
        rows.append(torch.arange(max(1, length // 8) - 1, length, device=device) + cu_tokens[-1])
        cu_tokens.append(cu_tokens[-1] + length)
    rows_R = torch.cat(rows)
    ids_N, response_N = (
        torch.randint(0, vocab_size, (cu_tokens[-1],), generator=generator, device=device) for _ in range(2)
    )
    hidden_RE = torch.randn(len(rows_R), teacher_width, generator=generator, device=device).bfloat16()
    ones_R = torch.ones(len(rows_R), device=device)
    segment = Segment("kl", 0, rows_R, response_N[: len(rows_R)], ones_R, ones_R, hidden_RE)
    positions_N = torch.cat([torch.arange(length, device=device) for length in lengths])
    return MicroBatch(Frame("train", 0, 0, 0, len(rows_R)), ids_N, positions_N, cu_tokens, (segment,))


def measure(
    setting: Setting, shape: dict[str, Any], teacher_width: int, device: torch.device, *, comparable: bool
) -> dict[str, Any]:
    """Tokens a second, and peak memory, of whole steps: forward, loss, backward, AdamW."""
    gc.collect()  # an engine's hooks make cycles, which hold the last setting's model
    forget_peak(device)
    model = random_student(shape, device, setting.precision, setting.compute)
    model.checkpoint_layers = setting.recompute
    vocab_size = shape["vocab_size"]
    student = Student(model, LossSettings(vocab_size, chunk_bytes=traits(device).chunk_bytes), {"kl": KL()})
    engine = TrainEngine(student, EngineSettings(1e-6), device=device)
    head_VE = torch.randn(vocab_size, teacher_width, device=device).bfloat16() * teacher_width**-0.5
    heads = TeacherHeads(lambda _: head_VE, vocab_size=vocab_size, device=device)
    batch = random_batch(setting.lengths, vocab_size, teacher_width, device)
    try:
        with torch.no_grad():
            twice = [float(engine(batch, heads)[0]) for _ in range(2)]
        check(twice[0] == twice[1], f"{setting.name}: the loss of equal weights is equal, {twice}")
        seconds = sorted([_step(engine, batch, heads) for _ in range(_STEPS + 1)][1:])[_STEPS // 2]
    finally:
        engine.close()
    rate = figure(sum(setting.lengths) / seconds, "tokens/s", setting.target)
    if not comparable:
        rate["holds"] = None
    peak = observed(device)["device_peak_bytes"]
    return {f"{setting.name}, tokens/s": rate, f"{setting.name}, peak": figure(peak / 2**30, "GiB", "")}


def _step(engine: TrainEngine, batch: MicroBatch, heads: TeacherHeads) -> float:
    """Seconds of one optimizer step."""
    started = time.perf_counter()
    loss, _, _ = engine(batch, heads)
    engine.backward(loss)
    check(engine.step() > 0, "a gradient")  # reads the norm: the device is waited for
    return time.perf_counter() - started


def check_own_teacher(device: torch.device) -> None:
    """The KL of a student to itself is what rounding leaves of zero."""
    model = random_student(SMALL, device)
    student = Student(model, LossSettings(SMALL["vocab_size"]), {"kl": KL()})
    batch = random_batch([100, 37], SMALL["vocab_size"], SMALL["hidden_size"], device)
    (segment,) = batch.segments
    with torch.no_grad():
        own_ND = model(batch.ids_N, batch.positions_N, PackedCausal(batch.cu_tokens))
    own = MicroBatch(
        batch.frame, batch.ids_N, batch.positions_N, batch.cu_tokens,
        (replace(segment, hidden_RE=own_ND[segment.rows_R]),),
    )  # fmt: skip
    heads = TeacherHeads(lambda _: model.head_weight.detach(), vocab_size=SMALL["vocab_size"], device=device)
    loss, (values,), _ = student(own, heads)
    loss.backward()
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    largest_kl = float(values["kl"].abs().max())
    check(largest_kl < 1e-4, f"no KL to oneself, {largest_kl}")
    check(largest < 1e-3, f"no gradient towards oneself, {largest}")
