"""Counter-based sampling: a token depends on its logits, its trajectory's key and its position, on nothing else.

Gumbel-max. Vocabulary index v of the token at position p (counted over the whole sequence, prompt included) draws
word v mod 4 of the Philox4x32-10 block with counter words (v div 4, p mod 2^32, p div 2^32, 0), least significant
first, and key words (key mod 2^32, key div 2^32). Of the word x: u = min((fp32(x) + 0.5) * 2^-32, 1 - 2^-24) and
noise = -log(-log1p(-u)), all in fp32. (The bound matters for the 128 largest words, whose u would round to 1.)
The sampled token maximises logit + noise over what temperature, top-k and top-p leave; ties go to the lowest id.

Cuts, in this order: logits / temperature; the top_k largest, ties to lower ids; of those, in descending order, each
whose predecessors hold less than top_p of their probability.

Letters: S rows, one a sequence; V vocabulary; B blocks of four ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10
_LARGEST_U = 1 - 2.0**-24
#: Rows whose Philox state is held at once: eight rows of a 49k vocabulary are 5 MB, which stays in cache.
_PHILOX_ROWS = 8
_SUM_BLOCK = 256


@dataclass(frozen=True)
class SamplingParams:
    """top_k 0 and top_p 1 cut nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Sampled:
    """ids int64 [S]; log-probabilities fp32 [S] of the raw model and of the distribution sampled from."""

    ids_S: torch.Tensor
    raw_S: torch.Tensor
    sampled_S: torch.Tensor


def sample(logits_SV: torch.Tensor, keys: Sequence[int], positions: Sequence[int], params: SamplingParams) -> Sampled:
    """One token a row. logits fp32; keys: 64-bit, one a row; positions: of the tokens to be sampled.

    A row without a finite maximum gives raw and sampled log-probabilities of NaN; the caller has to refuse it.
    """
    num_ids = logits_SV.shape[1]
    scaled_SV = logits_SV if params.temperature == 1.0 else logits_SV / params.temperature
    cuts = 0 < params.top_k < num_ids or params.top_p < 1.0
    if cuts:
        scaled_SV = torch.stack([_cut(row_V, params) for row_V in scaled_SV])
    scores_SV = gumbel_noise(keys, positions, num_ids, logits_SV.device).add_(scaled_SV)
    ids_S = scores_SV.argmax(-1)
    raw_S = _log_probability(logits_SV, ids_S)
    same = not cuts and params.temperature == 1.0
    return Sampled(ids_S, raw_S, raw_S if same else _log_probability(scaled_SV, ids_S))


