"""The models and the loss on a GPU against the CPU: fp32 there is the oracle, bf16 there the measure of what rounding
may cost. A GPU result may be no further from the oracle than FACTOR times as far as the CPU's bf16 result is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels.quant import mxfp4_dequantize, mxfp4_quantize
from kernels.testing import relative_error
from ml.checkpoint import load_model, read_head
from ml.linear import Compute, Fp8Weights, Linear, Precision
from ml.model import SampledCausal, Transformer
from ml.rollout.engine import RolloutEngine
from ml.rollout.requests import EngineConfig, Request
from ml.teacher import Reading, hidden_states
from ml.train.batches import Frame
from ml.train.heads import TeacherHeads
from ml.train.loss import LossSettings, Student
from ml.train.micro_batch import MicroBatch, Segment
from ml.train.objectives.kl import KL
from tests.support.random_models import random_model
from tests.support.rollout_world import PLAIN, MemoryLog, run

pytestmark = pytest.mark.gpu
FACTOR = 1.5
VOCAB = 1000
#: The long one goes to another attention kernel than the short ones.
LENGTHS = [1, 37, 300, 64, 2300, 129]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "student": random_model(base / "student", "small", seed=1),
        "teacher": random_model(base / "teacher", "small-teacher", seed=2),
    }


def sequences(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (n + 1,), generator=generator).tolist() for n in lengths]


def readings() -> list[Reading]:
    return [Reading(s[: max(1, len(s) // 3)], s[max(1, len(s) // 3) :]) for s in sequences()]


@pytest.mark.parametrize("precision", ["bf16", "mxfp4"])
def test_hidden_states_are_as_near_to_fp32_as_the_cpus(folders, precision: Precision):
    def states(compute: Compute, device: str) -> torch.Tensor:
        model = load_model(folders["teacher"], precision=precision, compute=compute, device=device)
        return torch.cat(list(hidden_states(model, readings(), batch_tokens=3000)))

    oracle = states("fp32", "cpu")
    assert relative_error(states("bf16", "cuda"), oracle) < FACTOR * relative_error(states("bf16", "cpu"), oracle)


def test_hidden_states_do_not_depend_on_company(folders):
    model = load_model(folders["teacher"], precision="bf16", compute="bf16", device="cuda")
    alone = [next(hidden_states(model, [r], batch_tokens=1)) for r in readings()]
    order = [3, 4, 0, 5, 1, 2]
    for batch_tokens in (100, 700, 10_000):
        found = hidden_states(model, [readings()[i] for i in order], batch_tokens=batch_tokens)
        for index, states in zip(order, found, strict=True):
            assert torch.equal(states, alone[index]), (batch_tokens, LENGTHS[index])


def logits(model: Transformer, tokens: list[list[int]]) -> torch.Tensor:
    device = model.head_weight.device
    cu_tokens = [0]
    for s in tokens:
        cu_tokens.append(cu_tokens[-1] + len(s))
    ids_N = torch.tensor([i for s in tokens for i in s], device=device)
    positions_N = torch.cat([torch.arange(len(s), device=device) for s in tokens])
    with torch.no_grad():
        return model.logits(model(ids_N, positions_N, SampledCausal(cu_tokens)), VOCAB)


@pytest.mark.parametrize("precision", ["bf16", "mxfp4"])
def test_the_samplers_logits_are_as_near_to_fp32_as_the_cpus(folders, precision: Precision):
    def of(compute: Compute, device: str) -> torch.Tensor:
        return logits(load_model(folders["student"], precision=precision, compute=compute, device=device), sequences())

    oracle, found = of("fp32", "cpu"), of("bf16", "cuda")
    assert found.dtype == torch.float32
    assert relative_error(found, oracle) < FACTOR * relative_error(of("bf16", "cpu"), oracle)


def test_the_samplers_logits_do_not_depend_on_company(folders):
    model = load_model(folders["student"], precision="bf16", compute="bf16", device="cuda")
    tokens = sequences()
    alone = [logits(model, [s]) for s in tokens]
    order = [3, 4, 0, 5, 1, 2]
    assert torch.equal(logits(model, [tokens[i] for i in order]), torch.cat([alone[i] for i in order]))


def test_packed_codes_give_the_bits_of_their_values(folders):
    packed = load_model(folders["student"], precision="mxfp4", compute="bf16", device="cuda")
    dense = load_model(folders["student"], precision="bf16", compute="bf16", device="cuda")
    linears = [m for m in dense.modules() if isinstance(m, Linear)]
    with torch.no_grad():
        for linear in linears:
            linear.weight.copy_(mxfp4_dequantize(*mxfp4_quantize(linear.weight.float())))
    assert all(m.weight.is_meta for m in packed.modules() if isinstance(m, Linear))
    for lengths in ([1], [5], [20], [33], [64], [100], [200], [600]):
        tokens = sequences(lengths)
        assert torch.equal(logits(packed, tokens), logits(dense, tokens)), lengths


@pytest.mark.parametrize("precision", ["bf16", "mxfp4"])
def test_decode_steps_log_what_the_cpu_finds_for_their_tokens(folders, precision: Precision):
    model = load_model(folders["student"], precision=precision, compute="bf16", device="cuda")
    config = EngineConfig.on(torch.device("cuda"), max_sequences=16, page_tokens=64, num_pages=200)
    engine = RolloutEngine(model, config, PLAIN, (VOCAB - 1,), VOCAB, MemoryLog())
    prompts = sequences([1, 37, 300, 64, 129])
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"t{i}", tuple(prompt), i, 40))
    finished = run(engine)
    tokens = [[*p, *finished[f"t{i}"].response_ids] for i, p in enumerate(prompts)]

    def logprobs(compute: Compute) -> torch.Tensor:
        """Of the sampled tokens, teacher-forced on the CPU."""
        cpu = load_model(folders["student"], precision=precision, compute=compute)
        whole = torch.log_softmax(logits(cpu, [s[:-1] for s in tokens]).double(), 1)
        found, first = [], 0
        for prompt, s in zip(prompts, tokens, strict=True):
            rows = whole[first + len(prompt) - 1 : first + len(s) - 1]
            found.append(rows.gather(1, torch.tensor(s[len(prompt) :])[:, None])[:, 0])
            first += len(s) - 1
        return torch.cat(found)

    logged = torch.tensor([x for i in range(len(prompts)) for x in finished[f"t{i}"].logprobs_raw], dtype=torch.double)
    oracle, cpu = logprobs("fp32"), logprobs("bf16")
    assert len(logged) > 100
    gap, bound = (logged - oracle).abs(), FACTOR * (cpu - oracle).abs()
    assert gap.mean() < bound.mean()
    assert gap.max() < 2 * bound.max()


def batch(device: str, teacher_width: int) -> MicroBatch:
    """One pack of all sequences, a third of each being the prompt; two segments of one teacher."""
    tokens = [s[:-1] for s in sequences()]
    generator = torch.Generator().manual_seed(4)
    cu_tokens, rows, responses = [0], [], []
    for s in tokens:
        first = max(0, len(s) // 3 - 1)
        rows.append(torch.arange(first, len(s)) + cu_tokens[-1])
        responses.append(torch.randint(0, VOCAB, (len(s) - first,), generator=generator))
        cu_tokens.append(cu_tokens[-1] + len(s))
    segments = []
    for part in (slice(0, 3), slice(3, None)):
        rows_R, response_R = torch.cat(rows[part]), torch.cat(responses[part])
        weight_R = (torch.rand(len(rows_R), generator=generator) > 0.2).float()
        hidden_RE = torch.randn(len(rows_R), teacher_width, generator=generator).bfloat16()
        parts = (rows_R, response_R, weight_R, torch.zeros(len(rows_R)), hidden_RE)
        segments.append(Segment("kl", 0, *(x.to(device) for x in parts)))
    frame = Frame("train", 0, 0, 0, 1500)
    ids_N = torch.tensor([i for s in tokens for i in s], device=device)
    positions_N = torch.cat([torch.arange(len(s)) for s in tokens]).to(device)
    return MicroBatch(frame, ids_N, positions_N, cu_tokens, tuple(segments))


def step_of(
    folders: dict[str, Path], precision: Precision, compute: Compute, device: str, *, recompute: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and gradient of every parameter in float64 on the CPU."""
    model = load_model(folders["student"], precision=precision, compute=compute, device=device, trainable=True)
    model.checkpoint_layers = recompute
    student = Student(model, LossSettings(VOCAB, chunk_bytes=8 << 20), {"kl": KL()})
    heads = TeacherHeads(lambda _: read_head(folders["teacher"]), vocab_size=VOCAB, device=torch.device(device))
    loss, values, _ = student(batch(device, 384), heads)
    loss.backward()
    assert len(values) == 2
    assert all(m.fp8_exact for m in model.modules() if isinstance(m, Linear) and m.fp8)
    found = {name: p.grad.double().cpu() for name, p in student.named_parameters() if p.grad is not None}
    assert len(found) == len(list(student.parameters()))
    return float(loss.detach()), found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "mxfp4"])
