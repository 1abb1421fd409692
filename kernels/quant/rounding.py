"""`mxfp4_round` on a CPU: values straight from values by integer arithmetic on their bits, without codes or tables.

A training forward on MXFP4 values rounds every linear each time. This takes a twentieth of the time of coding and
decoding by the reference, which it equals bit for bit.

Legend: N rows and K columns of a weight, B columns of a block.
"""

from __future__ import annotations

import torch

_SMALLEST_EXPONENT, _LARGEST_EXPONENT = 1, 254  # of a normal fp32, biased
_EXPONENT_BITS, _ONE = 0x7F800000, 0x3F800000


def mxfp4_round(x_NK: torch.Tensor) -> torch.Tensor:
    N, K = x_NK.shape
    x_NKB = x_NK.float().reshape(N, K // 32, 32)
    amax = x_NKB.abs().amax(2, keepdim=True)
    # 6 is 1.5 * 2^2: the ratio's exponent is amax's less 2, and one more where amax's mantissa is above 1.5.
    exponent = ((amax.view(torch.int32) + 0x3FFFFF) >> 23).sub_(2).clamp_(min=_SMALLEST_EXPONENT)
    scale = (exponent << 23).view(torch.float32).masked_fill_(~amax.isfinite(), float("nan"))
    inverse = ((_LARGEST_EXPONENT - exponent) << 23).view(torch.float32)
    scaled = x_NKB * inverse
    # The grid's step is half of the value's power of two, and 1/2 below 2. Adding and subtracting 1.5 * 2^23 steps
    # rounds to a multiple of the step, ties to even, which for this grid are the even codes.
    power = (scaled.view(torch.int32) & _EXPONENT_BITS).clamp_(min=_ONE).view(torch.float32)
    steps = power.mul_(1.5 * 2.0**22)
    rounded = scaled.add_(steps).sub_(steps).copysign_(x_NKB).mul_(scale)
    return rounded.reshape(N, K).to(x_NK.dtype)
