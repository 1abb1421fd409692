"""Shard bytes: per-token rows in plain safetensors, laid out so that a token range is one byte range.

    u64 little-endian header length | JSON header, padded with spaces | tensors, each [rows, ...], row-major

The header is padded so that the data starts at a multiple of 4096 bytes. A hidden-state shard has one tensor; a
range of it is one trajectory's, and its table row holds a CRC-32 (zlib) for each block of 256 rows counted from
the trajectory's first row, since a reader of a range never sees the whole object. A token shard says the same in its
own metadata, for blocks counted from each column's first row: `crcs.COLUMN`, eight hexadecimal digits a block.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from schemas.errors import FormatError

ALIGN_BYTES = 4096
BLOCK_ROWS = 256
#: The longest header that is read: what the safetensors library reads too.
MAX_HEADER_BYTES = 100_000_000
#: metadata["format"] of token shards with CRCs; those of version 0.1 have no metadata.
TOKENS_FORMAT = "opd-tokens-2"

#: safetensors name -> bytes an element. bf16 and fp8 have no numpy dtype: they travel as unsigned integers.
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "I16": 2, "U8": 1, "BOOL": 1}
_CARRIER = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F8_E4M3": np.uint8, "I64": np.int64,
    "I32": np.int32, "I16": np.int16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


class BlobReader(Protocol):
    """What `ml` needs of a store: bytes of a key, whole or a range. Raises StoreError when it cannot."""

    def get(self, key: str) -> bytes: ...

    def get_range(self, key: str, start: int, length: int) -> bytes: ...


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a shard: dtype (safetensors name), shape, and its byte range from the start of the object."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int

    @property
    def row_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype] * int(np.prod(self.shape[1:], dtype=np.int64))


def encode(tensors: Mapping[str, tuple[str, np.ndarray]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Whole shard. tensors: name -> (dtype name, C-contiguous array of the carrier type, first axis = rows)."""
    return b"".join(encode_parts(tensors, metadata))


def encode_parts(
    tensors: Mapping[str, tuple[str, np.ndarray]], metadata: Mapping[str, str] | None = None
) -> list[memoryview]:
    """The shard that `encode` makes, in parts that follow one another; tensors are not copied."""
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    chunks: list[memoryview] = []
    offset = 0
    for name, (dtype, array) in tensors.items():
        if array.dtype != _CARRIER[dtype]:
            raise TypeError(f"{name}: {dtype} travels as {_CARRIER[dtype].__name__}, not {array.dtype}")
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = -(8 + len(text)) % ALIGN_BYTES + len(text)
    return [memoryview(struct.pack("<Q", padded) + text.ljust(padded)), *chunks]


def encode_tokens(columns: Mapping[str, tuple[str, np.ndarray]]) -> bytes:
    """A whole token shard, as `encode` makes it, with the CRC-32 of each block of BLOCK_ROWS rows of each column."""
    crcs = {f"crcs.{name}": "".join(f"{crc:08x}" for crc in block_crcs(rows)) for name, (_, rows) in columns.items()}
    return encode(columns, {"format": TOKENS_FORMAT} | crcs)


def read_head(read: BlobReader, key: str) -> bytes:
    """An object's first bytes, its header whole: one read, or two where the header is longer than ALIGN_BYTES.

    Raises FormatError for a length that no header has, StoreError when the object has fewer bytes or cannot be read.
    """
    head = read.get_range(key, 0, ALIGN_BYTES)
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(key, expected=f"a header of at most {MAX_HEADER_BYTES} bytes", found=f"{length} bytes",
                          safe="every other object", next_command="opd repair RUN")  # fmt: skip
    more = 8 + length - len(head)
    return head + read.get_range(key, len(head), more) if more > 0 else head


