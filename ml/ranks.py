"""The processes that train, or hold, one model together: how they find one another, and part."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ml.device import traits


def join_ranks(device: torch.device, timeout: timedelta | None = None) -> tuple[int, int]:
    """(rank, number of ranks) after joining the group that RANK, WORLD_SIZE and MASTER_* name; alone without them.

    timeout: of a collective, torch's own without it.
    """
    backend = traits(device).backend
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if os.environ.get("MASTER_ADDR") == "127.0.0.1":
            # gloo would otherwise resolve the host's name, which need not lead to an interface that listens.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            store = _store_of_this_host()
            rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def _store_of_this_host() -> Any:
    """torch's own store would listen on every interface, and take commands from whoever reaches it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ranks, first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    listening = None
    if first:
        with socket.create_server((host, port), backlog=ranks) as server:
            listening = server.detach()  # the store's from now on
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, ranks, is_master=first, wait_for_workers=False, master_listen_fd=listening
    )


def leave_ranks() -> None:
    """End the group that `join_ranks` joined: threads of gloo that outlive it can abort the process at its exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
