"""Gradients of norms, rotation and gate in one pass each, against float64 formulas differentiated by torch."""

from __future__ import annotations

import pytest
import torch

from kernels import rows
from kernels.rows import Rotary
from schemas.errors import ContractError

EPSILON = 1e-5


@pytest.fixture(autouse=True)
def interpreted(request):
    if request.node.get_closest_marker("gpu") is None:
        request.getfixturevalue("triton_interpreter")


def normal(*shape: int, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def norm64(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def turn64(x, cos, sin):
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def errors(found, inputs, upstream, oracle):
    """Relative error of each output and each input's gradient against `oracle` in float64."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = oracle(*wide)
    gradients = torch.autograd.grad(found, inputs, upstream)
    wanted = torch.autograd.grad(expected, wide, [u.double() for u in upstream])
    pairs = [*zip(found, expected, strict=True), *zip(gradients, wanted, strict=True)]
    assert all(g.dtype == x.dtype for g, x in zip(gradients, inputs, strict=True))
    return [float((a.detach().double() - b.detach()).norm() / b.detach().norm().clamp(min=1e-30)) for a, b in pairs]


def all_errors(operations, device: str, dtype: torch.dtype, num_rows: int, width: int) -> dict[str, float]:
    """Largest error by operation, for rows that are columns of wider matrices."""

    def leaf(seed: int, columns: int) -> torch.Tensor:
        return normal(num_rows, columns + 8, seed=seed, device=device, dtype=dtype)[:, 8:].requires_grad_()

    def given(seed: int, *shape: int) -> torch.Tensor:
        return normal(*shape, seed=seed, device=device, dtype=dtype)

    x, delta, gate, up = (leaf(seed, width) for seed in range(4))
    weight = normal(width, seed=4, device=device).requires_grad_()
    worst = {}
    y = operations.rms_norm(x, weight, EPSILON)
    worst["norm"] = errors([y], [x, weight], [given(5, num_rows, width)], lambda x, w: [norm64(x, w)])
    # In bf16 the sum is rounded before its norm, which the oracle would not see.
    exact = delta.detach().mul(0.0).requires_grad_() if dtype == torch.bfloat16 else delta
    total, y = operations.add_rms_norm(x, exact, weight, EPSILON)
    upstream = [given(6, num_rows, width), given(7, num_rows, width)]
    worst["sum and norm"] = errors([total, y], [x, exact, weight], upstream, lambda x, d, w: [x + d, norm64(x + d, w)])
    y = operations.silu_gate(gate, up)
    worst["gate"] = errors([y], [gate, up], [given(8, num_rows, width)], lambda g, u: [g * torch.sigmoid(g) * u])
    q, k = (given(9 + i, num_rows, heads, 32).requires_grad_() for i, heads in enumerate((10, 3)))
    angles = torch.rand(50, 16, generator=torch.Generator().manual_seed(11)).to(device) * 6
    positions = torch.randint(0, 50, (num_rows,), generator=torch.Generator().manual_seed(12)).to(device)
    rotary = Rotary(angles.cos(), angles.sin(), positions)
    cos, sin = (table[positions].double()[:, None] for table in (rotary.cos_MC, rotary.sin_MC))
    turned = operations.rotate(q, k, rotary, None)
    upstream = [given(13, num_rows, 10, 32), given(14, num_rows, 3, 32)]
    worst["rotation"] = errors(turned, [q, k], upstream, lambda q, k: [turn64(q, cos, sin), turn64(k, cos, sin)])
    return {name: max(found) for name, found in worst.items()}


@pytest.mark.parametrize(("num_rows", "width"), [(1, 4), (3, 40), (5, 1100)])
def test_gradients_in_fp32(num_rows, width):
    from kernels.rows import training

    found = all_errors(training, "cpu", torch.float32, num_rows, width)
    assert max(found.values()) < 1e-5, found


def test_the_reference_has_the_same_gradients():
    found = all_errors(rows, "cpu", torch.float32, 6, 72)
    assert max(found.values()) < 1e-5, found


def test_more_rows_than_programs(monkeypatch):
    from kernels.rows import training

    monkeypatch.setattr(training, "_NORM_PROGRAMS", 3)
    assert max(all_errors(training, "cpu", torch.float32, 11, 24).values()) < 1e-5


def test_gates_far_from_zero_have_finite_gradients():
    from kernels.rows import training

    gate = torch.tensor([[-1e4, -200.0, -89.0, 89.0, 1e4]], requires_grad=True)
    up = torch.full_like(gate, 2.0, requires_grad=True)
    found = torch.autograd.grad(training.silu_gate(gate, up).sum(), [gate, up])
    torch.testing.assert_close(found[0], torch.tensor([[0.0, 0.0, 0.0, 2.0, 2.0]]))
    torch.testing.assert_close(found[1], torch.tensor([[0.0, 0.0, 0.0, 89.0, 1e4]]))


def test_norms_of_heads_are_refused_where_gradients_are_recorded():
    from kernels.rows import training

    with pytest.raises(ContractError, match="normed apart"):
        training.rotate(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), None, object())


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (700, 576), (2000, 4104)])
def test_gradients_on_the_gpu(num_rows, width):
    # One rounding to bf16 of each result.
    found = all_errors(rows, "cuda", torch.bfloat16, num_rows, width)
    assert max(found.values()) < 3e-3, found
    found = all_errors(rows, "cuda", torch.float32, num_rows, width)
    assert max(found.values()) < 1e-5, found
