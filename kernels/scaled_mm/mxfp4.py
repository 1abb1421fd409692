"""x @ W.T for a packed MXFP4 weight on Hopper: which blocks of mxfp4.cu serve how many rows, and the decoded copy.

A block of that kernel owns some rows of x and of the weight; the fewer rows of x, the more blocks, and the more often a
weight is decoded. Very many rows are cheaper over a decoded copy, which `_unpack` writes for the dense product.

Invariant: K is summed in ascending steps of 16 in one fp32 sum, as in dense.py, so the bits are those of the dense
product on the decoded values.

Shape letters: M rows of x, N rows of the weight, K columns of both.
"""

# The kernel is written in Triton's own types, which pyright takes for Python's.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl

from kernels.rows import silu_gate
from kernels.scaled_mm.cuda import Kernel, tensor_map
from kernels.scaled_mm.dense import library_mm
from kernels.scaled_mm.packing import Mxfp4Weight

#: Rows of x from which a decoded copy of the weight and the dense product are faster.
DECODED_COPY_ROWS = 8192
SOURCE = Path(__file__).with_name("mxfp4.cu")


@dataclass(frozen=True)
class Block:
    """Compile-time parameters of mxfp4.cu, which explains them, and the time of a wave of its blocks at K = 8192.

    Of several resident blocks a wave has no end that others wait for: parts of one count.
    """

    rows: int
    groups: int
    tiles: int
    slots: int
    wave_us: float
    sets: int = 2
    resident: int = 1
    parts: int = 2
    gate: bool = False

    @property
    def shared_bytes(self) -> int:
        slot = self.tiles * (self.rows * 256 + self.groups * self.parts * (2048 + 128)) + 16
        return self.slots * slot + self.groups * self.staged_rows * 128

    @property
    def staged_rows(self) -> int:
        """Rows of results that a group puts together at once."""
        return self.rows if self.rows <= 64 and self.groups == 1 else 16

    def for_columns(self, column_tiles: int) -> Block:
        """This block, or with slots of half the size where they would not fill a weight's columns (an even number)."""
        return self if column_tiles % self.tiles == 0 else replace(self, tiles=2, slots=self.slots * self.tiles // 2)

    def units(self, row_tiles: int) -> int:
        """Of a weight of so many tiles of rows."""
        return -(-row_tiles // (self.groups * self.parts))

    @property
    def defines(self) -> dict[str, int | str]:
        sums = self.rows // 2
        names = [f"%{i}" for i in range(sums + 5)]
        return {
            "ROWS": self.rows, "GROUPS": self.groups, "TILES": self.tiles, "SLOTS": self.slots,
            "SETS": self.sets, "RESIDENT": self.resident, "PARTS": self.parts, "GATE": int(self.gate),
            "STAGED_ROWS": self.staged_rows,
            "SUMS": ",".join(f'"+f"(sums[{i}])' for i in range(sums)),
            "OPERANDS": f'"{{{",".join(names[:sums])}}}, {{{",".join(names[sums:-1])}}}, {names[-1]}"',
        }  # fmt: skip


#: What `block_for` chooses from: rows, groups, tiles, slots, microseconds (BENCH.md).
BLOCKS = (
    Block(16, 1, 4, 6, 9.9, parts=1),
    Block(32, 1, 4, 3, 11.1, parts=1),
    Block(48, 1, 2, 5, 12.4, parts=1),
    Block(64, 1, 2, 4, 13.4, parts=1),
    Block(16, 1, 2, 9, 11.6),
    Block(32, 1, 2, 6, 12.8),
    Block(48, 1, 2, 4, 14.8, sets=4),
    Block(64, 1, 2, 5, 15.5, sets=4),
    Block(80, 1, 2, 4, 19.0, sets=4),
    Block(96, 1, 1, 7, 22.0, sets=4),
    Block(112, 1, 1, 6, 23.7, sets=4),
    Block(128, 1, 1, 5, 25.3, sets=4),
    Block(192, 1, 1, 4, 33.8, sets=4),
    Block(16, 1, 2, 6, 21.5, resident=2),
    Block(32, 1, 2, 4, 24.5, resident=2),
    Block(48, 1, 2, 3, 24.8, resident=2),
    Block(64, 1, 1, 5, 26.5, sets=4, resident=2),
    Block(48, 2, 2, 5, 25.1),
    Block(64, 2, 2, 4, 26.7),
    Block(96, 2, 1, 6, 36.6),
    Block(112, 2, 1, 6, 39.6),
    Block(128, 2, 1, 5, 42.6),
    Block(160, 2, 1, 4, 52.5),
    Block(192, 2, 1, 3, 61.7),
    Block(256, 2, 1, 3, 83.0),
)
#: Blocks that put gate and up rows side by side.
_GATED = tuple(replace(block, gate=True) for block in BLOCKS if block.parts == 2)


@cache
def block_for(rows: int, outputs: int, multiprocessors: int, *, gate: bool = False) -> Block:
    """The block that needs the least time. outputs: rows of the weight."""

    def us(block: Block) -> float:
        blocks = block.units(-(-outputs // 32)) * -(-rows // block.rows)
        if block.resident > 1:
            return max(blocks / (multiprocessors * block.resident), 1) * block.wave_us
        return -(-blocks // multiprocessors) * block.wave_us

    return min(_GATED if gate else BLOCKS, key=us)


#: PTX that turns a word ($4) into four bf16x2, scaled by $5. As `decode` in mxfp4.cu.
DECODE = tl.constexpr("""{
    .reg .b32 x0, x1, x2, x3, x4;
    shl.b32 x0, $4, 2;
    and.b32 x0, x0, 0x81C081C0;
    shl.b32 x1, $4, 6;
    and.b32 x1, x1, 0x81C081C0;
    shf.l.wrap.b32 x2, $4, $4, 12;
    and.b32 x2, x2, 0x81C081C0;
    and.b32 x3, $4, 0x81808180;
    shr.b32 x4, $4, 8;
    lop3.b32 x3, x4, 0x00400040, x3, 0xEA;
    mul.bf16x2 $0, x0, $5;
    mul.bf16x2 $1, x1, $5;
    mul.bf16x2 $2, x2, $5;
    mul.bf16x2 $3, x3, $5;
}""")
DECODE_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 2))


@triton.jit
def _unpack(words_ptr, exponents_ptr, w_ptr, num_rows, num_columns, column_tiles):
    """One packed tile to bf16 pairs; w_ptr counts int32, two columns each."""
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 512)
    group, quad, row = lane % 4, lane // 4 % 4, lane // 16
    word = tl.load(words_ptr + tile * 512 + lane)
    exponent = tl.load(exponents_ptr + tile * 128 + row * 4 + group).to(tl.int32)
    # An exponent in both halves of a word is a power of two in bf16x2.
    scale = exponent * 0x00800080
    pairs = tl.inline_asm_elementwise(DECODE, DECODE_CONSTRAINTS, [word, scale], (tl.int32,) * 4, True, 1)
    n = tile // column_tiles * 32 + row
    k = tile % column_tiles * 128 + group * 32 + quad * 2
    for p in tl.static_range(4):
        k_p = k + p * 8
        tl.store(w_ptr + (n * num_columns + k_p) // 2, pairs[p], mask=(n < num_rows) & (k_p < num_columns))


def decoded_copy(weight: Mxfp4Weight) -> torch.Tensor:
    """The weight's values, bf16 [N, K], on its CUDA device."""
    w_NK = torch.empty(weight.num_rows, weight.num_columns, dtype=torch.bfloat16, device=weight.words.device)
    tiles = weight.words.numel() // 512
    _unpack[(tiles,)](
        weight.words,
        weight.exponents.view(torch.uint8),
        w_NK.view(torch.int32),
        weight.num_rows,
        weight.num_columns,
        weight.column_tiles,
    )
    return w_NK


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _kernel(block: Block, device: torch.device) -> Kernel:
    # The device is the key alone: a module belongs to the one that is current.
    threads = 128 * (block.groups + 1)
    return Kernel(SOURCE, "mxfp4_mm", block.defines, threads=threads, shared_bytes=block.shared_bytes)


def mxfp4_mm(x_MK: torch.Tensor, weight: Mxfp4Weight) -> torch.Tensor:
    """See `kernels.scaled_mm.mxfp4_mm`; x_MK bf16, contiguous."""
    rows, outputs = len(x_MK), weight.num_rows
    if rows >= DECODED_COPY_ROWS:
        return library_mm(x_MK, decoded_copy(weight), x_MK.dtype)
    if rows == 0:
        return x_MK.new_empty(0, outputs)
    return product(x_MK, weight, block_for(rows, outputs, _multiprocessors(x_MK.device)))


def mxfp4_gate_mm(x_MK: torch.Tensor, weight: Mxfp4Weight) -> torch.Tensor:
    """See `kernels.scaled_mm.mxfp4_gate_mm`; x_MK bf16, contiguous."""
    rows, outputs = len(x_MK), weight.num_rows
    if not 0 < rows < DECODED_COPY_ROWS or outputs % 64:  # gate and up rows each fill tiles of 32
        return silu_gate(*mxfp4_mm(x_MK, weight).split(outputs // 2, 1))
    return product(x_MK, weight, block_for(rows, outputs, _multiprocessors(x_MK.device), gate=True))


def product(x_MK: torch.Tensor, weight: Mxfp4Weight, block: Block) -> torch.Tensor:
    """x @ W.T by one kind of block, of one row of x or more; with a gate, silu(gate) * up of its two halves of rows."""
    rows, outputs = len(x_MK), weight.num_rows // (2 if block.gate else 1)
    block = block.for_columns(weight.column_tiles)
    y_MN = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x_MK.device)
    units, parts_of_x = block.units(weight.row_tiles), triton.cdiv(rows, block.rows)
    # Where several blocks share rows of the weight each has one unit, so that they read it at the same time.
    blocks = min(units, _multiprocessors(x_MK.device) * block.resident) if parts_of_x == 1 else units
    tensors = (ctypes.c_void_p(t.data_ptr()) for t in (weight.words, weight.exponents, y_MN))
    numbers = (ctypes.c_uint32(n) for n in (rows, outputs, weight.column_tiles, weight.row_tiles, units))
    grid = parts_of_x, blocks
    _kernel(block, x_MK.device).launch(grid, (tensor_map(x_MK, block.rows), *tensors, *numbers))
    return y_MN
