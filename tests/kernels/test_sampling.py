"""The sampling kernel: words against plain-Python Philox, tokens and log-probabilities against float64, rows alone.

Interpreted on the CPU, where the hardware's approximate logarithm is NumPy's exact one; marked tests run on a GPU.
"""

# Triton calls kernels from kernels, which the type checker does not see.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernels.sampling import kernel, sample
from schemas.errors import ContractError

KERNEL: dict[str, Any] = {"impl": "kernel"}


@triton.jit
def exact_log2(x):
    return tl.log2(x)


@pytest.fixture
def interpreted(triton_interpreter, monkeypatch):
    # Inline PTX cannot be interpreted.
    monkeypatch.setattr(kernel, "log2", exact_log2)


@triton.jit
def words_of(key_ptr, position_ptr, out_ptr, BLOCKS: tl.constexpr):
    block_B = tl.arange(0, BLOCKS)
    w0_B, w1_B, w2_B, w3_B = kernel.philox(tl.load(key_ptr), tl.load(position_ptr), block_B)
    tl.store(out_ptr + block_B * 4, w0_B.to(tl.int64))
    tl.store(out_ptr + block_B * 4 + 1, w1_B.to(tl.int64))
    tl.store(out_ptr + block_B * 4 + 2, w2_B.to(tl.int64))
    tl.store(out_ptr + block_B * 4 + 3, w3_B.to(tl.int64))


def philox(key: int, position: int, block: int) -> list[int]:
    """Philox4x32-10 from its paper's description, on Python integers."""
    c, k0, k1 = [block, position % 2**32, position >> 32, 0], key % 2**32, key >> 32
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ k0, right % 2**32, (left >> 32) ^ c[3] ^ k1, left % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def signed(key: int) -> int:
    return key - 2**64 if key >= 2**63 else key


def case(rows: int, num_ids: int, seed: int, spread: float = 3.0, device: str = "cpu"):
    r = random.Random(seed)
    logits = torch.randn(rows, num_ids, generator=torch.Generator().manual_seed(seed)) * spread
    keys = [r.getrandbits(64) for _ in range(rows)]
    positions = [r.choice([r.randrange(5000), r.randrange(2**45)]) for _ in range(rows)]
    return (
        logits.to(device),
        torch.tensor([signed(k) for k in keys], device=device),
        torch.tensor(positions, device=device),
    )


