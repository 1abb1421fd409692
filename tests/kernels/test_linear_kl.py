"""linear_kl against float64 autograd over materialised logits; the kernel also against its own other runs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kernels.linear_kl import Plan, Teacher, linear_kl, linear_kl_by_teacher, reference
from schemas.errors import ContractError

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@dataclass
class Case:
    """Inputs of one call, on the CPU in fp32 (or bf16 values held in bf16)."""

    h_ND: torch.Tensor
    w_VD: torch.Tensor
    t_NE: torch.Tensor
    u_VE: torch.Tensor
    weight_N: torch.Tensor

    def to(self, device, dtype):
        h, w, t, u = (x.to(device, dtype) for x in (self.h_ND, self.w_VD, self.t_NE, self.u_VE))
        return Case(h, w, t, u, self.weight_N.to(device))


def random_case(N=37, D=24, E=40, V=1031, spread=1.0, seed=0) -> Case:
    """Student and teacher of different widths; logits have standard deviation `spread`."""
    g = torch.Generator().manual_seed(seed)
    heads = torch.randn(V, D, generator=g) * spread / D**0.5, torch.randn(V, E, generator=g) * spread / E**0.5
    return Case(
        torch.randn(N, D, generator=g),
        heads[0],
        torch.randn(N, E, generator=g),
        heads[1],
        torch.rand(N, generator=g) + 0.1,
    )


def twin_case(noise: float, V=1031) -> Case:
    """The teacher is the student, moved by `noise`."""
    case = random_case(D=32, E=32, V=V, spread=4.0)
    teacher = case.w_VD + noise * torch.randn(case.w_VD.shape, generator=torch.Generator().manual_seed(9)) / 32**0.5
    return Case(case.h_ND, case.w_VD, case.h_ND.clone(), teacher, case.weight_N)


def disjoint_case() -> Case:
    """Each side is sure of a token that the other gives a log-probability near -100 or below."""
    case = random_case(N=8, D=16, E=16, V=200, spread=0.1)
    case.h_ND[:, 0] = case.t_NE[:, 0] = 1.0
    case.w_VD[3, 0], case.u_VE[150, 0] = 120.0, 120.0
    return case


def oracle(case: Case, divergence, temperature=1.0, vocab_size=None, dtype=torch.float64):
    """(loss, kl_N, grad_h, grad_w) by autograd over whole logits; masked rows are cut out beforehand."""
    h, w = (x.detach().to("cpu", dtype, copy=True).requires_grad_() for x in (case.h_ND, case.w_VD))
    V = vocab_size or w.shape[0]
    live = case.weight_N.cpu() != 0
    q = (h[live] @ w[:V].t() / temperature).log_softmax(1)
    p = (case.t_NE.cpu()[live].to(dtype) @ case.u_VE.cpu()[:V].to(dtype).t() / temperature).log_softmax(1)
    kl = (q.exp() * (q - p)).sum(1) if divergence == "reverse" else (p.exp() * (p - q)).sum(1)
    loss = (kl * case.weight_N.cpu()[live].to(dtype)).sum()
    loss.backward()
    assert h.grad is not None
    assert w.grad is not None
    kl_N = torch.zeros(len(live), dtype=dtype)
    kl_N[live] = kl.detach()
    return loss.detach(), kl_N, h.grad, w.grad


def run(case: Case, upstream=1.0, **options):
    h, w = case.h_ND.detach().requires_grad_(), case.w_VD.detach().requires_grad_()
    w.grad_dtype = torch.float32
    loss, kl_N = linear_kl(h, w, case.t_NE, case.u_VE, case.weight_N, **options)
    (loss * upstream).backward()
    assert h.grad is not None
    assert w.grad is not None
    return tuple(x.cpu() for x in (loss.detach(), kl_N, h.grad, w.grad))


def error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


CASES = {
    "plain": random_case,
    "peaked": lambda: random_case(spread=30.0),
    "near": lambda: twin_case(0.05),
    "disjoint": disjoint_case,
    "one token": lambda: random_case(N=1),
    "one column": lambda: random_case(V=1),
    "several slices": lambda: random_case(N=5, V=3 * 8192 + 1),
    "narrow": lambda: random_case(N=19, D=1, E=3, V=130),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("divergence", ["reverse", "forward"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_float64(name, divergence, device):
    case = CASES[name]()
    expected = oracle(case, divergence)
    plain = oracle(case, divergence, dtype=torch.float32)
    found = run(case.to(device, torch.float32), divergence=divergence, chunk_bytes=1 << 18)
    # A gradient may be a difference of equal terms as large as the KL: what it is a sum of rounds in their measure.
    terms = 1e-7 * float(expected[1].max()) * float(case.weight_N.norm())
    rounding = 1e-7 * float(case.weight_N.sum()), 1e-7 * len(case.weight_N) ** 0.5
    slacks = (*rounding, terms * float(case.w_VD.norm()), terms * float(case.h_ND.norm()))
    for quantity, ours, theirs, exact, slack in zip(
        ("loss", "kl", "dh", "dw"), found, plain, expected, slacks, strict=True
    ):
        # Near plain fp32 autograd, whose own error grows with the spread.
        bound = 4 * float((theirs - exact).norm()) + 3e-6 * float(exact.norm()) + slack
        assert float((ours - exact).norm()) <= bound, quantity


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("divergence", ["reverse", "forward"])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_bf16_inputs_keep_fp32_logits(spread, divergence, device):
    case = random_case(N=70, D=64, E=96, V=9001, spread=spread).to("cpu", torch.bfloat16)
    expected = oracle(case, divergence)
    loss, kl_N, grad_h, grad_w = run(case.to(device, torch.bfloat16), divergence=divergence)
    assert grad_h.dtype == torch.bfloat16
    assert grad_w.dtype == torch.float32
    assert error(loss, expected[0]) < 1e-5
    assert error(kl_N, expected[1]) < 1e-5
    assert error(grad_h, expected[2]) < 3e-3
    assert error(grad_w, expected[3]) < 3e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_near_and_equal_distributions_keep_their_small_kl(divergence, device):
    near = twin_case(0.05)
    expected = oracle(near, divergence)[1]
    assert 2e-4 < float(expected.mean()) < 5e-3
    found = run(near.to(device, torch.float32), divergence=divergence)[1]
    assert bool(((found - expected).abs() <= 1e-3 * expected + 1e-6).all())
    equal = twin_case(0.0).to(device, torch.float32)
    _, kl_N, grad_h, grad_w = run(equal, divergence=divergence)
    assert float(kl_N.abs().max()) < 1e-6
    assert float(grad_h.abs().max()) < 1e-5
    assert float(grad_w.abs().max()) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_masked_rows_are_never_read(device):
    clean = random_case()
    dirty = random_case()
    for case in (clean, dirty):
        case.weight_N[::3] = 0
    dirty.h_ND[::3], dirty.t_NE[::3] = float("nan"), float("inf")
    expected, found = (run(x.to(device, torch.float32)) for x in (clean, dirty))
    for ours, wanted in zip(found, expected, strict=True):
        assert torch.equal(ours, wanted)
    assert not found[1][::3].any()
    assert not found[2][::3].any()
    assert error(found[3], oracle(clean, "reverse")[3]) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [0, 5])
def test_no_live_row_gives_zero(rows, device):
    case = random_case(N=rows)
    case.weight_N.zero_()
    case.h_ND.fill_(float("nan"))
    loss, kl_N, grad_h, grad_w = run(case.to(device, torch.float32))
    assert float(loss) == 0
    assert kl_N.shape == (rows,)
    assert grad_h.shape == (rows, 24)
    assert not kl_N.any()
    assert not grad_h.any()
    assert not grad_w.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_only_the_shared_vocabulary_counts(divergence, device):
    case = random_case(V=1100)
    case.u_VE = torch.cat((case.u_VE, torch.full((64, 40), float("nan"))))
    case.w_VD[1001:] = float("nan")
    expected = oracle(case, divergence, vocab_size=1001)
    found = run(case.to(device, torch.float32), divergence=divergence, vocab_size=1001)
    for ours, wanted in zip(found, expected, strict=True):
        assert error(ours, wanted.nan_to_num()) < 1e-5
    assert found[3].shape == (1100, 24)
    assert not found[3][1001:].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_temperature_and_upstream_factor(divergence, device):
    case = random_case()
    expected = oracle(case, divergence, temperature=2.5)
    found = run(case.to(device, torch.float32), upstream=-3.0, divergence=divergence, temperature=2.5)
    assert error(found[0], expected[0]) < 1e-5
    assert error(found[2], -3 * expected[2]) < 1e-5
    assert error(found[3], -3 * expected[3]) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_is_the_slope_of_the_loss(device):
    """Finite differences of the op's own loss, so that a wrong factor shared with an oracle would show."""
    case = random_case(N=6, D=8, E=8, V=50).to(device, torch.float32)
    _, _, grad_h, grad_w = run(case)
    for gradient, moved in ((grad_h, case.h_ND), (grad_w, case.w_VD)):
        direction = torch.randn(moved.shape, generator=torch.Generator().manual_seed(1)).to(device)
        losses = []
        for step in (1e-2, -1e-2):
            moved += step * direction
            losses.append(float(run(case)[0]))
            moved -= step * direction
        slope = (losses[0] - losses[1]) / 2e-2
        assert slope == pytest.approx(float((gradient * direction.cpu()).sum()), rel=2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_results_do_not_depend_on_chunks_beyond_rounding(device):
    case = random_case(N=200, V=2001).to(device, torch.float32)
    expected = oracle(case, "reverse")
    for chunk_bytes in (1, 1 << 20, 1 << 30):
        for ours, wanted in zip(run(case, chunk_bytes=chunk_bytes), expected, strict=True):
            assert error(ours, wanted) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_repeats_bit_for_bit(device):
    case = random_case(N=100, V=9000).to(device, torch.float32)
    first, second = run(case), run(case)
    for ours, again in zip(first, second, strict=True):
        assert torch.equal(ours, again)


@pytest.mark.parametrize("device", DEVICES)
def test_fp32_master_meets_bf16_states_as_its_bf16_values(device):
    narrow = random_case(D=32).to("cpu", torch.bfloat16)
    case = random_case(D=32).to(device, torch.bfloat16)
    case.w_VD = random_case(D=32).w_VD.to(device)
    expected = oracle(narrow, "reverse")
    _, kl_N, _, grad_w = run(case)
    assert error(kl_N, expected[1]) < 1e-5
    assert error(grad_w, expected[3]) < 3e-3


def test_autograd_contract():
    case = random_case()
    h, w = case.h_ND.clone().requires_grad_(), case.w_VD.clone().requires_grad_()
    loss, kl_N = linear_kl(h, w, case.t_NE, case.u_VE, case.weight_N)
    assert loss.requires_grad
    assert not kl_N.requires_grad
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()
    expected = oracle(case, "reverse")
    assert w.grad is not None
    assert error(w.grad, expected[3]) < 1e-5
    with torch.no_grad():
        loss, _ = linear_kl(h, w, case.t_NE, case.u_VE, case.weight_N)
    assert not loss.requires_grad
    h = case.h_ND.clone().requires_grad_()
    linear_kl(h, case.w_VD, case.t_NE, case.u_VE, case.weight_N)[0].backward()
    assert h.grad is not None
    assert error(h.grad, expected[2]) < 1e-5


class LargestTensor(TorchFunctionMode):
    """Notes the size of the largest tensor that any torch function returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_reference_holds_no_more_logits_for_more_tokens():
    sizes = []
    for N in (50, 400):
        case = random_case(N=N, D=4, E=4, V=3000)
        plan = Plan("reverse", 1.0, 3000, 24 * 3000 * 8, want_h=True, want_w=True)
        with LargestTensor() as seen:
            reference.forward(case.h_ND, case.w_VD, [Teacher(case.t_NE, lambda u=case.u_VE: u)], case.weight_N, plan)
        sizes.append(seen.elements)
    assert sizes[0] == sizes[1] <= 8 * 3000


class Teachers:
    """Tokens of several teachers of different widths, and the calls that each of them alone would be."""

    def __init__(self, counts, device, dtype, *, D=32, V=1031, widths=(48, 16, 80), seed=0):
        g = torch.Generator().manual_seed(seed)

        def normal(rows, columns):
            return torch.randn(rows, columns, generator=g).to(device, dtype)

        N = sum(counts)
        self.counts, self.h_ND, self.w_VD = counts, normal(N, D), normal(V, D)
        self.weight_N = (torch.rand(N, generator=g) + 0.1).to(device)
        self.weight_N[4::9] = 0
        self.h_ND[4::9] = float("nan")
        self.teachers = []
        for index, count in enumerate(counts):
            width = widths[index % len(widths)]
            head = normal(V + index, width)
            self.teachers.append(Teacher(normal(count, width), lambda head=head: head))

    def alone(self, **options):
        """As `run`, for each teacher that has tokens."""
        parts = (x.split(self.counts) for x in (self.h_ND, self.weight_N))
        for h, weight, teacher in zip(*parts, self.teachers, strict=True):
            if len(h):
                yield run(Case(h, self.w_VD, teacher.t_RE, teacher.head(), weight), **options)

    def together(self, **options):
        h, w = self.h_ND.detach().requires_grad_(), self.w_VD.detach().requires_grad_()
        w.grad_dtype = torch.float32
        loss, kl_N = linear_kl_by_teacher(h, w, self.teachers, self.weight_N, **options)
        loss.backward()
        assert h.grad is not None
        assert w.grad is not None
        return tuple(x.cpu() for x in (loss.detach(), kl_N, h.grad, w.grad))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["exact", "fp8_gradients", "fp8"])
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 19, 1 << 28])
@pytest.mark.parametrize("counts", [[70], [5, 16, 0, 33, 1], [300, 7, 129, 64, 2, 90]])
def test_teachers_together_are_the_sum_of_each_alone(counts, chunk_bytes, precision, device):
    case = Teachers(counts, device, torch.bfloat16)
    options = {"vocab_size": 1029, "precision": precision, "chunk_bytes": chunk_bytes}
    alone = list(zip(*case.alone(**options), strict=True))
    loss, kl_N, grad_h, grad_w = case.together(**options)
    assert error(loss, sum(alone[0])) < 1e-6
    assert torch.equal(kl_N, torch.cat(alone[1]))
    assert torch.equal(grad_h, torch.cat(alone[2]))
    # FP8 rounds the gradient of the logits and the states, over 128 tokens of one teacher either way.
    assert error(grad_w, sum(alone[3])) < 1e-5
    if len(counts) == 1:
        assert torch.equal(grad_w, alone[3][0])


@GPU
@pytest.mark.parametrize("precision", ["exact", "fp8_gradients", "fp8"])
def test_teachers_of_one_slab_whose_gradients_lie_in_the_head_gradients_memory(precision):
    from kernels.linear_kl import workspace

    case = Teachers([200, 3, 100, 129, 60], "cuda", torch.bfloat16, D=512, V=50257)
    options = {"vocab_size": 50257, "precision": precision}
    plan = Plan("reverse", 1.0, 50257, 40_000_000, want_h=True, want_w=True, precision=precision)
    assert workspace.Sizes.of(640, 512, 80, 2, plan).one_slab
    expected = case.together(chunk_bytes=1 << 30, **options)
    for buffer in workspace.buffers.values():
        buffer.fill_(255)  # NaN in every dtype
    found = case.together(chunk_bytes=40_000_000, **options)
    for ours, wanted in zip(found[1:3], expected[1:3], strict=True):
        assert torch.equal(ours, wanted)
    assert error(found[3], expected[3]) < 1e-5


def test_a_teachers_head_is_refused_when_it_comes():
    case = Teachers([3, 4], "cpu", torch.float32)
    narrow = Teacher(case.teachers[1].t_RE, lambda: torch.zeros(1031, 17))
    short = Teacher(case.teachers[1].t_RE, lambda: torch.zeros(1030, 16))
    for bad, kind, message in ((narrow, ValueError, "widths"), (short, ContractError, "teacher head 1030 rows")):
        with pytest.raises(kind, match=message):
            linear_kl_by_teacher(case.h_ND, case.w_VD, [case.teachers[0], bad], case.weight_N, vocab_size=1031)
    with pytest.raises(ValueError, match="rows differ"):
        linear_kl_by_teacher(case.h_ND, case.w_VD, case.teachers[:1], case.weight_N, vocab_size=1031)


def test_what_cannot_be_meant_is_refused():
    case = random_case()
    with pytest.raises(ContractError, match="1031 rows, teacher head 1000 rows"):
        linear_kl(case.h_ND, case.w_VD, case.t_NE, case.u_VE[:1000], case.weight_N)
    with pytest.raises(ContractError, match="at least 1032 rows"):
        linear_kl(case.h_ND, case.w_VD, case.t_NE, case.u_VE, case.weight_N, vocab_size=1032)
    with pytest.raises(ValueError, match="widths"):
        linear_kl(case.h_ND, case.u_VE, case.t_NE, case.u_VE, case.weight_N)
    with pytest.raises(ValueError, match="rows differ"):
        linear_kl(case.h_ND, case.w_VD, case.t_NE[1:], case.u_VE, case.weight_N)
    with pytest.raises(ValueError, match="divergence"):
        run(case, divergence="jsd")
    with pytest.raises(ValueError, match="positive"):
        linear_kl(case.h_ND, case.w_VD, case.t_NE, case.u_VE, case.weight_N, temperature=0.0)