def test_a_training_steps_loss_and_gradients_are_as_near_to_fp32_as_the_cpus(folders, precision: Precision, recompute):
    def gradients(compute: Compute, device: str) -> tuple[float, dict[str, torch.Tensor]]:
        return step_of(folders, precision, compute, device, recompute=recompute)

    oracle_loss, oracle = gradients("fp32", "cpu")
    cpu_loss, cpu = gradients("bf16", "cpu")
    gpu_loss, gpu = gradients("bf16", "cuda")
    assert abs(gpu_loss - oracle_loss) < 2e-3 * oracle_loss, (gpu_loss, cpu_loss, oracle_loss)
    for name, want in oracle.items():
        bound = FACTOR * relative_error(cpu[name], want) + 1e-3
        assert relative_error(gpu[name], want) < bound, (name, relative_error(gpu[name], want), bound)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_training_step_in_fp8_is_as_near_to_fp32_as_the_cpus(folders, recompute):
    """The CPU multiplies the same codes in fp32: what it is off by is what FP8 costs."""

    def gradients(compute: Compute, device: str) -> tuple[float, dict[str, torch.Tensor]]:
        return step_of(folders, "mxfp4", compute, device, recompute=recompute)

    oracle_loss, oracle = gradients("fp32", "cpu")
    cpu_loss, cpu = gradients("fp8", "cpu")
    gpu_loss, gpu = gradients("fp8", "cuda")
    assert abs(gpu_loss - oracle_loss) < FACTOR * abs(cpu_loss - oracle_loss) + 2e-3 * oracle_loss
    for name, want in oracle.items():
        found, bound = relative_error(gpu[name], want), FACTOR * relative_error(cpu[name], want) + 1e-3
        assert found < bound, (name, found, bound)


