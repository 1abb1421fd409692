"""Memory of linear_kl: how a call is cut into chunks, slabs and parts, and where everything lies.

All buffers lie in one workspace a device and stream, allocated once, but for those that fit into memory which a result
does not need yet. Where one slab takes the batch, dW is not written before all logits are done with. So its memory can
hold them (in FP8 also the heads' codes), or in exact mode half of them and dz:

    dW's memory     | student logits | dz 0 | dz 1 | .. | dz P-2 |        P places, dz p where dW of part p + 1 will be
    workspace       | teacher logits | dz P-1 |

dW is then written part by part, each over a part of dz that has been used already. Where the student's logits take two
places, dz moves on by two, and so on. A slab has up to 2 D rows then, so that a part of dz fits into a part of dW.
Parts in the workspace lie side by side, as one matrix: all of dz where there are several slabs, and in FP8.

Legend: N packed tokens, G tokens of a slab, L tokens of a chunk, D student width, E teacher width, V vocabulary,
P parts of the vocabulary, S columns of a part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.linear_kl import fp8, products
from kernels.linear_kl.products import Fp8

_ROW_STEP = 16
# Odd sizes would leave the library few algorithms, which differ in bits and speed.
_COLUMN_STEP = 8
# A slab is this many chunks: 8 bytes of logits a token for 2 bytes, or 1, of gradient make both halves equal.
_CHUNKS_PER_SLAB = 4
_CHUNKS_PER_FP8_SLAB = 8
_MAX_CHUNK_ROWS = 1024
# Columns that one program of the KL pass keeps in registers.
SLICE = 8192
# dX's bits depend on how the vocabulary is cut, so that follows from its size alone.
_PARTS = 8
_PART_STEP = 16

_VECTORS = ("weight_G", "kl_L", "arrived_L")
buffers: dict[tuple[torch.device, int], torch.Tensor] = {}


def held_bytes() -> int:
    """Device memory that the workspaces of all devices and streams hold."""
    return sum(buffer.numel() for buffer in buffers.values())


def release() -> None:
    """Give their memory back; the next call allocates anew."""
    buffers.clear()


@dataclass(frozen=True)
class Sizes:
    """How a call is cut.

    chunk_rows, slab_rows: at most so many. columns: of logits and dz. part_columns: of a part of dz, all of them in
    FP8. late_parts: parts of dz that lie in the workspace. one_slab: it takes the batch, and dW's memory holds logits
    and the other parts of dz.
    """

    chunk_rows: int
    slab_rows: int
    columns: int
    part_columns: int
    late_parts: int
    one_slab: bool = False

    @staticmethod
    def of(num_rows: int, width: int, teacher_width: int, itemsize: int, plan) -> Sizes:
        """For padded N, D, the widest E and the bytes of a state's element: one slab where that spares several and
        shortens no chunks."""
        slabs, one = _slabs(itemsize, plan), _one_slab(width, teacher_width, itemsize, plan)
        fits = plan.want_w and slabs.slab_rows < num_rows <= one.slab_rows
        return one if fits and one.chunk_rows >= slabs.chunk_rows else slabs

    @property
    def parts(self) -> int:
        return -(-self.columns // self.part_columns)

    def head_rows(self, plan) -> int:
        """Rows that dW's memory needs besides those of the head."""
        # FP8 products fill whole blocks of rows, with zeros past the vocabulary.
        return self.parts * self.part_columns if plan.fp8_gradients or self.one_slab else 0


class Room:
    """The memory of a head gradient that is not written before all logits are done with, handed out from its start."""

    def __init__(self, grad_w_VD: torch.Tensor):
        self.left = grad_w_VD.view(-1).view(torch.uint8)

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        size = rows * columns * dtype.itemsize
        taken, self.left = self.left[:size], self.left[size:]
        return taken.view(dtype).view(rows, columns)


@dataclass(frozen=True)
class Parts:
    """dz of a slab in parts [G, S] of the vocabulary: first those of early_PGS, then those of late_GV side by side."""

    early_PGS: torch.Tensor
    late_GV: torch.Tensor

    def part(self, index: int) -> torch.Tensor:
        early, _, columns = self.early_PGS.shape
        return self.early_PGS[index] if index < early else self.late_GV[:, (index - early) * columns :][:, :columns]

    def matrices(self) -> tuple[torch.Tensor, ...]:
        """The fewest matrices that are dz side by side."""
        return *self.early_PGS, self.late_GV

    def rows(self, rows: slice) -> Parts:
        return Parts(self.early_PGS[:, rows], self.late_GV[rows])


