"""Which product serves how many rows of a weight on CUDA: chosen by timing, once a shape and process.

Up to MOST rows there are two kinds of ways: the library's product, whose kernels for few rows and many columns are ten
times too slow without split-K, so that rows of zeros which make it take another one are a cure; and few_rows.cu. All
of them have the same bits, which is proved for each before it may be chosen: nothing but time depends on the choice. A
shape that was never chosen for takes the library's product.

Shape letters: M rows of x, N rows of the weight, K columns of both.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kernels.rows import silu_gate
from kernels.scaled_mm import dense, few_rows
from kernels.scaled_mm.few_rows import Block
from schemas.errors import ContractError

#: Numbers of rows that a choice is made for; others take the next one's.
SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
MOST = SIZES[-1]
#: What the library's product is padded to, or a block of few_rows.cu.
Way = int | Block
_HOPPER = (9, 0)
#: Weights that are multiplied in turn take more than the L2 cache holds.
_ROTATED_BYTES = 160 << 20
_TRIALS = 5
#: A further row of zeros must pay: timings differ by less than this anyway.
_NOISE = 1.02
#: What our own blocks may take of the library's time: they overlap their neighbours, and the library's do not.
_OVERLAP = 1.05

_TEST_ROWS = 2048

_Key = tuple[torch.device, int, int, torch.dtype]
_chosen: dict[_Key, tuple[Way, ...]] = {}
#: Of products whose halves are gated: the block that does both, None where two launches are as fast, for each of SIZES.
_gates: dict[_Key, tuple[Block | None, ...]] = {}


def chosen_mm(x_MK: torch.Tensor, w_NK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x @ w.T in dtype (x's, or fp32), the way that is chosen for the shape."""
    rows = len(x_MK)
    ways = _chosen.get(_key(x_MK, w_NK, dtype)) if 0 < rows <= MOST else None
    way = dense.FEWEST_ROWS if ways is None else ways[bisect.bisect_left(SIZES, rows)]
    w_NK = w_NK.to(x_MK.dtype)
    if isinstance(way, int):
        return dense.library_mm(x_MK, w_NK, dtype, way)
    if not few_rows.lies_well(w_NK):
        return dense.library_mm(x_MK, w_NK, dtype)
    return few_rows.few_rows_mm(x_MK, w_NK, dtype, way)