def gumbel_noise(
    keys: Sequence[int], positions: Sequence[int], num_ids: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """fp32 [S, num_ids], see `noise_of_words_`."""
    words_SV = torch.empty(len(keys), num_ids, dtype=torch.float32, device=device)
    for first in range(0, len(keys), _PHILOX_ROWS):
        rows = slice(first, first + _PHILOX_ROWS)
        words_SB4 = philox_words(keys[rows], positions[rows], -(-num_ids // 4), device)
        words_SV[rows] = words_SB4.flatten(1)[:, :num_ids]
    return noise_of_words_(words_SV)


def noise_of_words_(words: torch.Tensor) -> torch.Tensor:
    """Words, as fp32, to Gumbel noise in place: finite, from -2.9 (largest word) to 22.9 (word 0)."""
    u = words.add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_U)
    return u.neg_().log1p_().neg_().log_().neg_()


def philox_words(
    keys: Sequence[int], positions: Sequence[int], num_blocks: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Words of blocks 0..num_blocks-1 of each row, int64 [S, num_blocks, 4], each in 0..2^32-1."""

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device).unsqueeze(1)

    shape = (len(keys), num_blocks)
    c0_SB = torch.arange(num_blocks, device=device).expand(shape).contiguous()
    c1_SB = column([p & _WORD for p in positions]).expand(shape).contiguous()
    c2_SB = column([p >> 32 for p in positions]).expand(shape).contiguous()
    c3_SB = torch.zeros_like(c0_SB)
    key0_S1, key1_S1 = column([k & _WORD for k in keys]), column([k >> 32 for k in keys])
    high_SB, product_SB = torch.empty_like(c0_SB), torch.empty_like(c0_SB)
    for _ in range(_ROUNDS):
        # The product of two words may exceed 2^63: int64 wraps, so the mask also clears the shifted-in sign.
        torch.mul(c0_SB, _MULTIPLIERS[0], out=product_SB)
        torch.bitwise_right_shift(product_SB, 32, out=high_SB)
        high_SB.bitwise_and_(_WORD).bitwise_xor_(c3_SB).bitwise_xor_(key1_S1)
        torch.bitwise_and(product_SB, _WORD, out=c3_SB)
        torch.mul(c2_SB, _MULTIPLIERS[1], out=product_SB)
        c2_SB, high_SB = high_SB, c2_SB
        torch.bitwise_right_shift(product_SB, 32, out=high_SB)
        high_SB.bitwise_and_(_WORD).bitwise_xor_(c1_SB).bitwise_xor_(key0_S1)
        torch.bitwise_and(product_SB, _WORD, out=c1_SB)
        c0_SB, high_SB = high_SB, c0_SB
        key0_S1, key1_S1 = (key0_S1 + _WEYL[0]) & _WORD, (key1_S1 + _WEYL[1]) & _WORD
    return torch.stack((c0_SB, c1_SB, c2_SB, c3_SB), -1)


def _log_probability(logits_SV: torch.Tensor, ids_S: torch.Tensor) -> torch.Tensor:
    """log softmax at ids_S, fp32 [S]; -inf logits are allowed."""
    max_S1 = logits_SV.amax(-1, keepdim=True)
    weights_SV = (logits_SV - max_S1).exp_()
    # Sums of fixed blocks, then of the blocks: one long sum would be shared out among threads when rows are few.
    blocks_SBX = F.pad(weights_SV, (0, -logits_SV.shape[1] % _SUM_BLOCK)).unflatten(1, (-1, _SUM_BLOCK))
    log_sum_S = blocks_SBX.sum(-1).sum(-1).log()
    return (logits_SV.gather(1, ids_S.unsqueeze(1)) - max_S1).squeeze(1) - log_sum_S


def _cut(scaled_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The row with -inf where top-k and top-p cut. Each row by itself, so that it cannot feel its neighbours."""
    num_ids = len(scaled_V)
    if 0 < params.top_k < num_ids:
        order = _largest(scaled_V, params.top_k)
        if params.top_p < 1.0:
            order = order[: _nucleus(scaled_V[order], torch.logsumexp(scaled_V[order].double(), 0), params.top_p)]
    else:
        # Seldom more than a few hundred ids are needed; a sort of the whole vocabulary is fifty times as slow.
        total = torch.logsumexp(scaled_V.double(), 0)
        width = min(256, num_ids)
        while True:
            order = _largest(scaled_V, width)
            count = _nucleus(scaled_V[order], total, params.top_p)
            if count < width or width == num_ids:
                break
            width = min(16 * width, num_ids)
        order = order[:count]
    kept_V = torch.full_like(scaled_V, float("-inf"))
    kept_V[order] = scaled_V[order]
    return kept_V


def _largest(values_V: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest values, descending, equal ones by ascending index."""
    least = torch.topk(values_V, count).values[-1]
    candidates = (values_V >= least).nonzero().squeeze(1)
    order = torch.sort(values_V[candidates], descending=True, stable=True).indices
    return candidates[order[:count]]


def _nucleus(values: torch.Tensor, log_total: torch.Tensor, top_p: float) -> int:
    """How many of descending values it takes until the ones before hold top_p; at least one."""
    probabilities = (values.double() - log_total).exp()
    before = probabilities.cumsum(0) - probabilities
    return max(1, int((before < top_p).sum()))
