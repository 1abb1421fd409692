"""Sampling in plain torch: the kernel's counterpart on machines without one, and what rollouts on a CPU run.

Letters: S rows, one a sequence; V vocabulary; B blocks of four ids.
"""

from __future__ import annotations

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


def sample(
    logits_SV: torch.Tensor,
    keys_S: torch.Tensor,
    positions_S: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the contract in kernels.sampling."""
    num_ids = logits_SV.shape[1]
    scaled_SV = logits_SV if temperature == 1.0 else logits_SV / temperature
    cuts = 0 < top_k < num_ids or top_p < 1.0
    if cuts:
        rows = [_cut(row_V, top_k, top_p) for row_V in scaled_SV]
        scaled_SV = torch.stack(rows) if rows else scaled_SV
    scores_SV = gumbel_noise(keys_S, positions_S, num_ids).add_(scaled_SV)
    ids_S = scores_SV.argmax(-1)
    raw_S = _log_probability(logits_SV, ids_S)
    same = not cuts and temperature == 1.0
    return ids_S, raw_S, raw_S if same else _log_probability(scaled_SV, ids_S)


def gumbel_noise(keys_S: torch.Tensor, positions_S: torch.Tensor, num_ids: int) -> torch.Tensor:
    """fp32 [S, num_ids], see `noise_of_words_`."""
    words_SV = torch.empty(len(keys_S), num_ids, dtype=torch.float32, device=keys_S.device)
    for first in range(0, len(keys_S), _PHILOX_ROWS):
        rows = slice(first, first + _PHILOX_ROWS)
        words_SB4 = philox_words(keys_S[rows], positions_S[rows], -(-num_ids // 4))
        words_SV[rows] = words_SB4.flatten(1)[:, :num_ids]
    return noise_of_words_(words_SV)


def noise_of_words_(words: torch.Tensor) -> torch.Tensor:
    """Words, as fp32, to Gumbel noise in place: finite, from -2.9 (largest word) to 22.9 (word 0)."""
    u = words.add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_U)
    return u.neg_().log1p_().neg_().log_().neg_()


def philox_words(keys_S: torch.Tensor, positions_S: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Words of blocks 0..num_blocks-1 of each row, int64 [S, num_blocks, 4], each in 0..2^32-1."""
    shape = (len(keys_S), num_blocks)
    keys_S1, positions_S1 = keys_S.unsqueeze(1), positions_S.unsqueeze(1)
    c0_SB = torch.arange(num_blocks, device=keys_S.device).expand(shape).contiguous()
    c1_SB = (positions_S1 & _WORD).expand(shape).contiguous()
    c2_SB = (positions_S1 >> 32).expand(shape).contiguous()
    c3_SB = torch.zeros_like(c0_SB)
    # The shift of a key whose highest bit is set brings in ones.
    key0_S1, key1_S1 = keys_S1 & _WORD, (keys_S1 >> 32) & _WORD
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


def _cut(scaled_V: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The row with -inf where top-k and top-p cut. Each row by itself, so that it cannot feel its neighbours."""
    num_ids = len(scaled_V)
    if 0 < top_k < num_ids:
        order = _largest(scaled_V, top_k)
        if top_p < 1.0:
            order = order[: _nucleus(scaled_V[order], torch.logsumexp(scaled_V[order].double(), 0), top_p)]
    else:
        # Seldom more than a few hundred ids are needed; a sort of the whole vocabulary is fifty times as slow.
        total = torch.logsumexp(scaled_V.double(), 0)
        width = min(256, num_ids)
        while True:
            order = _largest(scaled_V, width)
            count = _nucleus(scaled_V[order], total, top_p)
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
