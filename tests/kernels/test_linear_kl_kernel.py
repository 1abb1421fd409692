"""The KL kernel beside its reference: in the interpreter, on a card, at sizes past 2^31."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kernels.linear_kl import linear_kl
from tests.kernels.test_linear_kl import GPU, Case, error, random_case, run


@pytest.mark.parametrize("op", ["linear_kl", "quant"])
def test_kernels_in_the_triton_interpreter(op):
    """In a process of its own, since the interpreter is chosen when triton is first imported."""
    done = subprocess.run([sys.executable, "-m", "tests.kernels.interpreter", op], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cases equal" in done.stdout


@GPU
@pytest.mark.parametrize("V", [151, 8193, 50257])
def test_kl_and_dx_are_the_same_bits_for_any_chunk_and_any_number_of_rows(V):
    case = random_case(N=700, D=64, E=48, V=V).to("cuda", torch.bfloat16)
    _, kl_N, grad_h, _ = run(case, chunk_bytes=1 << 30)
    for chunk_bytes, rows in ((1, 700), (8 << 20, 700), (64 << 20, 700), (1 << 30, 1), (1 << 30, 17), (1 << 30, 333)):
        part = Case(case.h_ND[:rows], case.w_VD, case.t_NE[:rows], case.u_VE, case.weight_N[:rows])
        _, kl_part, grad_part, _ = run(part, chunk_bytes=chunk_bytes)
        assert torch.equal(kl_part, kl_N[:rows])
        assert torch.equal(grad_part, grad_h[:rows])


@GPU
def test_workspace_is_allocated_once_and_may_hold_anything():
    from kernels.linear_kl import workspace

    case = random_case(N=150, D=64, E=48, V=1000).to("cuda", torch.bfloat16)
    expected = run(case, chunk_bytes=1 << 20)
    addresses, reserved = set(), set()
    for step in range(10_000):
        rows = 1 + step * 37 % 150
        part = Case(case.h_ND[:rows], case.w_VD, case.t_NE[:rows], case.u_VE, case.weight_N[:rows])
        h, w = part.h_ND.detach().requires_grad_(), part.w_VD.detach().requires_grad_()
        linear_kl(h, w, part.t_NE, part.u_VE, part.weight_N, chunk_bytes=1 << 20)[0].backward()
        addresses |= {buffer.data_ptr() for buffer in workspace.buffers.values()}
        if step >= 500:
            reserved.add(torch.cuda.memory_reserved())
    assert len(addresses) == len(workspace.buffers)
    assert len(reserved) == 1
    for buffer in workspace.buffers.values():
        buffer.fill_(255)  # NaN in every dtype
    for ours, wanted in zip(run(case, chunk_bytes=1 << 20), expected, strict=True):
        assert torch.equal(ours, wanted)


@GPU
def test_scaling_reaches_past_two_to_the_31():
    from kernels.linear_kl import kernel

    gradient = torch.ones((1 << 31) + 4097, device="cuda")
    kernel.scale(gradient, torch.tensor(3.0, device="cuda"))
    assert bool((gradient == 3).all())


@GPU
def test_kernel_and_reference_agree():
    case = random_case(N=333, D=128, E=64, V=32003, spread=5.0).to("cuda", torch.bfloat16)
    kernel, reference = (run(case, impl=impl) for impl in ("kernel", "reference"))
    for ours, wanted, bound in zip(kernel, reference, (1e-5, 1e-5, 4e-3, 4e-3), strict=True):
        assert error(ours, wanted) < bound
