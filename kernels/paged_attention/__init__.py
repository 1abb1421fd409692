"""Causal grouped-query attention over a paged KV cache: the contract, and the one place that picks an implementation.

A page holds T tokens of every KV head; `page_table_SP[s, i]` is the page of tokens i*T .. i*T+T-1 of sequence s.
The keys of a row are cut at absolute positions, multiples of `split_tokens`. Each cut is reduced on its own to fp32
(max, sum of exponentials, weighted sum of values) and the cuts are merged in ascending order.

Invariant: the bits of an output row depend on its query, its sequence's keys and values up to its position, and
`split_tokens`. They do not depend on the other rows or sequences of the call, on their order, on which pages hold the
keys and how large these are, or on whether the row came in a prefill chunk or alone in a decode step.

Shape letters: N rows of the call, S sequences, H query heads, G KV heads (H % G == 0), C channels of a head,
P pages of the cache (in `page_table_SP`: pages of one sequence), T tokens of a page, S1 = S + 1.
"""

from __future__ import annotations

from typing import Literal

import torch

from schemas.errors import ContractError

Implementation = Literal["kernel", "reference"]


def write_kv(
    k_NGC: torch.Tensor,
    v_NGC: torch.Tensor,
    k_cache_PTGC: torch.Tensor,
    v_cache_PTGC: torch.Tensor,
    slots_N: torch.Tensor,
) -> None:
    """Store row n's key and value at token slot `slots_N[n]` (page * T + offset in the page) of the caches, in place.

    Rows and caches share a dtype; slots are int64 and distinct. Slots that are not named keep their contents.
    """
    for rows_NGC, cache_PTGC in ((k_NGC, k_cache_PTGC), (v_NGC, v_cache_PTGC)):
        cache_PTGC.view(-1, *cache_PTGC.shape[2:]).index_copy_(0, slots_N, rows_NGC)


def paged_attention(
    q_NHC: torch.Tensor,
    k_cache_PTGC: torch.Tensor,
    v_cache_PTGC: torch.Tensor,
    page_table_SP: torch.Tensor,
    cu_rows_S1: torch.Tensor,
    kv_tokens_S: torch.Tensor,
    *,
    split_tokens: int,
    single_rows: bool = False,
    impl: Implementation | None = None,
) -> torch.Tensor:
    """Attend each row to its own sequence's cached keys, up to and including the row's own position.

    q_NHC: queries, bf16 (or fp32 on the CPU). The rows of sequence s are cu_rows_S1[s] : cu_rows_S1[s + 1]; n of
    them stand at positions kv_tokens_S[s] - n .. kv_tokens_S[s] - 1, and their keys are in the cache already.
    k_cache_PTGC, v_cache_PTGC: contiguous, the dtype of q_NHC, finite everywhere (allocate them zeroed: a key that
    no row may see counts 0 times its value). page_table_SP, cu_rows_S1, kv_tokens_S: int32.
    Entries of the page table past a sequence's last page are not read. Scores are scaled by C ** -0.5.
    split_tokens: tokens between two cuts, a multiple of the page size or a divisor of it.
    single_rows: every sequence has exactly one row, which the host cannot see in cu_rows_S1; it saves a launch.
    impl: None takes the kernel on CUDA and the reference elsewhere; a name forces one.
    Returns o_NHC in the dtype of q_NHC. Raises ContractError where sizes do not fit together.
    """
    _check(q_NHC, k_cache_PTGC, v_cache_PTGC, page_table_SP, cu_rows_S1, kv_tokens_S, split_tokens, single_rows)
    if impl is None:
        impl = "kernel" if q_NHC.is_cuda else "reference"
    where = page_table_SP, cu_rows_S1, kv_tokens_S
    if impl == "kernel":
        # Triton is not installed, or has no driver, on machines that only run the reference.
        from kernels.paged_attention import kernel

        return kernel.paged_attention(
            q_NHC, k_cache_PTGC, v_cache_PTGC, *where, split_tokens=split_tokens, single_rows=single_rows
        )
    from kernels.paged_attention import reference

    return reference.paged_attention(q_NHC, k_cache_PTGC, v_cache_PTGC, *where, split_tokens=split_tokens)


def _check(q_NHC, k_cache_PTGC, v_cache_PTGC, page_table_SP, cu_rows_S1, kv_tokens_S, split_tokens, single_rows):
    heads, channels = q_NHC.shape[1:]
    page_tokens, kv_heads = k_cache_PTGC.shape[1:3]
    sequences = page_table_SP.shape[0]
    rules = (
        (k_cache_PTGC.shape == v_cache_PTGC.shape, "keys and values of one shape", tuple(v_cache_PTGC.shape)),
        (k_cache_PTGC.shape[3] == channels, f"caches of {channels} channels", k_cache_PTGC.shape[3]),
        (heads % kv_heads == 0, f"heads a multiple of {kv_heads} KV heads", heads),
        (k_cache_PTGC.dtype == v_cache_PTGC.dtype == q_NHC.dtype, f"caches of {q_NHC.dtype}", k_cache_PTGC.dtype),
        (cu_rows_S1.shape == (sequences + 1,), f"{sequences + 1} row offsets", tuple(cu_rows_S1.shape)),
        (kv_tokens_S.shape == (sequences,), f"{sequences} KV lengths", tuple(kv_tokens_S.shape)),
        (split_tokens > 0, "a positive split_tokens", split_tokens),
        (not single_rows or len(q_NHC) == sequences, f"{sequences} single rows", len(q_NHC)),
        (
            split_tokens % page_tokens == 0 or page_tokens % split_tokens == 0,
            f"split_tokens a multiple or a divisor of the page size {page_tokens}",
            split_tokens,
        ),
    )
    for holds, expected, found in rules:
        if not holds:
            raise ContractError("paged_attention", expected=expected, found=str(found))