def decode_header(head: bytes | memoryview, where: str) -> dict[str, TensorSpec]:
    """Specs of all tensors from an object's first bytes (the header must be whole)."""
    if len(head) < 8:
        raise FormatError(where, expected="a safetensors shard", found=f"{len(head)} bytes")
    (length,) = struct.unpack_from("<Q", head)
    if length > MAX_HEADER_BYTES or len(head) < 8 + length:
        raise FormatError(where, expected=f"a header of {length} bytes", found=f"{len(head) - 8} bytes")
    try:
        header = json.loads(bytes(head[8 : 8 + length]))
        specs = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                spec = TensorSpec(entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start)
                if spec.length != ELEMENT_BYTES[spec.dtype] * int(np.prod(spec.shape, dtype=np.int64)):
                    raise ValueError(f"{name}: shape {spec.shape} does not fill {spec.length} bytes")
                specs[name] = spec
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{where}, header", expected="safetensors JSON", found=str(error)) from error
    return specs


def decode_metadata(head: bytes | memoryview, where: str) -> dict[str, str]:
    """The header's metadata, empty when it has none; checks as decode_header."""
    decode_header(head, where)
    (length,) = struct.unpack_from("<Q", head)
    metadata = json.loads(bytes(head[8 : 8 + length])).get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{where}, header", expected="metadata of text values", found=repr(metadata)[:200])
    return metadata


def decode_token_crcs(head: bytes | memoryview, where: str) -> dict[str, np.ndarray] | None:
    """CRC-32 of each block of each column, uint32 [blocks]; None for a shard that does not say them (version 0.1).

    Raises FormatError naming the column whose CRCs are missing, unreadable, or not one a block.
    """
    metadata = decode_metadata(head, where)
    if metadata.get("format") != TOKENS_FORMAT:
        return None
    out = {}
    for name, spec in decode_header(head, where).items():
        num_blocks = -(-spec.shape[0] // BLOCK_ROWS) if spec.shape else 0
        text = metadata.get(f"crcs.{name}", "")
        try:
            crcs = np.array([int(text[i : i + 8], 16) for i in range(0, len(text), 8)], np.uint32)
        except (ValueError, OverflowError):
            crcs = None
        if crcs is None or len(text) != 8 * num_blocks:
            raise FormatError(f"{where}, header, column {name}", expected=f"the CRCs of {num_blocks} blocks",
                              found=f"{len(text)} characters", safe="every other object",
                              next_command="opd repair RUN")  # fmt: skip
        out[name] = crcs
    return out


def decode(data: bytes | memoryview, where: str) -> dict[str, np.ndarray]:
    """All tensors of a whole shard, as views in their carrier types; read-only where `data` is."""
    out = {}
    for name, spec in decode_header(data, where).items():
        if spec.start + spec.length > len(data):
            raise FormatError(
                f"{where}, tensor {name}", expected=f"{spec.start + spec.length} bytes", found=f"{len(data)}"
            )
        flat = np.frombuffer(
            data, _CARRIER[spec.dtype], count=int(np.prod(spec.shape, dtype=np.int64)), offset=spec.start
        )
        out[name] = flat.reshape(spec.shape)
    return out


def block_crcs(rows: np.ndarray) -> list[int]:
    """CRC-32 of each block of BLOCK_ROWS rows; the last block may be short."""
    rows = np.ascontiguousarray(rows)
    return [zlib.crc32(rows[i : i + BLOCK_ROWS].tobytes()) for i in range(0, len(rows), BLOCK_ROWS)]


def check_block_crcs(rows: np.ndarray, crcs: Sequence[int], where: str, first_block: int = 0) -> None:
    """Raises FormatError naming the first block whose CRC differs. first_block: the number of the first one given."""
    found = block_crcs(rows)
    if len(found) != len(crcs):
        raise FormatError(where, expected=f"{len(crcs)} blocks", found=f"{len(found)}")
    for index, (have, want) in enumerate(zip(found, crcs, strict=True), first_block):
        if have != want:
            raise FormatError(f"{where}, block {index} (rows from {index * BLOCK_ROWS})",
                              expected=f"CRC {want:08x}", found=f"{have:08x}",
                              safe="every other object", next_command="opd repair RUN")  # fmt: skip
