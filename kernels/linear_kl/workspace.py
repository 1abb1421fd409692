"""Memory of linear_kl: sizes of chunks and slabs, and the one workspace a device and stream that all buffers lie in.

Legend: N packed tokens, G tokens of a slab, L tokens of a chunk, D student width, E teacher width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

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

_VECTORS = ("weight_G", "kl_L", "arrived_L")
buffers: dict[tuple[torch.device, int], torch.Tensor] = {}


def held_bytes() -> int:
    """Device memory that the workspaces of all devices and streams hold."""
    return sum(buffer.numel() for buffer in buffers.values())


def release() -> None:
    """Give their memory back; the next call allocates anew."""
    buffers.clear()


class Room:
    """The memory of a head gradient that is not written before all logits are done with, handed out from its start."""

    def __init__(self, grad_w_VD: torch.Tensor):
        self.left = grad_w_VD.view(-1).view(torch.uint8)

    @staticmethod
    def of(h_ND, t_NE, columns, plan, grad_w_VD) -> Room | None:
        """None where the batch takes one slab as it is, or several anyway, or where chunks would have fewer rows."""
        if grad_w_VD is None or not plan.fp8_gradients:
            return None
        chunk_rows, slab_rows, most_rows = _rows(h_ND, columns, plan)
        heads = (h_ND.shape[1] + t_NE.shape[1]) * columns if plan.fp8_logits else 0
        enough = 4 * grad_w_VD.numel() >= heads + 8 * columns * chunk_rows
        return Room(grad_w_VD) if enough and slab_rows < h_ND.shape[0] <= most_rows else None

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        size = rows * columns * dtype.itemsize
        taken, self.left = self.left[:size], self.left[size:]
        return taken.view(dtype).view(rows, columns)


@dataclass(frozen=True)
class Workspace:
    row_step: int
    chunk_rows: int
    slab_rows: int
    student_LV: torch.Tensor
    teacher_LV: torch.Tensor
    dz_GV: torch.Tensor
    h_GD: torch.Tensor
    grad_h_GD: torch.Tensor
    t_LE: torch.Tensor
    weight_G: torch.Tensor
    kl_L: torch.Tensor
    partial_L: torch.Tensor
    arrived_L: torch.Tensor
    # For FP8: what the gradient's codes lack, and one part's turned operands.
    dz_scales: torch.Tensor | None = None
    turned_dz_VG: torch.Tensor | None = None
    turned_dz_scales: torch.Tensor | None = None
    turned_head_DV: torch.Tensor | None = None
    turned_head_scales: torch.Tensor | None = None
    turned_h_DG: torch.Tensor | None = None
    turned_h_scales: torch.Tensor | None = None

    @staticmethod
    def of(h_ND, t_NE, columns, plan, room: Room | None) -> Workspace:
        """Buffers for `chunk_bytes` of logits and dz (at least a few rows), the same addresses at every such call."""
        row_step, dtype = _ROW_STEP, h_ND.dtype
        if plan.fp8_gradients:
            row_step, dtype = fp8.BLOCK, torch.float8_e4m3fn
            part_columns = fp8.part_columns(columns)
        chunk_rows, slab_rows, most_rows = _rows(h_ND, columns, plan)
        if room is not None:
            chunk_rows, slab_rows = _whole_rows(room.left.numel() // (8 * columns), plan), most_rows
        slices = -(-columns // SLICE)
        f32, D, E = torch.float32, h_ND.shape[1], t_NE.shape[1]
        of_slab = {
            "dz_GV": (slab_rows, columns, dtype),
            "h_GD": (slab_rows, D, h_ND.dtype),
            "weight_G": (1, slab_rows, f32),
            "t_LE": (chunk_rows, E, t_NE.dtype),
            "kl_L": (1, chunk_rows, f32),
            "partial_L": (chunk_rows, slices * 8, f32),
            "arrived_L": (1, chunk_rows + 1, torch.int32),
        }
        of_logits = dict.fromkeys(("student_LV", "teacher_LV"), (chunk_rows, columns, f32))
        of_gradients = {"grad_h_GD": (slab_rows, D, f32 if plan.fp8_gradients else h_ND.dtype)}
        if plan.fp8_gradients:
            of_slab["dz_scales"] = (columns // fp8.BLOCK, slab_rows, f32)
            of_gradients |= {
                "turned_dz_VG": (part_columns, slab_rows, dtype),
                "turned_dz_scales": (slab_rows // fp8.BLOCK, part_columns, f32),
                "turned_head_DV": (D, part_columns, dtype),
                "turned_head_scales": (*fp8.tile_scales(D, part_columns), f32),
                "turned_h_DG": (D, slab_rows, dtype),
                "turned_h_scales": (*fp8.tile_scales(D, slab_rows), f32),
            }
        # Logits are done with when a slab's gradients begin, so both lie in one place.
        views = {} if room is None else {name: room.take(*shape) for name, shape in of_logits.items()}
        offsets, slab_end = _place(of_slab, 0)
        logits_offsets, logits_end = _place({} if views else of_logits, slab_end)
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
            r, c, dtype = shapes[name]
            whole = buffer[offset : offset + r * c * dtype.itemsize].view(dtype).view(r, c)
            views[name] = whole[0] if name in _VECTORS else whole
        return Workspace(row_step, chunk_rows, slab_rows, **views)

    def gradient(self, rows: int) -> torch.Tensor | Fp8:
        """dz of the slab's first rows, along the vocabulary."""
        dz_GV = self.dz_GV[:rows]
        if self.dz_scales is None:
            return dz_GV
        return Fp8(dz_GV, _first(self.dz_scales, dz_GV.shape[1] // fp8.BLOCK, rows))

    def turned_gradient(self, columns: int, rows: int) -> Fp8:
        """Room for a part of dz, along tokens."""
        scales = _first(self.turned_dz_scales, rows // fp8.BLOCK, columns)
        return Fp8(_first(self.turned_dz_VG, columns, rows), scales)

    def turned_head(self, columns: int) -> Fp8:
        """Room for a part of the head, along the vocabulary."""
        return self._turned_tiles(self.turned_head_DV, self.turned_head_scales, columns)

    def turned_h(self, rows: int) -> Fp8:
        """Room for the slab's states, along tokens."""
        return self._turned_tiles(self.turned_h_DG, self.turned_h_scales, rows)

    def _turned_tiles(self, codes, scales, columns):
        D = self.h_GD.shape[1]
        return Fp8(_first(codes, D, columns), _first(scales, *fp8.tile_scales(D, columns)), tiles=True)


def _place(parts, offset):
    """(offset of each part, end of the last one), on whole 256 bytes."""
    offsets = {}
    for name, (rows, columns, dtype) in parts.items():
        offsets[name] = offset
        offset += -(-rows * columns * dtype.itemsize // 256) * 256
    return offsets, offset


def _first(buffer: torch.Tensor | None, rows: int, columns: int) -> torch.Tensor:
    """A dense [rows, columns] matrix at the buffer's start."""
    assert buffer is not None
    return buffer.view(-1)[: rows * columns].view(rows, columns)


def logit_columns(plan) -> int:
    """Columns of logits and their gradient."""
    step = fp8.BLOCK if plan.fp8_gradients else _COLUMN_STEP
    return -(-plan.vocab_size // step) * step


def _rows(h_ND, columns, plan) -> tuple[int, int, int]:
    """Tokens of a chunk and of a slab for `chunk_bytes`, and of a slab that is alone in them, with logits elsewhere."""
    dz_row_bytes, per_slab = columns * h_ND.dtype.itemsize, _CHUNKS_PER_SLAB
    if plan.fp8_gradients:
        # Scales take a 32nd of the codes.
        dz_row_bytes, per_slab = columns * 33 // 32, _CHUNKS_PER_FP8_SLAB
    chunk_rows = _whole_rows(plan.chunk_bytes // (8 * columns + dz_row_bytes * per_slab), plan)
    return chunk_rows, chunk_rows * per_slab, plan.chunk_bytes // dz_row_bytes // fp8.BLOCK * fp8.BLOCK


def _whole_rows(chunk_rows, plan):
    # Products in FP8 waste what is missing to a multiple of 128 rows.
    step = fp8.BLOCK if plan.fp8_gradients and chunk_rows >= fp8.BLOCK else _ROW_STEP
    return max(min(chunk_rows, _MAX_CHUNK_ROWS) // step * step, step)
