"""Matrix products by cuBLASLt itself: fp32 sums, fp32 or narrow results, never split along K.

torch.mm reaches the same library, but lets switches of the process decide on split-K, adds into an fp32 result with
whatever algorithm comes first (up to a third slower here than the best), and cannot add FP8 products at all.

An FP8 operand brings a scale for each of its blocks; the library sums 128 of K at a time and scales such a sum in fp32.

Invariant: every element of a result is one sum over K in ascending order. Where widths and leading dimensions are
multiples of 8 all algorithms offered on Hopper agree on its bits (tested), so it is safe to choose among them by
measurement, and a row's bits do not depend on the number of rows of the call.

The library is column-major: a row-major M x N result of a and b is asked for as the N x M product of b' and a'.
Legend: M rows and N columns of the result, K the summed dimension.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from schemas.errors import ContractError

# Values of cublasLt.h and library_types.h, the same in CUDA 12 and 13.
_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
_COMPUTE_FP32 = 68
_DESC_TRANSPOSE_A, _DESC_TRANSPOSE_B, _DESC_SCALE_A, _DESC_SCALE_B = 3, 4, 17, 18
_DESC_SCALE_MODE_A, _DESC_SCALE_MODE_B = 31, 32
_SCALE_1X128, _SCALE_128X128 = 4, 5
_PREFER_REDUCTION_SCHEMES, _PREFER_ALIGNMENT_FIRST = 3, 5
_MAX_CANDIDATES = 16
_TRIALS = 3


class _Candidate(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Fp8:
    """An E4M3 matrix with a scale for each block. The summed dimension K is the one of unit stride, a multiple of 16.

    scales, fp32, for a matrix of R rows along K: blocks of 1 x 128 take [ceil(K/128), R], R fastest; tiles of
    128 x 128 take [ceil(R/128), ceil(K/128) rounded up to a multiple of 4], K fastest.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    tiles: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def t(self) -> Fp8:
        return Fp8(self.codes.t(), self.scales, self.tiles)


def multiply(a_MK: torch.Tensor | Fp8, b_KN: torch.Tensor | Fp8, out_MN: torch.Tensor, *, accumulate=False) -> None:
    """out = a b (+ out), on the current stream. Each matrix has one unit stride; out is row-major.

    a and b: both bf16, both fp32, or both Fp8 (not tiles twice). out: fp32, or bf16. Raises ContractError where the
    library has no algorithm for the shape.
    """
    plan = _plan(*_signature(a_MK, b_KN, out_MN))
    plan.run(a_MK, b_KN, out_MN, accumulate, plan.candidates[plan.chosen])


def tune(a_MK: torch.Tensor | Fp8, b_KN: torch.Tensor | Fp8, out_MN: torch.Tensor, *, accumulate=False) -> None:
    """Choose the algorithm of all later products of this shape by timing them, once. Overwrites out.

    A shape that was never tuned takes the library's first choice.
    """
    plan = _plan(*_signature(a_MK, b_KN, out_MN))
    if plan.tuned:
        return
    timings = []
    for index, candidate in enumerate(plan.candidates):
        plan.run(a_MK, b_KN, out_MN, accumulate, candidate)
        for _ in range(_TRIALS):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            plan.run(a_MK, b_KN, out_MN, accumulate, candidate)
            stop.record()
            stop.synchronize()
            timings.append((start.elapsed_time(stop), index))
    plan.chosen, plan.tuned = min(timings)[1], True


def stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@dataclass
class _Plan:
    """A product of one signature: library descriptors, algorithms in the library's order, and the chosen one."""

    handle: ctypes.c_void_p
    description: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ...]
    candidates: list
    chosen: int = 0
    tuned: bool = False

    def run(self, a_MK, b_KN, out_MN, accumulate, candidate) -> None:
        # The library's first operand is our second, and the other way round.
        for attribute, operand in ((_DESC_SCALE_A, b_KN), (_DESC_SCALE_B, a_MK)):
            if isinstance(operand, Fp8):
                _set_pointer(self.description, attribute, operand.scales.data_ptr())
        first, second, result = self.layouts
        out = ctypes.c_void_p(out_MN.data_ptr())
        _call(
            "cublasLtMatmul",
            self.handle,
            self.description,
            ctypes.byref(ctypes.c_float(1.0)),
            ctypes.c_void_p(_matrix(b_KN).data_ptr()),
            first,
            ctypes.c_void_p(_matrix(a_MK).data_ptr()),
            second,
            ctypes.byref(ctypes.c_float(1.0 if accumulate else 0.0)),
            out,
            result,
            out,
            result,
            ctypes.byref(candidate.algorithm),
            None,
            _size(0),
            ctypes.c_void_p(stream(out_MN.device)),
        )


def _matrix(operand: torch.Tensor | Fp8) -> torch.Tensor:
    return operand.codes if isinstance(operand, Fp8) else operand