def chosen_gate_mm(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x @ w.T's halves, bf16, the way that is chosen for the shape."""
    rows = len(x_MK)
    ways = _gates.get(_key(x_MK, w_NK, x_MK.dtype)) if 0 < rows <= few_rows.MOST_ROWS else None
    block = None if ways is None else ways[bisect.bisect_left(SIZES, rows)]
    if block is not None and few_rows.lies_well(w_NK):
        return few_rows.few_rows_mm(x_MK, w_NK, x_MK.dtype, block)
    return silu_gate(*chosen_mm(x_MK, w_NK, x_MK.dtype).split(len(w_NK) // 2, 1))


def choose(x_MK: torch.Tensor, w_NK: torch.Tensor, expected_MN: torch.Tensor) -> dict[int, Way]:
    """Choose for w's shape, device and expected's dtype, unless that was done; the way for each of SIZES.

    x: at least MOST rows. expected: their library product, whose bits a way must have to be taken.
    """
    key = _key(x_MK, w_NK, expected_MN.dtype)
    if key not in _chosen:
        _chosen[key] = _choice(x_MK, w_NK, expected_MN)
    return dict(zip(SIZES, _chosen[key], strict=True))


def _key(x_MK, w_NK, dtype) -> _Key:
    return x_MK.device, *w_NK.shape, dtype


def choose_gate(x_MK: torch.Tensor, w_NK: torch.Tensor, expected_MN: torch.Tensor) -> dict[int, Block | None]:
    """As `choose`, which was called before, for the gate of the product's halves; the block for each of SIZES."""
    key = _key(x_MK, w_NK, expected_MN.dtype)
    if key not in _gates:
        gated = silu_gate(*expected_MN.split(len(w_NK) // 2, 1))
        _gates[key] = tuple(_gate_choice(x_MK[:size], w_NK, gated[:size]) for size in SIZES)
    return dict(zip(SIZES, _gates[key], strict=True))


def _gate_choice(x_MK, w_NK, gated) -> Block | None:
    rows, dtype = len(x_MK), gated.dtype
    if rows > few_rows.MOST_ROWS or len(w_NK) % 16 or not few_rows.takes(*w_NK.shape):
        return None
    if torch.cuda.get_device_capability(x_MK.device) != _HOPPER:
        return None
    weights, best = _rotated(w_NK), None
    best_us = _graph_us([partial(chosen_gate_mm, x_MK, weight) for weight in weights])  # none is chosen yet
    for block in few_rows.blocks(rows, len(w_NK), dtype, x_MK.device, gate=True):
        if not torch.equal(few_rows.few_rows_mm(x_MK, w_NK, dtype, block), gated):
            continue
        us = _graph_us([partial(few_rows.few_rows_mm, x_MK, weight, dtype, block) for weight in weights])
        if us < best_us * (_OVERLAP if best is None else 1):
            best, best_us = block, us
    return best


def _rotated(w_NK: torch.Tensor) -> list[torch.Tensor]:
    copies = min(32, -(-_ROTATED_BYTES // (w_NK.numel() * w_NK.itemsize)))
    return [w_NK, *(w_NK.clone() for _ in range(copies - 1))]


def _choice(x_MK, w_NK, expected_MN) -> tuple[Way, ...]:
    dtype = expected_MN.dtype
    weights = _rotated(w_NK)

    def us(rows: int, product: Callable[..., torch.Tensor], *options: Block) -> float | None:
        if not torch.equal(product(x_MK[:rows], w_NK, dtype, *options), expected_MN[:rows]):
            return None
        return _graph_us([partial(product, x_MK[:rows], weight, dtype, *options) for weight in weights])

    library = {size: us(size, dense.library_mm) for size in SIZES}
    own: dict[int, dict[Block, float | None]] = {}
    if few_rows.takes(*w_NK.shape) and torch.cuda.get_device_capability(x_MK.device) == _HOPPER:
        for size in (size for size in SIZES if size <= few_rows.MOST_ROWS):
            blocks = few_rows.blocks(size, len(w_NK), dtype, x_MK.device)
            own[size] = {block: us(size, few_rows.few_rows_mm, block) for block in blocks}
    return tuple(_fastest(size, library, own.get(size, {})) for size in SIZES)


def _fastest(size: int, library: dict[int, float | None], own: dict[Block, float | None]) -> Way:
    """Of padding to any size from this one on, and of our own blocks, by microseconds; None stands for other bits."""
    best: Way = size
    best_us = float("inf")
    for padded, padded_us in library.items():
        if padded >= size and padded_us is not None and padded_us * _NOISE < best_us:
            best, best_us = padded, padded_us
    for block, own_us in own.items():
        if own_us is not None and own_us < best_us * (_OVERLAP if isinstance(best, int) else 1):
            best, best_us = block, own_us
    return best


def _graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Least microseconds of one of the calls, which follow each other in one graph: no launch by the host counts."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    times = []
    for _ in range(_TRIALS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return min(times)


def check_row_invariance(
    num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device, *, gate: bool = False
) -> None:
    """Choose for a weight [num_rows, num_columns]; raise ContractError unless rows then keep their bits.

    gate: of the gate of its halves, too.
    """
    generator = torch.Generator(device).manual_seed(num_rows * 65536 + num_columns)
    normal = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    w_NK = torch.randn(num_rows, num_columns, **normal)
    x_MK = torch.randn(_TEST_ROWS, num_columns, **normal)
    expected_MN = dense.library_mm(x_MK, w_NK, dtype)
    choose(x_MK, w_NK, expected_MN)
    if gate:
        choose_gate(x_MK, w_NK, expected_MN)
    for rows in (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 192, 256, 257, 511, 512, 1000, 1024, 2000):
        chosen = torch.randperm(_TEST_ROWS, generator=generator, device=device)[:rows]
        same = torch.equal(chosen_mm(x_MK[chosen], w_NK, dtype), expected_MN[chosen])
        if same and gate:
            wanted = silu_gate(*expected_MN[chosen].split(num_rows // 2, 1))
            same = torch.equal(chosen_gate_mm(x_MK[chosen], w_NK), wanted)
        if not same:
            raise ContractError(
                f"row-invariant product, weight {num_rows} x {num_columns}, {dtype}",
                expected=f"rows of a product of {_TEST_ROWS} rows, bit for bit",
                found=f"other bits in a product of {rows} rows",
                next_command='ask for impl="triton", which sums K in one order by construction',
            )
