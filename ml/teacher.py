"""A teacher's only product: the final-norm states that predict each response token. Logits are never formed.

Row i of a trajectory is the state that predicts response token i: the last context token's state predicts token 0,
and the last response token is read by nobody. Rows do not depend on which trajectories share a forward pass.

Letters: N packed tokens, E teacher width, T response tokens of one trajectory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ml.device import to_host, traits
from ml.model import PackedCausal, Transformer
from schemas.errors import ContractError


@dataclass(frozen=True)
class Reading:
    """What a teacher reads of one trajectory: its own context, then the response unchanged. Both are non-empty."""

    context_ids: Sequence[int]
    response_ids: Sequence[int]


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
        length = _check(model, reading, index)
        if batch and num_tokens + length > batch_tokens:
            yield batch
            batch, num_tokens = [], 0
        batch.append(reading)
        num_tokens += length
    if batch:
        yield batch


def _check(model: Transformer, reading: Reading, index: int) -> int:
    """Tokens that the model reads: all but the last, which predicts nothing of the response."""
    where = f"trajectory {index} of the teacher's input"
    if not reading.context_ids or not reading.response_ids:
        raise ContractError(where, expected="a context and a response", found="an empty one")
    length = len(reading.context_ids) + len(reading.response_ids) - 1
    if length > model.config.max_positions:
        raise ContractError(where, expected=f"up to {model.config.max_positions} positions", found=f"{length}")
    largest = max(max(reading.context_ids), max(reading.response_ids))
    if min(min(reading.context_ids), min(reading.response_ids)) < 0 or largest >= model.config.vocab_rows:
        raise ContractError(where, expected=f"ids below {model.config.vocab_rows}", found=f"{largest}")
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
