"""Weight values against bit arithmetic, products against float64, and rows bit for bit in any company.

FP8 products against float64 sums over operands that ml_dtypes quantised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ml.linear
from kernels.quant import mxfp4_dequantize, mxfp4_quantize
from kernels.scaled_mm import row_invariant_mm
from kernels.scaled_mm.fixed_rows import ROWS
from ml.linear import Fp8Weights, Linear, join, weight_values
from tests.ml.test_mxfp4_loop import oracle_values

ROW_COUNTS = [*range(1, 36), 47, 63, 64, 65, 96, 100, 127, 199, 200]
SHAPES = [(576, 576), (192, 576), (576, 1536), (48, 100), (13, 7), (1, 1), (1000, 33)]


def rounded_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even, on the bits of finite fp32 numbers."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept, dropped = bits >> 16, bits & 0xFFFF
    up = (dropped > 0x8000) | ((dropped == 0x8000) & (kept & 1 == 1))
    return ((kept + up) << 16).astype(np.uint32).view(np.float32)


def test_bf16_values_are_nearest_with_ties_to_even():
    rng = np.random.default_rng(0)
    edges = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 1e-45, -1e-40, 1.17549435e-38, 3.3e38, 65504.0]
    values = np.concatenate([np.array(edges, np.float32), rng.normal(size=20000).astype(np.float32)])
    found = weight_values(torch.from_numpy(values), "bf16").numpy()
    np.testing.assert_array_equal(found.view(np.uint32), rounded_to_bf16(values).view(np.uint32))


def test_values_keep_dtype_and_pass_the_gradient_through_unrounded():
    w = torch.randn(5, 3, requires_grad=True)
    grad = torch.randn(5, 3)
    values = weight_values(w, "bf16")
    assert values.dtype == torch.float32
    values.backward(grad)
    assert w.grad is not None
    assert torch.equal(w.grad, grad)
    assert weight_values(w, "fp32") is w


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp4"])
def test_values_asked_for_in_bf16_are_the_bits_of_a_cast_and_so_is_their_gradient(precision):
    found_OI, wanted_OI = (torch.randn(7, 96, generator=torch.Generator().manual_seed(1)) * 1e-3 for _ in range(2))
    grad_OI = torch.randn(7, 96).bfloat16()
    found = weight_values(found_OI.requires_grad_(), precision, torch.bfloat16)
    wanted = weight_values(wanted_OI.requires_grad_(), precision).to(torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted)
    found.backward(grad_OI)
    wanted.backward(grad_OI)
    assert found_OI.grad is not None
    assert wanted_OI.grad is not None
    assert found_OI.grad.dtype == torch.float32
    assert torch.equal(found_OI.grad, wanted_OI.grad)


def test_unknown_precision_is_an_error():
    with pytest.raises(ValueError, match="fp3"):
        weight_values(torch.zeros(1), "fp3")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "logits"])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_a_row_has_the_same_bits_in_any_company(kind, num_outputs, num_inputs):
    generator = torch.Generator().manual_seed(num_outputs)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    x_NI = torch.randn(200, num_inputs, generator=generator).to(dtype)
    w_OI = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    out = torch.float32 if kind == "logits" else dtype
    alone = torch.cat([row_invariant_mm(row, w_OI, dtype=out) for row in x_NI.split(1)])
    for num_rows in ROW_COUNTS:
        chosen = torch.randperm(200, generator=generator)[:num_rows]
        assert torch.equal(row_invariant_mm(x_NI[chosen], w_OI, dtype=out), alone[chosen]), num_rows


@pytest.mark.parametrize("num_rows", [0, 1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS])
def test_products_and_bias_equal_float64(num_rows):
    x_NI, w_OI, bias_O = torch.randn(num_rows, 70), torch.randn(45, 70), torch.randn(45)
    want = x_NI.double() @ w_OI.double().t() + bias_O.double()
    found = row_invariant_mm(x_NI, w_OI, bias_O)
    assert found.shape == (num_rows, 45)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-4)


def test_logits_of_bf16_states_are_summed_and_kept_in_fp32():
    h_ND, w_VD = torch.randn(40, 576).bfloat16(), torch.randn(500, 576).bfloat16()
    want = h_ND.double() @ w_VD.double().t()
    found = row_invariant_mm(h_ND, w_VD, dtype=torch.float32)
    assert found.dtype == torch.float32
    # A bf16 result would be off by up to 0.25 at this size.
    assert (found - want).abs().max() < 1e-3
    assert torch.equal(found, row_invariant_mm(h_ND, w_VD.float(), dtype=torch.float32))


def test_logits_leave_the_precision_setting_as_it_was():
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = matmul.fp32_precision
    row_invariant_mm(torch.randn(3, 8).bfloat16(), torch.randn(5, 8), dtype=torch.float32)
    assert matmul.fp32_precision == before
    with pytest.raises(RuntimeError):
        row_invariant_mm(torch.randn(3, 8).bfloat16(), torch.randn(5, 9), dtype=torch.float32)
    assert matmul.fp32_precision == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_operands_lie_in_memory_does_not_matter(dtype):
    x_NI, w_OI = torch.randn(37, 100).to(dtype), torch.randn(50, 100).to(dtype)
    want = row_invariant_mm(x_NI, w_OI)
    for shift in (1, 3, 8):
        flat = torch.zeros(50 * 100 + shift, dtype=dtype)
        w_view = flat[shift:].view(50, 100).copy_(w_OI)
        assert torch.equal(row_invariant_mm(x_NI, w_view), want)
    x_strided = torch.empty(37, 200, dtype=dtype)[:, ::2].copy_(x_NI)
    assert torch.equal(row_invariant_mm(x_strided, w_OI), want)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_master_and_stored_values_give_the_same_bits(compute):
    master = Linear(64, 40, bias=True, precision="bf16", compute=compute, dtype=torch.float32)
    stored = Linear(64, 40, bias=True, precision="fp32", compute=compute, dtype=compute)
    with torch.no_grad():
        for parameter, copy in zip(master.parameters(), stored.parameters(), strict=True):
            copy.copy_(torch.from_numpy(rounded_to_bf16(parameter.normal_().numpy())))
        x_NI = torch.randn(50, 64)
        found = master(x_NI)
        assert found.dtype == compute
        assert torch.equal(found, stored(x_NI))
    tolerance = 1e-5 if compute == torch.float32 else 2e-2
    torch.testing.assert_close(master(x_NI), found, rtol=tolerance, atol=tolerance * 8)


def test_gradients_of_a_linear_equal_float64():
    linear = Linear(30, 20, bias=True, precision="bf16", compute=torch.float32, dtype=torch.float32)
    for parameter in linear.parameters():
        parameter.data.normal_()
    x_NI, upstream = torch.randn(11, 30, requires_grad=True), torch.randn(11, 20)
    linear(x_NI).backward(upstream)
    assert linear.weight.grad is not None
    assert linear.bias is not None
    values = torch.from_numpy(rounded_to_bf16(linear.weight.detach().numpy())).double()
    want = upstream.double().t() @ x_NI.detach().double()
    torch.testing.assert_close(linear.weight.grad, want.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear.bias.grad, upstream.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x_NI.grad, (upstream.double() @ values).float(), rtol=1e-5, atol=1e-5)


def test_it_is_not_the_class_that_deepspeed_gathers_in_bf16():
    linear = Linear(2, 2, bias=False, precision="bf16", compute=torch.float32, dtype=torch.float32)
    assert not isinstance(linear, torch.nn.Linear)


def test_a_packed_layer_keeps_codes_and_values_that_do_not_fit_stay_dense():
    w_OI = torch.randn(70, 96)
    blocks, scales = mxfp4_quantize(w_OI)
    layer = Linear(96, 70, bias=True, precision="fp32", compute=torch.bfloat16, dtype=torch.bfloat16, packs=True)
    x_NI = torch.randn(5, 96).bfloat16()
    with torch.no_grad():
        assert layer.bias is not None
        layer.bias.normal_()
        layer.set_weight(w_OI)
        assert layer.weight.is_meta
        values = mxfp4_dequantize(blocks, scales, torch.float32).double()
        want = (x_NI.double() @ values.t()).bfloat16() + layer.bias
        assert torch.equal(layer(x_NI), want)
        # MXFP4 values are their own codes.
        layer.set_weight(values.float())
        assert torch.equal(layer(x_NI), want)
        layer.set_weight(w_OI * 8)
        assert not layer.weight.is_meta
        assert torch.equal(layer.weight.double(), values * 8)
        torch.testing.assert_close(layer(x_NI) - layer.bias, (want - layer.bias) * 8, rtol=2e-2, atol=0.3)
        layer.set_weight(w_OI)
        assert torch.equal(layer(x_NI), want)


def test_joined_packed_linears_give_each_ones_bits_and_follow_new_weights():
    generator = torch.Generator().manual_seed(3)
    settings: dict[str, Any] = {"bias": True, "precision": "fp32", "compute": torch.bfloat16, "dtype": torch.bfloat16}
    linears = [Linear(96, rows, packs=True, **settings) for rows in (128, 64, 40)]
    joined = join(linears)
    x_NI = torch.randn(5, 96, generator=generator).bfloat16()

    def renew(linear: Linear, spread: float = 1.0) -> None:
        linear.set_weight(torch.randn(linear.num_outputs, 96, generator=generator) * spread)
        assert linear.bias is not None
        torch.nn.init.normal_(linear.bias, generator=generator)

    def agree() -> None:
        wanted = [linear(x_NI) for linear in linears]
        assert all(torch.equal(y, want) for y, want in zip(joined(x_NI), wanted, strict=True))

    with torch.no_grad():
        for linear in linears:
            renew(linear)
        agree()
        shared = {linear.packed.words.untyped_storage().data_ptr() for linear in linears if linear.packed}
        assert len(shared) == 1
        renew(linears[1])
        agree()
        renew(linears[2], 1000.0)  # beyond what a packed weight holds
        assert linears[2].packed is None
        agree()
        renew(linears[2])
        agree()


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_linears_give_the_gate_of_each_ones_product(packs, bias):
    generator = torch.Generator().manual_seed(4)
    settings: dict[str, Any] = {"bias": bias, "precision": "fp32", "compute": torch.bfloat16, "dtype": torch.bfloat16}
    linears = [Linear(96, 64, packs=packs, **settings) for _ in range(2)]
    with torch.no_grad():
        for linear in linears:
            linear.set_weight(torch.randn(64, 96, generator=generator))
            if linear.bias is not None:
                torch.nn.init.normal_(linear.bias, generator=generator)
        joined = join(linears)
        x_NI = torch.randn(5, 96, generator=generator).bfloat16()
        gate, up = (linear(x_NI).double() for linear in linears)
        found = joined.gated(x_NI)
    torch.testing.assert_close(found.double(), gate * torch.sigmoid(gate) * up, rtol=6e-3, atol=1e-6)


def test_packed_linears_that_end_inside_a_tile_are_not_joined():
    settings: dict[str, Any] = {"bias": False, "precision": "fp32", "compute": torch.bfloat16, "dtype": torch.bfloat16}
    linears = [Linear(32, rows, packs=True, **settings) for rows in (40, 64)]
    joined = join(linears)
    with torch.no_grad():
        for linear in linears:
            linear.set_weight(torch.eye(linear.num_outputs, 32))
        first, second = joined(torch.eye(32, dtype=torch.bfloat16))
    assert torch.equal(first[:, :32].float(), torch.eye(32))
    assert torch.equal(second[:, :32].float(), torch.eye(32))


def fp8_oracle(x: np.ndarray) -> np.ndarray:
    """float64 values of a matrix in E4M3, blocks of 1 x 128, the smallest power-of-two scale that clips nothing."""
    out = np.zeros(x.shape)
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], 128):
            block = x[row, first : first + 128].astype(np.float64)
            scale = 2.0 ** max(-126.0, np.ceil(np.log2(max(np.abs(block).max(), 1e-300) / 448)))
            codes = (block / scale).astype(ml_dtypes.float8_e4m3fn)
            out[row, first : first + 128] = codes.astype(np.float64) * scale
    return out


def fp8_linear_of(num_inputs: int, num_outputs: int, fp8: bool = True) -> Linear:
    torch.manual_seed(num_inputs)
    linear = Linear(
        num_inputs, num_outputs, bias=True, precision="mxfp4", compute=torch.bfloat16, dtype=torch.float32, fp8=fp8
    )
    for parameter in linear.parameters():
        parameter.data.normal_()
    return linear


def assert_near(found: torch.Tensor | None, want: np.ndarray, tolerance: float) -> None:
    """tolerance: of the largest magnitude."""
    assert found is not None
    assert found.shape == want.shape
    gap = np.abs(found.detach().double().numpy() - want)
    assert gap.max(initial=0.0) <= tolerance * np.abs(want).max(initial=0.0)


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [(37, 48, 160), (130, 272, 96), (1, 16, 32), (0, 16, 32), (16, 128, 128), (300, 144, 416)],
)
def test_an_fp8_linear_and_its_gradients_are_the_products_of_the_quantised_operands(num_rows, num_outputs, num_inputs):
    linear = fp8_linear_of(num_inputs, num_outputs)
    assert linear.bias is not None
    x_NI = (torch.randn(num_rows, num_inputs) * torch.logspace(-1, 1, num_inputs)).bfloat16().requires_grad_()
    upstream_NO = (torch.randn(num_rows, num_outputs) * 1e-9).bfloat16()
    out = linear(x_NI)
    assert out.dtype == torch.bfloat16
    out.backward(upstream_NO)
    assert linear.fp8_exact is True
    # The weight is its MXFP4 values, not one of them rounded.
    w, x, dy = oracle_values(linear.weight.detach().numpy()), x_NI.detach().float().numpy(), upstream_NO.float().numpy()
    # Rounded to bf16 twice, with the bias.
    assert_near(out, fp8_oracle(x) @ w.T + rounded_to_bf16(linear.bias.detach().numpy()), 2.0**-7)
    assert_near(x_NI.grad, fp8_oracle(dy) @ w, 2.0**-8)
    # In fp32 as it was summed: rounding to bf16 would be a thousand times as far off.
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32
    assert_near(linear.weight.grad, fp8_oracle(dy.T.copy()) @ fp8_oracle(x.T.copy()).T, 1e-6)
    assert_near(linear.bias.grad, dy.astype(np.float64).sum(0), 2.0**-7)


def spoilt(linear: Linear) -> None:
    """A block of one tile lies more than FP8's 14 binades below the others."""
    linear.weight.data[3, 32:64] *= 2.0**-20


