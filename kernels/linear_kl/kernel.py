"""linear_kl on CUDA: library products with fp32 logits around one Triton pass that turns logits into gradients.

Rows go in slabs of G tokens, a slab's logits in chunks of L <= G, its gradients in parts of the vocabulary:

    for each slab:  for each chunk:  z_s = h w', z_t = t u'  (fp32)   ->  kl, dz (rows of the slab, dtype of h or FP8)
                    for each part:   dX[slab] += dz w     dW[part] += dz' h  (fp32 sums; the first slab overwrites)

Two sizes of rows because the products want different things: logits cost 8 bytes each and are satisfied with L rows,
while dW is read and written whole once a slab, so a slab is long and holds only dz. The longest takes the batch, with
most of dz in the memory that dW is then written to (see workspace.py); parts are there for that, and for FP8, whose
turned operands are made as they are needed. dX is summed by parts however dz lies, so that its bits are the same; dW
takes in one product what lies as one matrix. Rows of each teacher are padded to a multiple of 16, or 128 for FP8, with
weight 0. Slabs hold rows of several teachers, chunks of one; a teacher's head is there for its chunks alone.

Legend: N packed tokens, R tokens of one teacher, G tokens of a slab, L tokens of a chunk, D student width, E teacher
width, V vocabulary.
"""

# Triton adds launch options to a kernel's own parameters, which the type checker cannot see.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from kernels.linear_kl import fp8, products, workspace
from kernels.linear_kl.passes import kl_slices, scale_unless_one, take_live_rows
from kernels.linear_kl.products import Fp8
from kernels.linear_kl.workspace import Parts, Room, Sizes, Workspace


def forward(h_ND, w_VD, teachers, weight_N, plan):
    """kl_N fp32, and the gradients of sum(weight_N * kl_N): in h_ND's dtype and in fp32 (None if not wanted)."""
    N, V, device = h_ND.shape[0], plan.vocab_size, h_ND.device
    if N == 0 or V == 1:
        # One entry is certain on both sides. (Triton takes V as a constant then, and of a word that it can tell to be
        # four equal FP8 codes ptxas 12.8 sets only half.)
        grad_h_ND = torch.zeros(h_ND.shape, dtype=h_ND.dtype, device=device) if plan.want_h else None
        return torch.zeros(N, device=device), grad_h_ND, torch.zeros(w_VD.shape, device=device) if plan.want_w else None
    D, widest_RE = h_ND.shape[1], max((teacher.t_RE for teacher in teachers), key=lambda t_RE: t_RE.shape[1])
    pieces = _pieces([len(teacher.t_RE) for teacher in teachers], workspace.row_step(plan))
    padded_rows = pieces[-1].place + pieces[-1].padded
    sizes = Sizes.of(padded_rows, D, widest_RE.shape[1], h_ND.dtype.itemsize, plan)
    kl_N = torch.empty(N, dtype=torch.float32, device=device)
    # A slab's states lie where its share of dX will be, which is written last.
    states = padded_rows if plan.want_h else sizes.slab_rows
    states_ND = torch.empty(states, D, dtype=h_ND.dtype, device=device)
    grad_w_VD = None
    if plan.want_w:
        grad_w_VD = torch.empty(max(len(w_VD), sizes.head_rows(plan)), D, dtype=torch.float32, device=device)
    room = Room(grad_w_VD) if sizes.one_slab and grad_w_VD is not None else None
    student_DV = _logits_operand(
        w_VD, h_ND.dtype, sizes.columns, plan, _codes(D, sizes.columns, plan, room, device)
    ).t()
    heads = _TeacherHeads(teachers, sizes.columns, plan, _codes(widest_RE.shape[1], sizes.columns, plan, room, device))
    space = Workspace.of(h_ND, widest_RE, sizes, plan, grad_w_VD, room)
    for first in range(0, padded_rows, sizes.slab_rows):
        padded = min(sizes.slab_rows, padded_rows - first)
        h_GD, weight_G = states_ND[first if plan.want_h else 0 :][:padded], space.weight_G[:padded]
        in_slab = [piece.cut(first, padded) for piece in pieces if piece.overlaps(first, padded)]
        weight_G.zero_()
        for piece in in_slab:
            weight_G[piece.place : piece.place + piece.live] = weight_N[piece.source : piece.source + piece.live]
            whole = slice(piece.place, piece.place + piece.padded)
            _take_rows(h_ND, piece.source, weight_G[whole], h_GD[whole])
        dz = space.gradient(padded)
        for piece in in_slab:
            _teach(piece, h_GD, student_DV, teachers, heads, weight_G, kl_N, dz, space, sizes, plan)
        grad_h_GD, recurring = space.grad_h_GD[:padded], padded == sizes.slab_rows
        if isinstance(dz, Fp8):
            _fp8_gradients(space, dz, h_GD, w_VD, grad_h_GD, grad_w_VD, plan, first > 0, recurring)
        else:
            _gradients(dz, h_GD, student_DV, grad_h_GD, grad_w_VD, plan, first > 0, recurring)
        if plan.want_h:
            h_GD.copy_(grad_h_GD)
    if grad_w_VD is not None:
        grad_w_VD[V:].zero_()
        grad_w_VD = grad_w_VD[: len(w_VD)]
    return kl_N, _without_padding(states_ND, pieces) if plan.want_h else None, grad_w_VD


