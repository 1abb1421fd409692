"""x @ W.T for up to 64 rows of x and a bf16 weight on Hopper: which blocks of few_rows.cu serve a weight.

Invariant: K is summed in ascending steps of 16 in one fp32 sum, as in dense.py, so the bits are the library's.

Shape letters: M rows of x, N rows of the weight, K columns of both.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from kernels.scaled_mm.cuda import Kernel, tile_map

#: Rows of x that the kernel takes at most.
MOST_ROWS = 64
SOURCE = Path(__file__).with_name("few_rows.cu")
_THREADS = 160
_BARRIER_BYTES = 1024
#: Not all that there is: a block of the next product finds room beside those of what runs before it.
_SHARED_BYTES = 190 << 10
#: What a left operand of 64 rows reads past the last slot.
_PAST_BYTES = 8192
_MOST_OUTPUTS, _MOST_SLOTS = 128, 48
#: Of the L2 cache, in speeds of memory.
_L2_SPEED = 1.5


@dataclass(frozen=True)
class Block:
    """Compile-time parameters of few_rows.cu, which explains them."""

    outputs: int
    tiles: int
    fp32: bool
    gate: bool = False

    @property
    def defines(self) -> dict[str, int | str]:
        sums = self.outputs // 2
        names = [f"%{i}" for i in range(sums + 2)]
        return {
            "OUTPUTS": self.outputs, "TILES": self.tiles, "RESULT": "float" if self.fp32 else "unsigned short",
            "GATE": int(self.gate),
            "SUMS": ",".join(f'"+f"(sums[{i}])' for i in range(sums)),
            "OPERANDS": f'"{{{",".join(names[:sums])}}}, {names[sums]}, {names[sums + 1]}"',
        }  # fmt: skip

    def slots(self, x_rows: int) -> int:
        room = _SHARED_BYTES - _BARRIER_BYTES - _PAST_BYTES
        return min(room // (self.tiles * 128 * (x_rows + self.outputs)), _MOST_SLOTS)


@cache
def block_for(outputs: int, x_rows: int, fp32: bool, multiprocessors: int, least_outputs: int = 16) -> Block:
    """The block under which the busiest multiprocessor reads the least: of the weight, or of weight and x from L2."""

    def busiest(width: int) -> float:
        rounds = math.ceil(math.ceil(outputs / width) / multiprocessors)
        return rounds * max(width, (width + x_rows) / _L2_SPEED)

    width = min(range(least_outputs, _MOST_OUTPUTS + 8, 8), key=lambda width: (busiest(width), -width))
    return Block(width, 4 if width <= 32 else 2 if width <= 64 else 1, fp32)


@cache
def _kernel(block: Block, device: torch.device) -> Kernel:
    # The device is the key alone: a module belongs to the one that is current.
    return Kernel(SOURCE, "few_rows", block.defines, threads=_THREADS, shared_bytes=_SHARED_BYTES)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def takes(num_outputs: int, num_columns: int) -> bool:
    """Whether the kernel serves a weight of this shape."""
    return num_outputs % 8 == 0 and num_columns % 64 == 0


def lies_well(w_NK: torch.Tensor) -> bool:
    """Whether the copy engine reads the weight where it lies."""
    return w_NK.is_contiguous() and w_NK.data_ptr() % 16 == 0


def blocks(rows: int, num_outputs: int, dtype: torch.dtype, device: torch.device, *, gate: bool = False) -> set[Block]:
    """Those that may be the fastest. num_outputs: rows of the weight."""
    x_rows, fp32 = -(-rows // 8) * 8, dtype == torch.float32
    found = {block_for(num_outputs, x_rows, fp32, _multiprocessors(device), least) for least in (16, 32)}
    # Of a gate's blocks the width is even in eights.
    return {replace(b, outputs=-(-b.outputs // 16) * 16, gate=True) for b in found} if gate else found


def few_rows_mm(x_MK: torch.Tensor, w_NK: torch.Tensor, dtype: torch.dtype, block: Block) -> torch.Tensor:
    """x @ w.T in dtype (bf16 or fp32, as the block says), both bf16, w of a shape that the kernel takes, lying well.

    With a gate silu(gate) * up, bf16, of the halves of the weight's rows, each a multiple of 8.
    """
    (rows, columns), outputs = x_MK.shape, len(w_NK) // (2 if block.gate else 1)
    if not lies_well(x_MK):
        x_MK = x_MK.clone(memory_format=torch.contiguous_format)
    y_MN = torch.empty(rows, outputs, dtype=dtype, device=x_MK.device)
    if rows == 0:
        return y_MN
    x_rows, stored = -(-rows // 8) * 8, block.outputs // (2 if block.gate else 1)
    w_map = tile_map(w_NK, stored, 1 if block.gate else block.tiles)
    steps = -(-columns // (64 * block.tiles))
    numbers = (ctypes.c_uint32(n) for n in (rows, outputs, x_rows, block.slots(x_rows), steps))
    grid = min(-(-outputs // stored), _multiprocessors(x_MK.device)), 1
    maps = tile_map(x_MK, x_rows, block.tiles), w_map
    _kernel(block, x_MK.device).launch(grid, (*maps, ctypes.c_void_p(y_MN.data_ptr()), *numbers))
    return y_MN
