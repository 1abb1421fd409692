"""Reverse KL, forward and backward, on one GPU: time, peak memory above the inputs, error; Liger's in the same run.

The FP8 modes are also measured where student and teacher nearly agree (KL about 1e-3), where they are furthest off.

Two protocols, since a large GPU throttles on its power limit after a few tens of milliseconds of matrix products:
`sustained` is the median of calls back to back, `rested` of calls that each follow an idle pause.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import time

import torch

from kernels.linear_kl import linear_kl
from kernels.testing import check, environment, figure, median_ms, peak_bytes, relative_error

_GIB = 1 << 30
_CHECKED_ROWS = 64
# A teacher's logits that differ by this standard deviation are a KL of about 1e-3 away.
_NEAR = 0.045
# (tokens, width of both models, vocabulary)
_SHAPES = {"d4096": (8192, 4096, 151936), "d7168": (8192, 7168, 129280)}
# (shape, precision, chunk_bytes, most GiB, most ms, most relative error of dX); None: reported
_RUNS = {
    "d4096_5gib": ("d4096", "exact", 1_245_000_000, 5.0, 60.0, 2.5e-3),
    "d4096_3gib": ("d4096", "exact", 623_000_000, 3.0, 67.0, 2.5e-3),
    "d4096_fp8_gradients": ("d4096", "fp8_gradients", 1_400_000_000, 5.0, 48.0, 0.06),
    "d4096_fp8": ("d4096", "fp8", 1_400_000_000, 5.0, 48.0, None),
    "d7168_6gib": ("d7168", "exact", 1_060_000_000, 6.0, 88.0, 2.5e-3),
    "d7168_fp8_gradients": ("d7168", "fp8_gradients", 1_200_000_000, 6.0, 70.0, 0.06),
    "d7168_fp8": ("d7168", "fp8", 1_200_000_000, 6.0, 70.0, None),
}
_LONG = (1 << 20, 2048, 128256, 1_060_000_000)


def run(quick: bool) -> dict:
    """Figures of every run, or of the first when quick; without a GPU none runs and all values are null."""
    runs = dict(list(_RUNS.items())[: 1 if quick else None])
    env = environment(" | ".join(f"{name} T{N} V{V}" for name, (N, _, V) in _SHAPES.items()))
    figures, peers = {}, {}
    if not torch.cuda.is_available():
        empty = {f"{name}_sustained": figure(None, "ms", f"<= {most[4]}") for name, most in runs.items()}
        return {"figures": empty, "peers": peers, "env": env}
    for shape in dict.fromkeys(entry[0] for entry in runs.values()):
        inputs = _Inputs(*_SHAPES[shape])
        for name, (of_shape, *options) in runs.items():
            if of_shape == shape:
                figures |= _own_figures(name, inputs, *options)
        peers |= _liger_figures(shape, inputs)
        del inputs
        torch.cuda.empty_cache()
        if not quick:
            figures |= _near_figures(shape)
    if not quick:
        figures |= _long_figures()
    return {"figures": figures, "peers": peers, "env": env}


class _Inputs:
    """bf16 states and heads whose logits have standard deviation 1.5, and float64 answers for some rows.

    near: the teacher has the student's states, and a head so close that the KL is about 1e-3.
    """

    def __init__(self, tokens: int, width: int, vocabulary: int, near: bool = False):
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(rows, scale):
            values = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, generator=generator)
            return values.mul_(scale)

        self.h_ND, self.t_NE = normal(tokens, 1.0).requires_grad_(), normal(tokens, 1.0)
        self.w_VD, self.u_VE = (
            normal(vocabulary, 1.5 / width**0.5).requires_grad_(),
            normal(vocabulary, (_NEAR if near else 1.5) / width**0.5),
        )
        if near:
            self.t_NE = self.h_ND.detach()
            self.u_VE += self.w_VD.detach()
        self.w_VD.grad_dtype = torch.float32
        self.weight_N = torch.full((tokens,), 1.0 / tokens, device="cuda")
        self.rows = torch.arange(_CHECKED_ROWS, device="cuda") * (tokens // _CHECKED_ROWS)
        head = self.w_VD.detach().double()
        q = (self.h_ND.detach()[self.rows].double() @ head.t()).log_softmax(1)
        p = (self.t_NE[self.rows].double() @ self.u_VE.double().t()).log_softmax(1)
        self.expected_kl = (q.exp() * (q - p)).sum(1)
        self.expected_dh = q.exp().mul_(q - p - self.expected_kl.unsqueeze(1)) @ head / tokens

    def clear(self):
        self.h_ND.grad = self.w_VD.grad = None

    def gradient(self) -> torch.Tensor:
        assert self.h_ND.grad is not None
        return self.h_ND.grad


def _step(inputs, rows=None, **options):
    inputs.clear()
    # A slice of a leaf would hold its gradient twice.
    h_ND = inputs.h_ND if rows is None else inputs.h_ND[:rows]
    arguments = h_ND, inputs.w_VD, inputs.t_NE[:rows], inputs.u_VE, inputs.weight_N[:rows]
    loss, kl_N = linear_kl(*arguments, **options)
    loss.backward()
    return kl_N


def _own_figures(name, inputs, precision, chunk_bytes, most_gib, most_ms, most_error):
    from kernels.linear_kl import workspace

    def step():
        return _step(inputs, chunk_bytes=chunk_bytes, precision=precision)

    workspace.release()
    inputs.clear()
    torch.cuda.empty_cache()
    peak = peak_bytes(step) / _GIB
    kl_N = step()
    kl_error = relative_error(kl_N[inputs.rows], inputs.expected_kl)
    dh_error = relative_error(inputs.gradient()[inputs.rows], inputs.expected_dh)
    check(precision == "fp8" or kl_error < 1e-4, f"{name}: KL off by {kl_error}")
    check(dh_error < (most_error or 0.5), f"{name}: dX off by {dh_error}")
    gradient = inputs.w_VD.grad
    repeated = step()
    check(torch.equal(kl_N, repeated) and torch.equal(gradient, inputs.w_VD.grad), f"{name}: a repeat differs")
    figures = {
        f"{name}_sustained": figure(median_ms(step), "ms", f"<= {most_ms}"),
        f"{name}_rested": figure(_rested_ms(step), "ms", f"<= {most_ms}"),
        f"{name}_peak": figure(peak, "GiB", f"<= {most_gib}"),
        f"{name}_dx_error": figure(dh_error, "relative", f"<= {most_error}" if most_error else "reported"),
        f"{name}_kl_error": figure(kl_error, "relative", "reported"),
    }
    if precision != "exact":
        _step(inputs, chunk_bytes=chunk_bytes)
        exact = inputs.w_VD.grad
        off = float((gradient.sub_(exact)).norm(dtype=torch.float64) / exact.norm(dtype=torch.float64))
        figures[f"{name}_dw_off_exact"] = figure(off, "relative", "reported")
    return figures


def _near_figures(shape):
    """What each precision makes of a KL of about 1e-3."""
    inputs = _Inputs(*_SHAPES[shape], near=True)
    true = float(inputs.expected_kl.mean())
    figures = {f"{shape}_near_kl": figure(true, "nat", "reported")}
    for precision in ("exact", "fp8_gradients", "fp8"):
        kl_N = _step(inputs, chunk_bytes=800_000_000, precision=precision)
        bias = float(kl_N[inputs.rows].double().mean()) / true - 1
        check(precision == "fp8" or abs(bias) < 1e-3, f"{shape}, near, {precision}: KL biased by {bias}")
        dh_error = relative_error(inputs.gradient()[inputs.rows], inputs.expected_dh)
        figures[f"{shape}_near_{precision}_kl_bias"] = figure(bias, "relative", "reported")
        figures[f"{shape}_near_{precision}_dx_error"] = figure(dh_error, "relative", "reported")
    return figures


def _rested_ms(step, repeats=8):
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        time.sleep(0.4)
        times.append(median_ms(step, repeats=1, warmup=0))
    return statistics.median(times)


def _liger_figures(name, inputs):
    """Liger's two ways, where it is installed; both round logits to bf16."""
    try:
        version = importlib.metadata.version("liger_kernel")
    except importlib.metadata.PackageNotFoundError:
        return {f"liger_{name}": {"value": None, "unit": "ms", "version": "not installed"}}
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss  # pyright: ignore[reportMissingImports]
    from liger_kernel.transformers.fused_linear_jsd import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearJSD,
    )

    labels = torch.zeros(inputs.h_ND.shape[0], dtype=torch.long, device="cuda")
    chunked = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, chunk_size=1024)
    ways = {"fused": LigerFusedLinearJSD(jsd_beta=1.0), "chunked": chunked}
    figures = {}
    for way, loss in ways.items():
        h_ND, w_VD = (x.detach().requires_grad_() for x in (inputs.h_ND, inputs.w_VD))
        extra = (labels if way == "chunked" else None,)

        def step(loss=loss, h_ND=h_ND, w_VD=w_VD, extra=extra):
            h_ND.grad = w_VD.grad = None
            loss(h_ND, w_VD, inputs.t_NE, inputs.u_VE, *extra).backward()

        inputs.clear()
        step()
        error = relative_error(h_ND.grad[inputs.rows], inputs.expected_dh)
        h_ND.grad = w_VD.grad = None
        figures |= {
            f"liger_{way}_{name}_peak": {"value": peak_bytes(step) / _GIB, "unit": "GiB", "version": version},
            f"liger_{way}_{name}_sustained": {"value": median_ms(step), "unit": "ms", "version": version},
            f"liger_{way}_{name}_rested": {"value": _rested_ms(step), "unit": "ms", "version": version},
            f"liger_{way}_{name}_dx_error": {"value": error, "unit": "relative", "version": version},
        }
    return figures


def _long_figures():
    """A million tokens in one call, whose workspace must be that of 8192."""
    from kernels.linear_kl import workspace

    tokens, width, vocabulary, chunk_bytes = _LONG
    workspace.release()
    inputs = _Inputs(tokens, width, vocabulary)

    def step(rows):
        return _step(inputs, rows, chunk_bytes=chunk_bytes)

    step(8192)
    held = workspace.held_bytes()
    start = time.monotonic()
    kl_N = step(tokens)
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    kl_error = relative_error(kl_N[inputs.rows], inputs.expected_kl)
    dh_error = relative_error(inputs.gradient()[inputs.rows], inputs.expected_dh)
    check(kl_error < 1e-4 and dh_error < 2.5e-3, f"million tokens: KL off by {kl_error}, dX by {dh_error}")
    return {
        "million_tokens": figure(seconds, "s", ""),
        "million_tokens_workspace_growth": figure(workspace.held_bytes() / held, "x", "<= 1.0"),
    }
