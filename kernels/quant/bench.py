"""The casts' share of this GPU's copy bandwidth, for the bytes that each must read and write.

Times are the device's, from graph replays: a cast takes less time than its launch from Python. Each is run for a tenth
of a second first, since some are bound by instructions, and a card that comes from other work has another clock.
"""

from __future__ import annotations

import torch

from kernels import quant
from kernels.testing import check, copy_gb_per_s, environment, figure, graph_us

_TARGET = ">= 0.8"
_SETTLE_S = 0.1


def run(quick: bool) -> dict:
    rows, columns = 8192, 8192 if quick else 16384
    env = environment(f"{rows} x {columns}")
    names = ("mxfp4_quantize_fp32", "mxfp4_quantize_bf16", "mxfp4_dequantize", "mxfp4_to_fp8")
    names += ("fp8_quantize_tiles_fp32", "fp8_quantize_tiles_bf16", "fp8_quantize_rows", "fp8_quantize_both")
    if not torch.cuda.is_available():
        return {"figures": {name: figure(None, "x", _TARGET) for name in names}, "peers": {}, "env": env}
    copy = copy_gb_per_s()
    wide = torch.randn(rows, columns, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    narrow = wide.bfloat16()
    blocks, scales = quant.mxfp4_quantize(wide)
    calls = (
        lambda impl=None: quant.mxfp4_quantize(wide, impl=impl),
        lambda impl=None: quant.mxfp4_quantize(narrow, impl=impl),
        lambda impl=None: (quant.mxfp4_dequantize(blocks, scales, impl=impl),),
        lambda impl=None: quant.mxfp4_to_fp8(blocks, scales, impl=impl),
        lambda impl=None: quant.fp8_quantize_tiles(wide, impl=impl),
        lambda impl=None: quant.fp8_quantize_tiles(narrow, impl=impl),
        lambda impl=None: quant.fp8_quantize_rows(narrow, impl=impl),
        lambda impl=None: quant.fp8_quantize_both(narrow, impl=impl),
    )
    inputs = ((wide,), (narrow,), (blocks, scales), (blocks, scales), (wide,), (narrow,), (narrow,), (narrow,))
    figures = {}
    for name, call, read in zip(names, calls, inputs, strict=True):
        found, wanted = call(), call("reference")
        same = all(
            torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
            for a, b in zip(found, wanted, strict=True)
        )
        check(same, f"{name} differs from its reference")
        moved = sum(t.numel() * t.element_size() for t in (*read, *found))
        del found, wanted
        figures[name] = figure(moved / graph_us([call], settle_s=_SETTLE_S) / 1e3 / copy, "x", _TARGET)
    peers = {"device_copy": {"value": copy, "unit": "GB/s", "version": torch.__version__}}
    return {"figures": figures, "peers": peers, "env": env}
