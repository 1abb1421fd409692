"""The casts of kernels.quant in plain torch, by comparison with tables: the CPU path, and the kernels' yardstick.

Legend: M rows of activations, N rows and K columns of a weight, B columns of a block.
"""

from __future__ import annotations

import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between codes c and c + 1 lies the middle of their values. A middle goes to the even code: up from an odd c.
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def mxfp4_quantize(x_NK):
    N, K = x_NK.shape
    x_NKB = x_NK.float().reshape(N, K // 32, 32)
    exponent_NK1, broken_NK1 = _scale_exponent(x_NKB, 6.0)
    magnitude = torch.ldexp(x_NKB.abs(), -exponent_NK1)
    codes = torch.zeros(magnitude.shape, dtype=torch.uint8, device=x_NK.device)
    for code, middle in enumerate(_MIDDLES):
        codes += (magnitude >= middle) if code % 2 else (magnitude > middle)
    codes += x_NKB.signbit() * 8
    codes = codes.masked_fill(broken_NK1, 0).reshape(N, K // 2, 2)
    scales = (exponent_NK1 + 127).masked_fill(broken_NK1, 255).to(torch.uint8).squeeze(2)
    return codes[:, :, 0] | codes[:, :, 1] << 4, scales


def mxfp4_dequantize(blocks, scales, dtype):
    N, half_K = blocks.shape
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), 2).reshape(N, half_K // 16, 32)
    exponents = scales.int().unsqueeze(2) - 127
    # In two steps, since 2^-127 and 2^128 are not normal fp32 numbers.
    values = torch.ldexp(torch.ldexp(table[codes.int()], exponents // 2), exponents - exponents // 2)
    return values.masked_fill(exponents == 128, float("nan")).reshape(N, half_K * 2).to(dtype)


def mxfp4_to_fp8(blocks, scales):
    values_NK = mxfp4_dequantize(blocks, scales, torch.float32)
    codes, tile_scales = fp8_quantize_tiles(values_NK)
    by_element = _spread(tile_scales, *values_NK.shape)
    same = codes.float() * by_element == values_NK
    N, K = same.shape
    whole = torch.ones(-(-N // 128) * 128, -(-K // 128) * 128, dtype=torch.bool, device=blocks.device)
    whole[:N, :K] = same
    exact = whole.reshape(whole.shape[0] // 128, 128, whole.shape[1] // 128, 128).all(3).all(1)
    return codes, tile_scales, exact


def fp8_quantize_tiles(w_NK):
    N, K = w_NK.shape
    tiles = _padded(w_NK.float(), 128, 128).reshape(-(-N // 128), 128, -(-K // 128), 128).transpose(1, 2)
    codes, scales = _fp8(tiles.reshape(tiles.shape[0], tiles.shape[1], 128 * 128))
    codes = codes.view(torch.uint8).reshape(tiles.shape).transpose(1, 2).reshape(-(-N // 128) * 128, -1)
    return codes[:N, :K].contiguous().view(torch.float8_e4m3fn), scales


def fp8_quantize_rows(x_MK):
    M, K = x_MK.shape
    codes, scales = _fp8(_padded(x_MK.float(), 1, 128).reshape(M, -(-K // 128), 128))
    codes = codes.view(torch.uint8).reshape(M, -(-K // 128) * 128)
    return codes[:, :K].contiguous().view(torch.float8_e4m3fn), scales.t().contiguous().t()


def fp8_quantize_both(x_MK):
    return *fp8_quantize_rows(x_MK), *fp8_quantize_rows(x_MK.t().contiguous())


def _fp8(x_NKB):
    """(codes, scales [N, K]) of blocks along the last dimension."""
    exponent, broken = _scale_exponent(x_NKB, 448.0)
    # torch's cast rounds to nearest even; nothing exceeds 448 here, where casts of other makers differ.
    codes = torch.ldexp(x_NKB, -exponent).masked_fill(broken, 0.0).to(torch.float8_e4m3fn)
    scales = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return codes, scales.masked_fill(broken, float("nan")).squeeze(2)


def _scale_exponent(x_NKB, largest):
    """(ceil(log2(amax / largest)) at least -126, whether the block holds inf or NaN), int32 and bool [N, K, 1]."""
    broken = ~x_NKB.isfinite().all(2, keepdim=True)
    amax = x_NKB.abs().amax(2, keepdim=True).masked_fill(broken, 1.0)
    # amax = mantissa * 2^exponent with mantissa in [0.5, 1); the same split of `largest` makes the ratio exact.
    mantissa, exponent = torch.frexp(amax)
    top_mantissa, top_exponent = torch.frexp(torch.tensor(largest))
    exponent = exponent - top_exponent.to(exponent.device) + (mantissa > top_mantissa.to(mantissa.device))
    return exponent.masked_fill(amax == 0, -126).clamp(min=-126).int(), broken


def _padded(x_MK, rows, columns):
    return torch.nn.functional.pad(x_MK, (0, -x_MK.shape[1] % columns, 0, -x_MK.shape[0] % rows))


def _spread(scales, rows, columns):
    return scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
