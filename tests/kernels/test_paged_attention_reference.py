"""The torch reference of paged attention: float64 loops as the oracle, and the bits of a row as the contract.

Letters: N rows, S sequences, H query heads, G KV heads, C channels, P pages, T tokens of a page.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from kernels.paged_attention import paged_attention, write_kv


@dataclass
class Cached:
    """Sequences in one cache, at shuffled pages; slots that no sequence wrote are NaN."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    pages: list[list[int]]
    k_cache_PTGC: torch.Tensor
    v_cache_PTGC: torch.Tensor

    def attend(self, rows: list[tuple[int, int, int]], split_tokens: int) -> list[torch.Tensor]:
        """rows: (sequence, first position, stop) in the order of the call; one output a sequence."""
        width = max((len(self.pages[s]) for s, _, _ in rows), default=1)
        table = [self.pages[s] + [10**6] * (width - len(self.pages[s])) for s, _, _ in rows]
        counts = [stop - first for _, first, stop in rows]
        cu_rows = [sum(counts[:i]) for i in range(len(counts) + 1)]
        q = [self.q[s][first:stop] for s, first, stop in rows]
        o_NHC = paged_attention(
            torch.cat(q) if q else self.q[0][:0], self.k_cache_PTGC, self.v_cache_PTGC,
            torch.tensor(table, dtype=torch.int32).view(len(rows), width),
            torch.tensor(cu_rows, dtype=torch.int32), torch.tensor([stop for _, _, stop in rows], dtype=torch.int32),
            split_tokens=split_tokens, impl="reference",
        )  # fmt: skip
        return list(o_NHC.split(counts))


def cached(lengths, *, heads=3, kv_heads=1, channels=16, page_tokens=8, dtype=torch.float32, seed=0) -> Cached:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        [torch.randn(n, h, channels, generator=g).to(dtype) for n in lengths] for h in (heads, kv_heads, kv_heads)
    )
    counts = [-(-n // page_tokens) for n in lengths]
    numbers = torch.randperm(sum(counts) + 3, generator=g).tolist()
    pages = [[numbers.pop() for _ in range(count)] for count in counts]
    k_cache, v_cache = (
        torch.full((sum(counts) + 3, page_tokens, kv_heads, channels), math.nan, dtype=dtype) for _ in range(2)
    )
    for s, n in enumerate(lengths):
        slots = [pages[s][i // page_tokens] * page_tokens + i % page_tokens for i in range(n)]
        write_kv(k[s], v[s], k_cache, v_cache, torch.tensor(slots))
    return Cached(q, k, v, pages, k_cache, v_cache)


def oracle(q_HC, k_MGC, v_MGC) -> torch.Tensor:
    """One row over all the keys that it may see, float64 [H, C]."""
    heads, channels = q_HC.shape
    group = heads // k_MGC.shape[1]
    out = []
    for h in range(heads):
        k, v = k_MGC[:, h // group].double(), v_MGC[:, h // group].double()
        out.append(torch.softmax(k @ q_HC[h].double() / math.sqrt(channels), 0) @ v)
    return torch.stack(out)


SHAPES = [
    # heads, kv_heads, channels, page_tokens, split_tokens
    (3, 1, 16, 8, 8),
    (9, 3, 64, 64, 64),
    (4, 4, 8, 4, 16),
    (14, 2, 64, 16, 64),
    (5, 1, 80, 32, 8),
    (8, 2, 128, 64, 128),
    (1, 1, 2, 1, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_float64_loops(shape, dtype):
    heads, kv_heads, channels, page_tokens, split = shape
    lengths = [1, split - 1 or 1, split, split + 1, 2 * split + 1, 1, 40]
    c = cached(lengths, heads=heads, kv_heads=kv_heads, channels=channels, page_tokens=page_tokens, dtype=dtype, seed=1)
    # Whole prompts, chunks of several sizes, and single rows in one call.
    rows = [(s, max(0, n - 1 - 3 * s), n) for s, n in enumerate(lengths)]
    rows[4] = (4, lengths[4] - 1, lengths[4])
    outputs = c.attend(rows, split)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    for (s, first, stop), o in zip(rows, outputs, strict=True):
        assert o.dtype == dtype
        for position in range(first, stop):
            want = oracle(c.q[s][position], c.k[s][: position + 1], c.v[s][: position + 1])
            torch.testing.assert_close(o[position - first].double(), want, rtol=tolerance, atol=tolerance)


def test_peaked_scores_neither_overflow_nor_vanish():
    c = cached([40], page_tokens=8)
    c.q[0] *= 1e4
    (o,) = c.attend([(0, 0, 40)], 8)
    for position in (0, 7, 8, 39):
        want = oracle(c.q[0][position], c.k[0][: position + 1], c.v[0][: position + 1])
        torch.testing.assert_close(o[position].double(), want, rtol=1e-3, atol=1e-3)


def test_no_rows():
    c = cached([5])
    assert c.attend([], 8) == []
    empty, one = c.attend([(0, 5, 5), (0, 4, 5)], 8)
    assert empty.shape == (0, 3, 16)
    assert torch.isfinite(one).all()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_decode_prefill_and_any_company(shape, num_threads, threads):
    threads(num_threads)
    heads, kv_heads, channels, page_tokens, split = shape
    r = random.Random(num_threads)
    lengths = [r.randint(1, 3 * min(split, 48) + 1) for _ in range(30)]
    lengths[:4] = [1, split, split + 1, 2 * split]
    lengths = [min(n, 200) for n in lengths]
    layout = {"heads": heads, "kv_heads": kv_heads, "channels": channels, "dtype": torch.bfloat16}
    c = cached(lengths, page_tokens=page_tokens, **layout)
    alone = [c.attend([(s, n - 1, n)], split)[0] for s, n in enumerate(lengths)]

    for count in (2, 3, 5, 30):
        company = r.sample(range(30), count)
        for s, o in zip(company, c.attend([(s, lengths[s] - 1, lengths[s]) for s in company], split), strict=True):
            assert torch.equal(o, alone[s]), f"sequence {s} among {count}"
    for s in r.sample(range(30), 8):
        first = r.randint(0, lengths[s] - 1)
        other = r.randrange(30)
        _, o = c.attend([(other, 0, lengths[other]), (s, first, lengths[s])], split)
        assert torch.equal(o[-1:], alone[s]), f"sequence {s} from {first}"


def test_bits_do_not_depend_on_pages_or_page_size():
    lengths = [70, 64, 65, 130]
    rows = [(0, 69, 70), (1, 0, 64), (2, 64, 65), (3, 100, 130)]
    first = cached(lengths, page_tokens=64).attend(rows, 64)
    for page_tokens in (8, 16, 64, 128):
        other = cached(lengths, page_tokens=page_tokens)
        other.pages = [list(p) for p in other.pages]
        for a, b in zip(first, other.attend(rows, 64), strict=True):
            assert torch.equal(a, b)


def test_up_to_two_hundred_rows_of_one_call():
    c = cached([200], heads=7, kv_heads=1, channels=64, page_tokens=16, dtype=torch.bfloat16)
    (whole,) = c.attend([(0, 0, 200)], 32)
    for position in range(200):
        (row,) = c.attend([(0, position, position + 1)], 32)
        assert torch.equal(row[0], whole[position]), position
    for count in range(1, 200, 7):
        (part,) = c.attend([(0, 200 - count, 200)], 32)
        assert torch.equal(part, whole[-count:]), count
