"""A teacher's only product: the hidden states that predict each response token. Logits are never formed.

A hidden state is what the model's output embedding (its head) is given; of our own transformer, the state after the
final norm. Row i of a trajectory is the state that predicts response token i: the last context token's state predicts
token 0, and the last response token is read by nobody. Rows do not depend on which trajectories share a forward pass.

Letters: N packed tokens, E teacher width, W stored width (ml.teacher_facts), T response tokens of one trajectory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from ml.device import to_host, traits
from ml.model import PackedCausal, Transformer
from ml.teacher_facts import TeacherFacts
from schemas.errors import ContractError


@dataclass(frozen=True)
class Reading:
    """What a teacher reads of one trajectory: its own context, then the response unchanged. Both are non-empty."""

    context_ids: Sequence[int]
    response_ids: Sequence[int]


class Teacher(Protocol):
    """A loaded teacher of any kind. Its head is no part of it: training reads that by name (ml.teacher_head)."""

    @property
    def facts(self) -> TeacherFacts: ...

    @property
    def device(self) -> torch.device: ...

    def hidden_states(self, readings: Iterable[Reading], *, batch_tokens: int) -> Iterator[torch.Tensor]:
        """One bf16 tensor [T, W] a reading, on the host, in order, finite; batch_tokens: how many a pass may take.

        The bytes of a reading's rows depend on the model and that reading alone, whatever batch_tokens is. Raises
        ContractError as `check_reading` does, and for a state that is not finite.
        """
        ...


@dataclass(frozen=True)
class OwnTeacher:
    """Our transformer as a teacher."""

    facts: TeacherFacts
    model: Transformer

    @property
    def device(self) -> torch.device:
        return self.model.head_weight.device

    def hidden_states(self, readings: Iterable[Reading], *, batch_tokens: int) -> Iterator[torch.Tensor]:
        """As `Teacher.hidden_states`."""
        return hidden_states(self.model, readings, batch_tokens=batch_tokens)


def hidden_states(model: Transformer, readings: Iterable[Reading], *, batch_tokens: int) -> Iterator[torch.Tensor]:
    """One bf16 tensor [T, E] a reading, in order; a forward pass takes up to batch_tokens tokens, at least one reading.

    Raises ContractError for an empty side, a sequence beyond the model's positions, an id without an embedding row,
    or a state that is not finite.
    """
    passes: deque[Callable[[], list[torch.Tensor]]] = deque()
    for batch in _batches(model, readings, batch_tokens):
        passes.append(_read_batch(model, batch))
        # The device goes on with a pass while the states of the one before reach the host.
        if len(passes) > traits(model.head_weight.device).steps_in_flight:
            yield from passes.popleft()()
    for states in passes:
        yield from states()


def _batches(model: Transformer, readings: Iterable[Reading], batch_tokens: int) -> Iterator[list[Reading]]:
    batch: list[Reading] = []
    num_tokens = 0
    for index, reading in enumerate(readings):
        length = check_reading(
            reading, index, context_tokens=model.config.max_positions, input_rows=model.config.vocab_rows
        )
        if batch and num_tokens + length > batch_tokens:
            yield batch
            batch, num_tokens = [], 0
        batch.append(reading)
        num_tokens += length
    if batch:
        yield batch


def check_reading(reading: Reading, index: int, *, context_tokens: int, input_rows: int) -> int:
    """Tokens that the model reads: all but the last, which predicts nothing of the response.

    index: of the reading, for errors. Raises ContractError for an empty side, more than context_tokens positions, and
    an id that is not below input_rows.
    """
    where = f"trajectory {index} of the teacher's input"
    if not reading.context_ids or not reading.response_ids:
        raise ContractError(where, expected="a context and a response", found="an empty one")
    length = len(reading.context_ids) + len(reading.response_ids) - 1
    if length > context_tokens:
        raise ContractError(where, expected=f"up to {context_tokens} positions", found=f"{length}")
    largest = max(max(reading.context_ids), max(reading.response_ids))
    if min(min(reading.context_ids), min(reading.response_ids)) < 0 or largest >= input_rows:
        raise ContractError(where, expected=f"ids below {input_rows}", found=f"{largest}")
    return length


@torch.no_grad()
def _read_batch(model: Transformer, batch: list[Reading]) -> Callable[[], list[torch.Tensor]]:
    """Start the pass; the call that is returned waits for its states."""
    sequences = [[*r.context_ids, *r.response_ids][:-1] for r in batch]
    device = model.head_weight.device
    cu_tokens = [0, *accumulate(len(s) for s in sequences)]
    ids_N = torch.tensor([i for s in sequences for i in s]).to(device, non_blocking=True)
    positions_N = torch.cat([torch.arange(len(s)) for s in sequences]).to(device, non_blocking=True)
    h_NE = model(ids_N, positions_N, PackedCausal(cu_tokens)).to(torch.bfloat16)
    # Rows of the contexts are no product.
    lengths = [len(r.response_ids) for r in batch]
    rows_N = torch.cat([torch.arange(end - n, end) for n, end in zip(lengths, cu_tokens[1:], strict=True)])
    finite, states = to_host(torch.isfinite(h_NE).all()), to_host(h_NE[rows_N.to(device, non_blocking=True)])

    def wait() -> list[torch.Tensor]:
        if not finite():
            raise ContractError("the teacher's hidden states", expected="finite numbers", found="NaN or infinity")
        return list(states().split(lengths))

    return wait
