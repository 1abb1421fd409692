"""Counter-based sampling: a token depends on its logits, its trajectory's key and its position, on nothing else.

Gumbel-max. Vocabulary index v of the token at position p (counted over the whole sequence, prompt included) draws
word v mod 4 of the Philox4x32-10 block with counter words (v div 4, p mod 2^32, p div 2^32, 0), least significant
first, and key words (key mod 2^32, key div 2^32). Of the word x: u = min((fp32(x) + 0.5) * 2^-32, 1 - 2^-24) and
noise = -log(-log1p(-u)), all in fp32. (The bound matters for the 128 largest words, whose u would round to 1.)
The sampled token maximises logit + noise over what temperature, top-k and top-p leave; ties go to the lowest id.

Cuts, in this order: logits / temperature; the top_k largest, ties to lower ids; of those, in descending order, each
whose predecessors hold less than top_p of their probability.

Invariant: a row's results have the same bits whatever other rows the call has. Words are the same on every kind of
device; logarithms, and so noise and log-probabilities, may differ between kinds in their last bits.

Shape letters: S rows, one a sequence; V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch

from schemas.errors import ContractError

Implementation = Literal["kernel", "reference"]


def sample(
    logits_SV: torch.Tensor,
    keys_S: torch.Tensor,
    positions_S: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    impl: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids int64 [S], raw fp32 [S], sampled fp32 [S]): one token a row and its log-probabilities.

    raw is that of the model (temperature 1, nothing cut), sampled that of the distribution sampled from. A row that
    holds NaN or whose maximum is not finite gives NaN for raw, and an id that means nothing: the caller has to
    refuse it.

    logits_SV: fp32, -inf allowed; rows may lie apart (stride), a row is contiguous. keys_S: int64, the bits of 64-bit
    keys. positions_S: int64, of the tokens to be sampled, not negative. top_k 0 and top_p 1 cut nothing; each cut makes
    the kernel read a row some twenty times more. impl: None takes the kernel on CUDA and the reference elsewhere; a
    name forces one. The kernel asks the host for nothing, so a CUDA graph can hold it. Raises ContractError where
    sizes or types do not fit.
    """
    _check(logits_SV, keys_S, positions_S, temperature)
    if impl is None:
        impl = "kernel" if logits_SV.is_cuda else "reference"
    if impl == "kernel":
        # Triton is not installed, or has no driver, on machines that only run the reference.
        from kernels.sampling.kernel import sample as draw
    else:
        from kernels.sampling.reference import sample as draw
    return draw(logits_SV, keys_S, positions_S, temperature, top_k, top_p)


def _check(logits_SV: torch.Tensor, keys_S: torch.Tensor, positions_S: torch.Tensor, temperature: float) -> None:
    rules = (
        (logits_SV.dtype == torch.float32, "logits in fp32", logits_SV.dtype),
        (logits_SV.dim() == 2 and logits_SV.shape[1] > 0, "logits [S, V] with V > 0", tuple(logits_SV.shape)),
        (logits_SV.stride(-1) == 1, "contiguous rows of logits", logits_SV.stride()),
        (keys_S.dtype == positions_S.dtype == torch.int64, "keys and positions in int64", keys_S.dtype),
        (keys_S.shape == positions_S.shape == logits_SV.shape[:1], "a key and a position a row", tuple(keys_S.shape)),
        (temperature > 0, "a positive temperature", temperature),
    )
    for holds, expected, found in rules:
        if not holds:
            raise ContractError("sampling", expected=expected, found=str(found))
