"""MXFP4 values straight from values against codes and back, and against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from kernels import quant
from tests.kernels.test_quant import adversarial, bits, broken, exact_scale_exponent

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_rounding_equals_coding_and_decoding(dtype, seed):
    for x in (adversarial(40, 96, seed), broken(11, 64), adversarial(3, 32, seed).abs(), torch.zeros(2, 64)):
        x = x.to(dtype)
        kept = x.clone()
        found = quant.mxfp4_round(x)
        assert found.dtype == dtype
        assert torch.equal(bits(found), bits(quant.mxfp4_round(x, impl="reference")))
        assert torch.equal(bits(x), bits(kept)), "the master is left alone"


def test_every_value_near_a_tie_goes_where_ml_dtypes_puts_it():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat([middles, middles.nextafter(torch.zeros(7)), middles.nextafter(torch.full((7,), 9.0))])
    for binade in (-126, -60, 0, 60, 124):
        block = torch.cat([near, -near[:10], torch.tensor([6.0])]) * 2.0**binade  # 6: the scale is the binade
        exponent = exact_scale_exponent(float(block.abs().max()), 6)
        scaled = (block.double().numpy() * 2.0**-exponent).astype(np.float32)
        expected = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * 2.0**exponent
        assert torch.equal(quant.mxfp4_round(block[None])[0].double(), torch.from_numpy(expected))


def test_strided_and_empty_matrices():
    x = adversarial(64, 64, 1)
    assert torch.equal(bits(quant.mxfp4_round(x.t())), bits(quant.mxfp4_round(x.t().contiguous())))
    assert quant.mxfp4_round(torch.empty(0, 32)).shape == (0, 32)
    with pytest.raises(ValueError, match="multiple of 32"):
        quant.mxfp4_round(torch.zeros(2, 48))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_same_bits(dtype):
    x = adversarial(70, 96, 2).to(dtype)
    assert torch.equal(bits(quant.mxfp4_round(x.cuda())), bits(quant.mxfp4_round(x)))
