"""MXFP4 weights in the order in which a tensor core's lanes hold them: the packed format, its writer and its reader.

A tile is 32 rows x 128 columns: 512 words of 32 bits, one for each (octet 4, row 8, quad 4, group 4), C order. A word
holds eight values of one row, 8 octet + row, at columns k, k + 1 for k = 32 group + 2 quad + 8 p, p = 0 to 3: what one
lane needs of that row for two steps of 16 columns. The value at column k of pair p has its sign, exponent (2) and
mantissa bits at BITS[p], the one at k + 1 16 bits on, round the word's end: one turn of the word and one mask make a
pair of bf16 of three of the four.

Exponents: one byte for each (octet, row, group) of a tile, E8M0 scale + 126. The bf16 read out of a word is
2^126 too small (bf16 has 8 exponent bits, E2M1 has 2), which the exponent makes up for.

Invariant: unpack(pack(x)) == x. Tiles run over columns first; columns are padded with zeros to 256, rows to 32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from schemas.errors import ContractError

#: Bit of sign, high exponent, low exponent, mantissa of a value of pair p, in its even column.
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
        """Tiles along K, an even number."""
        return -(-self.num_columns // 256) * 2

    @property
    def row_tiles(self) -> int:
        return -(-self.num_rows // 32)


def _places() -> Iterator[tuple[int, int, int, int]]:
    """(pair p, bit of a code, 0 for an even column or 1, place in a word) of each bit of a word."""
    for pair, places in enumerate(BITS):
        for i, place in enumerate(places):
            for odd in range(2):
                yield pair, 3 - i, odd, (place + 16 * odd) % 32


def pack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Mxfp4Weight:
    """Reorder `blocks` uint8 [N, K/2] and `scales` uint8 [N, K/32] of `kernels.quant` for `mxfp4_mm`.

    Raises ContractError for a scale above 2 (byte 128), which the decoder's bf16 cannot hold, and for NaN (255):
    such a weight has values beyond 12 and goes through `row_invariant_mm` on its bf16 values instead.
    """
    num_rows, num_columns = blocks.shape[0], blocks.shape[1] * 2
    largest = int(scales.max()) if scales.numel() else 0
    if largest > LARGEST_SCALE:
        raise ContractError("MXFP4 weight", expected=f"scale bytes up to {LARGEST_SCALE}", found=str(largest))
    row_tiles, column_tiles = -(-num_rows // 32), -(-num_columns // 256) * 2
    pad_rows, pad_columns = row_tiles * 32 - num_rows, column_tiles * 128 - num_columns
    codes = torch.stack([blocks & 15, blocks >> 4], -1).reshape(num_rows, num_columns)
    codes = F.pad(codes, (0, pad_columns, 0, pad_rows))
    # [tile, octet, row | tile, group, pair, quad, k + 1] to words of [.., pair, k + 1].
    codes = codes.view(row_tiles, 4, 8, column_tiles, 4, 4, 4, 2).permute(0, 3, 1, 2, 6, 4, 5, 7).int()
    codes = codes.reshape(-1, 4, 2)
    words = torch.zeros_like(codes[:, 0, 0])
    for pair, bit, odd, place in _places():
        words |= (codes[:, pair, odd] >> bit & 1) << place
    exponents = F.pad(scales.int() + 126, (0, pad_columns // 32, 0, pad_rows)).to(torch.uint8)
    exponents = exponents.view(row_tiles, 4, 8, column_tiles, 4).permute(0, 3, 1, 2, 4)
    exponents = exponents.reshape(-1, 4).view(torch.int32).flatten()
    return Mxfp4Weight(words.view(-1, 32), exponents, num_rows, num_columns)


def join_mxfp4(weights: Sequence[Mxfp4Weight]) -> Mxfp4Weight | None:
    """The weights one under the other, or None where one but the last ends in the middle of a tile of 32 rows."""
    if any(w.num_rows % 32 for w in weights[:-1]) or len({w.num_columns for w in weights}) > 1:
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
    row_tiles = weight.row_tiles
    words = weight.words.flatten()
    codes = torch.zeros(len(words), 4, 2, dtype=torch.int32, device=words.device)
    for pair, bit, odd, place in _places():
        codes[:, pair, odd] |= (words >> place & 1) << bit
    codes = codes.view(row_tiles, column_tiles, 4, 8, 4, 4, 4, 2).permute(0, 2, 3, 1, 5, 6, 4, 7)
    codes = codes.reshape(row_tiles * 32, column_tiles * 128)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=codes.device)
    exponents = weight.exponents.view(torch.uint8).view(row_tiles, column_tiles, 4, 8, 4).permute(0, 2, 3, 1, 4)
    scales_N32 = exponents.reshape(row_tiles * 32, column_tiles * 4).int() - 126
    scales_N32 = torch.exp2(scales_N32.double() - 127).repeat_interleave(32, 1)
    values = (table[codes.long()].double() * scales_N32).to(torch.bfloat16)
    return values[: weight.num_rows, : weight.num_columns]
