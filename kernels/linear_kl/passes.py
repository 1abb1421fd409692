"""The Triton passes of linear_kl: logits become divergence and gradients, rows are copied, gradients scaled.

Legend: N packed tokens, D student width, V vocabulary, S columns of an early part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.quant.bits import E4M3_CARRY, E4M3_EXPONENT, e4m3, fp8_scale, scale_byte, top_bits

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def take_live_rows(source, weight, out, first, stride_n, stride_d, D, BLOCK: tl.constexpr):
    """Copy rows first.. of source; rows of weight 0 become zeros without being read."""
    row = tl.program_id(0).to(tl.int64)
    live_columns = tl.where(tl.load(weight + row) != 0.0, D, 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + (first + row) * stride_n + column * stride_d, mask=column < live_columns, other=0.0)
    tl.store(out + row * D + column, value, mask=column < D)


@triton.jit
def scale_unless_one(tensor, factor, size, BLOCK: tl.constexpr):
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
def _store_slopes(slopes, early, late, row, first, columns, early_parts, early_pitch, S, late_pitch):
    """Store a slice of a row of dz, columns first.., into the part or the two parts that it belongs to."""
    column = first + tl.arange(0, slopes.shape[0])
    inside = column < columns
    part = first // S
    edge = (part + 1) * S
    place = _row_of_part(part, early, late, row, early_parts, early_pitch, S, late_pitch)
    tl.store(place + column, slopes, mask=inside & (column < edge))
    if edge < tl.minimum(first + slopes.shape[0], columns):
        place = _row_of_part(part + 1, early, late, row, early_parts, early_pitch, S, late_pitch)
        tl.store(place + column, slopes, mask=inside & (column >= edge))


@triton.jit
def _row_of_part(part, early, late, row, early_parts, early_pitch, S, late_pitch):
    """Where column 0 of the row would lie if the part began with it."""
    from_early = early + part.to(tl.int64) * early_pitch + (row - part) * S
    from_late = late + row * late_pitch - early_parts * S
    return tl.where(part < early_parts, from_early, from_late)


# One function: what it passes on between its halves are registers, which a call would send through memory.
@triton.jit
def kl_slices(
    student,
    teacher,
    early,
    late,
    dz_scales,
    weight,
    kl,
    partial,
    arrived,
    V,
    columns,
    early_parts,
    early_pitch,
    S,
    late_pitch,
    stride_scales,
    inverse_temperature,
    slices,
    REVERSE: tl.constexpr,
    GRADIENT: tl.constexpr,
    FP8: tl.constexpr,
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
    first = slice_index * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = column < V
    factor = tl.load(weight + row)
    if factor == 0.0:
        if GRADIENT:
            nothing = tl.zeros([BLOCK], late.dtype.element_ty)
            _store_slopes(nothing, early, late, row, first, columns, early_parts, early_pitch, S, late_pitch)
            if FP8:
                block = slice_index * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
                zero = tl.zeros([BLOCK // 128], tl.int32)
                scale = fp8_scale(zero, scale_byte(zero, E4M3_EXPONENT, E4M3_CARRY))
                place = dz_scales + block.to(tl.int64) * stride_scales + row
                tl.store(place, scale, mask=block < columns // 128)
        tl.store(kl + row, 0.0)
    else:
        to_log2 = inverse_temperature * _LOG2E
        x = tl.load(student + row * columns + column, mask=inside, other=float("-inf")) * to_log2
        y = tl.load(teacher + row * columns + column, mask=inside, other=float("-inf")) * to_log2
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
            if FP8:
                blocks = tl.reshape(slope, [BLOCK // 128, 128])
                bits = top_bits(blocks, 1)
                byte = scale_byte(bits, E4M3_EXPONENT, E4M3_CARRY)
                codes = tl.reshape(e4m3(blocks, byte[:, None]), [BLOCK])
                _store_slopes(codes, early, late, row, first, columns, early_parts, early_pitch, S, late_pitch)
                block = slice_index * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
                place = dz_scales + block.to(tl.int64) * stride_scales + row
                tl.store(place, fp8_scale(bits, byte), mask=block < columns // 128)
            else:
                slopes = slope.to(late.dtype.element_ty)
                _store_slopes(slopes, early, late, row, first, columns, early_parts, early_pitch, S, late_pitch)
