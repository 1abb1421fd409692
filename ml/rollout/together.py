"""The runner of ranks that share a model: rank 0 plans, samples and logs, the others do on the device what it does.

Rank 0's engine has a `LeadRunner`; it tells the others each command before it carries it out itself. They `follow`.
Sampling happens on every rank, from gathered logits that are equal, so the ids that the next step reads lie on each.

Letters: M positions of one sequence, L layers, G KV heads, C channels.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ml.model import Transformer
from ml.ranks import leave_ranks
from ml.rollout.runner import Placed, Runner, StepRows
from ml.tensor_parallel import Group

#: Most commands fit one broadcast of this size; of longer ones it holds the length.
_FIRST_BYTES = 16384


class LeadRunner(Runner):
    """A `Runner` whose device commands the other ranks of the model's group carry out too."""

    def __init__(self, model: Transformer, **settings: Any) -> None:
        self._group = model.group
        self._tell("open", settings)
        super().__init__(model, **settings)

    def clear(self) -> None:
        self._tell("clear")
        super().clear()

    def place(self, placed: Placed) -> None:
        self._tell("place", placed)
        super().place(placed)

    def run(self, rows: StepRows) -> Callable[[], np.ndarray]:
        self._tell("run", rows)
        return super().run(rows)

    def read_kv(
        self, pages: Seq[int], num_positions: int, *, to_return: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Runner's: keys and values of all heads, gathered in ordinary memory."""
        self._tell("read_kv", list(pages), num_positions)
        return _gather_heads(self, super().read_kv(pages, num_positions, to_return=False))

    def write_kv(self, pages: Seq[int], k_MLGC: torch.Tensor, v_MLGC: torch.Tensor) -> None:
        """As Runner's, from keys and values of all heads."""
        self._tell("write_kv", list(pages), k_MLGC.shape, k_MLGC.dtype)
        super().write_kv(pages, *_share_heads(self._group, k_MLGC, v_MLGC))

    def _tell(self, command: str, *arguments: Any) -> None:
        _send(self._group, (command, arguments))


def dismiss(group: Group) -> None:
    """Rank 0, when it needs the model no more: the ranks that `follow` return, and all leave torch.distributed.

    Engines must be gone by then: NCCL waits without end for captured graphs that hold its communicator.
    """
    if group.ranks > 1:
        _send(group, None)
        leave_ranks()


def follow(model: Transformer) -> None:
    """A rank above 0: do what rank 0's runners do, until it says `dismiss`.

    Raises RuntimeError of torch.distributed when rank 0 is gone.
    """
    runner: Runner | None = None
    while (message := _receive(model.group)) is not None:
        command, arguments = message
        if command == "open":
            runner = None  # frees its cache before the next is made
            runner = Runner(model, **arguments[0])
            continue
        assert runner is not None
        if command == "read_kv":
            _gather_heads(runner, runner.read_kv(*arguments, to_return=False))
        elif command == "write_kv":
            pages, shape, dtype = arguments
            kv = (torch.empty(shape, dtype=dtype) for _ in range(2))
            runner.write_kv(pages, *_share_heads(model.group, *kv))
        elif command == "clear":
            runner.clear()
        elif command == "place":
            runner.place(*arguments)
        elif command == "run":
            runner.run(*arguments)
    runner = None  # and its graphs: see `dismiss`
    leave_ranks()


def _gather_heads(runner: Runner, kv: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    config, group = runner.model.config, runner.model.group
    k_MLGC, v_MLGC = (
        group.gather(x.flatten(0, 1).flatten(1), config.kv_heads * config.head_channels)
        .view(*x.shape[:2], config.kv_heads, config.head_channels)
        for x in kv
    )  # fmt: skip
    return k_MLGC, v_MLGC


def _share_heads(group: Group, *kv: torch.Tensor) -> list[torch.Tensor]:
    """This rank's heads of keys and values that rank 0 has; the others bring room for them."""
    own = []
    for x_MLGC in kv:
        x_MLGC = x_MLGC.contiguous()
        dist.broadcast(x_MLGC.view(torch.uint8), 0, group=group.process_group)
        own.append(group.part(x_MLGC.transpose(0, 2)).transpose(0, 2).contiguous())
    return own


def _send(group: Group, message: Any) -> None:
    data = np.frombuffer(pickle.dumps(message), np.uint8)
    first = np.zeros(_FIRST_BYTES, np.uint8)
    first[:8] = np.array([len(data)], np.int64).view(np.uint8)
    if len(data) <= _FIRST_BYTES - 8:
        first[8 : 8 + len(data)] = data
    dist.broadcast(torch.from_numpy(first), 0, group=group.process_group)
    if len(data) > _FIRST_BYTES - 8:
        dist.broadcast(torch.from_numpy(data.copy()), 0, group=group.process_group)


def _receive(group: Group) -> Any:
    first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
    dist.broadcast(first, 0, group=group.process_group)
    size = int(first[:8].view(torch.int64))
    if size <= _FIRST_BYTES - 8:
        return pickle.loads(first[8 : 8 + size].numpy().tobytes())
    data = torch.empty(size, dtype=torch.uint8)
    dist.broadcast(data, 0, group=group.process_group)
    return pickle.loads(data.numpy().tobytes())