def passes(
    linear: Linear, x_NI: torch.Tensor, upstream_NO: torch.Tensor, forward: Callable[..., Any] | None = None
) -> list[torch.Tensor | None]:
    x_NI = x_NI.clone().requires_grad_()
    linear.zero_grad()
    out = (forward or linear)(x_NI)
    out.backward(upstream_NO)
    return [out.detach(), x_NI.grad, *(p.grad for p in linear.parameters())]


@pytest.mark.parametrize("whole", [True, False])
def test_a_weight_that_fp8_would_round_stays_in_bf16_until_it_is_looked_at_again(whole):
    linear, plain = fp8_linear_of(160, 144), fp8_linear_of(160, 144, fp8=False)
    x_NI, upstream_NO = torch.randn(21, 160).bfloat16(), torch.randn(21, 144).bfloat16()

    def same() -> list[bool]:
        both = zip(passes(linear, x_NI, upstream_NO), passes(plain, x_NI, upstream_NO), strict=True)
        return [a is not None and b is not None and torch.equal(a, b) for a, b in both]

    assert same() == [False, False, False, True]  # the bias's gradient is no product
    assert linear.fp8_exact is True
    for one in (linear, plain):
        spoilt(one)
    Fp8Weights([linear, plain], whole=whole).renew()
    assert linear.fp8_exact is (False if whole else None)
    assert same() == [True] * 4
    assert linear.fp8_exact is False
    linear.weight.data.normal_()
    Fp8Weights([linear, plain], whole=whole).renew()
    passes(linear, x_NI, upstream_NO)
    assert linear.fp8_exact is True
    assert plain.fp8_exact is None


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(48, 160), (144, 96), (272, 640), (1024, 32)])
def test_held_codes_are_made_once_and_change_no_bit(monkeypatch, num_outputs, num_inputs):
    linear = fp8_linear_of(num_inputs, num_outputs)
    x_NI, upstream_NO = torch.randn(21, num_inputs).bfloat16(), torch.randn(21, num_outputs).bfloat16()
    wanted = passes(linear, x_NI, upstream_NO)
    Fp8Weights([linear], whole=True).renew()
    monkeypatch.setattr(ml.linear, "fp8_values", None)
    again = functools.partial(checkpoint, linear, use_reentrant=False)
    for forward in (None, None, again):
        for found, want in zip(passes(linear, x_NI, upstream_NO, forward), wanted, strict=True):
            assert found is not None
            assert want is not None
            assert torch.equal(found, want)


