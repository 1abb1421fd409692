"""linear_kl's FP8 modes against float64 arithmetic on operands that ml_dtypes rounded."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from kernels.linear_kl import linear_kl
from tests.kernels.test_linear_kl import Case, error, oracle, random_case, run, twin_case

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
MODES = ["fp8_gradients", "fp8"]


def rounded(x, rows: int):
    """x in E4M3 blocks of rows x 128, each under the least power of two that clips nothing, as float64."""
    x = x.double().numpy()
    out = np.zeros_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], 128):
            block = x[i : i + rows, j : j + 128]
            largest = np.abs(block).max()
            scale = 2.0 ** max(np.ceil(np.log2(largest / 448)), -126) if largest else 1.0
            out[i : i + rows, j : j + 128] = (block / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    return torch.from_numpy(out)


def fp8_oracle(case: Case, divergence, precision, temperature=1.0):
    """(loss, kl_N, grad_h, grad_w): what the mode promises, by whole matrices in float64."""
    live = (case.weight_N != 0).unsqueeze(1)
    h, t = (x.double().masked_fill(~live, 0.0) for x in (case.h_ND, case.t_NE))
    w, u = case.w_VD.double(), case.u_VE.double()
    if precision == "fp8":
        student, teacher = rounded(h, 1) @ rounded(w, 128).t(), rounded(t, 1) @ rounded(u, 128).t()
    else:
        student, teacher = h @ w.t(), t @ u.t()
    q, p = (student / temperature).log_softmax(1), (teacher / temperature).log_softmax(1)
    if divergence == "reverse":
        kl = (q.exp() * (q - p)).sum(1)
        slope = q.exp() * (q - p - kl.unsqueeze(1))
    else:
        kl = (p.exp() * (p - q)).sum(1)
        slope = q.exp() - p.exp()
    weight = case.weight_N.double()
    along_v = rounded((slope * (weight / temperature).unsqueeze(1)).float(), 1)
    grad_w = rounded(along_v.t().float(), 1) @ rounded(h, 128)
    kl = kl.masked_fill(~live.squeeze(1), 0.0)
    return (kl * weight).sum(), kl, along_v @ rounded(w, 128), grad_w


def wide_case(N=37, V=1031, spread=1.0, D=48, E=64):
    return random_case(N=N, D=D, E=E, V=V, spread=spread)


CASES = {
    "plain": wide_case,
    "peaked": lambda: wide_case(spread=30.0),
    "near": lambda: twin_case(0.05),
    "one token": lambda: wide_case(N=1),
    "one column": lambda: wide_case(V=1),
    "less than a block": lambda: wide_case(V=100),
    "one column past a block": lambda: wide_case(N=130, V=257),
    "several slices": lambda: wide_case(N=5, V=2 * 8192 + 1),
    "wider than a block": lambda: wide_case(N=140, V=300, D=144, E=272),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("divergence", ["reverse", "forward"])
@pytest.mark.parametrize("precision", MODES)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_rounded_operands(name, precision, divergence, device):
    case = CASES[name]()
    case.weight_N[3::7] = 0
    expected = fp8_oracle(case, divergence, precision)
    found = run(case.to(device, torch.float32), divergence=divergence, precision=precision, chunk_bytes=1 << 18)
    exact = oracle(case, divergence)
    # Logits that differ in rounding turn a slope between two codes to the other one now and then. A card's FP8 logits
    # differ much, since its sums of 128 products keep some 13 bits.
    gradients = 3e-2 if (precision, device) == ("fp8", "cuda") else 2e-3
    bounds = zip(("loss", "kl", "dh", "dw"), (2e-3, 2e-3, gradients, gradients), strict=True)
    for (quantity, bound), ours, wanted, size in zip(bounds, found, expected, exact, strict=True):
        slack = bound * float(size.norm()) + 1e-5 * float(case.weight_N.sum())
        assert float((ours.double() - wanted).norm()) <= bound * float(wanted.norm()) + slack, quantity


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_exact_logits_keep_a_small_kl_and_fp8_logits_do_not(divergence, device):
    case = twin_case(0.05)
    expected = oracle(case, divergence)
    run_case = case.to(device, torch.float32)
    loss, kl_N, grad_h, grad_w = run(run_case, divergence=divergence, precision="fp8_gradients")
    assert error(loss, expected[0]) < 1e-4
    assert bool(((kl_N - expected[1]).abs() <= 1e-3 * expected[1] + 1e-6).all())
    assert error(grad_h, expected[2]) < 0.1
    assert error(grad_w, expected[3]) < 0.1
    assert error(run(run_case, divergence=divergence, precision="fp8")[0], expected[0]) > 0.1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", MODES)
def test_masked_rows_are_never_read_and_none_live_gives_zero(precision, device):
    clean, dirty = wide_case(N=150), wide_case(N=150)
    for case in (clean, dirty):
        case.weight_N[::3] = 0
    dirty.h_ND[::3], dirty.t_NE[::3] = float("nan"), float("inf")
    expected, found = (run(x.to(device, torch.float32), precision=precision) for x in (clean, dirty))
    for ours, wanted in zip(found, expected, strict=True):
        assert torch.equal(ours, wanted)
    for rows in (0, 5):
        case = wide_case(N=rows)
        case.weight_N.zero_()
        case.h_ND.fill_(float("nan"))
        for result in run(case.to(device, torch.float32), precision=precision):
            assert not result.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", MODES)
def test_rows_of_a_head_past_the_vocabulary_do_not_count(precision, device):
    case = wide_case(V=700)
    expected = fp8_oracle(case, "reverse", precision, temperature=2.0)
    case.w_VD = torch.cat((case.w_VD, torch.full((400, 48), float("nan"))))
    case.u_VE = torch.cat((case.u_VE, torch.full((3, 64), float("inf"))))
    found = run(case.to(device, torch.float32), precision=precision, temperature=2.0, vocab_size=700)
    assert found[3].shape == (1100, 48)
    assert not found[3][700:].any()
    for ours, wanted in zip((*found[:3], found[3][:700]), expected, strict=True):
        assert error(ours, wanted) < 3e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", MODES)
def test_gradients_of_one_side_and_of_none(precision, device):
    case = wide_case().to(device, torch.float32)
    both = run(case, precision=precision)
    for index in (2, 3):
        h_ND, w_VD = case.h_ND.clone(), case.w_VD.clone()
        leaf = (h_ND if index == 2 else w_VD).requires_grad_()
        linear_kl(h_ND, w_VD, case.t_NE, case.u_VE, case.weight_N, precision=precision)[0].backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad.cpu(), both[index])
    with torch.no_grad():
        _, kl_N = linear_kl(case.h_ND, case.w_VD, case.t_NE, case.u_VE, case.weight_N, precision=precision)
    assert error(kl_N.cpu(), both[1]) < 1e-6


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match="multiples of 16"):
        run(random_case(D=24), precision="fp8")
    with pytest.raises(ValueError, match="precision"):
        run(wide_case(), precision="bf16")


@GPU
@pytest.mark.parametrize("precision", MODES)
@pytest.mark.parametrize("V", [151, 8193, 50257])
def test_kl_and_dx_are_the_same_bits_for_any_chunk_and_any_number_of_rows(V, precision):
    case = wide_case(N=700, V=V).to("cuda", torch.bfloat16)
    _, kl_N, grad_h, _ = run(case, chunk_bytes=1 << 30, precision=precision)
    if precision == "fp8_gradients":
        assert error(kl_N, run(case, chunk_bytes=1 << 30)[1]) < 1e-6
    for chunk_bytes, rows in ((1, 700), (8 << 20, 700), (64 << 20, 700), (1 << 30, 1), (1 << 30, 17), (1 << 30, 333)):
        part = Case(case.h_ND[:rows], case.w_VD, case.t_NE[:rows], case.u_VE, case.weight_N[:rows])
        _, kl_part, grad_part, _ = run(part, chunk_bytes=chunk_bytes, precision=precision)
        assert torch.equal(kl_part, kl_N[:rows])
        assert torch.equal(grad_part, grad_h[:rows])


@GPU
@pytest.mark.parametrize("precision", MODES)
@pytest.mark.parametrize("vocab_size", [1031, 1152])
def test_one_slab_whose_logits_lie_where_the_head_gradient_will_be(vocab_size, precision, monkeypatch):
    from kernels.linear_kl import workspace

    taken, take = [], workspace.Room.take
    monkeypatch.setattr(workspace.Room, "take", lambda self, *shape: taken.append(shape) or take(self, *shape))
    case = wide_case(N=300, V=1400, D=256, E=64).to("cuda", torch.bfloat16)
    case.w_VD[vocab_size:], case.u_VE[vocab_size:] = float("nan"), float("inf")
    case.weight_N[3::7] = 0
    options = {"vocab_size": vocab_size, "precision": precision}
    expected = run(case, chunk_bytes=1 << 30, **options)
    assert not taken
    for _ in range(2):
        for buffer in workspace.buffers.values():
            buffer.fill_(255)  # NaN in every dtype
        found = run(case, chunk_bytes=460_000, **options)
        for ours, wanted in zip(found, expected, strict=True):
            assert torch.equal(ours, wanted)
        assert not found[3][vocab_size:].any()
    assert len(taken) == 2 * (4 if precision == "fp8" else 2)
    several = run(case, chunk_bytes=1 << 18, **options)
    assert torch.equal(several[1], expected[1])
    assert torch.equal(several[2], expected[2])
    assert error(several[3], expected[3]) < 1e-5
    assert len(taken) == 2 * (4 if precision == "fp8" else 2)


@GPU
@pytest.mark.parametrize("V", [1000, 1031])
@pytest.mark.parametrize("precision", MODES)
def test_workspace_is_allocated_once_and_may_hold_anything(precision, V):
    from kernels.linear_kl import workspace

    case = wide_case(N=600, V=V).to("cuda", torch.bfloat16)
    options = {"chunk_bytes": 1 << 20, "precision": precision}
    expected = run(case, **options)
    addresses, reserved = set(), set()
    for step in range(400):
        rows = 1 + step * 37 % 600
        part = Case(case.h_ND[:rows], case.w_VD, case.t_NE[:rows], case.u_VE, case.weight_N[:rows])
        run(part, **options)
        addresses |= {buffer.data_ptr() for buffer in workspace.buffers.values()}
        if step >= 200:
            reserved.add(torch.cuda.memory_reserved())
    assert len(addresses) == len(workspace.buffers)
    assert len(reserved) == 1
    for buffer in workspace.buffers.values():
        buffer.fill_(255)  # NaN in every dtype
    for ours, wanted in zip(run(case, **options), expected, strict=True):
        assert torch.equal(ours, wanted)


@GPU
@pytest.mark.parametrize("precision", MODES)
def test_kernel_and_reference_agree(precision):
    case = wide_case(N=333, D=128, E=64, V=32003, spread=5.0).to("cuda", torch.bfloat16)
    kernel, reference = (run(case, impl=impl, precision=precision) for impl in ("kernel", "reference"))
    gradients = 3e-2 if precision == "fp8" else 5e-3
    for ours, wanted, bound in zip(kernel, reference, (2e-3, 2e-3, gradients, gradients), strict=True):
        assert error(ours, wanted) < bound
