"""bf16 products on CPUs without bf16 instructions: rounded once, row-invariant, and chosen where they pay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.packed_attention import packed_attention
from kernels.scaled_mm import plain_mm, row_invariant_mm
from kernels.scaled_mm import wide as module
from tests.kernels.test_packed_attention import run


@pytest.fixture(autouse=True)
def chosen(monkeypatch):
    """The way of a CPU without bf16 instructions, on any."""
    monkeypatch.setattr(module, "_SLOW", 0.0)
    module.wide.cache_clear()
    assert module.wide()
    yield
    module.wide.cache_clear()


def nearly_rounded_once(found: torch.Tensor, want: torch.Tensor) -> None:
    """found, bf16, is the float64 want rounded to bf16, but where fp32 sums fall on the other side of a tie."""
    assert found.dtype == torch.bfloat16
    assert (found == want.bfloat16()).float().mean() > 0.99
    assert ((found.double() - want).abs() <= want.abs() * 2**-8 + 1e-3).all()


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(45, 70), (576, 192), (192, 576)])
def test_a_row_has_the_same_bits_in_any_company(out, num_outputs, num_inputs):
    generator = torch.Generator().manual_seed(num_outputs)
    x_MK = torch.randn(200, num_inputs, generator=generator).bfloat16()
    w_NK = torch.randn(num_outputs, num_inputs, generator=generator).bfloat16()
    alone_MN = torch.cat([row_invariant_mm(row, w_NK, dtype=out) for row in x_MK.split(1)])
    want_MN = x_MK.double() @ w_NK.double().T
    if out == torch.bfloat16:
        nearly_rounded_once(alone_MN, want_MN)
    else:
        assert (alone_MN - want_MN).abs().max() < 1e-3
    for rows in (1, 2, 31, 32, 33, 64, 100, 200):
        some = torch.randperm(200, generator=generator)[:rows]
        assert torch.equal(row_invariant_mm(x_MK[some], w_NK, dtype=out), alone_MN[some]), rows


def test_a_training_product_and_its_gradients_are_rounded_once():
    x_MK, w_NK, dy_MN = torch.randn(50, 192), torch.randn(96, 192), torch.randn(50, 96).bfloat16()
    x_MK, w_NK = (x.bfloat16().requires_grad_() for x in (x_MK, w_NK))
    y_MN = plain_mm(x_MK, w_NK)
    y_MN.backward(dy_MN)
    assert x_MK.grad is not None
    assert w_NK.grad is not None
    with torch.no_grad():
        nearly_rounded_once(y_MN, x_MK.double() @ w_NK.double().T)
        nearly_rounded_once(x_MK.grad, dy_MN.double() @ w_NK.double())
        nearly_rounded_once(w_NK.grad, dy_MN.double().T @ x_MK.double())
    frozen_NK = w_NK.detach()
    (grad_MK,) = torch.autograd.grad(plain_mm(x_MK, frozen_NK), x_MK, dy_MN)
    assert torch.equal(grad_MK, x_MK.grad)


def test_attention_in_training():
    assert max(run([0, 5, 6, 40], heads=6, kv_heads=2, channels=16, dtype=torch.bfloat16, device="cpu")) < 4e-3
    q, k, v = (torch.randn(40, heads, 16).bfloat16() for heads in (6, 2, 2))
    assert packed_attention(q, k, v, [0, 5, 40]).dtype == torch.bfloat16


def chosen_under(isa: str) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", "from kernels.scaled_mm.wide import wide; print(wide())"], text=True, check=True,
        capture_output=True, env=os.environ | {"ONEDNN_MAX_CPU_ISA": isa}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return {"True": True, "False": False}[done.stdout.strip()]


@pytest.mark.skipif("avx512_bf16" not in Path("/proc/cpuinfo").read_text(), reason="a CPU with bf16 instructions")
def test_the_measurement_tells_cpus_with_and_without_bf16_instructions():
    assert {isa: chosen_under(isa) for isa in ("ALL", "AVX2")} == {"ALL": False, "AVX2": True}
