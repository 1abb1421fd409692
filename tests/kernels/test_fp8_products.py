"""FP8 products, of FP8 and of MXFP4 weights, on a card: value, bits, what is refused."""

from __future__ import annotations

import pytest
import torch

from kernels.quant import fp8_quantize_rows, fp8_quantize_tiles, mxfp4_dequantize
from kernels.scaled_mm import (
    fp8_linear,
    fp8_mm,
    fp8_weight,
    w4a8_mm,
)
from schemas.errors import ContractError
from tests.kernels.test_scaled_mm import decode_mxfp4, error, random_mxfp4


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(300, 576, 1536), (16, 1536, 576), (1000, 2112, 7168), (1, 128, 128), (1, 16, 32)])
def test_fp8_products_on_the_gpu(shape):
    tokens, outputs, inputs = shape
    x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(outputs, inputs, device="cuda") * 0.02).requires_grad_()
    operands = *fp8_quantize_rows(x.detach()), *fp8_quantize_tiles(w.detach())
    assert error(fp8_mm(*operands), fp8_mm(*operands, impl="reference")) < 4e-3
    dy = torch.randn(tokens, outputs, device="cuda", dtype=torch.bfloat16)
    y = fp8_linear(x, w)
    y.backward(dy)
    assert x.grad is not None
    assert w.grad is not None
    on_cpu = x.detach().cpu().requires_grad_(), w.detach().cpu().requires_grad_()
    fp8_linear(*on_cpu).backward(dy.cpu())
    assert error(x.grad.cpu(), on_cpu[0].grad) < 4e-3
    assert error(w.grad.cpu(), on_cpu[1].grad) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(300, 576, 1536), (1024, 2112, 208), (16, 144, 4096), (1, 16, 32)])
def test_a_transpose_that_is_held_gives_the_bits_of_one_that_backward_makes(shape):
    tokens, outputs, inputs = shape
    x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(outputs, inputs, device="cuda") * 0.02).requires_grad_()
    dy = torch.randn(tokens, outputs, device="cuda", dtype=torch.bfloat16)
    tiles = fp8_quantize_tiles(w.detach())
    kinds = []
    for transposed in (False, True):
        y = fp8_linear(x, w, fp8_weight(*tiles, transposed=transposed))
        kinds.append((y, *torch.autograd.grad(y, (x, w), dy)))
    assert all(torch.equal(a, b) for a, b in zip(*kinds, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(300, 576, 1536), (16, 4096, 4096), (1, 128, 128)])
def test_w4a8_product_has_the_bits_of_the_fp8_product(shape):
    tokens, outputs, inputs = shape
    blocks, scales = random_mxfp4(outputs, inputs, low=109, high=122, device="cuda")
    values = decode_mxfp4(blocks.cpu(), scales.cpu()).float().cuda() if outputs < 1000 else None
    values = mxfp4_dequantize(blocks, scales, torch.float32) if values is None else values
    x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
    expected = fp8_mm(*fp8_quantize_rows(x), *fp8_quantize_tiles(values))
    assert torch.equal(w4a8_mm(x, blocks, scales), expected)


@pytest.mark.gpu
def test_fp8_product_names_a_shape_that_the_library_refuses():
    operands = (
        *fp8_quantize_rows(torch.randn(16, 40, device="cuda")),
        *fp8_quantize_tiles(torch.randn(16, 40, device="cuda")),
    )
    with pytest.raises(ContractError, match="16 x 40"):
        fp8_mm(*operands)
