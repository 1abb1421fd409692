"""Sampling on the GPU: one read of the logits, then a merge of a row's parts.

`_draw` gives each program one part of one row, ids at fixed places, so that a few rows fill the card and a thousand
stream. It leaves the part's best score, the block of four ids that has it, the largest logit and the sum of
exponentials. `_merge` folds a row's parts in a tree of fixed shape, finds the id in the block and writes it with its
log-probabilities.

What bounds it: instructions. A logit takes about 40 of them, among them the products and xors of ten Philox rounds
for four words, and three results of the special function unit. For 1024 rows of 128,256 logits that is 0.16 ms of
issue slots alone, where reading the logits takes 0.12 (BENCH.md).

Shape letters: S rows, V vocabulary, B blocks of four ids in a part, P parts of a row.
"""

# Triton adds launch options to a kernel's own parameters and calls kernels from kernels; the type checker sees neither.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_NO_BLOCK = tl.constexpr(1 << 28)
_LARGEST_U = tl.constexpr(1 - 2.0**-24)
# One warp a program, so that no reduction waits at a barrier.
_PART = 1024
_WARPS = 1
# Two rows a multiprocessor; one row of 32 warps is faster up to 132 rows and slower beyond (BENCH.md).
_CUT_BLOCK = 2048
_CUT_WARPS = 16


