"""Sampling against an independent plain-Python Philox and Gumbel-max, distributions, and the bits of a row."""

from __future__ import annotations

import math
import random
import struct
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import sampling
from kernels.sampling.reference import gumbel_noise, noise_of_words_, philox_words


class Params(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


class Sampled(NamedTuple):
    ids_S: torch.Tensor
    raw_S: torch.Tensor
    sampled_S: torch.Tensor


PLAIN = Params()


def key_tensor(keys: list[int]) -> torch.Tensor:
    return torch.tensor([key - 2**64 if key >= 2**63 else key for key in keys])


def sample(logits: torch.Tensor, keys: list[int], positions: list[int], params: Params) -> Sampled:
    found = sampling.sample(logits, key_tensor(keys), torch.tensor(positions), **params._asdict(), impl="reference")
    return Sampled(*found)


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-10 from its paper's description, on Python integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ k0, right % 2**32, (left >> 32) ^ c[3] ^ k1, left % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def fp32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def noise_of(key: int, position: int, token: int) -> float:
    counter = (token // 4, position % 2**32, position // 2**32, 0)
    word = philox((key % 2**32, key // 2**32), counter)[token % 4]
    u = min(fp32(fp32(word) + 0.5) / 2**32, 1 - 2**-24)
    return -math.log(-math.log1p(-u))


def kept_by(logits: list[float], params: Params) -> dict[int, float]:
    """Ids that the cuts leave and their probabilities."""
    scaled = {v: x / params.temperature for v, x in enumerate(logits)}
    order = sorted(scaled, key=lambda v: (-scaled[v], v))
    if params.top_k:
        order = order[: params.top_k]
    top = scaled[order[0]]
    total = math.fsum(math.exp(scaled[v] - top) for v in order)
    kept, before = [], 0.0
    for v in order:
        if kept and before >= params.top_p:
            break
        kept.append(v)
        before += math.exp(scaled[v] - top) / total
    total = math.fsum(math.exp(scaled[v] - top) for v in kept)
    return {v: math.exp(scaled[v] - top) / total for v in kept}


def random_logits(rows: int, num_ids: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, num_ids, generator=torch.Generator().manual_seed(seed)) * spread


def test_the_oracle_gives_the_published_vectors():
    ones, pi_key = 2**32 - 1, (0xA4093822, 0x299F31D0)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox((0, 0), (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((ones, ones), (ones, ones, ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox(pi_key, pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("position", [0, 1, 4095, 2**31, 2**32 - 1, 2**32, 2**40 + 3])
def test_words(position):
    keys = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF, 5, 6, 7]
    words = philox_words(key_tensor(keys), torch.full((len(keys),), position), 17)
    assert words.shape == (10, 17, 4)
    for key, row in zip(keys, words.tolist(), strict=True):
        for block, four in enumerate(row):
            assert four == philox((key % 2**32, key >> 32), (block, position % 2**32, position >> 32, 0))


def test_noise_follows_the_definition_and_ids_past_the_vocabulary_draw_nothing():
    for num_ids in (1, 3, 4, 5, 1021):
        noise = gumbel_noise(key_tensor([77, 2**64 - 1]), torch.tensor([3, 900]), num_ids)
        assert noise.shape == (2, num_ids)
        for row, (key, position) in zip(noise.tolist(), [(77, 3), (2**64 - 1, 900)], strict=True):
            for v in {0, num_ids // 2, num_ids - 1}:
                assert row[v] == pytest.approx(noise_of(key, position, v), rel=1e-5, abs=1e-5)


def test_noise_is_finite_and_descends_at_both_ends_of_a_word():
    low = [0, 1, 2, 3, 127, 128, 2**23 - 1, 2**23, 2**24, 2**24 + 1]
    high = [2**32 - n for n in (2**24, 4096, 257, 256, 129, 128, 127, 2, 1)]
    words = torch.tensor(low + high)
    noise = noise_of_words_(words.float())
    assert torch.isfinite(noise).all()
    assert (noise.diff() <= 0).all()
    assert noise[0].item() == pytest.approx(33 * math.log(2), rel=1e-6)
    assert noise[-1].item() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)


@pytest.mark.parametrize(
    "params",
    [PLAIN, Params(0.5), Params(2.0), Params(1.0, 5), Params(0.7, 1),
     Params(1.0, 0, 0.8), Params(1.3, 9, 0.6), Params(1.0, 500, 1e-9), Params(1.0, 37)],
    ids=str,
)  # fmt: skip
def test_tokens_and_log_probabilities_equal_plain_python(params):
    keys = [random.Random(i).getrandbits(64) for i in range(40)]
    positions = [1 + 7 * i for i in range(40)]
    logits = random_logits(40, 37, seed=4)
    got = sample(logits, keys, positions, params)
    differing = 0
    for row, key, position, token, raw, sampled in zip(
        logits.tolist(), keys, positions, got.ids_S.tolist(), got.raw_S.tolist(), got.sampled_S.tolist(), strict=True
    ):
        kept = kept_by(row, params)
        scores = {v: row[v] / params.temperature + noise_of(key, position, v) for v in kept}
        assert token == max(scores, key=lambda v: (scores[v], -v))
        assert raw == pytest.approx(math.log(kept_by(row, PLAIN)[token]), abs=2e-6)
        assert sampled == pytest.approx(math.log(kept[token]), abs=2e-6)
        differing += len(kept) < 37
    assert (differing == 40) == ((params.top_k or 37) < 37 or params.top_p < 1)


def test_ties_go_to_the_lowest_id():
    # Noise is lost beside 1e30, so three ids have one score.
    logits = torch.zeros(1, 50)
    logits[0, [7, 8, 40]] = 1e30
    assert sample(logits, [3], [1], PLAIN).ids_S.tolist() == [7]
    # At the edge of top-k too: of equal logits the lower ids are kept.
    seen = {sample(torch.zeros(1, 50), [key], [1], Params(1.0, 3)).ids_S.item() for key in range(60)}
    assert seen == {0, 1, 2}


def test_top_p_over_a_flat_vocabulary_needs_more_than_the_first_guess():
    num_ids = 6000
    seen = sample(torch.zeros(200, num_ids), list(range(200)), [1] * 200, Params(1.0, 0, 0.9)).ids_S
    assert seen.max().item() < 5402
    assert seen.max().item() > 5000


def test_minus_infinity_is_never_sampled_and_bad_rows_are_marked_alone():
    logits = random_logits(5, 40, seed=9)
    logits[0, 1:] = -math.inf
    logits[1, 13] = math.nan
    logits[2, 5] = math.inf
    logits[3] = -math.inf
    for params in (PLAIN, Params(0.7, 6, 0.9)):
        got = sample(logits, [1, 2, 3, 4, 5], [0] * 5, params)
        alone = sample(logits[4:], [5], [0], params)
        assert got.ids_S[0] == 0
        assert got.raw_S[0] == 0
        assert not torch.isfinite(got.raw_S[1:4]).any()
        assert torch.equal(got.raw_S[4:], alone.raw_S)
        assert torch.equal(got.ids_S[4:], alone.ids_S)


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    total = sum(counts)
    return sum((c - total * p) ** 2 / (total * p) for c, p in zip(counts, probabilities, strict=True))


@pytest.mark.parametrize("params", [PLAIN, Params(0.6), Params(1.0, 6), Params(1.0, 0, 0.7)])
@pytest.mark.parametrize("vary", ["positions", "keys"])
def test_frequencies_follow_the_distribution(params, vary):
    draws, row = 10_000, random_logits(1, 15, seed=2, spread=1.0)
    several = [random.Random(1).getrandbits(64)] * draws if vary == "positions" else [7919 * i for i in range(draws)]
    positions = list(range(draws)) if vary == "positions" else [5] * draws
    if params.top_k or params.top_p < 1:
        draws = 4000
    logits = row.expand(draws, -1).contiguous()
    ids = sample(logits, several[:draws], positions[:draws], params).ids_S.tolist()
    kept = kept_by(row[0].tolist(), params)
    assert set(ids) == set(kept)
    counts, degrees = [ids.count(v) for v in kept], len(kept) - 1
    # Mean `degrees`, variance twice that: five deviations are one false alarm in some millions.
    assert chi_square(counts, list(kept.values())) < degrees + 5 * math.sqrt(2 * degrees)
    assert chi_square(counts, [1 / len(kept)] * len(kept)) > degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_ids", [49152, 1021])
@pytest.mark.parametrize("params", [PLAIN, Params(0.7, 20, 0.9)], ids=["plain", "cut"])
def test_a_row_has_the_same_bits_in_any_company(num_ids, params, num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        r = random.Random(num_ids)
        logits = random_logits(40, num_ids, seed=6)
        keys, positions = [r.getrandbits(64) for _ in range(40)], [r.randrange(5000) for _ in range(40)]
        whole = sample(logits, keys, positions, params)
        for count in (1, 1, 1, 2, 3, 7, 8, 9, 31):
            some = r.sample(range(40), count)
            got = sample(logits[some], [keys[i] for i in some], [positions[i] for i in some], params)
            for a, b in ((got.ids_S, whole.ids_S), (got.raw_S, whole.raw_S), (got.sampled_S, whole.sampled_S)):
                assert torch.equal(a, b[some])
    finally:
        torch.set_num_threads(before)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 2.0, 4.0]), min_size=1, max_size=30),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 31),
    top_p=st.sampled_from([0.05, 0.33, 0.71, 0.93, 1.0]),
    key=st.integers(0, 2**64 - 1),
)
def test_cuts_with_many_ties(values, temperature, top_k, top_p, key):
    params = Params(temperature, top_k, top_p)
    kept = kept_by(values, params)
    got = sample(torch.tensor([values]), [key], [9], params)
    token = int(got.ids_S.item())
    assert token in kept
    assert got.sampled_S.item() == pytest.approx(math.log(kept[token]), abs=2e-6)
