"""Products of few rows: every way has the library's bits, the fastest is taken, and launches that overlap wait."""

from __future__ import annotations

import pytest
import torch

from kernels.scaled_mm import choice, dense, few_rows, row_invariant_gate_mm, row_invariant_mm, self_test
from kernels.scaled_mm.few_rows import Block, block_for, few_rows_mm
from schemas.errors import ContractError

GPU = pytest.mark.gpu
BF16, FP32 = torch.bfloat16, torch.float32


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def test_a_block_leaves_no_multiprocessor_much_to_read():
    assert [block_for(n, 16, False, 132).outputs for n in (2048, 3072, 4096, 16384, 28672)] == [16, 24, 32, 128, 112]
    # Many rows of x, which every block reads, and many of the weight: wider blocks.
    assert block_for(2048, 64, False, 132).outputs >= 16
    assert block_for(128256, 16, True, 132).outputs >= 32


@pytest.mark.skipif(torch.version.cuda is None, reason="torch without NVRTC")
@pytest.mark.parametrize("fp32", [False, True])
def test_blocks_compile_and_fit(fp32):
    from kernels.scaled_mm.cuda import compile_source

    for outputs, gate in ((8, False), (16, False), (40, False), (128, False), (16, not fp32), (112, not fp32)):
        block = Block(outputs, 4 if outputs <= 32 else 1, fp32, gate)
        assert b"few_rows" in compile_source(few_rows.SOURCE, tuple(block.defines.items()))
        for x_rows in (8, 64):
            slots = block.slots(x_rows)
            assert 2 <= slots <= few_rows._MOST_SLOTS
            size = few_rows._BARRIER_BYTES + slots * block.tiles * 128 * (x_rows + outputs) + few_rows._PAST_BYTES
            assert size <= few_rows._SHARED_BYTES
            assert slots * 16 <= few_rows._BARRIER_BYTES


def test_the_fastest_way_with_the_right_bits_is_taken():
    library = {16: 187.0, 32: 188.0, 48: 15.7, 64: 15.5, 96: None, 128: 16.0, 192: 17.0, 256: 20.0}
    # 64 gains no more than timings differ by.
    assert [choice._fastest(size, library, {}) for size in (16, 48, 64)] == [48, 48, 64]
    narrow, wide = Block(16, 4, False), Block(32, 4, False)
    assert choice._fastest(16, library, {narrow: 11.9, wide: 11.4}) == wide
    assert choice._fastest(16, library, {narrow: 11.9, wide: None}) == narrow
    # The library's products do not overlap their neighbours.
    assert choice._fastest(16, library, {narrow: 16.4}) == narrow
    assert choice._fastest(16, library, {narrow: 16.9}) == 48
    assert choice._fastest(16, library, {wide: 16.2, narrow: 16.4}) == wide
    assert choice._fastest(96, library, {}) == 128
    assert choice._fastest(16, dict.fromkeys(choice.SIZES), {}) == 16


@GPU
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", [(1000, 64), (2056, 192), (136, 4864), (16640, 576)])
def test_every_block_has_the_bits_of_the_library(shape, dtype):
    outputs, columns = shape
    w, x = normal(outputs, columns), normal(64, columns)
    x[40] = float("nan")  # what one row holds, others do not see
    others = torch.arange(64, device="cuda") != 40
    expected = dense.library_mm(x, w, dtype)
    for width in range(8, 136, 8):
        for tiles in (1, 2, 4):
            block = Block(width, tiles, dtype == FP32)
            if block.slots(64) < 2:
                continue
            for rows in (1, 9, 16, 33, 64):
                found = few_rows_mm(x[:rows], w, dtype, block)
                assert torch.equal(found[others[:rows]], expected[:rows][others[:rows]]), (block, rows)
                assert rows <= 40 or bool(found[40].isnan().all())


@GPU
@pytest.mark.parametrize("shape", [(2048, 8192), (1024, 3072), (896, 4864), (4096, 14336)])
def test_a_choice_changes_no_bit_and_cures_the_library(shape, monkeypatch):
    monkeypatch.setattr(choice, "_chosen", {})
    w, x = normal(*shape), normal(300, shape[1])
    before = {rows: row_invariant_mm(x[-rows:], w) for rows in (1, 7, 16, 31, 64, 100, 256, 300)}
    self_test([shape])
    (ways,) = choice._chosen.values()
    for rows, expected in before.items():
        assert torch.equal(row_invariant_mm(x[-rows:], w), expected), (rows, ways)
        assert torch.equal(row_invariant_mm(x[-rows:], w, impl="triton"), expected)
    strided = normal(64, 2 * shape[1])[:, : shape[1]]
    assert torch.equal(row_invariant_mm(strided, w), row_invariant_mm(strided.contiguous(), w))
    apart = torch.empty(shape[0] * shape[1] + 1, device="cuda", dtype=BF16)[1:].view(shape).copy_(w)
    assert torch.equal(row_invariant_mm(x[:5], apart), row_invariant_mm(x[:5], w))


