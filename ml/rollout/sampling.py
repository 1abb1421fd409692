"""What a user may choose of sampling; `kernels.sampling` draws."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """top_k 0 and top_p 1 cut nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
