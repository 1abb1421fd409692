"""Teacher heads: one at a time, loaded once while it is in use, never narrower than the vocabulary."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.linear_kl import linear_kl
from ml.train.heads import TeacherHeads
from ml.train.loader import Segment
from ml.train.loss import LossSettings, StudentHead
from schemas.errors import ContractError

CPU = torch.device("cpu")


class Heads:
    """Heads that are read on demand; notes how many were alive at each read."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref] = []
        self.coexisting: list[int] = []

    def read(self, teacher_index: int) -> torch.Tensor:
        self.coexisting.append(sum(ref() is not None for ref in self.alive))
        head = torch.full((7, 3), float(teacher_index), dtype=torch.bfloat16)
        self.alive.append(weakref.ref(head.untyped_storage()))
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
    segment = Segment(0, rows, rows, torch.ones(5), torch.zeros(5), hidden)
    batch: Any = SimpleNamespace(segments=(segment,), frame=SimpleNamespace(denominator_tokens=10))
    h_ND = torch.randn(5, 16, generator=g).bfloat16().requires_grad_()
    student = StudentHead(body, LossSettings(140, precision=precision))
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
