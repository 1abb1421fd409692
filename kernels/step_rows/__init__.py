"""Around a decode step's model: what its rows are, from four integers a row that the host sends, and what comes back.

Integers alone, a few bytes a row: on a GPU one launch each, since the dozen single operations take as long as two
layers of a small model.

Shape letters: N decode rows, S slots, P pages of a sequence at most, W of them that attention may see, N1 = N + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch

from schemas.errors import ContractError

Implementation = Literal["kernel", "reference"]


@dataclass(frozen=True)
class DecodeRows:
    """int64: ids, positions, places in the cache (page * page_tokens + offset), slots, sampling keys of the rows, and
    the positions of the tokens to be sampled. int32: page tables [N, W], row offsets [N + 1], KV lengths."""

    ids_N: torch.Tensor
    positions_N: torch.Tensor
    kv_slots_N: torch.Tensor
    slots_N: torch.Tensor
    keys_N: torch.Tensor
    next_positions_N: torch.Tensor
    table_NW: torch.Tensor
    cu_rows_N1: torch.Tensor
    kv_tokens_N: torch.Tensor


def decode_rows(
    rows_4N: torch.Tensor,
    tables_SP: torch.Tensor,
    last_ids_S: torch.Tensor,
    keys_S: torch.Tensor,
    *,
    page_tokens: int,
    width: int,
    impl: Implementation | None = None,
) -> DecodeRows:
    """Rows of a decode step; tables_SP learns each row's page, in place.

    rows_4N: int32, contiguous: ids, or -1 for last_ids_S of the slot; positions; slots; the page of the position. Rows
    of one slot are alike, or follow one another across at most one page that the table does not know.
    tables_SP: int32, contiguous; last_ids_S and keys_S: int64. width: W. impl: None takes the kernel on CUDA and the
    reference elsewhere; a name forces one. ContractError where sizes or types do not fit.
    """
    slots = len(tables_SP)
    rules = (
        (rows_4N.dim() == 2 and len(rows_4N) == 4 and rows_4N.is_contiguous(), "contiguous rows [4, N]", rows_4N.shape),
        (tables_SP.is_contiguous() and 0 < width <= tables_SP.shape[1], f"a table of {width} pages", tables_SP.shape),
        (rows_4N.dtype == tables_SP.dtype == torch.int32, "rows and tables in int32", rows_4N.dtype),
        (last_ids_S.dtype == keys_S.dtype == torch.int64, "ids and keys in int64", last_ids_S.dtype),
        (last_ids_S.shape == keys_S.shape == (slots,), f"an id and a key for each of {slots} slots", keys_S.shape),
    )
    for holds, expected, found in rules:
        if not holds:
            raise ContractError("decode_rows", expected=expected, found=str(found))
    chosen = _implementation(impl, rows_4N)
    return chosen.decode_rows(rows_4N, tables_SP, last_ids_S, keys_S, page_tokens=page_tokens, width=width)


def keep_results(
    ids_R: torch.Tensor,
    raw_R: torch.Tensor,
    sampled_R: torch.Tensor,
    slots_R: torch.Tensor,
    last_ids_S: torch.Tensor,
    *,
    impl: Implementation | None = None,
) -> torch.Tensor:
    """int32 [3, R]: ids and the bits of both fp32 log-probabilities; last_ids_S of the slots becomes ids, in place.

    ids_R and slots_R: int64; of results of one slot that differ, any is kept in last_ids_S. impl: as of `decode_rows`.
    """
    return _implementation(impl, ids_R).keep_results(ids_R, raw_R, sampled_R, slots_R, last_ids_S)


def _implementation(impl: Implementation | None, rows: torch.Tensor) -> ModuleType:
    # Triton is not installed, or has no driver, on machines that only run the reference.
    if impl == "kernel" or (impl is None and rows.is_cuda):
        from kernels.step_rows import kernel as chosen
    else:
        from kernels.step_rows import reference as chosen
    return chosen
