"""Teacher heads: one at a time, loaded once while it is in use, never narrower than the vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.linear_kl import linear_kl
from kernels.testing import peak_bytes
from ml.train.heads import TeacherHeads
from ml.train.loss import LossSettings, StudentHead
from ml.train.micro_batch import Segment
from ml.train.objectives.kl import KL
from schemas.errors import ContractError

CPU = torch.device("cpu")


class Heads:
    """Heads that are read on demand; notes how many were alive at each read."""

    def __init__(self, rows: int = 7, width: int = 3, device: torch.device = CPU) -> None:
        self.shape, self.device = (rows, width), device
        self.alive: list[StorageWeakRef] = []
        self.coexisting: list[int] = []

    def read(self, teacher_index: int) -> torch.Tensor:
        self.coexisting.append(sum(not ref.expired() for ref in self.alive))
        head = torch.full(self.shape, float(teacher_index), dtype=torch.bfloat16, device=self.device)
        self.alive.append(StorageWeakRef(head.untyped_storage()))
        return head


def test_a_head_is_read_once_in_order_and_its_predecessor_is_gone_by_then():
    source = Heads()
    heads = TeacherHeads(source.read, vocab_size=5, device=CPU)
    for teacher_index in (0, 0, 1, 1, 1, 2):
        u_VE = heads.use(teacher_index)
        assert u_VE.shape == (5, 3)
        assert set(u_VE.flatten().tolist()) == {float(teacher_index)}
        del u_VE
    assert source.coexisting == [0, 0, 0]
    assert heads.take_loads() == {0: 1, 1: 1, 2: 1}
    heads.use(2)
    assert heads.take_loads() == {}, "the head that a mini-batch ended with stays for the next"


class Large(TorchDispatchMode):
    """Notes how many tensors of at least so many bytes were alive at once, of those that operations make."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes, self.alive, self.most = num_bytes, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        storage = result.untyped_storage() if isinstance(result, torch.Tensor) else None
        if storage is not None and storage.nbytes() >= self.num_bytes and storage.data_ptr() not in known:
            self.alive = {k: ref for k, ref in self.alive.items() if not ref.expired()}
            self.alive[storage.data_ptr()] = StorageWeakRef(storage)
            self.most = max(self.most, len(self.alive))
        return result


def pack(num_segments: int, rows: int, width: int, teacher_width: int, vocab_size: int, device: torch.device):
    """A student's head, its states, and a micro-batch of as many teachers as segments."""
    g = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device, dtype=torch.bfloat16)

    body: Any = SimpleNamespace(
        head_weight=torch.nn.Parameter(normal(vocab_size, width).float() * width**-0.5), precision="bf16"
    )
    segments = []
    for index in range(num_segments):
        rows_R = torch.arange(index * rows, (index + 1) * rows, device=device)
        ones_R = torch.ones(rows, device=device)
        segments.append(Segment("kl", index, rows_R, rows_R, ones_R, ones_R, normal(rows, teacher_width)))
    batch: Any = SimpleNamespace(segments=tuple(segments), frame=SimpleNamespace(denominator_tokens=rows))
    return body, normal(num_segments * rows, width).requires_grad_(), batch


@pytest.mark.parametrize("num_segments", [1, 3, 12])
def test_a_micro_batch_has_one_teachers_head_and_one_gradient_of_the_students_at_a_time(num_segments):
    rows, width, vocab_size = 4, 16, 3 * 8192
    body, h_ND, batch = pack(num_segments, rows, width, 8, vocab_size, CPU)
    source = Heads(vocab_size, 8)
    heads = TeacherHeads(source.read, vocab_size=vocab_size, device=CPU)
    student = StudentHead(body, LossSettings(vocab_size, chunk_bytes=1 << 20), {"kl": KL()})
    with Large(4 * vocab_size * width) as large:
        loss, values, _ = student(h_ND, batch, heads, False)
        loss.backward()
    assert large.most == 1
    assert source.coexisting == [0] * num_segments
    assert heads.take_loads() == dict.fromkeys(range(num_segments), 1)
    assert [len(by_metric["kl"]) for by_metric in values] == [rows] * num_segments
    assert h_ND.grad is not None
    assert bool((h_ND.grad != 0).any(1).all())


