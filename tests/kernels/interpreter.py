"""Compares kernels with references on the CPU, in Triton's interpreter: `python -m tests.kernels.interpreter OP`.

The interpreter runs one program after the other and rounds FP8 wrongly. So rows have one slice here (several slices
wait for each other) with an edge between two parts in its middle, FP8 inputs lie on its grid, library products are
plain torch, and the two casts with inline PTX are left to a GPU. The rest is the kernels' own.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch


def linear_kl() -> int:
    from kernels.linear_kl import Plan, Teacher, linear_kl, linear_kl_by_teacher, products, workspace

    def multiply(a_MK, b_KN, out_MN, *, accumulate=False):
        if not accumulate:
            out_MN.fill_(float("nan"))  # seen by an operand that lies where the result does
        out_MN.copy_(out_MN + a_MK @ b_KN if accumulate else a_MK @ b_KN)

    workspace._part_columns = lambda columns: workspace.SLICE // 2
    products.multiply, products.stream = multiply, lambda device: 0
    products.tune = lambda a_MK, b_KN, out_MN, *, accumulate=False: out_MN.fill_(float("nan"))
    cases = 0
    for divergence in ("reverse", "forward"):
        # The last takes one slab, whose dz lies in the head gradient's memory.
        for N, D, V, chunk_bytes in (
            (70, 24, 61, 1),
            (1, 24, 64, 1),
            (37, 24, 7, 1),
            (0, 24, 9, 1),
            (70, 80, 250, 74_000),
        ):
            # Short, since the interpreter takes a Python step for each element of a reduction.
            workspace.SLICE = 256 if V > 64 else 64
            plan = Plan(divergence, 1.7, V, chunk_bytes, want_h=True, want_w=True)
            assert workspace.Sizes.of(N, D, 40, 4, plan).one_slab == (V > 64)
            generator = torch.Generator().manual_seed(N)
            h, t = torch.randn(N, D, generator=generator), torch.randn(N, 40, generator=generator)
            w, u = torch.randn(V + 5, D, generator=generator), torch.randn(V + 9, 40, generator=generator)
            weight = torch.rand(N, generator=generator)
            masked = torch.arange(N) % 7 == 3 if V <= 64 else torch.arange(N) % 5 > 0
            weight[masked], h[masked], t[masked] = 0, float("nan"), float("inf")
            results = []
            for impl in ("kernel", "reference"):
                leaves = h.clone().requires_grad_(), w.clone().requires_grad_()
                options = {"divergence": divergence, "temperature": 1.7, "vocab_size": V, "chunk_bytes": chunk_bytes}
                loss, kl_N = linear_kl(*leaves, t, u, weight, **options, impl=impl)
                (loss * 3).backward()
                results.append((loss.detach(), kl_N, leaves[0].grad, leaves[1].grad))
            for found, wanted in zip(*results, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            cases += 1
    # Rows of three teachers in several slabs, and in one whose dz lies in the head gradient's memory.
    for D, V, chunk_bytes in ((24, 61, 1), (80, 250, 74_000)):
        workspace.SLICE = 256 if V > 64 else 64
        generator = torch.Generator().manual_seed(V)
        counts, widths = (5, 33, 20), (40, 24, 56)
        h, w = torch.randn(58, D, generator=generator), torch.randn(V + 5, D, generator=generator)
        weight = torch.rand(58, generator=generator)
        weight[3::5] = 0
        teachers = []
        for count, width in zip(counts, widths, strict=True):
            u = torch.randn(V + 2, width, generator=generator)
            teachers.append(Teacher(torch.randn(count, width, generator=generator), lambda u=u: u))
        results = []
        for impl in ("kernel", "reference"):
            leaves = h.clone().requires_grad_(), w.clone().requires_grad_()
            loss, kl_N = linear_kl_by_teacher(
                *leaves, teachers, weight, vocab_size=V, chunk_bytes=chunk_bytes, impl=impl
            )
            loss.backward()
            results.append((loss.detach(), kl_N, leaves[0].grad, leaves[1].grad))
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        cases += 1
    return cases


def quant() -> int:
    from kernels import quant as q

    def bits(x):
        x = x.contiguous().view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
        return x.masked_fill(x.isnan(), float("nan")).view(torch.int32) if x.dtype == torch.float32 else x

    cases = 0
    for N, K in ((5, 64), (130, 96)):
        generator = torch.Generator().manual_seed(N)
        x = torch.randn(N, K, generator=generator)
        x *= torch.exp2(torch.randint(-9, 9, (N, K // 32), generator=generator).float()).repeat_interleave(32, 1)
        x[0, :32] = 0
        if N > 4:
            x[1, 3], x[2, 40], x[3] = float("nan"), float("inf"), 1e-41
            x[4] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0]).repeat(K // 8)
        on_grid = torch.randint(0, 8, (N, K - 3), generator=generator) * 2.0 ** torch.randint(
            -3, 5, (N, K - 3), generator=generator
        )
        results = []
        for impl in ("kernel", "reference"):
            blocks, scales = q.mxfp4_quantize(x, impl=impl)
            blocks = blocks.masked_fill((scales == 255).repeat_interleave(16, 1), 0)
            results.append(
                (
                    blocks,
                    scales,
                    q.mxfp4_dequantize(blocks, scales, torch.float32, impl=impl),
                    q.fp8_quantize_tiles(x, impl=impl)[1],
                    q.fp8_quantize_rows(x, impl=impl)[1],
                    *q.fp8_quantize_tiles(on_grid, impl=impl),
                    *q.fp8_quantize_rows(on_grid, impl=impl),
                )
            )
        for index, (found, wanted) in enumerate(zip(*results, strict=True)):
            assert torch.equal(bits(found), bits(wanted)), (N, K, index)
        cases += 1
    return cases


if __name__ == "__main__":
    count = {"linear_kl": linear_kl, "quant": quant}[sys.argv[1]]()
    print(f"{count} cases equal")
