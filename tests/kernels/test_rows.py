"""Norms, rotation and gate: float64 formulas, views of wider products, rows alone, and the pages that nobody named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import rows
from kernels.rows import HeadNorms, Rotary
from schemas.errors import ContractError

IMPLS = pytest.mark.parametrize("impl", ["kernel", "reference"])


@pytest.fixture(autouse=True)
def interpreted(request):
    if request.node.get_closest_marker("gpu") is None:
        request.getfixturevalue("triton_interpreter")


def normal(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def norm64(x, weight, epsilon):
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + epsilon).sqrt() * weight.double()


def turn64(x, angles):
    """Each pair (c, c + C/2) as a complex number times e^(i angle)."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((turned.real, turned.imag), -1)


def heads_case(num_rows, heads, kv_heads, channels, device="cpu", dtype=torch.float32):
    """q, k, v as columns of one product, positions, float64 angles and their tables."""
    wide = normal(num_rows, (heads + 2 * kv_heads) * channels, seed=1, device=device, dtype=dtype)
    q, k, v = (
        x.unflatten(1, (-1, channels)) for x in wide.split([n * channels for n in (heads, kv_heads, kv_heads)], 1)
    )
    angles = torch.rand(60, channels // 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 6
    positions = torch.randint(0, 60, (num_rows,), generator=torch.Generator().manual_seed(3))
    rotary = Rotary(angles.cos().float().to(device), angles.sin().float().to(device), positions.to(device))
    return q, k, v, rotary, angles[positions].unsqueeze(1)


def ulps(found, expected):
    """Largest difference in units of bf16's last place."""
    found, expected = found.double().cpu(), expected.double().cpu()
    unit = torch.exp2(expected.abs().clamp(min=2.0**-126).log2().floor() - 7)
    return float(((found - expected).abs() / unit).max())


@IMPLS
@pytest.mark.parametrize("width", [1, 7, 64, 576, 2000])
def test_norm_of_a_sum(impl, width):
    wide, delta, weight = normal(5, width + 3), normal(5, width, seed=1), normal(width, seed=2)
    h = wide[:, 3:]
    total, y = rows.add_rms_norm(h, delta, weight, 1e-5, impl=impl)
    assert torch.equal(total, h + delta)
    torch.testing.assert_close(y.double(), norm64(h + delta, weight, 1e-5), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        rows.rms_norm(h, weight, 1e-5, impl=impl).double(), norm64(h, weight, 1e-5), rtol=1e-6, atol=1e-6
    )
    assert torch.equal(rows.rms_norm(h[3:4], weight, 1e-5, impl=impl)[0], rows.rms_norm(h, weight, 1e-5, impl=impl)[3])


@IMPLS
@pytest.mark.parametrize("width", [1, 40, 1025])
def test_gate(impl, width):
    wide = normal(4, 2 * width + 1) * 5
    gate, up = wide[:, :width], wide[:, width + 1 :]
    gate[0, 0] = -200.0
    with torch.no_grad():
        found = rows.silu_gate(gate, up, impl=impl)
        assert torch.equal(rows.silu_gate(gate[2:3], up[2:3], impl=impl)[0], found[2])
    expected = gate.double() * torch.sigmoid(gate.double()) * up.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@IMPLS
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "channels"), [(1, 1, 2), (9, 3, 16), (12, 1, 24), (16, 16, 8)])
def test_rotation_and_pages(impl, normed, heads, kv_heads, channels):
    q, k, v, rotary, angles = heads_case(5, heads, kv_heads, channels)
    norms = HeadNorms(normal(channels, seed=4), normal(channels, seed=5), 1e-6) if normed else None
    weights = (norms.q_weight_C, norms.k_weight_C) if norms else (None, None)
    expected_q, expected_k = (
        turn64(x if w is None else norm64(x, w, 1e-6), angles) for x, w in zip((q, k), weights, strict=True)
    )
    for found, expected in zip(rows.rotate(q, k, rotary, norms, impl=impl), (expected_q, expected_k), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)
    caches = torch.full((3, 4, kv_heads, channels), 7.0), torch.full((3, 4, kv_heads, channels), 8.0)
    slots = torch.tensor([11, 0, 6, 5, 2])
    found = rows.rotate_into_pages(q, k, v, rotary, norms, *caches, slots, impl=impl)
    k_slots, v_slots = (cache.flatten(0, 1) for cache in caches)
    torch.testing.assert_close(found.double(), expected_q, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(k_slots[slots].double(), expected_k, rtol=2e-6, atol=2e-6)
    assert torch.equal(v_slots[slots], v)
    others = [slot for slot in range(12) if slot not in slots.tolist()]
    assert (k_slots[others] == 7).all()
    assert (v_slots[others] == 8).all()


@IMPLS
def test_no_rows(impl):
    assert rows.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5, impl=impl).shape == (0, 8)
    assert rows.silu_gate(torch.empty(0, 8), torch.empty(0, 8), impl=impl).shape == (0, 8)
    q, k, _, rotary, _ = heads_case(5, 2, 1, 4)
    none = replace(rotary, positions_N=rotary.positions_N[:0])
    assert rows.rotate(q[:0], k[:0], none, impl=impl)[1].shape == (0, 1, 4)