def _signature(a_MK, b_KN, out_MN):
    """All that decides on the algorithm: dtypes, scales, sizes, orders, leading dimensions, alignments, device."""
    if a_MK.shape[1] != b_KN.shape[0] or out_MN.shape != (a_MK.shape[0], b_KN.shape[1]):
        raise ValueError(f"product of {list(a_MK.shape)} and {list(b_KN.shape)} into {list(out_MN.shape)}")
    operands = tuple(_operand(x) for x in (a_MK, b_KN, out_MN))
    if not operands[2][1]:
        raise ValueError("the result of a product must be row-major")
    return *operands, *out_MN.shape, a_MK.shape[1], out_MN.device.index


def _operand(operand):
    """(dtype, whether row-major, leading dimension, alignment, scale mode)."""
    x, mode = _matrix(operand), 0
    if isinstance(operand, Fp8):
        mode = _SCALE_128X128 if operand.tiles else _SCALE_1X128
    rows, columns = x.shape
    alignment = min(x.data_ptr() & -x.data_ptr(), 256)
    if x.stride(1) == 1 and (x.stride(0) >= columns or rows == 1):
        return x.dtype, True, max(x.stride(0), columns), alignment, mode
    if x.stride(0) == 1 and (x.stride(1) >= rows or columns == 1):
        return x.dtype, False, max(x.stride(1), rows), alignment, mode
    raise ValueError(f"a matrix of shape {list(x.shape)} and strides {x.stride()} is neither row- nor column-major")


@functools.cache
def _plan(a, b, out, M: int, N: int, K: int, device_index: int) -> _Plan:
    description = ctypes.c_void_p()
    _call("cublasLtMatmulDescCreate", ctypes.byref(description), _COMPUTE_FP32, _TYPES[torch.float32])
    for attribute, operand in ((_DESC_TRANSPOSE_A, b), (_DESC_TRANSPOSE_B, a)):
        _set_int(description, attribute, not operand[1])
    modes = (_DESC_SCALE_MODE_A, _DESC_SCALE_A, b[4]), (_DESC_SCALE_MODE_B, _DESC_SCALE_B, a[4])
    for mode_attribute, pointer_attribute, mode in modes:
        if mode:
            _set_int(description, mode_attribute, mode)
            # The search for algorithms wants to see a pointer; it never reads what is there.
            _set_pointer(description, pointer_attribute, 256)
    # A row-major [r, c] matrix is a column-major [c, r] one.
    layouts = (
        _layout(b, N, K) if b[1] else _layout(b, K, N),
        _layout(a, K, M) if a[1] else _layout(a, M, K),
        _layout(out, N, M),
    )
    preference = ctypes.c_void_p()
    _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    wishes = [(_PREFER_REDUCTION_SCHEMES, 0)]
    wishes += [(_PREFER_ALIGNMENT_FIRST + i, x[3]) for i, x in enumerate((b, a, out, out))]
    for attribute, value in wishes:
        number = ctypes.c_uint32(value)
        _call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(number), _size(4))
    handle, found, count = _handle(device_index), (_Candidate * _MAX_CANDIDATES)(), ctypes.c_int()
    first, second, result = layouts
    answer = _library().cublasLtMatmulAlgoGetHeuristic(
        handle, description, first, second, result, result, preference, len(found), found, ctypes.byref(count)
    )
    _library().cublasLtMatmulPreferenceDestroy(preference)
    candidates = [found[i] for i in range(count.value) if found[i].status == 0]
    if answer != 0 or not candidates:
        raise ContractError(
            f"cuBLASLt, product of {M} x {K} and {K} x {N}",
            expected="an algorithm without split-K",
            found=f"none (status {answer}) for {a}, {b} into {out}",
        )
    return _Plan(handle, description, layouts, candidates)


def _layout(operand, rows, columns):
    layout = ctypes.c_void_p()
    dtype, leading = operand[0], operand[2]
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(leading)
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), _TYPES[dtype], *sizes)
    return layout


@functools.cache
def _handle(device_index: int):
    handle = ctypes.c_void_p()
    with torch.cuda.device(device_index):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


@functools.cache
def _library():
    """The copy that torch has loaded, whatever its version and path."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcublasLt.so" in line}
    if not paths:
        raise ContractError(
            "the GPU path of linear_kl", expected="a torch that loads libcublasLt", found=f"torch {torch.__version__}"
        )
    return ctypes.CDLL(min(paths))


def _set_int(description, attribute: int, value: int) -> None:
    number = ctypes.c_int32(value)
    _call("cublasLtMatmulDescSetAttribute", description, attribute, ctypes.byref(number), _size(4))


def _set_pointer(description, attribute: int, address: int) -> None:
    pointer = ctypes.c_void_p(address)
    _call("cublasLtMatmulDescSetAttribute", description, attribute, ctypes.byref(pointer), _size(8))


def _call(name: str, *arguments) -> None:
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        raise ContractError(f"cuBLASLt, {name}", expected="status 0", found=f"status {status}")


def _size(value: int):
    return ctypes.c_size_t(value)