@pytest.mark.gpu
def test_twelve_teachers_fit_where_one_does():
    """12 x 4096 x 151,936: a head is 1.24 GB, its gradient 2.49."""
    cuda, rows, width, vocab_size, chunk_bytes = torch.device("cuda"), 600, 4096, 151936, 1_245_000_000
    peaks = {}
    for num_segments in (1, 12):
        body, h_ND, batch = pack(num_segments, rows, width, width, vocab_size, cuda)
        source = Heads(vocab_size, width, cuda)
        heads = TeacherHeads(source.read, vocab_size=vocab_size, device=cuda)
        student = StudentHead(body, LossSettings(vocab_size, chunk_bytes=chunk_bytes), {"kl": KL()})

        def step(student=student, h_ND=h_ND, batch=batch, heads=heads):
            student(h_ND, batch, heads, False)[0].backward()

        peaks[num_segments] = peak_bytes(step)
        assert source.coexisting == [0] * num_segments
        del body, h_ND, batch, student, heads, step
    head, gradient, states = 2 * vocab_size * width, 4 * vocab_size * width, 2 * 12 * rows * width
    # The student's head in bf16 and a teacher's, the gradient, the workspace, states and their gradients.
    assert peaks[12] < 2 * head + 1.01 * gradient + chunk_bytes + 8 * states
    print(f"peak of 1 and 12 teachers: {peaks[1] / 2**30:.2f} and {peaks[12] / 2**30:.2f} GiB")


def test_a_walk_that_is_not_in_order_shows_in_the_count():
    heads = TeacherHeads(Heads().read, vocab_size=5, device=CPU)
    for teacher_index in (0, 1, 0):
        heads.use(teacher_index)
    assert heads.take_loads() == {0: 2, 1: 1}


@pytest.mark.parametrize("shape", [(4, 3), (15,)])
def test_a_head_without_the_whole_vocabulary_is_refused(shape):
    heads = TeacherHeads(lambda _: torch.zeros(shape), vocab_size=5, device=CPU)
    with pytest.raises(ContractError, match="teacher 3"):
        heads.use(3)


@pytest.mark.parametrize("precision", ["exact", "fp8_gradients", "fp8"])
def test_the_kl_runs_in_the_precision_asked_for(precision):
    g = torch.Generator().manual_seed(0)
    body: Any = SimpleNamespace(head_weight=torch.nn.Parameter(torch.randn(140, 16, generator=g)), precision="bf16")
    hidden, head = torch.randn(5, 32, generator=g).bfloat16(), torch.randn(140, 32, generator=g).bfloat16()
    rows = torch.arange(5)
    segment = Segment("kl", 0, rows, rows, torch.ones(5), torch.zeros(5), hidden)
    batch: Any = SimpleNamespace(segments=(segment,), frame=SimpleNamespace(denominator_tokens=10))
    h_ND = torch.randn(5, 16, generator=g).bfloat16().requires_grad_()
    student = StudentHead(body, LossSettings(140), {"kl": KL(precision=precision)})
    student(h_ND, batch, TeacherHeads(lambda _: head, vocab_size=140, device=CPU), False)[0].backward()
    found = h_ND.grad
    assert found is not None
    gradients = {}
    for other in ("exact", "fp8_gradients", "fp8"):
        h_ND.grad = None
        linear_kl(h_ND, body.head_weight, hidden, head, torch.full((5,), 0.1), precision=other)[0].backward()
        assert h_ND.grad is not None
        gradients[other] = h_ND.grad
    assert [other for other in gradients if torch.equal(found, gradients[other])] == [precision]