def test_held_codes_end_with_the_weight_that_they_were_made_of():
    linear, x_NI, upstream_NO = (
        fp8_linear_of(160, 144),
        torch.randn(21, 160).bfloat16(),
        torch.randn(21, 144).bfloat16(),
    )
    new_OI = torch.randn(144, 160)

    def multiply() -> None:
        with torch.no_grad():
            linear.weight.mul_(-3)

    def copy() -> None:
        with torch.no_grad():
            linear.weight.copy_(new_OI)

    def past_the_count() -> None:
        linear.weight.data.copy_(new_OI)
        Fp8Weights([linear], whole=True).renew()

    for write in (multiply, copy, lambda: linear.set_weight(new_OI * 5), past_the_count):
        Fp8Weights([linear], whole=True).renew()
        assert linear.fp8_exact is True
        write()
        assert linear.fp8_exact is (True if write is past_the_count else None)
        out, dx_NI, *_ = passes(linear, x_NI, upstream_NO)
        w, bias = oracle_values(linear.weight.detach().numpy()), linear.bias
        assert bias is not None
        want = fp8_oracle(x_NI.float().numpy()) @ w.T + rounded_to_bf16(bias.detach().numpy())
        assert_near(out, want, 2.0**-7)
        assert_near(dx_NI, fp8_oracle(upstream_NO.float().numpy()) @ w, 2.0**-8)