@pytest.mark.parametrize("num_rows", [0, 1, 37, 300])
@pytest.mark.parametrize("spoil", [False, True])
def test_an_fp8_linear_multiplies_the_cpus_codes(num_rows, spoil):
    """Ragged tiles; a weight that FP8 would round falls back on both devices."""
    linear = Linear(416, 208, bias=True, precision="mxfp4", compute=torch.bfloat16, dtype=torch.float32, fp8=True)
    generator = torch.Generator().manual_seed(5)
    for parameter in linear.parameters():
        parameter.data.normal_(generator=generator)
    if spoil:
        linear.weight.data[200, 32:64] *= 2.0**-20
    x_NI = torch.randn(num_rows, 416, generator=generator).bfloat16()
    upstream_NO = torch.randn(num_rows, 208, generator=generator).bfloat16()

    def passes(device: str) -> list[torch.Tensor]:
        one = copy.deepcopy(linear).to(device)
        x = x_NI.to(device).requires_grad_()
        out = one(x)
        out.backward(upstream_NO.to(device))
        assert one.fp8_exact is not spoil
        found = [out, x.grad, *(p.grad for p in one.parameters())]
        return [t.detach().float().cpu() for t in found if t is not None]

    for found, want in zip(passes("cuda"), passes("cpu"), strict=True):
        assert found.shape == want.shape
        assert (found - want).norm() <= 4e-3 * want.norm()


def test_codes_that_a_graph_renews_are_those_of_the_weights_as_they_are():
    """Held codes give the bits of codes made on the way: at first, after updates, one spoilt, in other memory."""
    linears = [
        Linear(inputs, outputs, bias=False, precision="mxfp4", compute=torch.bfloat16, dtype=torch.float32, fp8=True)
        for inputs, outputs in ((416, 208), (96, 144), (1024, 32))
    ]
    generator = torch.Generator("cuda").manual_seed(3)

    def fill() -> None:
        for linear in linears:
            linear.weight.data.normal_(generator=generator)

    def spoil() -> None:
        linears[1].weight.data[7, 32:64] *= 2.0**-20

    def move() -> None:
        for linear in linears:
            linear.weight.data = linear.weight.data * 3.0

    for linear in linears:
        linear.cuda()
    fill()
    weights = Fp8Weights(linears, whole=True)
    for change, exact in ((fill, [True] * 3), (fill, [True] * 3), (spoil, [True, False, True]),
                          (move, [True, False, True]), (fill, [True] * 3)):  # fmt: skip
        change()
        weights.renew()
        assert [linear.fp8_exact for linear in linears] == exact
        for linear in linears:
            x_NI = torch.randn(37, linear.num_inputs, device="cuda", generator=generator).bfloat16()
            fresh = copy.deepcopy(linear)
            Fp8Weights([fresh], whole=False).renew()
            passes = []
            for one in (linear, fresh):
                x = x_NI.clone().requires_grad_()
                out = one(x)
                out.backward(torch.ones_like(out))
                passes.append((out, x.grad))
            for found, want in zip(*passes, strict=True):
                assert torch.equal(found, want)


def test_recomputed_log_probabilities_are_the_samplers_bits(folders):
    """The student in training recomputes, from its fp32 master, what a sampler that loaded the folder would log."""
    for precision in ("bf16", "mxfp4"):
        sampler = load_model(folders["student"], precision=precision, compute="bf16", device="cuda")
        model = load_model(folders["student"], precision=precision, compute="bf16", device="cuda", trainable=True)
        student = Student(model, LossSettings(VOCAB), {"kl": KL()})
        micro_batch = batch("cuda", 384)
        with torch.no_grad():
            found = student(micro_batch, None, want_logprobs=True)[2]
        want_NV = torch.log_softmax(logits(sampler, [s[:-1] for s in sequences()]), 1)
        for segment, logprobs_R in zip(micro_batch.segments, found, strict=True):
            assert torch.equal(logprobs_R, want_NV[segment.rows_R].gather(1, segment.response_R[:, None])[:, 0])
