"""x @ W.T for a packed MXFP4 weight on Hopper: which kernel serves how many rows, and the kernel of few rows.

Few rows, here, in Gluon: a program owns 64 rows of the weight and up to 64 rows of x. One warp streams packed tiles
and tiles of x through a ring in shared memory. Two warp groups take turns along K: while one multiplies, the other
decodes its next run of columns right into the registers from which the tensor core reads its left operand, then takes
the sums over. Decoded weights never touch memory. Many rows, mxfp4.cu: decoded tiles go through shared memory, and
serve 128 or 256 rows. Yet more are cheaper over a decoded copy, which `_unpack` writes for the dense product.

Invariant: K is summed in ascending steps of 16 in one fp32 sum, as in dense.py, so the bits are those of the dense
product on the decoded values.

Shape letters: M rows of x, N rows of the weight, K columns of both.
"""

# Kernels are written in Gluon's own types, which pyright takes for Python's.
# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.scaled_mm.cuda import Kernel, tensor_map
from kernels.scaled_mm.dense import library_mm
from kernels.scaled_mm.packing import Mxfp4Weight

#: Rows of x from which a decoded copy of the weight and the dense product are faster.
DECODED_COPY_ROWS = 4096
#: Rows of x a program -> microseconds of a wave of programs that fills the GPU, at K = 8192 (BENCH.md).
WAVE_US = {16: 14.6, 32: 16.4, 64: 21.5, 128: 29.1, 256: 46.6}
#: Rows of x a program of few rows -> buffers of the ring.
BUFFERS = {16: 8, 32: 6, 64: 5}
SOURCE = Path(__file__).with_name("mxfp4.cu")


@dataclass(frozen=True)
class ManyRows:
    """Compile-time parameters of mxfp4.cu, which explains them."""

    rows: int
    word_slots: int
    tile_slots: int
    x_slots: int

    @property
    def shared_bytes(self) -> int:
        barriers = 2 * (self.word_slots + self.tile_slots + self.x_slots)
        words, tiles, x = self.word_slots * 2 * (2048 + 128), self.tile_slots * 2 * 8192, self.x_slots * self.rows * 128
        return words + tiles + x + 8 * barriers

    @property
    def defines(self) -> dict[str, int]:
        return {
            "ROWS": self.rows, "WORD_SLOTS": self.word_slots, "TILE_SLOTS": self.tile_slots, "X_SLOTS": self.x_slots,
        }  # fmt: skip


#: By rows of x a program.
MANY_ROWS = {128: ManyRows(128, 6, 5, 7), 256: ManyRows(256, 6, 4, 4)}


def rows_a_program(rows: int, outputs: int, multiprocessors: int) -> int:
    """The rows of x a program that need the least time: fewer make for more programs, and for more waves of them."""

    def us(block: int) -> float:
        programs = -(-outputs // 64) * -(-rows // block)
        return -(-programs // multiprocessors) * WAVE_US[block]

    return min(WAVE_US, key=us)


def _decode_word(word: int, upper: int, lower: int, out: int) -> str:
    """PTX that turns operand `word` into four bf16x2 at `out`; operands `upper`, `lower` scale rows n and n + 8.

    Masks pick sign and magnitude of one column in each half word; packing.BITS says where they lie.
    """
    return f"""
    and.b32 x0, ${word}, 0x81C081C0;
    shl.b32 x1, ${word}, 3;
    and.b32 x1, x1, 0x81C081C0;
    shl.b32 x2, ${word}, 6;
    and.b32 x2, x2, 0x81C081C0;
    shl.b32 x3, ${word}, 1;
    and.b32 x3, x3, 0x80008000;
    shr.b32 x4, ${word}, 3;
    lop3.b32 x3, x4, 0x01800180, x3, 0xEA;
    shr.b32 x4, ${word}, 7;
    lop3.b32 x3, x4, 0x00400040, x3, 0xEA;
    mul.bf16x2 ${out}, x0, ${upper};
    mul.bf16x2 ${out + 1}, x1, ${lower};
    mul.bf16x2 ${out + 2}, x2, ${upper};
    mul.bf16x2 ${out + 3}, x3, ${lower};"""


_DECLARE = ".reg .b32 x0, x1, x2, x3, x4;"
#: Two neighbouring words (k and k + 16) at a time, since outputs of 16 bits come in pairs.
DECODE_PAIR = gl.constexpr("{" + _DECLARE + _decode_word(8, 10, 12, 0) + _decode_word(9, 11, 13, 4) + "}")
DECODE_PAIR_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 6))
DECODE_ONE = tl.constexpr("{" + _DECLARE + _decode_word(4, 5, 6, 0) + "}")
DECODE_ONE_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 3))


