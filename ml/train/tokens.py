"""Token shards by byte range: of a shard, a trajectory's rows are read, whatever else lies in it.

A shard's header says the CRC-32 of each block of BLOCK_ROWS rows of each column. A reader takes the blocks that hold
its rows and checks those, so nothing is used that was not checked. Headers are read once and kept (20 bytes for 256
response rows): a trajectory is read once for each teacher and phase, in an order that no cache of shards could follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schemas.errors import ContractError, FormatError
from schemas.keys import digest_bytes
from schemas.shards import (
    BLOCK_ROWS,
    BlobReader,
    TensorSpec,
    block_crcs,
    check_block_crcs,
    decode,
    decode_header,
    decode_token_crcs,
    read_head,
)

#: The columns that training reads: safetensors dtype, numpy dtype.
_COLUMNS = {
    "prompt_ids": ("I32", np.dtype(np.int32)),
    "response_ids": ("I32", np.dtype(np.int32)),
    "logprobs_raw": ("F32", np.dtype(np.float32)),
    "logprobs_sampled": ("F32", np.dtype(np.float32)),
    "sampled_mask": ("U8", np.dtype(np.uint8)),
}


@dataclass(frozen=True)
class TokenShard:
    """One shard's header. specs and crcs (uint32 [blocks]) of the columns that training reads, by name."""

    store: BlobReader
    key: str
    specs: dict[str, TensorSpec]
    crcs: dict[str, np.ndarray]

    def read(
        self, trajectory_id: str, *, prompt: tuple[int, int], response: tuple[int, int], behaviour: bool = False
    ) -> dict[str, np.ndarray]:
        """prompt_ids int32 [P]; response_ids int32, logprobs_raw float32, sampled_mask uint8 [R]: one trajectory's.

        prompt, response: (first row, number of rows). behaviour: logprobs_sampled float32 [R] too. Raises
        ContractError when the shard has fewer rows, FormatError for a block that differs from its CRC, StoreError when
        a range cannot be read.
        """
        wanted = [name for name in _COLUMNS if behaviour or name != "logprobs_sampled"]
        rows = {name: prompt if name == "prompt_ids" else response for name in wanted}
        blocks = {name: self._blocks(name, trajectory_id, *of_name) for name, of_name in rows.items()}
        data = self._fetch([self._span(name, *of_name) for name, of_name in blocks.items()])
        out = {}
        for name, (first, stop) in blocks.items():
            column = np.frombuffer(data[self._span(name, first, stop)], _COLUMNS[name][1])
            where = f"{self.key}, column {name}"
            check_block_crcs(column, self.crcs[name][first:stop].tolist(), where, first)
            start = rows[name][0] - first * BLOCK_ROWS
            out[name] = column[start : start + rows[name][1]]
        return out

    def _blocks(self, name: str, trajectory_id: str, first_row: int, num_rows: int) -> tuple[int, int]:
        """First block and the one after the last of those that hold the rows."""
        found = self.specs[name].shape[0]
        if first_row < 0 or first_row + num_rows > found:
            raise ContractError(
                f"{self.key}, trajectory {trajectory_id}",
                expected=f"rows {first_row}..{first_row + num_rows} of {name}", found=f"{found} rows",
            )  # fmt: skip
        return first_row // BLOCK_ROWS, -(-(first_row + num_rows) // BLOCK_ROWS)

    def _span(self, name: str, first_block: int, stop_block: int) -> tuple[int, int]:
        """Start and end of blocks in the object, in bytes."""
        spec = self.specs[name]
        stop_row = min(stop_block * BLOCK_ROWS, spec.shape[0])
        return spec.start + first_block * BLOCK_ROWS * spec.row_bytes, spec.start + stop_row * spec.row_bytes

    def _fetch(self, spans: list[tuple[int, int]]) -> dict[tuple[int, int], memoryview]:
        """Bytes of each span. Spans that touch (columns of a small shard) come in one read."""
        runs: list[list[tuple[int, int]]] = []
        for span in sorted(spans):
            if runs and runs[-1][-1][1] == span[0]:
                runs[-1].append(span)
            else:
                runs.append([span])
        out = {}
        for run in runs:
            start, end = run[0][0], run[-1][1]
            data = memoryview(self.store.get_range(self.key, start, end - start))
            if len(data) != end - start:
                raise FormatError(f"{self.key}, bytes {start}..{end}", expected=f"{end - start} bytes",
                                  found=f"{len(data)}", next_command="opd repair RUN")  # fmt: skip
            out |= {(a, b): data[a - start : b - start] for a, b in run}
        return out


class TokenShards:
    """Headers of token shards, each read once. `open` is for one thread; a TokenShard may be read by many at once."""

    def __init__(self, store: BlobReader) -> None:
        self._store = store
        self._shards: dict[str, TokenShard] = {}

    def open(self, key: str, digest: str) -> TokenShard:
        """digest: SHA-256 of the whole object, for a shard that does not say its CRCs.

        Raises FormatError for what is no token shard, or not the one of the digest, StoreError when it cannot be read.
        """
        shard = self._shards.get(key)
        if shard is None:
            head = read_head(self._store, key)
            crcs = decode_token_crcs(head, key)
            if crcs is None:
                head = self._whole(key, digest)
                crcs = {name: np.array(block_crcs(rows), np.uint32) for name, rows in decode(head, key).items()}
            specs = decode_header(head, key)
            dtypes = {name: specs[name].dtype for name in _COLUMNS if name in specs and len(specs[name].shape) == 1}
            if dtypes != {name: dtype for name, (dtype, _) in _COLUMNS.items()}:
                raise FormatError(key, expected=f"a token shard with {', '.join(_COLUMNS)}", found=str(specs)[:500])
            shard = TokenShard(
                self._store, key, {name: specs[name] for name in _COLUMNS}, {name: crcs[name] for name in _COLUMNS}
            )
            self._shards[key] = shard
        return shard

    def _whole(self, key: str, digest: str) -> bytes:
        """A shard that does not say its CRCs (version 0.1): read whole, once, and checked by its digest."""
        data = self._store.get(key)
        found = digest_bytes(data)
        if found != digest:
            raise FormatError(key, expected=f"SHA-256 {digest}", found=found, safe="every other object",
                              next_command="opd repair RUN")  # fmt: skip
        return data
