"""One process group of two ranks as training makes it: tensors between GPUs over NCCL, vectors between hosts over gloo.

`pytest -m gpu -s` prints what a copy of 1 GiB reaches.
"""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from infra.launch import free_port
from ml.device import rank_device
from ml.ranks import join_ranks, leave_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
GIB = 1 << 30


def pattern(device: torch.device, seed: int) -> torch.Tensor:
    """1 GiB that is the same wherever it is made."""
    numbers = torch.arange(GIB // 4, dtype=torch.int32, device=device)
    return numbers * 2654435761 % 1000003 + seed


def copy(rank: int, port: int, answers) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}  # fmt: skip
    device = rank_device()
    assert join_ranks(device) == (rank, 2)
    assert device.index == rank
    rates = {}
    mine, both = pattern(device, rank), torch.zeros(2, GIB // 4, dtype=torch.int32, device=device)
    received = torch.empty_like(mine)
    for name in ("broadcast", "all-gather"):
        for _ in range(3):  # the first call sets up connections
            torch.cuda.synchronize()
            dist.barrier()
            started = time.perf_counter()
            if name == "broadcast":
                received.copy_(mine)
                dist.broadcast(received, src=0)
            else:
                dist.all_gather_into_tensor(both, mine)
            torch.cuda.synchronize()
            rates[name] = GIB / (time.perf_counter() - started) / 1e9
    assert torch.equal(received, pattern(device, 0))
    for other in (0, 1):
        assert torch.equal(both[other], pattern(device, other))
    host = torch.tensor([1.0 + rank, 1e300], dtype=torch.float64)
    dist.all_reduce(host)
    assert host.tolist() == [3.0, 2e300]
    leave_ranks()
    answers.put(rates)


def test_tensors_arrive_whole():
    port = free_port()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=copy, args=(rank, port, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert [p.exitcode for p in processes] == [0, 0]
    print({name: f"{rate:.0f} GB/s" for name, rate in answers.get().items()})