@pytest.mark.parametrize("held", [False, True])
def test_without_gradients_an_fp8_linear_is_the_samplers(held):
    linear, plain = fp8_linear_of(96, 48), fp8_linear_of(96, 48, fp8=False)
    x_NI = torch.randn(5, 96)
    Fp8Weights([linear], whole=held).renew()
    with torch.no_grad():
        assert torch.equal(linear(x_NI), plain(x_NI))
    assert linear.fp8_exact is (True if held else None)


@pytest.mark.parametrize("spoil", [False, True])
def test_a_verdict_is_read_once_however_often_the_forward_runs(monkeypatch, spoil):
    """Each reading waits for the device; the recomputation in backward must also go the way of its forward."""
    linear = fp8_linear_of(96, 48)
    if spoil:
        spoilt(linear)
    reads = []
    whole = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda t: reads.append(t.shape) or whole(t))
    x_NI = torch.randn(5, 96).bfloat16().requires_grad_()
    upstream_NO = torch.randn(5, 48).bfloat16()
    recomputed = checkpoint(linear, x_NI, use_reentrant=False)
    assert isinstance(recomputed, torch.Tensor)
    recomputed.backward(upstream_NO)
    found = [x_NI.grad, *(p.grad for p in linear.parameters())]
    wanted = passes(linear, x_NI.detach(), upstream_NO)[1:]
    assert len(reads) == 1
    for grad, want in zip(found, wanted, strict=True):
        assert grad is not None
        assert want is not None
        assert torch.equal(grad, want)
