"""CUDA C++ kernels by the compiler that ships with torch (NVRTC): compiled at first use, launched by the driver.

For schedules that Triton's dialects did not reach (BENCH.md). No toolkit is needed.

Invariant: a launch reads nothing back and waits for nothing, so CUDA graphs capture it. A kernel may start while those
before it on the stream still run, and waits for them itself (griddepcontrol.wait).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

ARCHITECTURE = "sm_90a"
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_BFLOAT16, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES = 9, 3, 3


@cache
def compile_source(path: Path, defines: tuple[tuple[str, int | str], ...]) -> bytes:
    """The device code (cubin) of a source file. Needs no GPU. Raises RuntimeError with the compiler's own words."""
    library = ctypes.CDLL(f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}")
    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", f"--include-path={path.parent}"]
    options += [f"-D{name}={value}" for name, value in defines]
    program = ctypes.c_void_p()
    _compiler(library.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), path.name.encode(), 0, None, None))
    try:
        c_options = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), c_options):
            raise RuntimeError(_text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).decode())
        return _text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_of, read, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _compiler(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _compiler(read(program, buffer))
    return buffer.raw


def _compiler(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC status {status}")


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("value", ctypes.c_uint64 * 8))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid_and_block", ctypes.c_uint32 * 6),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint32),
    )


class Kernel:
    """The function `name` of a source file for one set of defines, on the current device."""

    def __init__(
        self, path: Path, name: str, defines: Mapping[str, int | str], *, threads: int, shared_bytes: int
    ) -> None:
        self.threads, self.shared_bytes = threads, shared_bytes
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.current_stream()  # the driver needs torch's context
        code = compile_source(path, tuple(defines.items()))
        _driver("cuModuleLoadData", ctypes.byref(module), code)
        _driver("cuModuleGetFunction", ctypes.byref(self.function), module, name.encode())
        _driver("cuFuncSetAttribute", self.function, _MAX_DYNAMIC_SHARED, shared_bytes)

    def launch(self, grid: tuple[int, int], arguments: Sequence[ctypes._SimpleCData | ctypes.Array]) -> None:
        """Queue one launch on the current stream."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        early = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (1,))
        sizes = (*grid, 1, self.threads, 1, 1)
        stream = torch.cuda.current_stream().cuda_stream
        launch = _Launch(sizes, self.shared_bytes, stream, ctypes.pointer(early), 1)
        _driver("cuLaunchKernelEx", ctypes.byref(launch), self.function, pointers, None)


def tensor_map(x_MK: torch.Tensor, box_rows: int) -> ctypes.Array:
    """Descriptor with which a kernel copies boxes of box_rows x 64 columns of a contiguous bf16 matrix.

    Rows of a box take 128 bytes each, swizzled as the tensor core reads them; what lies outside x reads as zero. The
    matrix must start at a multiple of 16 bytes and K be a multiple of 8.
    """
    rows, columns = x_MK.shape
    return _encoded(x_MK, (columns, rows), (columns * 2,), (64, box_rows))


def tile_map(x_MK: torch.Tensor, box_rows: int, box_tiles: int) -> ctypes.Array:
    """As `tensor_map`, of boxes of box_tiles x box_rows x 64: tiles of 64 columns one after the other.

    K must be a multiple of 64.
    """
    rows, columns = x_MK.shape
    return _encoded(x_MK, (64, rows, columns // 64), (columns * 2, 128), (64, box_rows, box_tiles))


def _encoded(x_MK: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> ctypes.Array:
    """The fastest dimension first. strides: bytes, of all dimensions but that."""
    raw, rank = ctypes.create_string_buffer(192), len(sizes)
    tensor = (ctypes.c_char * 128).from_buffer(raw, -ctypes.addressof(raw) % 64)
    _driver(
        "cuTensorMapEncodeTiled",
        ctypes.byref(tensor),
        _BFLOAT16,
        rank,
        ctypes.c_void_p(x_MK.data_ptr()),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _SWIZZLE_128_BYTES,
        _PROMOTE_TO_256_BYTES,
        0,
    )
    return tensor


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver(name: str, *arguments) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'').decode() or status}")
