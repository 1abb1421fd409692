"""Do two samples come from one distribution? The two-sample Kolmogorov-Smirnov test, ties allowed."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence


def ks_two_sample(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """(D, p): the largest distance of the two empirical distribution functions, and how likely one as large is by
    chance. p is asymptotic, with Stephens' correction for small samples, and too large where values repeat."""
    a, b = sorted(a), sorted(b)
    distance = max(abs(bisect.bisect_right(a, x) / len(a) - bisect.bisect_right(b, x) / len(b)) for x in {*a, *b})
    root = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    return distance, kolmogorov_tail((root + 0.12 + 0.11 / root) * distance)


def kolmogorov_tail(x: float) -> float:
    """P(K > x) of the Kolmogorov distribution: 2 * sum over j >= 1 of (-1)^(j-1) exp(-2 j^2 x^2)."""
    if x < 0.2:
        return 1.0  # short of 1 by less than 1e-12, where the series converges slowly
    return min(1.0, 2 * sum((-1) ** (j - 1) * math.exp(-2 * (j * x) ** 2) for j in range(1, 101)))
