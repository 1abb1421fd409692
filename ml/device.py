"""What a device asks of ml: which one a rank has, and all that differs between a GPU and a CPU.

Nothing else in ml asks for a kind of device. Products, attention, casts and the loss tell devices apart by their
tensors, inside `kernels`.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Traits:
    """What differs by kind of device.

    backend: of torch.distributed; vectors on the host always go through gloo. overlap: whether DeepSpeed reduces
    gradients beside the backward pass. bucket_elements: gradients that ZeRO-1 reduces at once and where they lie, None
    for DeepSpeed's choice, a buffer for all of them. chunk_bytes: logits of one chunk of the KL, unless the
    configuration says.
    compute_dtypes: those that the kernels take. head_dtype: in which inference keeps embedding and head, None for the
    model's compute dtype. packs_mxfp4: whether a product reads MXFP4 codes themselves. split_tokens: where the
    sampler cuts a sequence's keys, in absolute positions; the cuts decide bits.
    prefill_chunk_tokens: prefill rows of one rollout step. steps_in_flight: rollout steps, or passes of a teacher, that
    may run while an older one's result is taken. graphs: whether decode steps are replayed from graphs.
    guess_tokens: most tokens that it is worth to guess of one sequence, for an engine that guesses.
    """

    backend: str
    overlap: bool
    bucket_elements: int | None
    chunk_bytes: int
    compute_dtypes: frozenset[torch.dtype]
    head_dtype: torch.dtype | None
    packs_mxfp4: bool
    split_tokens: int
    prefill_chunk_tokens: int
    steps_in_flight: int
    graphs: bool
    guess_tokens: int


_CPU = Traits(
    backend="gloo",
    overlap=False,
    # The buffer would be new at every step, and its pages cost more than the update.
    bucket_elements=4_000_000,
    chunk_bytes=256 << 20,
    compute_dtypes=frozenset({torch.float32, torch.bfloat16}),
    # Logits are products of fp32 operands there: keeping the head so saves a conversion a call.
    head_dtype=torch.float32,
    packs_mxfp4=False,
    split_tokens=64,
    prefill_chunk_tokens=256,
    steps_in_flight=0,
    graphs=False,
    guess_tokens=31,
)
_CUDA = Traits(
    backend="cpu:gloo,cuda:nccl",
    overlap=True,
    bucket_elements=None,
    # Fewer tokens a chunk read and write the head's gradient too often (kernels/BENCH.md).
    chunk_bytes=1 << 30,
    compute_dtypes=frozenset({torch.bfloat16}),
    head_dtype=None,
    packs_mxfp4=True,
    # Cuts of 1024, with pages of 128, prefill faster and decode more slowly (BENCH.md, "Rollout").
    split_tokens=512,
    prefill_chunk_tokens=8192,
    steps_in_flight=1,
    graphs=True,
    guess_tokens=15,
)


def traits(device: torch.device | str) -> Traits:
    """The traits of a CUDA device, or the CPU's, which are those of tensors without storage too."""
    return _CUDA if torch.device(device).type == "cuda" else _CPU


def rank_device() -> torch.device:
    """The device of this process: GPU LOCAL_RANK modulo the visible ones (0 without LOCAL_RANK), else the CPU.

    It becomes torch's current one, since kernels launch there.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, in the order of what is launched there; nobody waits."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def host_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised, on the host; page-locked where the device is a GPU, which can then copy beside other work."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def plain_buffer(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised, in ordinary host memory, which costs a fraction of page-locked memory to get."""
    # numpy asks for huge pages, so that gigabytes are touched for the first time in few steps.
    num_bytes = dtype.itemsize * math.prod(shape)
    return torch.from_numpy(np.empty(num_bytes, np.uint8)).view(dtype).view(tuple(shape))


def copy_to_host(tensor: torch.Tensor, out: torch.Tensor) -> None:
    """Into ordinary host memory; from a GPU by way of page-locked memory of the tensor's size. Waits for it."""
    if tensor.device.type == "cuda":
        staged = host_buffer(tensor.shape, tensor.dtype, tensor.device)
        staged.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        tensor = staged
    out.copy_(tensor)


def wait_for(device: torch.device) -> None:
    """Return once all that was launched on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor to the host; the call that is returned waits until it is there."""
    copy = tensor.to("cpu", non_blocking=True)
    if tensor.device.type != "cuda":
        return lambda: copy
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> torch.Tensor:
        arrived.synchronize()
        return copy

    return wait


def forget_peak(device: torch.device) -> None:
    """Let `observed` count from here, on a GPU; a CPU process cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def observed(device: torch.device) -> dict[str, Any]:
    """What a stage notes of its device: {"device": name, "device_peak_bytes": most memory held so far}.

    The memory is the allocator's on a GPU, and the process's own on a CPU.
    """
    if device.type == "cuda":
        return {
            "device": torch.cuda.get_device_name(device),
            "device_peak_bytes": torch.cuda.max_memory_allocated(device),
        }
    return {"device": "cpu", "device_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}
