"""Ranks that compute one model together for inference: each keeps a part of every matrix's rows.

Every linear, and the head, is split by its outputs. What a linear reads is gathered whole first, so each sum over its
inputs has one order and is never added up from parts: results do not depend on the number of ranks wherever a product
gives a row of the weight the same bits whatever other rows it has (kernels.scaled_mm says where). Attention is split
by KV heads. Norms, embedding and residual stream are whole on every rank, and equal.

Letters: N rows, O outputs of a linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ml.ranks import join_ranks
from schemas.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """rank of ranks; process_group: of torch.distributed, for the device of the model, None for one rank alone."""

    rank: int = 0
    ranks: int = 1
    process_group: Any = None

    def share(self, count: int) -> int:
        """How many of `count` things a rank has; the last ranks may have fewer, for which results are padded."""
        return -(-count // self.ranks)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of x, a view."""
        share = self.share(len(x))
        return x[self.rank * share : (self.rank + 1) * share]

    def gather(self, y_NO: torch.Tensor, num_outputs: int) -> torch.Tensor:
        """All ranks' columns side by side, [N, num_outputs]; y: this rank's columns. Every rank calls it alike."""
        if self.ranks == 1:
            return y_NO
        share = self.share(num_outputs)
        # Moved as bytes: gloo knows fewer dtypes than torch.
        own = F.pad(y_NO, (0, share - y_NO.shape[1])).contiguous().view(torch.uint8)
        parts = own.new_empty(self.ranks * len(own), own.shape[1])
        dist.all_gather_into_tensor(parts, own, group=self.process_group)
        return parts.view(y_NO.dtype).unflatten(0, (self.ranks, -1)).transpose(0, 1).flatten(1)[:, :num_outputs]

    def check(self, where: str, **counts: int) -> None:
        """ConfigError unless the ranks divide each count; underscores of names are spoken as spaces."""
        for name, count in counts.items():
            if count % self.ranks:
                raise ConfigError(
                    f"{where}, split over tensor-parallel ranks",
                    expected=f"a number of ranks that divides its {count} {name.replace('_', ' ')}",
                    found=f"{self.ranks} ranks",
                )  # fmt: skip


ALONE = Group()


def join_group(device: torch.device) -> Group:
    """The group of all ranks that RANK, WORLD_SIZE and MASTER_* name, for models on `device`."""
    # Ranks wait for the next command as long as rank 0 scores and uploads.
    return Group(*join_ranks(device, timeout=timedelta(days=30)), dist.group.WORLD)
