"""MXFP4 weights in the order in which a tensor core's lanes hold them: the packed format, its writer and its reader.

A tile is 64 rows x 64 columns: 512 words of 32 bits, one for each (warp 4, row 8, quad 4, group 2, block 2), C order.
A word holds the eight values at rows n, n + 8 and columns k, k + 1, k + 8, k + 9, where n = 16 warp + row and
k = 32 group + 16 block + 2 quad: what one lane needs of a 16 x 16 operand. The four values p = (row + 8) +
2 (column + 8) of even columns have their sign, exponent (2) and mantissa bits at BITS[p], those of odd columns 16 bits
on, round the word's end: one turn of the word and one mask make a pair of bf16 of three of the four.

Exponents: one byte for each (warp, row, row + 8, group) of a tile, E8M0 scale + 126. The bf16 read out of a word is
2^126 too small (bf16 has 8 exponent bits, E2M1 has 2), which the exponent makes up for.

Invariant: unpack(pack(x)) == x. Tiles run over columns first; columns are padded with zeros to 256, rows to 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from schemas.errors import ContractError

#: Bit of sign, high exponent, low exponent, mantissa of value p, in an even column.
BITS = ((13, 6, 5, 4), (9, 2, 1, 0), (3, 28, 27, 26), (15, 8, 7, 14))
#: The largest scale byte that a packed weight holds: 2^1, for values up to 12.
LARGEST_SCALE = 128


@dataclass(frozen=True)
class Mxfp4Weight:
    """words int32 [tiles * 16, 32] and exponents int32 [tiles * 32], four bytes each, of a [num_rows, num_columns]."""

    words: torch.Tensor
    exponents: torch.Tensor
    num_rows: int
    num_columns: int

    @property
    def column_tiles(self) -> int:
        """Tiles along K, a multiple of four."""
        return -(-self.num_columns // 256) * 4


def _places() -> Iterator[tuple[int, int, int, int]]:
    """(value p, bit of its code, 0 for an even column or 1, place in a word) of each bit of a word."""
    for value, places in enumerate(BITS):
        for i, place in enumerate(places):
            for odd in range(2):
                yield value, 3 - i, odd, (place + 16 * odd) % 32


def pack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Mxfp4Weight:
    """Reorder `blocks` uint8 [N, K/2] and `scales` uint8 [N, K/32] of `kernels.quant` for `mxfp4_mm`.

    Raises ContractError for a scale above 2 (byte 128), which the decoder's bf16 cannot hold, and for NaN (255):
    such a weight has values beyond 12 and goes through `row_invariant_mm` on its bf16 values instead.
    """
    num_rows, num_columns = blocks.shape[0], blocks.shape[1] * 2
    largest = int(scales.max()) if scales.numel() else 0
    if largest > LARGEST_SCALE:
        raise ContractError("MXFP4 weight", expected=f"scale bytes up to {LARGEST_SCALE}", found=str(largest))
    row_tiles, column_tiles = -(-num_rows // 64), -(-num_columns // 256) * 4
    pad_rows, pad_columns = row_tiles * 64 - num_rows, column_tiles * 64 - num_columns
    codes = torch.stack([blocks & 15, blocks >> 4], -1).reshape(num_rows, num_columns)
    codes = F.pad(codes, (0, pad_columns, 0, pad_rows))
    # [tile, warp, n + 8, row | tile, group, block, k + 8, quad, k + 1] to words of [.., k + 8, n + 8, k + 1].
    codes = codes.view(row_tiles, 4, 2, 8, column_tiles, 2, 2, 2, 4, 2).permute(0, 4, 1, 3, 8, 5, 6, 7, 2, 9).int()
    codes = codes.reshape(-1, 4, 2)
    words = torch.zeros_like(codes[:, 0, 0])
    for value, bit, odd, place in _places():
        words |= (codes[:, value, odd] >> bit & 1) << place
    exponents = F.pad(scales.int() + 126, (0, pad_columns // 32, 0, pad_rows)).to(torch.uint8)
    exponents = exponents.view(row_tiles, 4, 2, 8, column_tiles, 2).permute(0, 4, 1, 3, 2, 5)
    exponents = exponents.reshape(-1, 4).view(torch.int32).flatten()
    return Mxfp4Weight(words.view(-1, 32), exponents, num_rows, num_columns)


def join_mxfp4(weights: Sequence[Mxfp4Weight]) -> Mxfp4Weight | None:
    """The weights one under the other, or None where one but the last ends in the middle of a tile of 64 rows."""
    if any(w.num_rows % 64 for w in weights[:-1]) or len({w.num_columns for w in weights}) > 1:
        return None
    words, exponents = (torch.cat(parts) for parts in zip(*((w.words, w.exponents) for w in weights), strict=True))
    return Mxfp4Weight(words, exponents, sum(w.num_rows for w in weights), weights[0].num_columns)


def split_mxfp4(whole: Mxfp4Weight, parts: Sequence[Mxfp4Weight]) -> list[Mxfp4Weight]:
    """Views of what `join_mxfp4` made of `parts`."""
    words, exponents = (
        whole.words.split([len(p.words) for p in parts]),
        whole.exponents.split([len(p.exponents) for p in parts]),
    )
    return [Mxfp4Weight(w, e, p.num_rows, p.num_columns) for w, e, p in zip(words, exponents, parts, strict=True)]


def unpack_mxfp4(weight: Mxfp4Weight) -> torch.Tensor:
    """The weight's values, bf16 [N, K], by plain torch on any device."""
    column_tiles = weight.column_tiles
    row_tiles = weight.words.numel() // 512 // column_tiles
    words = weight.words.flatten()
    codes = torch.zeros(len(words), 4, 2, dtype=torch.int32, device=words.device)
    for value, bit, odd, place in _places():
        codes[:, value, odd] |= (words >> place & 1) << bit
    codes = codes.view(row_tiles, column_tiles, 4, 8, 4, 2, 2, 2, 2, 2).permute(0, 2, 8, 3, 1, 5, 6, 7, 4, 9)
    codes = codes.reshape(row_tiles * 64, column_tiles * 64)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=codes.device)
    exponents = weight.exponents.view(torch.uint8).view(row_tiles, column_tiles, 4, 8, 2, 2).permute(0, 2, 4, 3, 1, 5)
    scales_N32 = exponents.reshape(row_tiles * 64, column_tiles * 2).int() - 126
    scales_N32 = torch.exp2(scales_N32.double() - 127).repeat_interleave(32, 1)
    values = (table[codes.long()].double() * scales_N32).to(torch.bfloat16)
    return values[: weight.num_rows, : weight.num_columns]
