"""linear_kl on CUDA: library products with fp32 logits around one Triton pass that turns logits into gradients.

Rows go in slabs of G tokens, a slab's logits in chunks of L <= G:

    for each slab:  for each chunk:  z_s = h w', z_t = t u'  (fp32)   ->  kl, dz (rows of the slab, dtype of h)
                    dX[slab] = dz w        dW += dz' h  (fp32 sums; the first slab overwrites)

Two sizes because the products want different things: logits cost 8 bytes each and are satisfied with L rows, while
dW is read and written whole once a slab, so a slab is long and holds only dz. All buffers lie in one workspace a
device and stream, allocated once. Rows are padded to a multiple of 16 with weight 0.

Legend: N packed tokens, G tokens of a slab, L tokens of a chunk, D student width, E teacher width, V vocabulary.
"""

# Triton adds launch options to a kernel's own parameters, which the type checker cannot see.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.linear_kl import products

_ROW_STEP = 16
# Odd sizes would leave the library few algorithms, which differ in bits and speed.
_COLUMN_STEP = 8
# A slab is this many chunks: 8 bytes of logits a token for 2 bytes of gradient make both halves equal.
_CHUNKS_PER_SLAB = 4
_MAX_CHUNK_ROWS = 1024
# Columns that one program of the KL pass keeps in registers.
_SLICE = 8192
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)

_buffers: dict[tuple[torch.device, int], torch.Tensor] = {}