def test_gradients_pass_where_they_are_recorded():
    x, delta, weight = (normal(3, 8, seed=s).requires_grad_() for s in range(3))
    total, y = rows.add_rms_norm(x, delta, weight[0], 1e-5)
    (rows.silu_gate(y, total).sum()).backward()
    assert all(leaf.grad is not None for leaf in (x, delta, weight))


def test_what_does_not_fit_is_refused():
    q, k, v, rotary, _ = heads_case(5, 2, 1, 4)
    cache = torch.zeros(2, 4, 1, 4)
    slots = torch.arange(5)
    for delta in (torch.zeros(4, 2).t(), torch.zeros(3, 4), torch.zeros(2, 4).bfloat16()):
        with pytest.raises(ContractError, match="contiguous columns"):
            rows.add_rms_norm(torch.zeros(2, 4), delta, torch.ones(4), 1e-5)
    with pytest.raises(ContractError, match="weight of 4 columns"):
        rows.rms_norm(torch.zeros(2, 4), torch.ones(5), 1e-5)
    with pytest.raises(ContractError, match="contiguous heads"):
        rows.rotate(q, k[:, :, :2], rotary)
    with pytest.raises(ContractError, match="angles of 4 channels"):
        rows.rotate(q, k, replace(rotary, cos_MC=torch.zeros(60, 4)))
    for bad in (cache.bfloat16(), cache[:, :, :, :2], cache.transpose(0, 1)):
        with pytest.raises(ContractError, match="caches"):
            rows.rotate_into_pages(q, k, v, rotary, None, cache, bad, slots)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 576, 2048, 7168])
def test_bits_and_roundings_on_the_gpu(width):
    options = {"device": "cuda", "dtype": torch.bfloat16}
    wide, delta, weight = normal(700, 2 * width, **options), normal(700, width, seed=1, **options), normal(width).cuda()
    h, gate = wide[:, :width], wide[:, width:]
    calls = (
        lambda s, impl=None: rows.add_rms_norm(h[s], delta[s], weight, 1e-5, impl=impl),
        lambda s, impl=None: (rows.rms_norm(h[s], weight, 1e-5, impl=impl),),
        lambda s, impl=None: (rows.silu_gate(gate[s], h[s], impl=impl),),
    )
    with torch.no_grad():
        for call in calls:
            whole, reference = call(slice(None)), call(slice(None), "reference")
            for found, expected in zip(whole, reference, strict=True):
                assert ulps(found, expected) <= 1
            for some in (slice(3, 4), slice(10, 74), slice(1, 700)):
                for part, all_rows in zip(call(some), whole, strict=True):
                    assert torch.equal(part, all_rows[some])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "channels", "normed"), [(32, 8, 64, False), (16, 8, 128, True), (9, 3, 64, False)]
)
def test_rotation_on_the_gpu(heads, kv_heads, channels, normed):
    q, k, v, rotary, _ = heads_case(300, heads, kv_heads, channels, "cuda", torch.bfloat16)
    norms = HeadNorms(normal(channels).cuda(), normal(channels, seed=5).cuda(), 1e-6) if normed else None
    slots = torch.randperm(640, device="cuda")[:300]
    results = []
    for impl in ("kernel", "reference"):
        caches = [torch.zeros(10, 64, kv_heads, channels, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        found = rows.rotate_into_pages(q, k, v, rotary, norms, caches[0], caches[1], slots, impl=impl)
        results.append((found, *caches))
        assert torch.equal(caches[1].flatten(0, 1)[slots], v)
    for found, expected in zip(*results, strict=True):
        # The rotation cancels: an error is one of its largest term.
        assert ((found.float() - expected.float()).abs() <= 2**-7 * expected.float().abs().amax(-1, keepdim=True)).all()
    turned_q, turned_k = rows.rotate(q[7:9], k[7:9], replace(rotary, positions_N=rotary.positions_N[7:9]), norms)
    assert torch.equal(turned_q, results[0][0][7:9])
    assert torch.equal(turned_k, results[0][1].flatten(0, 1)[slots[7:9]])
