"""Packed causal attention against float64 softmax written out, forward and backward."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels.packed_attention import packed_attention
from kernels.packed_attention.kernel import calls
from schemas.errors import ContractError


def oracle(q, k, v, cu_tokens):
    """Each sequence and head on its own, scores masked above the diagonal."""
    parts = []
    group = q.shape[1] // k.shape[1]
    for first, last in pairwise(cu_tokens):
        heads = []
        for head in range(q.shape[1]):
            keys, values = k[first:last, head // group], v[first:last, head // group]
            scores = q[first:last, head] @ keys.T / q.shape[2] ** 0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
            heads.append(torch.softmax(scores, -1) @ values)
        parts.append(torch.stack(heads, 1))
    return torch.cat(parts)


def run(cu_tokens, *, heads, kv_heads, channels, dtype, device):
    generator = torch.Generator(device).manual_seed(len(cu_tokens))
    options = {"generator": generator, "device": device, "dtype": dtype}
    do, q = (torch.randn(cu_tokens[-1], heads, channels, **options) for _ in range(2))
    k, v = (torch.randn(cu_tokens[-1], kv_heads, channels, **options) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output = packed_attention(q, k, v, cu_tokens)
    gradients = torch.autograd.grad(output, leaves, do)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = oracle(wide[0], wide[1], wide[2], cu_tokens)
    expected_gradients = torch.autograd.grad(expected, wide, do.double())
    pairs = zip((output, *gradients), (expected, *expected_gradients), strict=True)
    # A sequence of one token has gradients of zero.
    return [float((a.detach().double() - b.detach()).norm() / b.detach().norm().clamp(min=1)) for a, b in pairs]


@pytest.mark.parametrize("cu_tokens", [[0, 1], [0, 5, 6, 40], [0, 33]])
def test_packed_sequences_on_the_cpu(cu_tokens):
    assert max(run(cu_tokens, heads=6, kv_heads=2, channels=16, dtype=torch.float32, device="cpu")) < 1e-5


@pytest.mark.parametrize("cu_tokens", [[], [0], [1, 8], [0, 4, 4, 8], [0, 9], [0, 7]])
def test_offsets_that_do_not_cover_the_pack_are_refused(cu_tokens):
    x = torch.zeros(8, 2, 16)
    with pytest.raises(ContractError, match="cu_tokens"):
        packed_attention(x, x, x, cu_tokens)


def test_neighbours_share_a_call_where_one_kernel_takes_them():
    spans = [(0, 10), (10, 20), (20, 3020), (3020, 6020), (6020, 9021), (9021, 9022)]
    assert calls(spans) == [[0, 10, 20], [20, 3020, 6020], [6020, 9021], [9021, 9022]]


@pytest.mark.gpu
@pytest.mark.parametrize("cu_tokens", [[0, 1], [0, 100, 2600, 2601, 4700, 4800], [0, 2048, 4096, 4100, 6200], [0, 700]])
@pytest.mark.parametrize("channels", [64, 128])
def test_packed_sequences_on_the_gpu(cu_tokens, channels):
    errors = run(cu_tokens, heads=6, kv_heads=2, channels=channels, dtype=torch.bfloat16, device="cuda")
    assert max(errors) < 6e-3
