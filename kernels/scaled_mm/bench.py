"""Figures of the products against cuBLAS bf16: small-M MXFP4, large-M FP8, FP8 training, the cost of row invariance.

Weights of small products rotate over five copies, so that none is read from the L2 cache. All calls are replayed from
CUDA graphs, ours and the peers', so that figures hold the device's time and no launches.

Small products are timed twice, since a card that multiplies without pause slows down at its power limit: rested, after
a pause, and sustained, at the clock that each contestant settles at by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from kernels.quant import fp8_quantize_rows, fp8_quantize_tiles, mxfp4_dequantize
from kernels.scaled_mm import fp8_linear, fp8_mm, mxfp4_mm, pack_mxfp4, row_invariant_mm, self_test, w4a8_mm
from kernels.scaled_mm.mxfp4 import decoded_copy
from kernels.testing import check, environment, figure, graph_us, median_ms, relative_error

#: (N, K) of linears of Llama and Qwen models and of a 7168-wide one.
MODEL_SHAPES = (
    *((576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)),
    *((2048, 2048), (8192, 2048), (2048, 8192), (4096, 4096), (14336, 4096), (4096, 14336)),
    *((896, 4864), (4864, 896), (2112, 7168), (7168, 2048), (7168, 7168), (8192, 8192)),
)

_PAUSE_S, _SETTLE_S = 0.3, 0.15


def _default_library() -> None:
    torch.backends.cuda.preferred_blas_library("cublas")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


def _normal(*shape: int, scale: float = 1.0, grad: bool = False) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16().requires_grad_(grad)


def _mxfp4(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(0, 256, (outputs, inputs // 2), device="cuda", dtype=torch.uint8)
    scales = torch.randint(115, 126, (outputs, inputs // 32), device="cuda", dtype=torch.uint8)
    return blocks, scales


def _cublas(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    _default_library()
    return F.linear(x_MK, w_NK)


def _rested_us(calls: Sequence[Callable[[], object]]) -> float:
    torch.cuda.synchronize()
    time.sleep(_PAUSE_S)
    return graph_us(calls)


def small_rows(figures: dict, peers: dict, rows: Sequence[int], shape: tuple[int, int] = (8192, 8192)) -> None:
    """MXFP4 weights of one shape against cuBLAS on their bf16 values."""
    targets = {16: ">= 2.2", 64: ">= 2.2", 256: ">= 1.0"} if shape == (8192, 8192) else {}
    suffix = "" if shape == (8192, 8192) else f"_{shape[0]}x{shape[1]}"
    copies = max(5, -(-(640 << 20) // (2 * shape[0] * shape[1])))
    weights = [pack_mxfp4(*_mxfp4(*shape)) for _ in range(min(copies, 40))]
    values = [decoded_copy(weight) for weight in weights]
    for count in rows:
        x_MK, name = _normal(count, shape[1]), f"m{count}{suffix}"
        exact = torch.equal(mxfp4_mm(x_MK, weights[0]), row_invariant_mm(x_MK, values[0]))
        check(exact, f"mxfp4_mm at {count} rows differs from the row-invariant product")
        contestants = (
            [partial(_cublas, x_MK, w) for w in values],
            [partial(row_invariant_mm, x_MK, w) for w in values],
            [partial(mxfp4_mm, x_MK, w) for w in weights],
        )
        rested = [_rested_us(calls) for calls in contestants]
        sustained = [graph_us(calls, settle_s=_SETTLE_S) for calls in contestants]
        for (cublas, library, ours), how in ((rested, ""), (sustained, "_sustained")):
            figures[f"mxfp4_{name}{how}"] = figure(cublas / ours, "x cuBLAS bf16", targets.get(count, ""))
            figures[f"mxfp4_{name}{how}_us"] = figure(ours, "us", "")
            figures[f"row_invariant_{name}{how}"] = figure(cublas / library, "x cuBLAS bf16", "")
            peers[f"cublas_bf16_{name}{how}"] = {"value": cublas, "unit": "us", "version": torch.__version__}


def large_rows(figures: dict, peers: dict) -> None:
    """FP8 blocks at 8192^3, quantisation of the activations counted, that of the weight not."""
    x_MK, w_NK = _normal(8192, 8192), _normal(8192, 8192, scale=0.02)
    weight = fp8_quantize_tiles(w_NK)
    _default_library()
    bf16 = graph_us([lambda: x_MK @ w_NK.T]) / 1e3
    product = fp8_mm(*fp8_quantize_rows(x_MK), *weight)
    check(relative_error(product[:256], x_MK[:256].double() @ w_NK.double().T) < 0.05, "fp8_mm at 8192^3")
    fp8 = graph_us([lambda: fp8_mm(*fp8_quantize_rows(x_MK), *weight)]) / 1e3
    figures["fp8_8192"] = figure(bf16 / fp8, "x cuBLAS bf16", ">= 1.5")
    figures["fp8_8192_ms"] = figure(fp8, "ms", "")
    blocks, scales = _mxfp4(8192, 8192)
    values = fp8_quantize_tiles(mxfp4_dequantize(blocks, scales))
    exact = torch.equal(w4a8_mm(x_MK, blocks, scales), fp8_mm(*fp8_quantize_rows(x_MK), *values))
    check(exact, "w4a8_mm differs from the FP8 product on the weight's values")
    # Not from a graph: each call reads its verdicts back.
    w4a8 = median_ms(lambda: w4a8_mm(x_MK, blocks, scales))
    figures["w4a8_8192"] = figure(bf16 / w4a8, "x cuBLAS bf16", "")
    figures["w4a8_8192_ms"] = figure(w4a8, "ms", "")
    peers["cublas_bf16_8192"] = {"value": bf16, "unit": "ms", "version": torch.__version__}


def training(figures: dict, peers: dict) -> None:
    """Forward and backward of a linear, M8192 N7168 K7168, every quantisation counted."""
    x_MK, w_NK = _normal(8192, 7168, grad=True), _normal(7168, 7168, scale=0.02, grad=True)
    dy_MN = _normal(8192, 7168)
    _default_library()

    def step(linear: Callable) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(linear(x_MK, w_NK), (x_MK, w_NK), dy_MN)

    for found, wanted in zip(step(fp8_linear), step(F.linear), strict=True):
        check(relative_error(found[:256], wanted[:256]) < 0.05, "a gradient of fp8_linear")
    bf16, fp8 = (graph_us([partial(step, linear)]) / 1e3 for linear in (F.linear, fp8_linear))
    figures["fp8_training"] = figure(bf16 / fp8, "x bf16 linear", ">= 1.35")
    figures["fp8_training_ms"] = figure(fp8, "ms", "")
    peers["bf16_linear"] = {"value": bf16, "unit": "ms", "version": torch.__version__}


def run(quick: bool) -> dict:
    """Figures and peers of this module; raises CheckFailed where a product is wrong, ContractError by `self_test`."""
    figures: dict = {}
    peers: dict = {}
    torch.manual_seed(0)
    shapes = MODEL_SHAPES[:4] if quick else MODEL_SHAPES
    self_test(shapes)
    figures["row_invariant_shapes"] = figure(len(shapes), "shapes of models", "")
    small_rows(figures, peers, (16, 64, 256) if quick else (1, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024))
    for shape in () if quick else ((2048, 2048), (16384, 2048), (2048, 8192)):
        small_rows(figures, peers, (64, 256), shape)
    large_rows(figures, peers)
    training(figures, peers)
    return {"figures": figures, "peers": peers, "env": environment("N=K=8192; training M8192 N=K=7168")}
