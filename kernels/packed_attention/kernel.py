"""Packed attention on CUDA by what ships with torch: which library takes which sequences.

Nothing here is a kernel of our own. cuDNN is the fastest attention on the card, but its packed form returned wrong
gradients when measured (BENCH.md), so it takes one sequence a call; torch's flash kernel takes many sequences a call
at half the speed. Long sequences therefore go to cuDNN one by one (neighbours of one length as a batch), and each run
of short ones to flash in one call. The operators are called on slices and write into whole tensors: autograd through
the slices would pad each slice's gradient to the pack and add the pads up.

Invariant: no sequence sees another's tokens. Gradients of queries are summed in no fixed order by either library.

Shape letters: N packed tokens, B sequences of one length T, H query heads, G KV heads (H % G == 0), C channels.
"""

from __future__ import annotations

from itertools import groupby

import torch

#: Tokens from which a sequence goes to cuDNN; a shorter one does not pay for a launch of its own.
LONG_TOKENS = 2048

_aten = torch.ops.aten


def attend(q_NHC: torch.Tensor, k_NGC: torch.Tensor, v_NGC: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """o_NHC for the sequences at rows first : last of each span; bf16."""
    return _Packed.apply(q_NHC, k_NGC, v_NGC, calls(spans))  # pyright: ignore[reportReturnType]


def calls(spans: list[tuple[int, int]]) -> list[list[int]]:
    """Offsets of each call: neighbouring short sequences share one, and so do neighbouring long ones of one length."""

    def length_if_long(span: tuple[int, int]) -> int:
        length = span[1] - span[0]
        return length if length >= LONG_TOKENS else 0

    runs = [list(members) for _, members in groupby(spans, length_if_long)]
    return [[run[0][0], *(last for _, last in run)] for run in runs]


def _is_long(call: list[int]) -> bool:
    return call[1] - call[0] >= LONG_TOKENS


def _offsets(call: list[int], device: torch.device) -> tuple[torch.Tensor, int]:
    """int32 offsets from the call's first token, and the longest sequence."""
    from_first = torch.tensor([offset - call[0] for offset in call], dtype=torch.int32)
    longest = int(from_first.diff().max())
    # Pinned, so that the copy does not wait for the device.
    return from_first.pin_memory().to(device, non_blocking=True), longest


def _batch(call: list[int], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """[B * T, H, C] as [B, H, T, C]."""
    return [x.unflatten(0, (len(call) - 1, -1)).transpose(1, 2) for x in tensors]


def _rows(x_BHTC: torch.Tensor) -> torch.Tensor:
    return x_BHTC.transpose(1, 2).flatten(0, 1)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_NHC, k_NGC, v_NGC, calls):
        o_NHC = torch.empty_like(q_NHC)
        extras = []
        for call in calls:
            rows = slice(call[0], call[-1])
            q, k, v = q_NHC[rows], k_NGC[rows], v_NGC[rows]
            if _is_long(call):
                # Returns output, log-sum-exp, four descriptions of packs (unused), seed, offset, mask.
                o, lse, *_, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
                    *_batch(call, q, k, v), None, True, 0.0, True, False
                )
                o_NHC[rows] = _rows(o)
                extras += [lse, seed, offset]
            else:
                cu_S1, longest = _offsets(call, q.device)
                o, lse, seed, offset, _ = _aten._flash_attention_forward(
                    q, k, v, cu_S1, cu_S1, longest, longest, 0.0, True, False
                )
                o_NHC[rows] = o
                extras += [lse, seed, offset]
        ctx.save_for_backward(q_NHC, k_NGC, v_NGC, o_NHC, *extras)
        ctx.calls = calls
        return o_NHC

    @staticmethod
    def backward(ctx, *grads):
        q_NHC, k_NGC, v_NGC, o_NHC, *extras = ctx.saved_tensors
        do_NHC = grads[0].contiguous()
        dq_NHC, dk_NGC, dv_NGC = torch.empty_like(q_NHC), torch.empty_like(k_NGC), torch.empty_like(v_NGC)
        for index, call in enumerate(ctx.calls):
            lse, seed, offset = extras[3 * index : 3 * index + 3]
            rows = slice(call[0], call[-1])
            do, q, k, v, o = (x[rows] for x in (do_NHC, q_NHC, k_NGC, v_NGC, o_NHC))
            if _is_long(call):
                longest = call[1] - call[0]
                parts = _aten._scaled_dot_product_cudnn_attention_backward(
                    *_batch(call, do, q, k, v, o), lse, seed, offset, None, None, None, longest, longest, 0.0, True
                )
                dq, dk, dv = (_rows(part) for part in parts)
            else:
                cu_S1, longest = _offsets(call, q.device)
                dq, dk, dv = _aten._flash_attention_backward(
                    do, q, k, v, o, lse, cu_S1, cu_S1, longest, longest, 0.0, True, seed, offset
                )
            dq_NHC[rows], dk_NGC[rows], dv_NGC[rows] = dq, dk, dv
        return dq_NHC, dk_NGC, dv_NGC, None