def early_parts(grad_w_VD: torch.Tensor, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
    """The parts of dz in dW's memory, [P - late_parts, G, S]: part p lies where dW's part p + late_parts will be."""
    places = grad_w_VD[: sizes.parts * sizes.part_columns].view(-1).view(dtype).view(sizes.parts, -1)
    shape = sizes.slab_rows, sizes.part_columns
    return places[sizes.late_parts :, : shape[0] * shape[1]].unflatten(1, shape)


@dataclass(frozen=True)
class Workspace:
    student_LV: torch.Tensor
    teacher_LV: torch.Tensor
    grad_h_GD: torch.Tensor
    t_LE: torch.Tensor
    weight_G: torch.Tensor
    kl_L: torch.Tensor
    partial_L: torch.Tensor
    arrived_L: torch.Tensor
    dz: Parts
    # For FP8: what the gradient's codes lack, and one part's turned operands.
    dz_scales: torch.Tensor | None = None
    turned_dz_VG: torch.Tensor | None = None
    turned_dz_scales: torch.Tensor | None = None
    turned_head_DV: torch.Tensor | None = None
    turned_head_scales: torch.Tensor | None = None
    turned_h_DG: torch.Tensor | None = None
    turned_h_scales: torch.Tensor | None = None

    @staticmethod
    def of(h_ND, t_NE, sizes: Sizes, plan, grad_w_VD, room: Room | None) -> Workspace:
        """Buffers for `chunk_bytes` of logits and dz (at least a few rows), the same addresses at every such call."""
        dtype = torch.float8_e4m3fn if plan.fp8_gradients else h_ND.dtype
        L, G, columns = sizes.chunk_rows, sizes.slab_rows, sizes.columns
        f32, D, E = torch.float32, h_ND.shape[1], t_NE.shape[1]
        of_slab = {
            "dz": (G, sizes.late_parts * sizes.part_columns, dtype),
            "weight_G": (1, G, f32),
            "t_LE": (L, E, t_NE.dtype),
            "kl_L": (1, L, f32),
            "partial_L": (L, -(-columns // SLICE) * 8, f32),
            "arrived_L": (1, L + 1, torch.int32),
        }
        of_logits = {"student_LV": (L, columns, f32), "teacher_LV": (L, columns, f32)}
        of_gradients = {"grad_h_GD": (G, D, f32)}
        if plan.fp8_gradients:
            part_columns = fp8.part_columns(columns)
            of_slab["dz_scales"] = (columns // fp8.BLOCK, G, f32)
            of_gradients |= {
                "turned_dz_VG": (part_columns, G, dtype),
                "turned_dz_scales": (G // fp8.BLOCK, part_columns, f32),
                "turned_head_DV": (D, part_columns, dtype),
                "turned_head_scales": (*fp8.tile_scales(D, part_columns), f32),
                "turned_h_DG": (D, G, dtype),
                "turned_h_scales": (*fp8.tile_scales(D, G), f32),
            }
        views = {}
        if room is not None:
            for name in tuple(of_logits) if plan.fp8_gradients else ("student_LV",):
                views[name] = room.take(*of_logits.pop(name))
        # Logits are done with when a slab's gradients begin, so both lie in one place.
        offsets, slab_end = _place(of_slab, 0)
        logits_offsets, logits_end = _place(of_logits, slab_end)
        gradient_offsets, gradient_end = _place(of_gradients, slab_end)
        offsets |= logits_offsets | gradient_offsets
        total = max(logits_end, gradient_end)
        key = (h_ND.device, products.stream(h_ND.device))
        buffer = buffers.get(key)
        if buffer is None or buffer.numel() < total:
            buffers.pop(key, None)  # free before the larger one is asked for
            buffer = None
            buffer = buffers[key] = torch.empty(total, dtype=torch.uint8, device=h_ND.device)
        shapes = of_slab | of_logits | of_gradients
        for name, offset in offsets.items():
            r, c, element = shapes[name]
            whole = buffer[offset : offset + r * c * element.itemsize].view(element).view(r, c)
            views[name] = whole[0] if name in _VECTORS else whole
        late_GV = views.pop("dz")
        in_room = room is not None and not plan.fp8_gradients
        early_PGS = early_parts(grad_w_VD, sizes, dtype) if in_room else late_GV.new_empty(0, G, sizes.part_columns)
        return Workspace(dz=Parts(early_PGS, late_GV), **views)

    def teacher_states(self, rows: int, width: int) -> torch.Tensor:
        """Room for a chunk's states of a teacher no wider than the widest."""
        return leading(self.t_LE, rows, width)

    def gradient(self, rows: int) -> Parts | Fp8:
        """dz of the slab's first rows."""
        dz = self.dz.rows(slice(rows))
        if self.dz_scales is None:
            return dz
        codes_GV = dz.late_GV
        return Fp8(codes_GV, leading(self.dz_scales, codes_GV.shape[1] // fp8.BLOCK, rows))

    def turned_gradient(self, columns: int, rows: int) -> Fp8:
        """Room for a part of dz, along tokens."""
        scales = leading(self.turned_dz_scales, rows // fp8.BLOCK, columns)
        return Fp8(leading(self.turned_dz_VG, columns, rows), scales)

    def turned_head(self, columns: int) -> Fp8:
        """Room for a part of the head, along the vocabulary."""
        return self._turned_tiles(self.turned_head_DV, self.turned_head_scales, columns)

    def turned_h(self, rows: int) -> Fp8:
        """Room for the slab's states, along tokens."""
        return self._turned_tiles(self.turned_h_DG, self.turned_h_scales, rows)

    def _turned_tiles(self, codes, scales, columns):
        D = self.grad_h_GD.shape[1]
        return Fp8(leading(codes, D, columns), leading(scales, *fp8.tile_scales(D, columns)), tiles=True)


def _place(parts, offset):
    """(offset of each part, end of the last one), on whole 256 bytes."""
    offsets = {}
    for name, (rows, columns, dtype) in parts.items():
        offsets[name] = offset
        offset += -(-rows * columns * dtype.itemsize // 256) * 256
    return offsets, offset


def leading(buffer: torch.Tensor | None, rows: int, columns: int) -> torch.Tensor:
    """A dense [rows, columns] matrix at the buffer's start."""
    assert buffer is not None
    return buffer.view(-1)[: rows * columns].view(rows, columns)


def row_step(plan) -> int:
    """What rows of one teacher are padded to."""
    return fp8.BLOCK if plan.fp8_gradients else _ROW_STEP


def _columns(plan) -> int:
    step = fp8.BLOCK if plan.fp8_gradients else _COLUMN_STEP
    return -(-plan.vocab_size // step) * step


def _part_columns(columns: int) -> int:
    # No fewer than a slice has, which then meets one edge between parts at most.
    parts = max(min(columns // SLICE, _PARTS), 1)
    return -(-columns // (parts * _PART_STEP)) * _PART_STEP


def _dz_row_bytes(itemsize: int, plan) -> int:
    # Scales take a 32nd of the codes.
    return _columns(plan) * 33 // 32 if plan.fp8_gradients else _columns(plan) * itemsize


def _slabs(itemsize: int, plan) -> Sizes:
    """Slabs and their chunks within `chunk_bytes`."""
    columns, dz_bytes = _columns(plan), _dz_row_bytes(itemsize, plan)
    if plan.fp8_gradients:
        chunk_rows = _whole_fp8_rows(plan.chunk_bytes // (8 * columns + dz_bytes * _CHUNKS_PER_FP8_SLAB))
        return Sizes(chunk_rows, chunk_rows * _CHUNKS_PER_FP8_SLAB, columns, columns, 1)
    chunk_rows = _whole_rows(plan.chunk_bytes // (8 * columns + dz_bytes * _CHUNKS_PER_SLAB))
    part_columns = _part_columns(columns)
    parts = -(-columns // part_columns)
    return Sizes(chunk_rows, chunk_rows * _CHUNKS_PER_SLAB, columns, part_columns, parts)


def _one_slab(width: int, teacher_width: int, itemsize: int, plan) -> Sizes:
    """The longest slab that takes `chunk_bytes` beside dW's memory, in the longest chunks; 0 rows where none does."""
    columns = _columns(plan)
    if plan.fp8_gradients:
        slab_rows = plan.chunk_bytes // _dz_row_bytes(itemsize, plan) // fp8.BLOCK * fp8.BLOCK
        heads = (width + teacher_width) * columns if plan.fp8_logits else 0
        room = 4 * width * columns - heads
        chunk_rows = _whole_fp8_rows(room // (8 * columns)) if room >= 8 * columns * _ROW_STEP else 0
        return Sizes(chunk_rows, slab_rows, columns, columns, 1, one_slab=True)
    part_columns = _part_columns(columns)
    # A part of dz takes no more than dW's.
    slab_rows = 4 * width // itemsize // _ROW_STEP * _ROW_STEP
    best = Sizes(0, slab_rows, columns, part_columns, 0, one_slab=True)
    for late_parts in range(1, best.parts + 1):
        left = plan.chunk_bytes - late_parts * slab_rows * part_columns * itemsize
        rows = min(late_parts * part_columns * width, left // 4) // columns
        if rows >= _ROW_STEP and left >= 4 * slab_rows * width and _whole_rows(rows) > best.chunk_rows:
            best = replace(best, chunk_rows=_whole_rows(rows), late_parts=late_parts)
    return best


def _whole_rows(chunk_rows, step=_ROW_STEP):
    return max(min(chunk_rows, _MAX_CHUNK_ROWS) // step * step, step)


def _whole_fp8_rows(chunk_rows):
    # Products in FP8 waste what is missing to a multiple of 128 rows.
    return _whole_rows(chunk_rows, fp8.BLOCK if chunk_rows >= fp8.BLOCK else _ROW_STEP)