def noise_of(key: int, position: int, num_ids: int) -> torch.Tensor:
    """Gumbel noise in float64 from words of plain Python."""
    words = [w for block in range(-(-num_ids // 4)) for w in philox(key % 2**64, position, block)][:num_ids]
    u = ((torch.tensor(words, dtype=torch.float64).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    return -torch.log(-torch.log1p(-u))


def oracle(logits, keys, positions, temperature=1.0):
    """Per row: float64 scores, raw and tempered log-probabilities of every id."""
    logits = logits.double().cpu()
    scaled = logits / temperature
    noise = [noise_of(k, p, logits.shape[1]) for k, p in zip(keys.tolist(), positions.tolist(), strict=True)]
    return scaled + torch.stack(noise), torch.log_softmax(logits, -1), torch.log_softmax(scaled, -1)


def check_against_oracle(found, case, temperature, tolerance):
    ids, raw, sampled = (x.cpu() for x in found)
    scores, all_raw, all_sampled = oracle(*case, temperature)
    chosen = ids.unsqueeze(1)
    # A tie within rounding may go either way.
    assert (scores.gather(1, chosen).squeeze(1) >= scores.amax(1) - 2e-5).all()
    torch.testing.assert_close(raw.double(), all_raw.gather(1, chosen).squeeze(1), rtol=0, atol=tolerance)
    torch.testing.assert_close(sampled.double(), all_sampled.gather(1, chosen).squeeze(1), rtol=0, atol=tolerance)
    return (ids == scores.argmax(1)).sum().item()


@pytest.mark.parametrize("position", [0, 2**32 - 1, 2**40 + 3])
@pytest.mark.parametrize("key", [0, 2**32 - 1, 2**64 - 1, 0x0123456789ABCDEF])
def test_words_interpreted(triton_interpreter, key, position):
    out = torch.empty(8, 4, dtype=torch.int64)
    words_of[(1,)](torch.tensor([signed(key)]), torch.tensor([position]), out, BLOCKS=8)
    assert out.tolist() == [philox(key, position, block) for block in range(8)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("num_ids", [1, 2, 3, 37, 1023, 1024, 1025, 2051])
def test_tokens_and_log_probabilities_interpreted(interpreted, num_ids, temperature):
    inputs = case(4, num_ids, num_ids)
    found = sample(*inputs, temperature=temperature, **KERNEL)
    assert check_against_oracle(found, inputs, temperature, 3e-6) == 4
    if temperature == 1.0:
        assert found[1] is found[2]


@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.7, "top_k": 9, "top_p": 0.6}], ids=str
)
def test_cuts_interpreted(interpreted, options):
    logits, keys, positions = case(9, 50, 3)
    logits[0] = 0.0
    logits[1, 20:] = logits[1, 7]
    found = sample(logits, keys, positions, **options, **KERNEL)
    for ours, theirs in zip(found, sample(logits, keys, positions, **options, impl="reference"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_frequencies_follow_the_softmax_interpreted(interpreted):
    """Chi-square over many positions of one key; five deviations are one false alarm in some millions."""
    draws, num_ids = 200, 4
    logits = torch.randn(num_ids, generator=torch.Generator().manual_seed(1))
    rows = logits.expand(draws, -1).contiguous()
    keys = torch.full((draws,), signed(0xFEDCBA9876543210))
    ids = sample(rows, keys, torch.arange(draws), temperature=2.0, **KERNEL)[0]
    expected = torch.softmax(logits.double() / 2.0, 0) * draws
    statistic = ((torch.bincount(ids, minlength=num_ids) - expected) ** 2 / expected).sum().item()
    assert statistic < num_ids - 1 + 5 * math.sqrt(2 * (num_ids - 1))


@pytest.mark.parametrize("impl", ["kernel", "reference"])
def test_infinities_ties_and_nan_interpreted(interpreted, impl):
    logits, keys, positions = case(8, 2200, 7)
    logits[0, 1:] = -math.inf
    logits[1, 2199] = math.nan
    logits[2, 5] = math.inf
    logits[3] = -math.inf
    logits[4] = math.nan
    logits[5] = 0.0
    logits[5, [1030, 1033, 2100]] = 1e30  # noise is lost beside it
    logits[6, :1100] = -math.inf
    ids, raw, sampled = sample(logits, keys, positions, temperature=0.5, impl=impl)
    assert ids[0] == 0
    assert raw[0] == sampled[0] == 0
    assert ids[5] == 1030
    assert ids[6] >= 1100
    assert raw[[1, 2, 3, 4]].isnan().all()
    assert sampled[[1, 2, 3, 4]].isnan().all()
    assert raw[[0, 6, 7]].isfinite().all()
    assert ((ids >= 0) & (ids < 2200)).all()
    alone = sample(logits[6:7], keys[6:7], positions[6:7], temperature=0.5, impl=impl)
    assert [x[0].item() for x in alone] == [ids[6].item(), raw[6].item(), sampled[6].item()]


def test_rows_that_lie_apart_interpreted(interpreted):
    wide = torch.full((5, 103), math.nan)
    logits, keys, positions = case(5, 90, 2)
    wide[:, 3:93] = logits
    for ours, theirs in zip(
        sample(wide[:, 3:93], keys, positions, **KERNEL), sample(logits, keys, positions, **KERNEL), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_no_rows(interpreted):
    empty = torch.empty(0, dtype=torch.int64)
    for impl in ("kernel", "reference"):
        for options in ({}, {"top_k": 2}):
            found = sample(torch.empty(0, 7), empty, empty, **options, impl=impl)
            assert [x.shape for x in found] == [(0,)] * 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"logits_SV": torch.zeros(2, 5, dtype=torch.bfloat16)}, "fp32"),
        ({"logits_SV": torch.zeros(5, 2).t()}, "contiguous rows"),
        ({"logits_SV": torch.zeros(2, 0)}, "V > 0"),
        ({"keys_S": torch.zeros(2, dtype=torch.int32)}, "int64"),
        ({"positions_S": torch.zeros(3, dtype=torch.int64)}, "a key and a position a row"),
        ({"temperature": 0.0}, "positive temperature"),
    ],
)
def test_what_does_not_fit_is_refused(change, expected):
    zeros = torch.zeros(2, dtype=torch.int64)
    arguments: dict[str, Any] = {"logits_SV": torch.zeros(2, 5), "keys_S": zeros, "positions_S": zeros} | change
    with pytest.raises(ContractError, match=expected):
        sample(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ids", [37, 4097, 128256, 151936])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_k": 50, "top_p": 0.9}, {"top_k": 1}], ids=str)
def test_rows_keep_their_bits_on_the_gpu(num_ids, options: dict[str, Any]):
    inputs = case(300, num_ids, 5, device="cuda")
    whole = sample(*inputs, **options)
    if "top_k" not in options:
        some = tuple(x[:1] for x in inputs)
        check_against_oracle(tuple(x[:1] for x in whole), some, options.get("temperature", 1.0), 4e-6)
    else:
        some = tuple(x[:40] for x in inputs)
        reference = sample(*some, **options, impl="reference")
        same = whole[0][:40] == reference[0]
        assert same.sum() >= 39  # the noise differs in its last bits
        torch.testing.assert_close(whole[2][:40][same], reference[2][same], rtol=0, atol=1e-5)
    for count in (1, 2, 31, 64, 257):
        chosen = torch.randperm(300, device="cuda")[:count]
        for part, all_rows in zip(sample(*(x[chosen] for x in inputs), **options), whole, strict=True):
            assert torch.equal(part, all_rows[chosen])


@pytest.mark.gpu
def test_frequencies_on_the_gpu():
    draws, num_ids = 400_000, 1000
    logits = torch.randn(num_ids, generator=torch.Generator().manual_seed(1)).cuda()
    keys = torch.full((draws,), signed(0xFEDCBA9876543210), device="cuda")
    ids = sample(logits.expand(draws, -1).contiguous(), keys, torch.arange(draws, device="cuda"))[0]
    expected = torch.softmax(logits.double(), 0) * draws
    statistic = ((torch.bincount(ids, minlength=num_ids) - expected) ** 2 / expected).sum().item()
    assert abs(statistic - (num_ids - 1)) < 5 * math.sqrt(2 * (num_ids - 1))


@pytest.mark.gpu
def test_a_graph_holds_the_call():
    logits, keys, positions = case(64, 128256, 11, device="cuda")
    several: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.7, "top_p": 0.9})
    for options in several:
        expected = sample(logits, keys, positions + 1, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = sample(logits, keys, positions, **options)
        positions += 1
        graph.replay()
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
