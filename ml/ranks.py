"""The processes that train, or hold, one model together: how they find one another, and part."""

from __future__ import annotations

import os
from datetime import timedelta

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
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def leave_ranks() -> None:
    """End the group that `join_ranks` joined: threads of gloo that outlive it can abort the process at its exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
