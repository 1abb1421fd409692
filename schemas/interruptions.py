"""How often the sampling of a trajectory was interrupted, and what its KV came back from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interruptions:
    """preemptions: lives of a worker that went on from logged tokens. kv_restores: KV read from a spill.
    prefill_rebuilds: KV computed again from tokens that were sampled before."""

    preemptions: int = 0
    kv_restores: int = 0
    prefill_rebuilds: int = 0

    def __add__(self, other: Interruptions) -> Interruptions:
        return Interruptions(
            self.preemptions + other.preemptions,
            self.kv_restores + other.kv_restores,
            self.prefill_rebuilds + other.prefill_rebuilds,
        )


UNINTERRUPTED = Interruptions()