@GPU
@pytest.mark.parametrize("shape", [(2064, 192), (272, 4864), (16384, 576)])
def test_every_gated_block_has_the_bits_of_the_gate_of_the_product(shape):
    from kernels.rows import silu_gate

    w, x = normal(*shape) / 8, normal(64, shape[1])
    x[40] = float("nan")
    others = torch.arange(64, device="cuda") != 40
    y = dense.library_mm(x, w, BF16)
    expected = silu_gate(*y.split(shape[0] // 2, 1))
    gate, up = (x.double() @ w.double().T)[others].split(shape[0] // 2, 1)
    exact = gate * torch.sigmoid(gate) * up
    assert float((expected[others].double() - exact).norm() / exact.norm()) < 1e-2
    for width in range(16, 144, 16):
        for tiles in (1, 2, 4):
            block = Block(width, tiles, False, True)
            if block.slots(64) < 2:
                continue
            for rows in (1, 9, 16, 33, 64):
                found = few_rows_mm(x[:rows], w, BF16, block)
                assert torch.equal(found[others[:rows]], expected[:rows][others[:rows]]), (block, rows)


def test_a_gate_without_as_many_up_rows_is_refused():
    with pytest.raises(ContractError, match="7 rows"):
        row_invariant_gate_mm(torch.ones(2, 8), torch.ones(7, 8))


@GPU
@pytest.mark.parametrize("shape", [(16384, 2048), (1040, 576), (1000, 512)])
def test_a_chosen_gate_changes_no_bit(shape, monkeypatch):
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(choice, "_gates", {})
    w, x = normal(*shape), normal(300, shape[1])
    before = {rows: row_invariant_gate_mm(x[-rows:], w) for rows in (1, 7, 16, 31, 64, 65, 300)}
    self_test([], gates=[shape])
    (ways,) = choice._gates.values()
    assert all(block is None for block in ways[choice.SIZES.index(96) :])
    for rows, expected in before.items():
        assert torch.equal(row_invariant_gate_mm(x[-rows:], w), expected), (rows, ways)
    apart = torch.empty(w.numel() + 1, device="cuda", dtype=BF16)[1:].view(shape).copy_(w)
    assert torch.equal(row_invariant_gate_mm(x[:5], apart), row_invariant_gate_mm(x[:5], w))


@GPU
def test_a_way_with_other_bits_is_never_taken(monkeypatch):
    monkeypatch.setattr(choice, "_chosen", {})
    library, own = dense.library_mm, few_rows.few_rows_mm
    monkeypatch.setattr(few_rows, "few_rows_mm", lambda x, *more: own(x, *more) + (len(x) == 32))
    monkeypatch.setattr(dense, "library_mm", lambda x, *more: library(x, *more) + (len(x) == 64))
    self_test([(2048, 8192)])
    (ways,) = choice._chosen.values()
    chosen = dict(zip(choice.SIZES, ways, strict=True))
    assert isinstance(chosen[32], int)
    assert 64 not in ways
    assert not isinstance(chosen[16], int)


@GPU
def test_overlapping_launches_wait_for_what_they_read():
    """Norms, gates and products start early; each must see its inputs, also a weight that was just written."""
    from kernels.rows import add_rms_norm, silu_gate

    width, inner, block = 1024, 4096, Block(32, 4, False)
    plain = [normal(2 * inner, width) / width**0.5, normal(width, inner) / inner**0.5]
    source, norm = normal(48, width), torch.ones(width, device="cuda")
    gate_up, down, held = torch.empty_like(plain[0]), torch.empty_like(plain[1]), torch.empty_like(source)

    def chain(wait):
        results = []
        h, x = held.copy_(source), source
        wait()
        for i in range(6):
            gate_up.copy_(plain[0] if i % 2 else -plain[0])
            wait()
            down.copy_(plain[1])
            wait()
            h, x = add_rms_norm(h, x, norm, 1e-5)
            wait()
            parts = few_rows_mm(x, gate_up, BF16, block)
            wait()
            y = silu_gate(*parts.split(inner, 1))
            wait()
            x = few_rows_mm(y, down, BF16, block)
            wait()
            results.append(x.sum(1, dtype=torch.float64))
        return results

    expected = chain(torch.cuda.synchronize)
    assert all(bool(x.isfinite().all()) for x in expected)
    assert all(torch.equal(a, b) for a, b in zip(chain(lambda: None), expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(lambda: None)
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
