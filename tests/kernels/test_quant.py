"""MXFP4 and FP8 casts against ml_dtypes and exact rationals; kernels against references, bit for bit."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import quant

E2M1 = (0, Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6)
GPU = pytest.mark.gpu


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers that are equal exactly where the values are the same bits, any NaN counting as one."""
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.contiguous().view(torch.uint8).cpu()
    if tensor.dtype == torch.float32:
        return tensor.masked_fill(tensor.isnan(), float("nan")).view(torch.int32).cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.masked_fill(tensor.isnan(), float("nan")).view(torch.int16).cpu()
    return tensor.cpu()


def adversarial(rows: int, columns: int, seed: int) -> torch.Tensor:
    """fp32: scales over many binades, ties of both formats, zeros of both signs, subnormals, extremes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    binades = torch.randint(-40, 40, (rows, -(-columns // 32)), generator=generator).float()
    x *= torch.exp2(binades).repeat_interleave(32, 1)[:, :columns]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    kinds = [
        torch.zeros(columns),
        -torch.zeros(columns),
        torch.full((columns,), 1e-41),
        torch.full((columns,), -(2.0**-126)),
        torch.full((columns,), 3 * 2.0**-132),  # subnormal in bf16 too
        torch.full((columns,), 3e38),
        ties.repeat(-(-columns // 8))[:columns],
        -ties.repeat(-(-columns // 8))[:columns] * 2.0**-9,
        torch.full((columns,), 6.0 * 2**-126),
        torch.full((columns,), 448.0),
        torch.nextafter(torch.full((columns,), 448.0), torch.tensor(1e9)),
    ]
    for row, kind in zip(range(rows), kinds, strict=False):
        x[row] = kind
    return x


def broken(rows: int, columns: int) -> torch.Tensor:
    x = adversarial(rows, columns, 5)
    x[0, 1], x[rows // 2, columns - 1], x[rows - 1, columns // 2] = float("nan"), float("inf"), -float("inf")
    return x


def exact_scale_exponent(amax: float, largest: int) -> int:
    """The smallest e >= -126 with largest * 2^e >= amax, by rational arithmetic."""
    exponent = -126
    while Fraction(largest) * Fraction(2) ** exponent < Fraction(amax):
        exponent += 1
    return exponent


def test_mxfp4_scales_and_codes_equal_ml_dtypes():
    x = adversarial(24, 96, 0)
    blocks, scales = quant.mxfp4_quantize(x)
    for row in range(24):
        for group in range(3):
            block = x[row, group * 32 : group * 32 + 32]
            exponent = exact_scale_exponent(float(block.abs().max()), 6)
            assert int(scales[row, group]) == exponent + 127
            scaled = (block.double().numpy() * 2.0**-exponent).astype(np.float32)
            expected = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
            packed = blocks[row, group * 16 : group * 16 + 16].numpy()
            assert (np.stack((packed & 15, packed >> 4), 1).reshape(-1) == expected).all()


def test_mxfp4_decodes_every_code_under_every_scale():
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # byte b holds code b % 16 in the even column
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 16)
    values = quant.mxfp4_dequantize(codes, scales, torch.float32)
    names = scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64).repeat(32, 1)
    nibbles = np.stack((codes.numpy() & 15, codes.numpy() >> 4), 2).reshape(256, 512)
    with np.errstate(over="ignore"):
        expected = (nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * names).astype(np.float32)
    assert torch.equal(bits(values), bits(torch.from_numpy(expected)))
    finite = values.isfinite()
    assert torch.equal(quant.mxfp4_dequantize(codes, scales).float()[finite], values[finite])


@pytest.mark.parametrize("make", [quant.fp8_quantize_rows, quant.fp8_quantize_tiles])
def test_fp8_codes_equal_ml_dtypes(make):
    x = adversarial(20, 200, 1)
    codes, scales = make(x)
    height = 1 if make is quant.fp8_quantize_rows else 128
    for row in range(0, 20, height):
        for group in range(2):
            block = x[row : row + height, group * 128 : group * 128 + 128]
            exponent = exact_scale_exponent(float(block.abs().max()), 448)
            assert float(scales[row // height, group]) == 2.0**exponent
            scaled = (block.double().numpy() * 2.0**-exponent).astype(np.float32)
            expected = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            found = codes[row : row + height, group * 128 : group * 128 + 128].view(torch.uint8).numpy()
            assert (found == expected).all()
    assert torch.equal(quant.fp8_dequantize(codes, scales, torch.float32).isfinite(), torch.ones(20, 200).bool())


def test_both_orientations_are_those_of_the_matrix_and_its_transpose():
    x = adversarial(150, 70, 2)
    expected = (*quant.fp8_quantize_rows(x), *quant.fp8_quantize_rows(x.t().contiguous()))
    for found, wanted in zip(quant.fp8_quantize_both(x), expected, strict=True):
        assert torch.equal(bits(found), bits(wanted))


@pytest.mark.parametrize("impl", ["reference", pytest.param("kernel", marks=GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (31, 129), (33, 500), (300, 128)])
def test_scales_of_rows_lie_column_by_column(rows, columns, dtype, impl):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = x.to("cuda" if impl == "kernel" else "cpu")
    _, scales, _, turned_scales = quant.fp8_quantize_both(x, impl=impl)
    for found, shape in (
        (quant.fp8_quantize_rows(x, impl=impl)[1], (rows, -(-columns // 128))),
        (scales, (rows, -(-columns // 128))),
        (turned_scales, (columns, -(-rows // 128))),
    ):
        assert found.shape == shape
        assert found.t().is_contiguous()


@settings(max_examples=60, deadline=None)
@given(spread=st.integers(0, 16), base=st.integers(20, 200), seed=st.integers(0, 999))
def test_fp8_verdict_is_what_rational_arithmetic_says(spread, base, seed):
    """One tile whose scale bytes lie `spread` apart: exact up to 14, and beyond only if the codes happen to allow."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (3, 32), dtype=torch.uint8, generator=generator)
    scales = torch.randint(base, base + spread + 1, (3, 2), generator=generator).to(torch.uint8)
    scales[0, 0], scales[2, 1] = base, base + spread
    codes, tile_scales, exact = quant.mxfp4_to_fp8(blocks, scales)
    representable = {Fraction(float(v)) for v in np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn) if v == v}
    all_fit, values = True, []
    for row in range(3):
        for column in range(64):
            code = int(blocks[row, column // 2]) >> 4 * (column % 2) & 15
            value = E2M1[code & 7] * (-1 if code & 8 else 1) * Fraction(2) ** (int(scales[row, column // 32]) - 127)
            values.append(value)
            all_fit &= value / Fraction(float(tile_scales[0, 0])) in representable
    assert bool(exact) == all_fit
    assert all_fit or spread > 14
    decoded = [Fraction(float(c)) * Fraction(float(tile_scales[0, 0])) for c in codes.float().flatten()]
    assert (decoded == values) == all_fit


def test_zero_blocks_do_not_narrow_the_lossless_range():
    blocks = torch.full((1, 48), 0x11, dtype=torch.uint8)  # every code 0.5
    blocks[0, 16:32] = 0x80  # +0 and -0 under a scale far away
    exact = quant.mxfp4_to_fp8(blocks, torch.tensor([[120, 250, 133]], dtype=torch.uint8))[2]
    assert bool(exact)
    assert not quant.mxfp4_to_fp8(blocks[:, :16], torch.tensor([[255]], dtype=torch.uint8))[2]


def test_quantising_mxfp4_values_again_changes_nothing():
    values = quant.mxfp4_dequantize(*quant.mxfp4_quantize(torch.randn(40, 64)), torch.float32)
    again = quant.mxfp4_dequantize(*quant.mxfp4_quantize(values), torch.float32)
    assert torch.equal(values, again)


def test_bf16_input_means_its_own_values():
    x = torch.randn(9, 64).bfloat16()
    for narrow, wide in zip(quant.mxfp4_quantize(x), quant.mxfp4_quantize(x.float()), strict=True):
        assert torch.equal(narrow, wide)


def test_blocks_with_inf_or_nan_decode_to_nan_and_only_they():
    x = broken(7, 96)
    spoilt = ~x.isfinite().reshape(7, 3, 32).all(2).repeat_interleave(32, 1)
    blocks, scales = quant.mxfp4_quantize(x)
    assert torch.equal(scales == 255, spoilt[:, ::32])
    finite_values = quant.mxfp4_dequantize(blocks, scales, torch.float32).isnan()
    assert torch.equal(finite_values, spoilt)
    codes, fp8_scales = quant.fp8_quantize_rows(x)
    rows = ~x.isfinite().all(1)
    assert torch.equal(quant.fp8_dequantize(codes, fp8_scales).isnan().all(1), rows)


def test_worst_relative_error_of_a_block_maximum():
    x = torch.linspace(1.0, 64.0, 4001).unsqueeze(1).expand(-1, 32).contiguous()
    error = (quant.mxfp4_dequantize(*quant.mxfp4_quantize(x), torch.float32) / x - 1).abs().max()
    assert math.isclose(float(error), 0.2, abs_tol=2e-3)


@pytest.mark.parametrize(("rows", "columns"), [(0, 64), (3, 0)])
def test_empty_matrices(rows, columns):
    x = torch.empty(rows, columns)
    blocks, scales = quant.mxfp4_quantize(x)
    assert blocks.shape == (rows, columns // 2)
    assert quant.mxfp4_dequantize(blocks, scales).shape == (rows, columns)


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match="multiple of 32"):
        quant.mxfp4_quantize(torch.zeros(2, 48))
    with pytest.raises(ValueError, match="uint8"):
        quant.mxfp4_dequantize(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="one a 32 columns"):
        quant.mxfp4_dequantize(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))


def blanked(codes, scales):
    """FP8 codes as bytes, 0 where the block's scale is NaN: those mean nothing."""
    height = 1 if scales.shape[0] == codes.shape[0] else 128
    blank = scales.isnan().repeat_interleave(height, 0).repeat_interleave(128, 1)
    return codes.contiguous().view(torch.uint8).masked_fill(blank[: codes.shape[0], : codes.shape[1]], 0)


def outputs(impl, x, device):
    """Everything that the six casts make of x, by one implementation."""
    x = x.to(device)
    whole = x[:, : x.shape[1] // 32 * 32].contiguous()
    blocks, scales = quant.mxfp4_quantize(whole, impl=impl)
    codes, tile_scales, exact = quant.mxfp4_to_fp8(blocks, scales, impl=impl)
    tensors = [
        blocks.masked_fill((scales == 255).repeat_interleave(16, 1), 0),
        scales,
        quant.mxfp4_dequantize(blocks, scales, torch.float32, impl=impl),
        quant.mxfp4_dequantize(blocks, scales, torch.bfloat16, impl=impl),
        *(blanked(codes, tile_scales), tile_scales, exact),
    ]
    both = quant.fp8_quantize_both(x, impl=impl)
    for pair in (
        quant.fp8_quantize_tiles(x, impl=impl),
        quant.fp8_quantize_rows(x, impl=impl),
        both[:2],
        both[2:],
    ):
        tensors += [blanked(*pair), pair[1]]
    return tensors


@GPU
@pytest.mark.parametrize(("rows", "columns"), [(33, 64), (130, 160), (257, 300), (128, 128), (16, 4097)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_references_bit_for_bit(rows, columns, dtype):
    for x in (adversarial(rows, columns, 3).to(dtype), broken(rows, columns).to(dtype)):
        for index, (found, wanted) in enumerate(
            zip(outputs("kernel", x, "cuda"), outputs("reference", x, "cpu"), strict=True)
        ):
            assert torch.equal(bits(found), bits(wanted)), index


@GPU
def test_kernels_decode_every_code_under_every_scale():
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8, device="cuda").unsqueeze(1).repeat(1, 16)
    for dtype in (torch.float32, torch.bfloat16):
        found = quant.mxfp4_dequantize(codes, scales, dtype, impl="kernel")
        assert torch.equal(bits(found), bits(quant.mxfp4_dequantize(codes, scales, dtype, impl="reference")))


def assert_lossless_equal(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Codes, tile scales and verdicts of the kernel are the reference's."""
    found = quant.mxfp4_to_fp8(blocks.cuda(), scales.cuda(), impl="kernel")
    wanted = quant.mxfp4_to_fp8(blocks, scales, impl="reference")
    assert torch.equal(blanked(*found[:2]).cpu(), blanked(*wanted[:2]))
    assert torch.equal(bits(found[1]), bits(wanted[1]))
    assert torch.equal(found[2].cpu(), wanted[2])


@GPU
@pytest.mark.parametrize("spread", [0, 8, 11, 13, 14, 15, 16, 40, 250])
def test_lossless_kernel_equals_reference_at_every_spread(spread):
    generator = torch.Generator().manual_seed(spread)
    for low in {1, min(120, 253 - spread), 253 - spread, 0}:
        blocks = torch.randint(0, 256, (300, 160), dtype=torch.uint8, generator=generator)
        blocks[torch.rand(300, 160, generator=generator) < 0.2] = 0
        scales = torch.randint(low, low + spread + 1, (300, 10), generator=generator).to(torch.uint8)
        blocks[:40, :32] = 0
        assert_lossless_equal(blocks, scales)


@GPU
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 260])
def test_lossless_kernel_equals_reference_on_ragged_tiles(rows, groups):
    """Tiles that end inside a row's four groups, inside 128 rows, or both; scales around the ends of every range."""
    generator = torch.Generator().manual_seed(rows * groups)
    for low, high in ((112, 127), (0, 15), (1, 9), (240, 254), (0, 254), (0, 255)):
        blocks = torch.randint(0, 256, (rows, groups * 16), dtype=torch.uint8, generator=generator)
        zero = torch.rand(rows, groups, generator=generator) < 0.3
        blocks.view(rows, groups, 16)[zero] &= 0x88  # of both signs
        scales = torch.randint(low, high + 1, (rows, groups), generator=generator).to(torch.uint8)
        assert_lossless_equal(blocks, scales)


@GPU
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (1, 128), (15, 129), (16, 48), (128, 257), (129, 31), (240, 136)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_orientations_equal_reference_on_ragged_tiles(rows, columns, dtype):
    whole = adversarial(rows, columns, 7).to(dtype)
    spoilt = whole.clone()
    spoilt[rows // 2, columns // 2] = float("nan")
    for x in (whole, spoilt, torch.full_like(whole, -float("inf"))):
        found = quant.fp8_quantize_both(x.cuda(), impl="kernel")
        wanted = quant.fp8_quantize_both(x, impl="reference")
        for pair in (slice(0, 2), slice(2, 4)):
            assert torch.equal(blanked(*found[pair]).cpu(), blanked(*wanted[pair]))
            assert torch.equal(bits(found[pair][1]), bits(wanted[pair][1]))


@pytest.mark.parametrize("impl", ["reference", pytest.param("kernel", marks=GPU)])
def test_both_orientations_round_every_bf16_value_as_ml_dtypes(impl):
    """Each value up to 448 with either sign; 448 itself stands in every row and column, so that all scales are 1."""
    magnitudes = torch.arange(0x43E1, dtype=torch.int16).view(torch.bfloat16)
    values = torch.cat((magnitudes, -magnitudes, torch.zeros(3 * 127 * 127 - 2 * 0x43E1, dtype=torch.bfloat16)))
    x = torch.full((3, 128, 128), 448.0, dtype=torch.bfloat16)
    x[:, 1:, 1:] = values.reshape(3, 127, 127)
    x = x.reshape(384, 128).to("cuda" if impl == "kernel" else "cpu")
    codes, scales, turned_codes, turned_scales = quant.fp8_quantize_both(x, impl=impl)
    assert (scales == 1).all()
    assert (turned_scales == 1).all()
    expected = torch.from_numpy(x.cpu().float().numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert torch.equal(bits(codes), expected)
    assert torch.equal(bits(turned_codes), expected.t())


@GPU
def test_kernels_round_every_fp8_tie_and_neighbour():
    grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (grid[1:] + grid[:-1]) / 2
    points = torch.cat((grid, middles, torch.nextafter(middles, grid[1:]), torch.nextafter(middles, grid[:-1])))
    x = torch.cat((points, -points, torch.full((10,), 448.0)))
    x = torch.stack([x[i : i + 127] for i in range(x.numel() - 126)])
    x = torch.cat((x, torch.full((x.shape[0], 1), 448.0)), 1)  # so that every scale is 1
    for found, wanted in zip(
        quant.fp8_quantize_rows(x.cuda(), impl="kernel"), quant.fp8_quantize_rows(x, impl="reference"), strict=True
    ):
        assert torch.equal(bits(found), bits(wanted))
