"""bf16 products on CPUs without bf16 instructions, whose libraries take several times as long over them as over fp32.

There such a product is one of fp32 copies of the operands, whose result is rounded once to bf16: the numbers that the
instructions would give, up to the order of sums. Which way a CPU goes is measured once a process; the two ways differ
by a factor of two at least on every kind of CPU that was tried, in one direction or the other, so that processes of one
machine agree.

Shape letters as in the contract.
"""

from __future__ import annotations

import functools
import time

import torch

#: bf16 products took 0.4 to 0.6 times as long as fp32 ones with bf16 instructions (AVX512-bf16, AMX), 2.7 times with
#: AVX512 alone, and 4 to 14 times with AVX2.
_SLOW = 1.2
_SHAPE = 32, 1536, 576
_REPEATS = 9


@functools.cache
def wide() -> bool:
    """Whether bf16 products of this process's CPU go through fp32 ones. Takes some tens of milliseconds, once."""
    rows, outputs, columns = _SHAPE
    x_MK, w_NK = torch.ones(rows, columns), torch.ones(outputs, columns)
    ways = (x_MK.bfloat16(), w_NK.bfloat16()), (x_MK, w_NK)
    best = [float("inf")] * 2
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(_REPEATS):  # the first round warms up
            for way, (x, w) in enumerate(ways):
                started = time.thread_time()  # of this thread alone, whatever else the machine does
                torch.mm(x, w.t())
                best[way] = min(best[way], time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
    return best[0] > _SLOW * best[1]


class WideProduct(torch.autograd.Function):
    """x @ w.T of bf16 matrices, and both gradients, as fp32 products rounded once. What is kept is bf16."""

    @staticmethod
    def forward(ctx, x_MK, w_NK):
        ctx.save_for_backward(x_MK, w_NK)
        return (x_MK.float() @ w_NK.float().t()).to(x_MK.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy_MN):
        x_MK, w_NK = ctx.saved_tensors
        dy_MN = dy_MN.float()
        dx_MK = (dy_MN @ w_NK.float()).to(x_MK.dtype) if ctx.needs_input_grad[0] else None
        dw_NK = (dy_MN.t() @ x_MK.float()).to(w_NK.dtype) if ctx.needs_input_grad[1] else None
        return dx_MK, dw_NK
