"""What lies between two products, and a whole decode step of kernels: a Llama of 1.24 B parameters, replayed."""

from __future__ import annotations

import torch

from kernels.paged_attention import paged_attention
from kernels.rows import Rotary, add_rms_norm, rotate_into_pages, silu_gate
from kernels.sampling import sample
from kernels.scaled_mm import row_invariant_mm, row_invariant_mms
from kernels.testing import check, copy_gb_per_s, environment, figure, graph_us

_LAYERS, _WIDTH, _HEADS, _KV_HEADS, _CHANNELS, _GATE, _VOCABULARY = 16, 2048, 32, 8, 64, 8192, 128256
_TOKENS, _PAGE_TOKENS, _SPLIT_TOKENS = 384, 128, 512
_SIZES = [_HEADS * _CHANNELS, _KV_HEADS * _CHANNELS, _KV_HEADS * _CHANNELS]
#: Batch -> milliseconds of a step, log-probabilities included.
_TARGETS = {64: "<= 2.1", 256: "<= 3.6", 1024: "<= 11.3"}


def run(quick: bool) -> dict:
    batches = (64,) if quick else tuple(_TARGETS)
    env = environment(f"{_LAYERS} layers, d{_WIDTH}, {_TOKENS} positions, V{_VOCABULARY}, batches {batches}")
    if not torch.cuda.is_available():
        return {"figures": {f"step_{b}": figure(None, "ms", _TARGETS[b]) for b in batches}, "peers": {}, "env": env}
    copy = copy_gb_per_s()
    peers = {"device_copy": {"value": copy, "unit": "GB/s", "version": torch.__version__}}
    figures = {}
    with torch.no_grad():
        for rows in (64, 8192):
            _operations(figures, rows, copy)
        weights = _Weights()
        for batch in batches:
            _step(figures, weights, batch)
    return {"figures": figures, "peers": peers, "env": env}


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _rotary(rows: int) -> Rotary:
    angles = torch.rand(4096, _CHANNELS // 2, device="cuda") * 6
    return Rotary(angles.cos(), angles.sin(), torch.full((rows,), _TOKENS - 1, device="cuda"))


def _operations(figures: dict, rows: int, copy: float) -> None:
    """Each operation's time, and at many rows its share of copy bandwidth for the bytes that it must move."""
    h_ND, delta_ND, weight_D = _bf16(rows, _WIDTH), _bf16(rows, _WIDTH), torch.rand(_WIDTH, device="cuda")
    both_N2I, qkv_NX = _bf16(rows, 2 * _GATE), _bf16(rows, sum(_SIZES))
    q_NHC, k_NGC, v_NGC = (x.unflatten(1, (-1, _CHANNELS)) for x in qkv_NX.split(_SIZES, 1))
    cache_PTGC = torch.zeros(rows // 64 + 1, 64, _KV_HEADS, _CHANNELS, device="cuda", dtype=torch.bfloat16)
    rotary, slots_N = _rotary(rows), torch.arange(rows, device="cuda")
    calls = {
        "add_norm": (lambda impl=None: add_rms_norm(h_ND, delta_ND, weight_D, 1e-5, impl=impl), 8 * h_ND.numel()),
        "gate": (lambda impl=None: (silu_gate(*both_N2I.chunk(2, 1), impl=impl),), 3 * both_N2I.numel()),
        "rotate": (
            lambda impl=None: (
                rotate_into_pages(q_NHC, k_NGC, v_NGC, rotary, None, cache_PTGC, cache_PTGC, slots_N, impl=impl),
            ),
            4 * qkv_NX.numel(),
        ),
    }
    for name, (call, num_bytes) in calls.items():
        for found, expected in zip(call(), call("reference"), strict=True):
            scale = expected.float().abs().amax(-1, keepdim=True)
            check(bool(((found.float() - expected.float()).abs() <= scale * 2**-7).all()), name)
        microseconds = graph_us([call])
        figures[f"{name}_{rows}_us"] = figure(microseconds, "us", "")
        if rows > 1024:
            figures[f"{name}_{rows}"] = figure(num_bytes / microseconds / 1e3 / copy, "x copy", "")


class _Weights:
    def __init__(self) -> None:
        self.qkv = [_bf16(sum(_SIZES), _WIDTH) * 0.02 for _ in range(_LAYERS)]
        self.out = [_bf16(_WIDTH, _SIZES[0]) * 0.02 for _ in range(_LAYERS)]
        self.gate_up = [_bf16(2 * _GATE, _WIDTH) * 0.02 for _ in range(_LAYERS)]
        self.down = [_bf16(_WIDTH, _GATE) * 0.02 for _ in range(_LAYERS)]
        self.head = _bf16(_VOCABULARY, _WIDTH) * 0.02
        self.norm = torch.ones(_WIDTH, device="cuda")


def _step(figures: dict, w: _Weights, batch: int) -> None:
    pages = batch * _TOKENS // _PAGE_TOKENS
    shape = (_LAYERS, pages, _PAGE_TOKENS, _KV_HEADS, _CHANNELS)
    k_LPTGC, v_LPTGC = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table_SP = torch.randperm(pages, device="cuda").int().view(batch, -1)
    cu_rows_S1 = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    kv_tokens_S = torch.full((batch,), _TOKENS, device="cuda", dtype=torch.int32)
    slots_S = table_SP[:, -1].long() * _PAGE_TOKENS + (_TOKENS - 1) % _PAGE_TOKENS
    rotary = _rotary(batch)
    keys_S = torch.randint(-(2**62), 2**62, (batch,), device="cuda")
    ids_S = torch.randint(0, _VOCABULARY, (batch,), device="cuda")

    def attend(layer: int, x_SD: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(1, (-1, _CHANNELS)) for y in row_invariant_mms(x_SD, w.qkv[layer], _SIZES))
        q = rotate_into_pages(q, k, v, rotary, None, k_LPTGC[layer], v_LPTGC[layer], slots_S)
        o_SHC = paged_attention(
            q, k_LPTGC[layer], v_LPTGC[layer], table_SP, cu_rows_S1, kv_tokens_S,
            split_tokens=_SPLIT_TOKENS, single_rows=True,
        )  # fmt: skip
        return row_invariant_mm(o_SHC.flatten(1), w.out[layer])

    def step() -> torch.Tensor:
        h_SD = w.head[ids_S]
        delta_SD = torch.zeros_like(h_SD)
        for layer in range(_LAYERS):
            h_SD, x_SD = add_rms_norm(h_SD, delta_SD, w.norm, 1e-5)
            h_SD, x_SD = add_rms_norm(h_SD, attend(layer, x_SD), w.norm, 1e-5)
            gate_SI, up_SI = row_invariant_mms(x_SD, w.gate_up[layer], [_GATE, _GATE])
            delta_SD = row_invariant_mm(silu_gate(gate_SI, up_SI), w.down[layer])
        final_SD = add_rms_norm(h_SD, delta_SD, w.norm, 1e-5)[1]
        logits_SV = row_invariant_mm(final_SD, w.head, dtype=torch.float32)
        return sample(logits_SV, keys_S, rotary.positions_N + 1)[1]

    check(bool(step().isfinite().all()), "log-probabilities of a step")
    milliseconds = graph_us([step], repeats=2) / 1e3
    figures[f"step_{batch}"] = figure(milliseconds, "ms", _TARGETS[batch])
    figures[f"step_{batch}_tok_s"] = figure(batch / milliseconds * 1e3, "tok/s", "")