@dataclass(frozen=True)
class _Piece:
    """Rows of one teacher that are computed together: `padded` of them from `place`, the first `live` of which are
    those from `source` of the batch and from `of_teacher` of the teacher's states. The rest has weight 0."""

    teacher: int
    source: int
    of_teacher: int
    live: int
    place: int
    padded: int

    def overlaps(self, first: int, rows: int) -> bool:
        return self.place < first + rows and first < self.place + self.padded

    def cut(self, first: int, rows: int) -> _Piece:
        """What lies in the rows from `first` on; its place is counted from there."""
        start = max(first - self.place, 0)
        padded = min(self.place + self.padded, first + rows) - self.place - start
        live = max(min(self.live - start, padded), 0)
        place = self.place + start - first
        return _Piece(self.teacher, self.source + start, self.of_teacher + start, live, place, padded)


def _pieces(counts: Sequence[int], row_step: int) -> list[_Piece]:
    """One for each teacher that has rows."""
    pieces, source, place = [], 0, 0
    for teacher, count in enumerate(counts):
        padded = -(-count // row_step) * row_step
        if count:
            pieces.append(_Piece(teacher, source, 0, count, place, padded))
        source, place = source + count, place + padded
    return pieces


def _without_padding(states_ND, pieces):
    if all(piece.source == piece.place for piece in pieces):
        return states_ND[: pieces[-1].source + pieces[-1].live]
    return torch.cat([states_ND[piece.place :][: piece.live] for piece in pieces])


def _teach(piece, h_GD, student_DV, teachers, heads, weight_G, kl_N, dz, space, sizes, plan):
    """KL and dz of the rows of a slab that have one teacher."""
    t_RE, end = teachers[piece.teacher].t_RE, piece.place + piece.padded
    for start in range(piece.place, end, sizes.chunk_rows):
        chunk = slice(start, min(start + sizes.chunk_rows, end))
        size, done = chunk.stop - start, start - piece.place
        h_LD, t_LE = h_GD[chunk], space.teacher_states(size, t_RE.shape[1])
        _take_rows(t_RE, piece.of_teacher + done, weight_G[chunk], t_LE)
        if plan.fp8_logits:
            h_LD, t_LE = fp8.rows(h_LD), fp8.rows(t_LE)
        recurring = size == sizes.chunk_rows
        _multiply(h_LD, student_DV, space.student_LV[:size], recurring)
        _multiply(t_LE, heads.operand(piece.teacher), space.teacher_LV[:size], recurring)
        _kl_pass(space, chunk, dz, plan)
        live = max(min(piece.live - done, size), 0)
        kl_N[piece.source + done :][:live] = space.kl_L[:live]


def _gradients(dz, h_GD, head_DV, grad_h_GD, grad_w_VD, plan, accumulate, recurring):
    """A slab's share of both gradients. Overwrites grad_h_GD, and then what of dz lies in dW's memory."""
    columns, step = head_DV.shape[1], dz.early_PGS.shape[2]
    if plan.want_h:
        parts = [slice(start, min(start + step, columns)) for start in range(0, columns, step)]
        operands = [(dz.part(i)[:, : x.stop - x.start], head_DV[:, x].t()) for i, x in enumerate(parts)]
        if recurring:
            for part_GV, head_VD in operands:
                products.tune(part_GV, head_VD, grad_h_GD, accumulate=True)
        for i, (part_GV, head_VD) in enumerate(operands):
            products.multiply(part_GV, head_VD, grad_h_GD, accumulate=i > 0)
    if grad_w_VD is not None:
        left_VD = grad_w_VD[: plan.vocab_size]
        for matrix_GV in dz.matrices():
            part_VD, left_VD = left_VD[: matrix_GV.shape[1]], left_VD[matrix_GV.shape[1] :]
            _add(matrix_GV[:, : len(part_VD)].t(), h_GD, part_VD, accumulate, recurring)


def _fp8_gradients(space, dz_GV, h_GD, w_VD, grad_h_GD, grad_w_VD, plan, accumulate, recurring):
    """A slab's share of both gradients, part by part of the vocabulary. Overwrites grad_h_GD."""
    rows, columns = dz_GV.shape
    if grad_w_VD is not None:
        turned_h_DG = space.turned_h(rows)
        fp8.turned_tiles(h_GD, turned_h_DG, h_GD.dtype)
    step = fp8.part_columns(columns)
    for start in range(0, columns, step):
        part = slice(start, min(start + step, columns))
        size = part.stop - part.start
        part_GV = Fp8(dz_GV.codes[:, part], dz_GV.scales[start // fp8.BLOCK :])
        if plan.want_h:
            head_DV = space.turned_head(size)
            fp8.turned_tiles(w_VD[start : min(part.stop, plan.vocab_size)], head_DV, h_GD.dtype)
            _add(part_GV, head_DV.t(), grad_h_GD, start > 0, recurring)
        if grad_w_VD is not None:
            part_VG = space.turned_gradient(size, rows)
            fp8.turned_gradient(part_GV, part_VG)
            _add(part_VG, turned_h_DG.t(), grad_w_VD[part], accumulate, recurring)


def scale(gradient, factor):
    """Multiply in place by a device scalar; costs nothing when it is 1, and never asks the host."""
    size = gradient.numel()
    scale_unless_one[(min(triton.cdiv(size, 4096), 2048),)](gradient, factor, size, BLOCK=4096, num_warps=8)


class _TeacherHeads:
    """The teachers' heads as the products of logits take them: one at a time, each asked for once."""

    def __init__(self, teachers, columns: int, plan, codes) -> None:
        self._teachers, self._columns, self._plan, self._codes = teachers, columns, plan, codes
        self._current: tuple[int, torch.Tensor | Fp8] | None = None

    def operand(self, index: int) -> torch.Tensor | Fp8:
        """[E, columns] of a teacher. It must not be kept."""
        if self._current is None or self._current[0] != index:
            self._current = None  # freed before its successor is asked for
            teacher = self._teachers[index]
            dtype = teacher.t_RE.dtype
            head_VE = _logits_operand(teacher.head(), dtype, self._columns, self._plan, self._codes)
            self._current = index, head_VE.t()
        return self._current[1]


def _codes(width: int, columns: int, plan, room: Room | None, device) -> torch.Tensor | None:
    """Memory for a head of up to `width` in FP8, if logits are made of such: in the room if there is one."""
    if not plan.fp8_logits:
        return None
    shape, e4m3 = (columns, width), torch.float8_e4m3fn
    return room.take(*shape, e4m3) if room else torch.empty(shape, dtype=e4m3, device=device)


def _logits_operand(head_VD, dtype, columns: int, plan, codes: torch.Tensor | None) -> torch.Tensor | Fp8:
    """The head's rows of the vocabulary in dtype, or their FP8 codes, followed by zeros up to `columns` rows; a copy
    only if that takes one."""
    values_VD = head_VD[: plan.vocab_size]
    if codes is not None:
        return fp8.tiles(values_VD, workspace.leading(codes, columns, head_VD.shape[1]), dtype)
    values_VD = values_VD.to(dtype)
    missing = columns - plan.vocab_size
    return torch.nn.functional.pad(values_VD, (0, 0, 0, missing)) if missing else values_VD


def _multiply(a_MK, b_KN, out_MN, recurring):
    if recurring:  # tails come in many sizes, each too rare to be worth timing
        products.tune(a_MK, b_KN, out_MN)
    products.multiply(a_MK, b_KN, out_MN)


def _add(a_MK, b_KN, out_MN, accumulate, recurring):
    if recurring and not accumulate:
        products.tune(a_MK, b_KN, out_MN, accumulate=True)
    products.multiply(a_MK, b_KN, out_MN, accumulate=accumulate)


def _take_rows(source_ND, first, weight_M, out_MD):
    M, D = out_MD.shape
    take_live_rows[(M, triton.cdiv(D, 2048))](source_ND, weight_M, out_MD, first, *source_ND.stride(), D, BLOCK=2048)


def _kl_pass(space, chunk, dz, plan):
    """KL and gradient of a chunk's logits, which are these rows of the slab."""
    in_fp8 = isinstance(dz, Fp8)
    scales = dz.scales if in_fp8 else space.partial_L
    if in_fp8:
        codes_GV = dz.codes.view(torch.uint8)
        dz = Parts(codes_GV.new_empty(0, *codes_GV.shape), codes_GV)
    dz = dz.rows(chunk)
    columns = space.student_LV.shape[1]
    slices = -(-columns // workspace.SLICE)
    space.arrived_L.zero_()
    kl_slices[((chunk.stop - chunk.start) * slices,)](
        space.student_LV,
        space.teacher_LV,
        dz.early_PGS,
        dz.late_GV,
        scales[:, chunk] if in_fp8 else scales,
        space.weight_G[chunk],
        space.kl_L,
        space.partial_L,
        space.arrived_L,
        plan.vocab_size,
        columns,
        len(dz.early_PGS),
        dz.early_PGS.stride(0),
        dz.early_PGS.shape[2],
        dz.late_GV.stride(0),
        scales.stride(0),
        1.0 / plan.temperature,
        slices,
        REVERSE=plan.divergence == "reverse",
        GRADIENT=plan.want_h or plan.want_w,
        FP8=in_fp8,
        SLICES_POW2=triton.next_power_of_2(slices),
        BLOCK=workspace.SLICE,
        num_warps=4,
    )