@gluon.jit
def _operand(words, exponents, word_layout: gl.constexpr, sum_layout: gl.constexpr):
    """Left operand [64, 64] of a packed tile: words [16, 32], exponents [4 warp, 8 row]."""
    words = gl.convert_layout(words.reshape([4, 8, 4, 2, 2]), word_layout, assert_trivial=True)
    group = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, word_layout)))))
    for axis in gl.static_range(3):
        group = gl.expand_dims(group, axis)
    for axis in gl.static_range(3):
        exponents = gl.expand_dims(exponents, 2 + axis)
    exponents = exponents >> (gl.expand_dims(group, 4) * 8)
    # An exponent in both halves of a word is a power of two in bf16x2.
    upper = (exponents & 0xFF) * 0x00800080
    lower = ((exponents >> 16) & 0xFF) * 0x00800080
    words, upper = gl.broadcast(words, upper)
    words, lower = gl.broadcast(words, lower)
    v = gl.inline_asm_elementwise(
        DECODE_PAIR, DECODE_PAIR_CONSTRAINTS, [words, upper, lower], (gl.bfloat16,) * 8, True, 2
    )
    # v[p + 4 block]: the last axis, which was the word's place in the pair, is now the column's parity.
    first = gl.join(gl.join(v[0], v[1]), gl.join(v[2], v[3]))
    second = gl.join(gl.join(v[4], v[5]), gl.join(v[6], v[7]))
    # Axes: warp, row, quad, group, k + 1, n + 8, k + 8, block.
    tile = gl.join(first, second).permute((0, 5, 1, 3, 7, 6, 2, 4)).reshape([64, 64])
    return gl.convert_layout(tile, gl.DotOperandLayout(0, sum_layout, 2), assert_trivial=True)


