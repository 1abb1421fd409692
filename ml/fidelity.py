"""What four bits cost a model: the distributions of its MXFP4 self against those of its bf16 self.

Every position of every context counts, the last too, which predicts the first token of a response.

Letters: N positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ml.checkpoint import fp8_exact, load_model
from ml.linear import Precision
from ml.teacher import Reading, hidden_states

_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Fidelity:
    """kl_mean, kl_max: KL(MXFP4 || bf16) of a position, in nats. top1_agreement: share of positions where both hold
    the same token for the likeliest. fp8_inexact: linears, of `linears`, whose MXFP4 values FP8 would change."""

    positions: int
    kl_mean: float
    kl_max: float
    top1_agreement: float
    linears: int
    fp8_inexact: int


@torch.no_grad()
def fidelity(
    folder: Path,
    contexts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    device: torch.device | str = "cpu",
    batch_tokens: int = 4096,
) -> Fidelity:
    """Compare a float model folder with its quantised self on non-empty contexts of token ids.

    The two are in memory one after the other. Raises as load_model and hidden_states do.
    """
    quantised_ND = _states(folder, "mxfp4", contexts, device, batch_tokens)[0]
    plain_ND, model = _states(folder, "bf16", contexts, device, batch_tokens)
    rows = max(1, _CHUNK_BYTES // (8 * vocab_size))
    kls, agreed = [], 0
    for quantised, plain in zip(quantised_ND.split(rows), plain_ND.split(rows), strict=True):
        # Both have the same head: it is never quantised.
        q_NV, p_NV = (torch.log_softmax(model.logits(h.to(device), vocab_size).double(), 1) for h in (quantised, plain))
        kls.append((q_NV.exp() * (q_NV - p_NV)).sum(1).cpu())
        agreed += int((q_NV.argmax(1) == p_NV.argmax(1)).sum())
    kl_N = torch.cat(kls)
    exact = fp8_exact(folder)
    return Fidelity(
        positions=len(kl_N),
        kl_mean=float(kl_N.mean()),
        kl_max=float(kl_N.max()),
        top1_agreement=agreed / len(kl_N),
        linears=len(exact),
        fp8_inexact=sum(not e for e in exact.values()),
    )


def _states(folder: Path, precision: Precision, contexts: Sequence[Sequence[int]], device, batch_tokens: int):
    """(bf16 states [N, D] of every position, model)."""
    model = load_model(folder, precision=precision, compute="bf16", device=device)
    # A reading's last token predicts nothing: one more is put there, which nobody reads.
    readings = [Reading(context[:1], [*context[1:], context[0]]) for context in contexts]
    return torch.cat(list(hidden_states(model, readings, batch_tokens=batch_tokens))), model
