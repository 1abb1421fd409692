"""The runner of ranks that share a model: rank 0 plans, samples and logs, the others do on the device what it does.

Rank 0's engine has a `LeadRunner`; it tells the others each command before it carries it out itself. They `follow`.
Sampling happens on every rank, from gathered logits that are equal, so the ids that the next step reads lie on each.

A command is JSON and arrays as plain bytes: what arrives can be wrong, but it cannot run.

    u64 bytes that follow | u64 bytes of the JSON | JSON [command, arguments] | bytes of the arrays, in their order
    an array in the JSON: {"dtype": numpy's name, "shape": [...]}

Letters: M positions of one sequence, L layers, G KV heads, C channels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ml.model import Transformer
from ml.ranks import leave_ranks
from ml.rollout.runner import Runner
from ml.rollout.sampling import SamplingParams
from ml.rollout.steps import Placed, StepRows
from ml.tensor_parallel import Group

#: Most commands fit one broadcast of this size; of longer ones it holds the length.
_FIRST_BYTES = 16384


class LeadRunner(Runner):
    """A `Runner` whose device commands the other ranks of the model's group carry out too."""

    def __init__(self, model: Transformer, **settings: Any) -> None:
        self._group = model.group
        self._tell("open", settings | {"sampling": asdict(settings["sampling"])})
        super().__init__(model, **settings)

    def clear(self) -> None:
        self._tell("clear")
        super().clear()

    def place(self, placed: Placed) -> None:
        self._tell("place", placed.slots_A, placed.tables_AP, placed.keys_A, placed.copies_C2)
        super().place(placed)

    def run(self, rows: StepRows) -> Callable[[], np.ndarray]:
        self._tell("run", rows.decode_4D, rows.width, rows.chunks)
        return super().run(rows)

    def read_kv(
        self, pages: Seq[int], num_positions: int, *, to_return: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Runner's: keys and values of all heads, gathered in ordinary memory."""
        self._tell("read_kv", list(pages), num_positions)
        return _gather_heads(self, super().read_kv(pages, num_positions, to_return=False))

    def write_kv(self, pages: Seq[int], k_MLGC: torch.Tensor, v_MLGC: torch.Tensor) -> None:
        """As Runner's, from keys and values of all heads."""
        self._tell("write_kv", list(pages), list(k_MLGC.shape), str(k_MLGC.dtype).removeprefix("torch."))
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
            settings = arguments[0]
            runner = Runner(model, **settings | {"sampling": SamplingParams(**settings["sampling"])})
            continue
        assert runner is not None
        if command == "read_kv":
            _gather_heads(runner, runner.read_kv(*arguments, to_return=False))
        elif command == "write_kv":
            pages, shape, dtype = arguments
            kv = (torch.empty(shape, dtype=getattr(torch, dtype)) for _ in range(2))
            runner.write_kv(pages, *_share_heads(model.group, *kv))
        elif command == "clear":
            runner.clear()
        elif command == "place":
            runner.place(Placed(*arguments))
        elif command == "run":
            decode_4D, width, chunks = arguments
            runner.run(StepRows(decode_4D, width, [tuple(chunk) for chunk in chunks]))
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


def encode(message: Any) -> bytes:
    """Bytes of a command of JSON values and numpy arrays, tuples as lists."""
    arrays: list[bytes] = []

    def describe(value: Any) -> dict[str, Any]:
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            raise TypeError(f"{type(value).__name__} in a command")
        arrays.append(value.tobytes())
        return {"dtype": value.dtype.str, "shape": list(value.shape)}

    text = json.dumps(message, default=describe).encode()
    return b"".join([np.array([len(text)], np.uint64).tobytes(), text, *arrays])


def decode(data: bytes) -> Any:
    """The command that `encode` took, its arrays copies. Raises ValueError for bytes of another kind."""
    (size,) = np.frombuffer(data, np.uint64, 1).tolist()
    place = 8 + size

    def array(value: dict[str, Any]) -> Any:
        nonlocal place
        if set(value) != {"dtype", "shape"}:
            return value
        dtype = np.dtype(value["dtype"])
        if dtype.kind not in "iufb":
            raise ValueError(f"an array of {dtype}")
        found = np.frombuffer(data, dtype, int(np.prod(value["shape"], dtype=np.int64)), place).copy()
        place += found.nbytes
        return found.reshape(value["shape"])

    return json.loads(data[8:place], object_hook=array)


def _send(group: Group, message: Any) -> None:
    data = np.frombuffer(encode(message), np.uint8)
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
        return decode(first[8 : 8 + size].numpy().tobytes())
    data = torch.empty(size, dtype=torch.uint8)
    dist.broadcast(data, 0, group=group.process_group)
    return decode(data.numpy().tobytes())