@gluon.jit
def _compute(
    TURN: gl.constexpr,
    y_ptr,
    exponents_ptr,
    words_smem,
    x_smem,
    sum_smem,
    full,
    empty,
    handed,
    first_m,
    rows,
    outputs,
    steps,
    RUN: gl.constexpr,
):
    """Turns TURN, TURN + 2, ... of RUN steps each: the program's 64 rows of the weight against its rows of x."""
    BUFFERS: gl.constexpr = words_smem.shape[0]
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    TILES: gl.constexpr = words_smem.shape[1] // 16
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    word_layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2, 2], [1, 8, 4, 1, 1], [4, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    exponent_layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, word_layout)))
    run_parent: gl.constexpr = gl.BlockedLayout([1, 1, 1, TILES * RUN], [1, 8, 4, 1], [4, 1, 1, 1], [3, 2, 1, 0])
    run_layout: gl.constexpr = gl.SliceLayout(2, run_parent)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile_n = gl.program_id(0)
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, run_layout)))
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, run_layout)))
    part = gl.arange(0, TILES * RUN, gl.SliceLayout(0, gl.SliceLayout(1, run_layout)))
    exponents_ptr += tile_n.to(gl.int64) * steps * (TILES * 32)
    exponents_ptrs = exponents_ptr + (warp[:, None, None] * 8 + row[None, :, None] + part[None, None, :] * 32)
    runs = steps // RUN
    sum_NM = gl.zeros([64, BLOCK_M], gl.float32, sum_layout)
    exponents = gl.load(exponents_ptrs + gl.minimum(TURN, runs - 1) * (RUN * TILES * 32))
    for run in range(TURN, runs, 2):
        later = gl.load(exponents_ptrs + gl.minimum(run + 2, runs - 1) * (RUN * TILES * 32))
        operands = ()
        for i in gl.static_range(RUN):
            step = run * RUN + i
            slot = step % BUFFERS
            mbarrier.wait(full.index(slot), (step // BUFFERS) & 1)
            for tile in gl.static_range(TILES):
                # The index is a constant of each register, so this picks one and adds nothing.
                mine = gl.sum(gl.where(part[None, None, :] == TILES * i + tile, exponents, 0), 2)
                mine = gl.convert_layout(mine, exponent_layout, assert_trivial=True)
                words = words_smem.index(slot).slice(16 * tile, 16, 0).load(load_layout)
                operands = operands + (_operand(words, mine, word_layout, sum_layout),)  # noqa: RUF005, Gluon has no unpacking
        # All of this run is decoded by the time the other group hands over its sums.
        mbarrier.wait(handed.index(TURN), (run // 2 + 1 - TURN) & 1)
        token = warpgroup_mma_init(sum_smem.load(sum_layout))
        for i in gl.static_range(RUN):
            x = x_smem.index((run * RUN + i) % BUFFERS)
            for tile in gl.static_range(TILES):
                x_tile = x.slice(64 * tile, 64, 1).permute((1, 0))
                token = warpgroup_mma(operands[TILES * i + tile], x_tile, token, is_async=True)
        sum_NM = warpgroup_mma_wait(0, deps=(token,))
        sum_smem.store(sum_NM)
        # One thread speaks for the group, so all of it must have stored, and be past the wait.
        gl.thread_barrier()
        mbarrier.arrive(handed.index(1 - TURN), count=1)
        for i in gl.static_range(RUN):
            mbarrier.arrive(empty.index((run * RUN + i) % BUFFERS), count=1)
        exponents = later
    if (runs - 1) % 2 == TURN:
        store_layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        y_NM = gl.convert_layout(sum_NM.to(gl.bfloat16), store_layout)
        n = tile_n * 64 + gl.arange(0, 64, gl.SliceLayout(1, store_layout))
        m = first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, store_layout))
        y_ptrs = y_ptr + m[None, :].to(gl.int64) * outputs + n[:, None]
        gl.store(y_ptrs, y_NM, mask=(m[None, :] < rows) & (n[:, None] < outputs))


@gluon.jit
def _load(words_desc, x_desc, words_smem, x_smem, full, empty, first_m, steps):
    BUFFERS: gl.constexpr = words_smem.shape[0]
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    TILES: gl.constexpr = words_smem.shape[1] // 16
    first_row = gl.program_id(0) * steps * (TILES * 16)
    for step in range(steps):
        slot = step % BUFFERS
        mbarrier.wait(empty.index(slot), ((step // BUFFERS) & 1) ^ 1)
        mbarrier.expect(full.index(slot), TILES * (2048 + BLOCK_M * 128))
        tma.async_copy_global_to_shared(
            words_desc, [first_row + step * (TILES * 16), 0], full.index(slot), words_smem.index(slot)
        )
        tma.async_copy_global_to_shared(x_desc, [first_m, step * (TILES * 64)], full.index(slot), x_smem.index(slot))


# A count of one step would become a constant, of which the compiler makes code that its own later passes refuse.
@gluon.jit(do_not_specialize=["steps"])
def _decode_mm(
    words_desc,
    exponents_ptr,
    x_desc,
    y_ptr,
    rows,
    outputs,
    steps,
    BLOCK_M: gl.constexpr,
    BUFFERS: gl.constexpr,
    TILES: gl.constexpr,
    RUN: gl.constexpr,
    num_warps: gl.constexpr,
):
    first_m = gl.program_id(1) * BLOCK_M
    words_smem = gl.allocate_shared_memory(gl.int32, [BUFFERS, TILES * 16, 32], words_desc.layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BLOCK_M, TILES * 64], x_desc.layout)
    # Rows of sums would fall on the same banks.
    hand_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, BLOCK_M // 8 if BLOCK_M < 64 else 8, [1, 0])
    sum_smem = gl.allocate_shared_memory(gl.float32, [64, BLOCK_M], hand_layout)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(handed.index(i), count=1)
    # The first group begins with sums that nobody handed over.
    zero_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    sum_smem.store(gl.zeros([64, BLOCK_M], gl.float32, zero_layout))
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_compute, (0, y_ptr, exponents_ptr, words_smem, x_smem, sum_smem, full, empty, handed, first_m, rows,
                        outputs, steps, RUN)),
            (_compute, (1, y_ptr, exponents_ptr, words_smem, x_smem, sum_smem, full, empty, handed, first_m, rows,
                        outputs, steps, RUN)),
            (_load, (words_desc, x_desc, words_smem, x_smem, full, empty, first_m, steps)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@triton.jit
def _unpack(words_ptr, exponents_ptr, w_ptr, num_rows, num_columns, column_tiles):
    """One packed tile to bf16 pairs; w_ptr counts int32, two columns each."""
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 512)
    block, group, quad, row, warp = lane % 2, lane // 2 % 2, lane // 4 % 4, lane // 16 % 8, lane // 128
    word = tl.load(words_ptr + tile * 512 + lane)
    exponent = tl.load(exponents_ptr + tile * 32 + warp * 8 + row) >> (group * 8)
    upper = (exponent & 0xFF) * 0x00800080
    lower = (exponent >> 16 & 0xFF) * 0x00800080
    pairs = tl.inline_asm_elementwise(
        DECODE_ONE, DECODE_ONE_CONSTRAINTS, [word, upper, lower], (tl.int32,) * 4, True, 1
    )
    n = tile // column_tiles * 64 + warp * 16 + row
    k = tile % column_tiles * 64 + group * 32 + block * 16 + quad * 2
    for p in tl.static_range(4):
        n_p, k_p = n + p % 2 * 8, k + p // 2 * 8
        tl.store(w_ptr + (n_p * num_columns + k_p) // 2, pairs[p], mask=(n_p < num_rows) & (k_p < num_columns))


def decoded_copy(weight: Mxfp4Weight) -> torch.Tensor:
    """The weight's values, bf16 [N, K], on its CUDA device."""
    w_NK = torch.empty(weight.num_rows, weight.num_columns, dtype=torch.bfloat16, device=weight.words.device)
    tiles = weight.words.numel() // 512
    _unpack[(tiles,)](
        weight.words,
        weight.exponents,
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
def _many_rows(block: int, device: torch.device) -> Kernel:
    # The device is the key alone: a module belongs to the one that is current.
    plan = MANY_ROWS[block]
    return Kernel(SOURCE, "mxfp4_mm", plan.defines, threads=640, shared_bytes=plan.shared_bytes)


def mxfp4_mm(x_MK: torch.Tensor, weight: Mxfp4Weight) -> torch.Tensor:
    """See `kernels.scaled_mm.mxfp4_mm`; x_MK bf16, contiguous."""
    rows, outputs = len(x_MK), weight.num_rows
    if rows >= DECODED_COPY_ROWS:
        return library_mm(x_MK, decoded_copy(weight), x_MK.dtype)
    y_MN = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x_MK.device)
    if rows == 0:
        return y_MN
    block = rows_a_program(rows, outputs, _multiprocessors(x_MK.device))
    grid = triton.cdiv(outputs, 64), triton.cdiv(rows, block)
    if block in MANY_ROWS:
        # As few copies of x as leave at most 15 rows to be filled with zeros.
        sixteens = -(-rows // 16) * 16
        box = min(block, sixteens & -sixteens)
        tensors = (ctypes.c_void_p(t.data_ptr()) for t in (weight.words, weight.exponents, y_MN))
        numbers = (ctypes.c_uint32(n) for n in (rows, box, outputs, weight.column_tiles // 2))
        _many_rows(block, x_MK.device).launch(grid, (tensor_map(x_MK, box), *tensors, *numbers))
        return y_MN
    steps = weight.column_tiles // 4
    _decode_mm[grid](
        TensorDescriptor.from_tensor(weight.words, [64, 32], gl.NVMMASharedLayout.get_default_for([64, 32], gl.int32)),
        weight.exponents,
        TensorDescriptor.from_tensor(
            x_MK, [block, 256], gl.NVMMASharedLayout.get_default_for([block, 256], gl.bfloat16)
        ),
        y_MN,
        rows,
        outputs,
        steps,
        BLOCK_M=block,
        BUFFERS=BUFFERS[block],
        TILES=4,
        RUN=2 if steps % 2 == 0 else 1,
        num_warps=4,
    )
    return y_MN