def forward(h_ND, w_VD, t_NE, u_VE, weight_N, plan):
    """kl_N fp32, and the gradients of sum(weight_N * kl_N): in h_ND's dtype and in fp32 (None if not wanted)."""
    N, V, device = h_ND.shape[0], plan.vocab_size, h_ND.device
    kl_N = torch.empty(N, dtype=torch.float32, device=device)
    grad_h_ND = torch.empty_like(h_ND, memory_format=torch.contiguous_format) if plan.want_h else None
    grad_w_VD = torch.empty(w_VD.shape, dtype=torch.float32, device=device) if plan.want_w else None
    if grad_w_VD is not None:
        grad_w_VD[V if N else 0 :].zero_()
    if N == 0:
        return kl_N, grad_h_ND, grad_w_VD
    w_values_VD, u_values_VE = _values(w_VD, V, h_ND.dtype), _values(u_VE, V, t_NE.dtype)
    space = _Workspace.of(h_ND, t_NE, V, plan.chunk_bytes)
    for first in range(0, N, space.slab_rows):
        rows = min(space.slab_rows, N - first)
        padded = -(-rows // _ROW_STEP) * _ROW_STEP
        h_GD, dz_GV, weight_G = space.h_GD[:padded], space.dz_GV[:padded], space.weight_G[:padded]
        weight_G[:rows] = weight_N[first : first + rows]
        weight_G[rows:].zero_()
        _take_rows(h_ND, first, weight_G, h_GD)
        for start in range(0, padded, space.chunk_rows):
            chunk = slice(start, min(start + space.chunk_rows, padded))
            size = chunk.stop - chunk.start
            _take_rows(t_NE, first + start, weight_G[chunk], space.t_LE[:size])
            _multiply(h_GD[chunk], w_values_VD.t(), space.student_LV[:size], size == space.chunk_rows)
            _multiply(space.t_LE[:size], u_values_VE.t(), space.teacher_LV[:size], size == space.chunk_rows)
            _kl_pass(space, size, weight_G[chunk], dz_GV[chunk], plan)
            live = min(chunk.stop, rows) - start
            kl_N[first + start : first + start + live] = space.kl_L[:live]
        if grad_h_ND is not None:
            _multiply(dz_GV, w_values_VD, space.grad_h_GD[:padded], padded == space.slab_rows)
            grad_h_ND[first : first + rows] = space.grad_h_GD[:rows]
        if grad_w_VD is not None:
            if first == 0 and padded == space.slab_rows:
                products.tune(dz_GV[:, :V].t(), h_GD, grad_w_VD[:V], accumulate=True)
            products.multiply(dz_GV[:, :V].t(), h_GD, grad_w_VD[:V], accumulate=first > 0)
    return kl_N, grad_h_ND, grad_w_VD


def scale(gradient, factor):
    """Multiply in place by a device scalar; costs nothing when it is 1, and never asks the host."""
    size = gradient.numel()
    _scale_unless_one[(min(triton.cdiv(size, 4096), 2048),)](gradient, factor, size, BLOCK=4096, num_warps=8)


def workspace_bytes() -> int:
    """Device memory that the workspaces of all devices and streams hold."""
    return sum(buffer.numel() for buffer in _buffers.values())


def release_workspaces() -> None:
    """Give their memory back; the next call allocates anew."""
    _buffers.clear()


@dataclass(frozen=True)
class _Workspace:
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

    @staticmethod
    def of(h_ND, t_NE, V, chunk_bytes) -> _Workspace:
        """Buffers for `chunk_bytes` of logits and dz (at least 16 rows), the same addresses at every call."""
        columns = -(-V // _COLUMN_STEP) * _COLUMN_STEP
        chunk_rows, slab_rows = _rows(columns, h_ND.element_size(), chunk_bytes)
        slices = -(-V // _SLICE)
        f32, D, E = torch.float32, h_ND.shape[1], t_NE.shape[1]
        parts = {
            "student_LV": (chunk_rows, columns, f32),
            "teacher_LV": (chunk_rows, columns, f32),
            "dz_GV": (slab_rows, columns, h_ND.dtype),
            "h_GD": (slab_rows, D, h_ND.dtype),
            "grad_h_GD": (slab_rows, D, h_ND.dtype),
            "t_LE": (chunk_rows, E, t_NE.dtype),
            "weight_G": (1, slab_rows, f32),
            "kl_L": (1, chunk_rows, f32),
            "partial_L": (chunk_rows, slices * 8, f32),
            "arrived_L": (1, chunk_rows + 1, torch.int32),
        }
        sizes = {name: -(-r * c * dtype.itemsize // 256) * 256 for name, (r, c, dtype) in parts.items()}
        key = (h_ND.device, products.stream(h_ND.device))
        buffer = _buffers.get(key)
        if buffer is None or buffer.numel() < sum(sizes.values()):
            _buffers.pop(key, None)  # free before the larger one is asked for
            buffer = None
            buffer = _buffers[key] = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=h_ND.device)
        views, offset = {}, 0
        for name, (r, c, dtype) in parts.items():
            whole = buffer[offset : offset + r * c * dtype.itemsize].view(dtype).view(r, c)
            views[name] = whole if r > 1 else whole[0]
            offset += sizes[name]
        return _Workspace(chunk_rows, slab_rows, **views)


def _rows(columns, dz_bytes, chunk_bytes):
    """(rows of a chunk, rows of a slab) whose logits and gradient fit in chunk_bytes, 16 rows at least."""
    per_chunk_row = columns * (8 + dz_bytes * _CHUNKS_PER_SLAB)
    chunk_rows = min(chunk_bytes // per_chunk_row, _MAX_CHUNK_ROWS) // _ROW_STEP * _ROW_STEP
    chunk_rows = max(chunk_rows, _ROW_STEP)
    return chunk_rows, chunk_rows * _CHUNKS_PER_SLAB


def _values(head_VD, V, dtype):
    """The head's first V rows in dtype, followed by zeros up to a multiple of 8; a copy only if that takes one."""
    missing = -V % _COLUMN_STEP
    values_VD = head_VD[:V].to(dtype)
    return torch.nn.functional.pad(values_VD, (0, 0, 0, missing)) if missing else values_VD


def _multiply(a_MK, b_KN, out_MN, recurring):
    if recurring:  # tails come in many sizes, each too rare to be worth timing
        products.tune(a_MK, b_KN, out_MN)
    products.multiply(a_MK, b_KN, out_MN)


def _take_rows(source_ND, first, weight_M, out_MD):
    M, D = out_MD.shape
    _take_live_rows[(M, triton.cdiv(D, 2048))](source_ND, weight_M, out_MD, first, *source_ND.stride(), D, BLOCK=2048)


def _kl_pass(space, size, weight_L, dz_LV, plan):
    V = plan.vocab_size
    slices = -(-V // _SLICE)
    space.arrived_L.zero_()
    _kl_slices[(size * slices,)](
        space.student_LV,
        space.teacher_LV,
        dz_LV,
        weight_L,
        space.kl_L,
        space.partial_L,
        space.arrived_L,
        V,
        space.student_LV.stride(0),
        dz_LV.stride(0),
        1.0 / plan.temperature,
        slices,
        REVERSE=plan.divergence == "reverse",
        GRADIENT=plan.want_h or plan.want_w,
        SLICES_POW2=triton.next_power_of_2(slices),
        BLOCK=_SLICE,
        num_warps=4,
    )


@triton.jit
def _take_live_rows(source, weight, out, first, stride_n, stride_d, D, BLOCK: tl.constexpr):
    """Copy rows first.. of source; rows of weight 0 become zeros without being read."""
    row = tl.program_id(0).to(tl.int64)
    live_columns = tl.where(tl.load(weight + row) != 0.0, D, 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + (first + row) * stride_n + column * stride_d, mask=column < live_columns, other=0.0)
    tl.store(out + row * D + column, value, mask=column < D)


@triton.jit
def _scale_unless_one(tensor, factor, size, BLOCK: tl.constexpr):
    by = tl.load(factor)
    if by != 1.0:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        remaining = size - tl.program_id(0).to(tl.int64) * BLOCK
        while remaining > 0:
            value = tl.load(tensor + index, mask=index < size)
            tl.store(tensor + index, (value.to(tl.float32) * by).to(value.dtype), mask=index < size)
            index += tl.num_programs(0).to(tl.int64) * BLOCK
            remaining -= tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit
def _max_two(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _kl_slices(
    student,
    teacher,
    dz,
    weight,
    kl,
    partial,
    arrived,
    V,
    stride_z,
    stride_dz,
    inverse_temperature,
    slices,
    REVERSE: tl.constexpr,
    GRADIENT: tl.constexpr,
    SLICES_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One slice of one row: logits are read once and stay in registers while the row's slices meet.

    Each program publishes its slice's maxima and sums, waits until all of its row have, and merges them in slice
    order, so every program of the row computes the same normalisers. Work is taken by ticket: whoever waits has a
    higher or equal row than all unfinished programs, which run already, so the wait ends however the hardware
    orders programs. Logarithms are of base 2 inside.
    """
    ticket = tl.atomic_add(arrived, 1, sem="relaxed")
    row = (ticket // slices).to(tl.int64)
    slice_index = ticket % slices
    column = slice_index * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    factor = tl.load(weight + row)
    if factor == 0.0:
        if GRADIENT:
            tl.store(dz + row * stride_dz + column, tl.zeros([BLOCK], dz.dtype.element_ty), mask=column < stride_dz)
        tl.store(kl + row, 0.0)
    else:
        to_log2 = inverse_temperature * _LOG2E
        x = tl.load(student + row * stride_z + column, mask=inside, other=float("-inf")) * to_log2
        y = tl.load(teacher + row * stride_z + column, mask=inside, other=float("-inf")) * to_log2
        x_max, y_max = tl.reduce((x, y), 0, _max_two)
        # Shifted by the slice's own maxima; columns outside V get probability 0 and difference 0.
        p_local = tl.exp2(y - y_max)
        q_local = tl.exp2(x - x_max)
        difference = tl.where(inside, (x - x_max) - (y - y_max), 0.0)
        x_sum, y_sum, weighted = tl.reduce(
            (q_local, p_local, (q_local if REVERSE else p_local) * difference), 0, _add_three
        )
        here = partial + (row * slices + slice_index) * 8
        tl.store(here + 0, x_max)
        tl.store(here + 1, x_sum)
        tl.store(here + 2, y_max)
        tl.store(here + 3, y_sum)
        tl.store(here + 4, weighted)
        tl.debug_barrier()
        waiting = tl.atomic_add(arrived + 1 + row, 1, sem="acq_rel") + 1
        while waiting < slices:
            waiting = tl.atomic_add(arrived + 1 + row, 0, sem="acquire")
        tl.debug_barrier()

        each = tl.arange(0, SLICES_POW2)
        there = partial + (row * slices + each) * 8
        exists = each < slices
        x_maxes = tl.load(there + 0, mask=exists, other=float("-inf"), cache_modifier=".cg")
        y_maxes = tl.load(there + 2, mask=exists, other=float("-inf"), cache_modifier=".cg")
        x_top, y_top = tl.reduce((x_maxes, y_maxes), 0, _max_two)
        x_scale = tl.exp2(x_maxes - x_top)
        y_scale = tl.exp2(y_maxes - y_top)
        x_sums = tl.load(there + 1, mask=exists, other=0.0, cache_modifier=".cg") * x_scale
        y_sums = tl.load(there + 3, mask=exists, other=0.0, cache_modifier=".cg") * y_scale
        weights = tl.load(there + 4, mask=exists, other=0.0, cache_modifier=".cg")
        # A slice's differences were taken from its own maxima; moving them to the row's adds a constant a slice.
        moved = tl.where(exists, (x_maxes - x_top) - (y_maxes - y_top), 0.0)
        if REVERSE:
            weights = weights * x_scale + x_sums * moved
        else:
            weights = weights * y_scale + y_sums * moved
        x_sum, y_sum, weighted = tl.reduce((x_sums, y_sums, weights), 0, _add_three)
        log_ratio = tl.log2(x_sum / y_sum)
        total = weighted / x_sum - log_ratio if REVERSE else log_ratio - weighted / y_sum
        if slice_index == 0:
            tl.store(kl + row, total * _LN2)
        if GRADIENT:
            q = q_local * (tl.exp2(x_max - x_top) / x_sum)
            if REVERSE:
                shift = (x_max - x_top) - (y_max - y_top) - log_ratio - total
                slope = q * ((difference + shift) * _LN2)
            else:
                slope = q - p_local * (tl.exp2(y_max - y_top) / y_sum)
            slope = tl.where(inside, slope * (factor * inverse_temperature), 0.0)
            tl.store(dz + row * stride_dz + column, slope.to(dz.dtype.element_ty), mask=column < stride_dz)