def sample(
    logits_SV: torch.Tensor,
    keys_S: torch.Tensor,
    positions_S: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the contract in kernels.sampling."""
    rows, num_ids = logits_SV.shape
    device = logits_SV.device
    ids_S = torch.empty(rows, dtype=torch.int64, device=device)
    raw_S = torch.empty(rows, dtype=torch.float32, device=device)
    cut = 0 < top_k < num_ids or top_p < 1.0
    scaled = cut or temperature != 1.0
    sampled_S = torch.empty_like(raw_S) if scaled else raw_S
    if rows == 0:
        return ids_S, raw_S, sampled_S
    # Without a cut nothing reads the second matrix.
    kept_SV = _cut(logits_SV / temperature, top_k, top_p) if cut else logits_SV
    parts = -(-num_ids // _PART)
    stats = torch.empty(rows, parts, 5 if scaled else 3, dtype=torch.float32, device=device)
    part_blocks = torch.empty(rows, parts, dtype=torch.int32, device=device)
    common = (logits_SV, kept_SV, logits_SV.stride(0), kept_SV.stride(0), 1 / temperature, stats, part_blocks, num_ids)
    flags: dict[str, Any] = {"CUT": cut, "SCALED": scaled}
    draw: dict[str, Any] = {"BLOCKS": _PART // 4, "num_warps": _WARPS, **flags}
    merge: dict[str, Any] = {"PARTS": triton.next_power_of_2(parts), "num_warps": 1, **flags}
    # On one axis: the others end at 65,535.
    _draw[(rows * parts,)](keys_S, positions_S, *common, parts, **draw)
    _merge[(rows,)](keys_S, positions_S, *common, ids_S, raw_S, sampled_S, parts, **merge)
    return ids_S, raw_S, sampled_S


@triton.jit
def log2(x):
    """The special function unit's: off by 2^-22 at most, of 1 within 0.5 to 2 and of the result elsewhere."""
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def score(x, word):
    """x plus the noise of a Philox word as kernels.sampling defines it, plus a constant of all words (ln ln 2)."""
    u = tl.minimum(tl.fma(word.to(tl.float32), 2.0**-32, 2.0**-33), _LARGEST_U)
    # -log2(1 - u). Near zero 1 - u forgets u: there u times a polynomial, within 2^-23, elsewhere the hardware's log2.
    small = tl.fma(u, 0.490447342, 0.207486257)
    small = tl.fma(small, u, 0.371956378)
    small = tl.fma(small, u, 0.48020792)
    small = tl.fma(small, u, 0.72136277)
    small = tl.fma(small, u, 1.44269502)
    exponential = tl.where(u < 0.25, u * small, -log2(1.0 - u))
    return tl.fma(log2(exponential), -_LN_2, x)


@triton.jit
def philox(key, position, block):
    """The four words of each block, uint32."""
    c0, c1, c2 = block.to(tl.uint32), position.to(tl.uint32), (position >> 32).to(tl.uint32)
    key0, key1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c3 = tl.zeros_like(key0)
    factor0, factor2 = tl.full((), 0xD2511F53, tl.uint32), tl.full((), 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        # Two instructions a product are faster here than one that gives all 64 bits.
        high0, low0 = tl.umulhi(c0, factor0), c0 * factor0
        high2, low2 = tl.umulhi(c2, factor2), c2 * factor2
        c0, c1, c2, c3 = high2 ^ c1 ^ key0, low2, high0 ^ c3 ^ key1, low0
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _load(row_ptr, part, num_ids, BLOCKS: tl.constexpr):
    """Four [B] tensors, neighbours of a thread's 16 bytes; -inf past the vocabulary."""
    block_B = part * BLOCKS + tl.arange(0, BLOCKS)
    id_B4 = block_B[:, None] * 4 + tl.arange(0, 4)[None, :]
    # A mask costs a twentieth of the whole, and only a row's last part needs one.
    if (part + 1) * BLOCKS * 4 <= num_ids:
        x_B4 = tl.load(row_ptr + id_B4)
    else:
        x_B4 = tl.load(row_ptr + id_B4, mask=id_B4 < num_ids, other=float("-inf"))
    even_B2, odd_B2 = tl.split(tl.reshape(x_B4, (x_B4.shape[0], 2, 2)))
    x0_B, x2_B = tl.split(even_B2)
    x1_B, x3_B = tl.split(odd_B2)
    return x0_B, x1_B, x2_B, x3_B


@triton.jit
def _max_and_sum(x0_B, x1_B, x2_B, x3_B):
    """Largest value, and the sum of exponentials below it (0 where all are -inf)."""
    top = tl.max(tl.maximum(tl.maximum(x0_B, x1_B), tl.maximum(x2_B, x3_B)), 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    e0_B, e1_B = tl.exp2((x0_B - shift) * _LOG2_E), tl.exp2((x1_B - shift) * _LOG2_E)
    e2_B, e3_B = tl.exp2((x2_B - shift) * _LOG2_E), tl.exp2((x3_B - shift) * _LOG2_E)
    return top, tl.sum((e0_B + e1_B) + (e2_B + e3_B), 0)


@triton.jit
def _draw(
    keys_ptr,
    positions_ptr,
    logits_ptr,
    kept_ptr,
    row_stride,
    kept_stride,
    factor,
    stats_ptr,
    part_blocks_ptr,
    num_ids,
    parts,
    BLOCKS: tl.constexpr,
    CUT: tl.constexpr,
    SCALED: tl.constexpr,
):
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    block_B = part * BLOCKS + tl.arange(0, BLOCKS)
    x0_B, x1_B, x2_B, x3_B = _load(logits_ptr + row.to(tl.int64) * row_stride, part, num_ids, BLOCKS)
    place = row.to(tl.int64) * parts + part
    stats_ptr += place * (5 if SCALED else 3)
    top, total = _max_and_sum(x0_B, x1_B, x2_B, x3_B)
    tl.store(stats_ptr + 1, top)
    tl.store(stats_ptr + 2, total)
    if SCALED:
        if CUT:
            x0_B, x1_B, x2_B, x3_B = _load(kept_ptr + row.to(tl.int64) * kept_stride, part, num_ids, BLOCKS)
        else:
            x0_B, x1_B, x2_B, x3_B = x0_B * factor, x1_B * factor, x2_B * factor, x3_B * factor
        top, total = _max_and_sum(x0_B, x1_B, x2_B, x3_B)
        tl.store(stats_ptr + 3, top)
        tl.store(stats_ptr + 4, total)
    w0_B, w1_B, w2_B, w3_B = philox(tl.load(keys_ptr + row), tl.load(positions_ptr + row), block_B)
    first_B = tl.maximum(score(x0_B, w0_B), score(x1_B, w1_B))
    score_B = tl.maximum(first_B, tl.maximum(score(x2_B, w2_B), score(x3_B, w3_B)))
    best = tl.max(score_B, 0)
    tl.store(stats_ptr, best)
    # NaN equals nothing: a part without a number has no block.
    tl.store(part_blocks_ptr + place, tl.min(tl.where(score_B == best, block_B, _NO_BLOCK), 0))


@triton.jit
def _merge(
    keys_ptr,
    positions_ptr,
    logits_ptr,
    kept_ptr,
    row_stride,
    kept_stride,
    factor,
    stats_ptr,
    part_blocks_ptr,
    num_ids,
    ids_ptr,
    raw_ptr,
    sampled_ptr,
    parts,
    PARTS: tl.constexpr,
    CUT: tl.constexpr,
    SCALED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part_P = tl.arange(0, PARTS)
    used_P = part_P < parts
    stats_ptr += (row * parts + part_P) * (5 if SCALED else 3)
    score_P = tl.load(stats_ptr, mask=used_P, other=float("-inf"))
    block_P = tl.load(part_blocks_ptr + row * parts + part_P, mask=used_P, other=_NO_BLOCK)
    best = tl.max(score_P, 0)
    block = tl.minimum(tl.min(tl.where(score_P == best, block_P, _NO_BLOCK), 0), (num_ids - 1) // 4)
    # Which of the block's four it is, `_draw` did not keep: the same scores again.
    w0, w1, w2, w3 = philox(tl.load(keys_ptr + row), tl.load(positions_ptr + row), block)
    word_4 = tl.arange(0, 4)
    drawn_4 = tl.where(word_4 == 0, w0, tl.where(word_4 == 1, w1, tl.where(word_4 == 2, w2, w3)))
    id_4 = block * 4 + word_4
    row_ptr = kept_ptr + row * kept_stride if CUT else logits_ptr + row * row_stride
    x_4 = tl.load(row_ptr + id_4, mask=id_4 < num_ids, other=float("-inf"))
    if SCALED and not CUT:
        x_4 = x_4 * factor
    chosen = tl.minimum(tl.min(tl.where(score(x_4, drawn_4) == best, id_4, num_ids - 1), 0), num_ids - 1)
    tl.store(ids_ptr + row, chosen.to(tl.int64))
    logit = tl.load(logits_ptr + row * row_stride + chosen)
    raw = _log_probability(logit, stats_ptr + 1, used_P)
    tl.store(raw_ptr + row, raw)
    if SCALED:
        kept = tl.load(kept_ptr + row * kept_stride + chosen) if CUT else logit * factor
        sampled = _log_probability(kept, stats_ptr + 3, used_P)
        # NaN in the logits may have been cut off.
        tl.store(sampled_ptr + row, tl.where(raw == raw, sampled, raw))


@triton.jit
def _log_probability(value, stats_ptr, used_P):
    """value - log of the row's sum of exponentials; NaN where the row holds NaN or its maximum is not finite."""
    top_P = tl.load(stats_ptr, mask=used_P, other=float("-inf"))
    total_P = tl.load(stats_ptr + 1, mask=used_P, other=0.0)
    top = tl.max(top_P, 0)
    weight_P = tl.where(top_P == float("-inf"), 0.0, tl.exp2((top_P - top) * _LOG2_E))
    return (value - top) - tl.log(tl.sum(total_P * weight_P, 0))


def _cut(scaled_SV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """scaled_SV with -inf where top-k and top-p cut."""
    rows, num_ids = scaled_SV.shape
    kept_SV = torch.empty(rows, num_ids, dtype=torch.float32, device=scaled_SV.device)
    # In 2^-53: a float argument would lose half of its digits.
    share = round(top_p * 2**53)
    flags: dict[str, Any] = {"RANK": 0 < top_k < num_ids, "SHARE": top_p < 1.0}
    _keep[(rows,)](
        scaled_SV, kept_SV, scaled_SV.stride(0), num_ids, top_k, share,
        BLOCK=_CUT_BLOCK, num_warps=_CUT_WARPS, **flags,
    )  # fmt: skip
    return kept_SV


# Neither number is worth a kernel of its own when it happens to be 1.
@triton.jit(do_not_specialize=["top_k", "share"])
def _keep(
    x_ptr,
    kept_ptr,
    x_stride,
    num_ids,
    top_k,
    share,
    RANK: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's cut is the least value that stays, and how many of its equals do, the lowest ids first."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    top_B = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, num_ids, BLOCK):
        id_B = first + tl.arange(0, BLOCK)
        top_B = tl.maximum(top_B, tl.load(x_ptr + id_B, mask=id_B < num_ids, other=float("-inf")))
    top = tl.max(top_B, 0)
    least = tl.full((), 0, tl.uint32)
    equals = tl.full((), 1 << 40, tl.int64)
    if RANK:
        least = _least(x_ptr, num_ids, top, top_k, True, BLOCK)
        above, _ = _sums(x_ptr, num_ids, top, least, True, BLOCK)
        equals = (top_k - above).to(tl.int64)
    if SHARE:
        above, same = _sums(x_ptr, num_ids, top, least, False, BLOCK)
        total = above + same
        if RANK:
            # Of the equals of the last rank only so many take part; each has the same weight.
            _, count = _sums(x_ptr, num_ids, top, least, True, BLOCK)
            total = above + same // count * equals
        wanted = tl.maximum(tl.ceil(total.to(tl.float64) * (share.to(tl.float64) * 2.0**-53)).to(tl.int64), 1)
        by_share = _least(x_ptr, num_ids, top, wanted, False, BLOCK)
        above, same = _sums(x_ptr, num_ids, top, by_share, False, BLOCK)
        _, count = _sums(x_ptr, num_ids, top, by_share, True, BLOCK)
        weight = tl.maximum(same // tl.maximum(count, 1), 1)
        needed = (wanted - above + weight - 1) // weight
        equals = tl.where(by_share == least, tl.minimum(equals, needed), needed)
        least = by_share
    seen = tl.full((), 0, tl.int64)
    for first in tl.range(0, num_ids, BLOCK):
        id_B = first + tl.arange(0, BLOCK)
        inside_B = id_B < num_ids
        x_B = tl.load(x_ptr + id_B, mask=inside_B, other=float("-inf"))
        rank_B = _rank(x_B)
        equal_B = ((rank_B == least) & inside_B).to(tl.int32)
        before_B = seen + tl.cumsum(equal_B, 0) - equal_B
        stays_B = (rank_B > least) | ((rank_B == least) & (before_B < equals))
        tl.store(kept_ptr + row * num_ids + id_B, tl.where(stays_B, x_B, float("-inf")), mask=inside_B)
        seen += tl.sum(equal_B, 0)


@triton.jit
def _rank(x_B):
    """uint32 in the order of the values; -0 counts as 0."""
    bits_B = (x_B + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits_B < 0, ~bits_B, bits_B | -(2**31)).to(tl.uint32, bitcast=True)


@triton.jit
def _weight(x_B, top, COUNT: tl.constexpr):
    """One, or the probability over the largest one in units of 2^-43: whole numbers, whose sums keep their bits.

    int32 or int64: a step of `_least` has little else to do than add them.
    """
    if COUNT:
        weight_B = tl.full(x_B.shape, 1, tl.int32)
    else:
        weight_B = (tl.exp2((x_B - top) * _LOG2_E) * 2.0**43).to(tl.int64)
    return weight_B


@triton.jit
def _sums(x_ptr, num_ids, top, rank, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Weights of the values above a rank, and at it."""
    above_B = tl.zeros([BLOCK], tl.int32 if COUNT else tl.int64)
    same_B = tl.zeros([BLOCK], tl.int32 if COUNT else tl.int64)
    for first in tl.range(0, num_ids, BLOCK):
        id_B = first + tl.arange(0, BLOCK)
        inside_B = id_B < num_ids
        x_B = tl.load(x_ptr + id_B, mask=inside_B, other=float("-inf"))
        rank_B, weight_B = _rank(x_B), tl.where(inside_B, _weight(x_B, top, COUNT), 0)
        above_B += tl.where(rank_B > rank, weight_B, 0)
        same_B += tl.where(rank_B == rank, weight_B, 0)
    return tl.sum(above_B, 0), tl.sum(same_B, 0)


@triton.jit
def _least(x_ptr, num_ids, top, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The highest rank from which on the weights reach `wanted`, two bits a pass over the row."""
    found = tl.full((), 0, tl.uint32)
    unit = tl.full((), 1 << 30, tl.uint32)
    for _ in tl.range(0, 16):
        one_B = tl.zeros([BLOCK], tl.int32 if COUNT else tl.int64)
        two_B = tl.zeros([BLOCK], tl.int32 if COUNT else tl.int64)
        three_B = tl.zeros([BLOCK], tl.int32 if COUNT else tl.int64)
        for first in tl.range(0, num_ids, BLOCK):
            id_B = first + tl.arange(0, BLOCK)
            inside_B = id_B < num_ids
            x_B = tl.load(x_ptr + id_B, mask=inside_B, other=float("-inf"))
            rank_B, weight_B = _rank(x_B), tl.where(inside_B, _weight(x_B, top, COUNT), 0)
            one_B += tl.where(rank_B >= found + unit, weight_B, 0)
            two_B += tl.where(rank_B >= found + 2 * unit, weight_B, 0)
            three_B += tl.where(rank_B >= found + 3 * unit, weight_B, 0)
        one, two, three = tl.sum(one_B, 0), tl.sum(two_B, 0), tl.sum(three_B, 0)
        digit = (one >= wanted).to(tl.uint32) + (two >= wanted).to(tl.uint32) + (three >= wanted).to(tl.uint32)
        found += digit * unit
        unit = unit >> 2
    return found
