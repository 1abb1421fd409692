"""Device functions that every kernel writing FP8 blocks shares: from an amax to a scale, from a value to a code.

A scale is carried as the biased exponent byte of its fp32. With amax = m * 2^e and largest = l * 2^p (1 <= m, l < 2),
the exponent is e - p, plus one where m > l: adding l's complement to the bits of amax carries exactly then. inf and
NaN are the largest bit patterns, so an integer maximum finds them.
"""

# Triton calls kernels from kernels, which the type checker cannot see.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

# The largest code of each format: its exponent, and what its mantissa lacks to a carry.
E2M1_EXPONENT, E2M1_CARRY = tl.constexpr(2), tl.constexpr(0x7FFFFF - 0x400000)  # 6
E4M3_EXPONENT, E4M3_CARRY = tl.constexpr(8), tl.constexpr(0x7FFFFF - 0x600000)  # 448
INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def top_bits(x, axis: tl.constexpr):
    """Bits of the largest magnitude along an axis, those of inf or NaN if there is one."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)


@triton.jit
def scale_byte(bits, EXPONENT: tl.constexpr, CARRY: tl.constexpr):
    """Biased exponent, at least 1, of the scale for an amax of these bits; meaningless for inf and NaN."""
    return tl.maximum(((bits + CARRY) >> 23) - EXPONENT, 1)


@triton.jit
def inverse_scale(byte):
    """2^-(byte - 127) in fp32."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8_scale(bits, byte):
    """The fp32 scale of an amax of these bits: NaN where a block holds inf or NaN."""
    return tl.where(bits >= INFINITY, 0x7FC00000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(x, byte):
    """Codes as bytes: Triton 3.6 can corrupt transposed stores of its own FP8 type on Hopper (its issue 11111)."""
    return (x * inverse_scale(byte)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def larger_pair(a, b):
    """The larger of either 16-bit half of two words, as unsigned numbers."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)
