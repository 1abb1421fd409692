"""Products on packed and block-scaled operands, against decoders written here and float64 sums.

Bits on the GPU are compared between implementations; the CPU covers formats, references and gradients.
"""

from __future__ import annotations

import pytest
import torch

from kernels.quant import fp8_quantize_both, fp8_quantize_rows, fp8_quantize_tiles, mxfp4_to_fp8
from kernels.scaled_mm import (
    fp8_linear,
    fp8_mm,
    fp8_weight,
    mxfp4_gate_mm,
    mxfp4_mm,
    pack_mxfp4,
    row_invariant_mm,
    self_test,
    w4a8_mm,
)
from kernels.scaled_mm.packing import unpack_mxfp4
from schemas.errors import ContractError

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def decode_mxfp4(blocks, scales):
    """float64 values, one code at a time: sign, table, power of two; the even column is the low nibble."""
    rows, half = blocks.shape
    values = torch.zeros(rows, 2 * half, dtype=torch.float64)
    for n, row in enumerate(blocks.tolist()):
        for byte_index, byte in enumerate(row):
            for k, code in ((2 * byte_index, byte & 15), (2 * byte_index + 1, byte >> 4)):
                magnitude = E2M1[code & 7] * 2.0 ** (int(scales[n, k // 32]) - 127)
                values[n, k] = -magnitude if code & 8 else magnitude
    return values


def random_mxfp4(rows, columns, *, low=100, high=129, device="cpu", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, columns // 2), generator=generator, device=device, dtype=torch.uint8)
    scales = torch.randint(low, high, (rows, columns // 32), generator=generator, device=device, dtype=torch.uint8)
    return blocks, scales


def error(actual, expected):
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", [(64, 64), (1, 32), (130, 96), (200, 320)])
def test_packed_weight_holds_every_code(shape):
    blocks, scales = random_mxfp4(*shape)
    weight = pack_mxfp4(blocks, scales)
    assert torch.equal(unpack_mxfp4(weight).double(), decode_mxfp4(blocks, scales))
    assert torch.equal(unpack_mxfp4(weight).signbit(), decode_mxfp4(blocks, scales).signbit())
    assert weight.words.shape[1] == 32
    assert weight.words.numel() * 8 >= shape[0] * shape[1]


def test_packing_follows_its_description():
    # One code at (n, k) = (32 + 8 * 2 + 5, 128 + 32 * 3 + 2 * 1 + 8 * 3 + 1): pair 3, its odd column.
    blocks, scales = torch.zeros(64, 128, dtype=torch.uint8), torch.full((64, 8), 127, dtype=torch.uint8)
    blocks[53, 251 // 2] = 0b1011 << 4  # sign, exponent 01, mantissa 1
    weight = pack_mxfp4(blocks, scales)
    words = weight.words.view(2, 2, 4, 8, 4, 4)  # tiles of 32 rows, of 128 columns; octet, row, quad, group
    assert words.count_nonzero() == 1
    assert int(words[1, 1, 2, 5, 1, 3]) & 0xFFFFFFFF == (1 << 15 | 1 << 7 | 1 << 14) << 16
    # And in pair 2, whose exponent and mantissa lie round the word's end.
    blocks[53, 251 // 2], blocks[53, 243 // 2] = 0, 0b1011 << 4
    words = pack_mxfp4(blocks, scales).words.view(2, 2, 4, 8, 4, 4)
    assert words.count_nonzero() == 1
    assert int(words[1, 1, 2, 5, 1, 3]) == 1 << 19 | 1 << 11 | 1 << 10
    # The scale of a row and 32 columns.
    scales[53, 7] = 120
    exponents = pack_mxfp4(blocks, scales).exponents.view(torch.uint8).view(2, 2, 4, 8, 4)
    assert torch.nonzero(exponents != 253).tolist() == [[1, 1, 2, 5, 3]]
    assert int(exponents[1, 1, 2, 5, 3]) == 246


def test_a_scale_beyond_the_decoder_is_refused():
    blocks, scales = random_mxfp4(64, 64)
    for byte in (129, 255):
        scales[3, 1] = byte
        with pytest.raises(ContractError, match=str(byte)):
            pack_mxfp4(blocks, scales)
    scales[3, 1] = 128
    assert float(unpack_mxfp4(pack_mxfp4(blocks, scales))[3, 32:].abs().max()) <= 12.0


def test_mxfp4_reference_is_the_float64_product():
    blocks, scales = random_mxfp4(70, 96, low=120)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = (x.double() @ decode_mxfp4(blocks, scales).T).bfloat16()
    assert torch.equal(mxfp4_mm(x, pack_mxfp4(blocks, scales)), expected)
    assert mxfp4_mm(x[:0], pack_mxfp4(blocks, scales)).shape == (0, 70)


def gated(gate, up):
    """silu(gate) * up in float64 of what bf16 holds."""
    gate, up = gate.bfloat16().double(), up.bfloat16().double()
    return gate * torch.sigmoid(gate) * up


def test_gated_mxfp4_reference_is_the_gate_of_the_float64_product():
    blocks, scales = random_mxfp4(140, 96, low=120)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    y = x.double() @ decode_mxfp4(blocks, scales).T
    found = mxfp4_gate_mm(x, pack_mxfp4(blocks, scales))
    assert found.shape == (5, 70)
    assert error(found, gated(y[:, :70], y[:, 70:])) < 3e-3
    with pytest.raises(ContractError, match="69 rows"):
        mxfp4_gate_mm(x, pack_mxfp4(blocks[:69], scales[:69]))


def test_triton_product_interpreted(triton_interpreter):
    from kernels.scaled_mm.dense import triton_mm

    generator = torch.Generator().manual_seed(2)
    for rows, outputs, columns in ((1, 130, 72), (70, 5, 64), (129, 128, 8)):
        x, w = torch.randn(rows, columns, generator=generator), torch.randn(outputs, columns, generator=generator)
        assert error(triton_mm(x, w, x.dtype), x.double() @ w.double().T) < 1e-6
    assert triton_mm(x[:0], w, x.dtype).shape == (0, 128)


@pytest.mark.parametrize("shape", [(3, 16, 128), (40, 130, 200), (130, 16, 300)])
def test_fp8_product_of_blocks(shape):
    rows, outputs, columns = shape
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(rows, columns, generator=generator), torch.randn(outputs, columns, generator=generator)
    x_codes, x_scales = fp8_quantize_rows(x)
    w_codes, w_scales = fp8_quantize_tiles(w)
    expected = torch.zeros(rows, outputs, dtype=torch.float64)
    for k in range(columns):
        x_column = x_codes[:, k].double() * x_scales[:, k // 128].double()
        w_column = w_codes[:, k].double() * w_scales[torch.arange(outputs) // 128, k // 128].double()
        expected += x_column[:, None] * w_column[None, :]
    assert error(fp8_mm(x_codes, x_scales, w_codes, w_scales, dtype=torch.float32), expected) < 1e-6
    # The same weight with a scale a row: what the weight gradient multiplies.
    w_codes, w_scales = fp8_quantize_rows(w)
    by_row = fp8_mm(x_codes, x_scales, w_codes, w_scales, dtype=torch.float32)
    assert error(by_row, x.double() @ w.double().T) < 0.06


def test_w4a8_product_is_the_fp8_product_on_the_values():
    blocks, scales = random_mxfp4(130, 256, low=108, high=122)
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(9))
    x_codes, x_scales = fp8_quantize_rows(x)
    x_values = x_codes.double() * x_scales.double().repeat_interleave(128, 1)
    found = w4a8_mm(x, blocks, scales, dtype=torch.float32)
    assert error(found, x_values @ decode_mxfp4(blocks, scales).T) < 1e-6
    values = decode_mxfp4(blocks, scales).float()
    assert torch.equal(w4a8_mm(x, blocks, scales), fp8_mm(x_codes, x_scales, *fp8_quantize_tiles(values)))


def test_w4a8_product_names_a_weight_that_fp8_would_round():
    blocks, scales = torch.full((256, 128), 0x11, dtype=torch.uint8), torch.full((256, 8), 127, dtype=torch.uint8)
    x = torch.ones(1, 256)
    blocks[200, 16:32] = 0x77  # a block of 6.0 beside blocks of 0.5
    scales[200, 2] = 112  # 15 binades below in one tile
    with pytest.raises(ContractError, match=r"layers\.3\.up_proj(.|\n)*1 of 4"):
        w4a8_mm(x, blocks, scales, name="layers.3.up_proj")
    scales[200, 2] = 120
    assert torch.isfinite(w4a8_mm(x, blocks, scales)).all()


@pytest.mark.parametrize("tokens", [1, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_linear_gradients(tokens, dtype):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, 160, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(144, 160, generator=generator) * 0.05).to(dtype).requires_grad_()
    dy = torch.randn(tokens, 144, generator=generator).bfloat16()
    y = fp8_linear(x, w)
    y.backward(dy)
    assert y.dtype == torch.bfloat16
    assert error(y, x.double() @ w.double().T) < 0.06
    assert x.grad is not None
    assert w.grad is not None
    assert x.grad.dtype == w.grad.dtype == dtype
    # Quantisation error of two E4M3 operands; a wrong transpose or scale gives an error of order one.
    assert error(x.grad, dy.double() @ w.double()) < 0.06
    assert error(w.grad, dy.double().T @ x.double()) < 0.06


def test_fp8_linear_keeps_an_fp8_grid_exactly():
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-8, 9, (32, 128), generator=generator).float()
    w = torch.randint(-8, 9, (16, 128), generator=generator).float() * 2.0**-7
    assert torch.equal(fp8_linear(x, w).double(), (x.double() @ w.double().T).bfloat16().double())
    assert torch.equal(fp8_quantize_both(x)[2].float(), fp8_quantize_rows(x.T.contiguous())[0].float())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 21])
def test_fp8_linear_multiplies_the_codes_that_it_is_given_and_its_gradient_goes_to_the_weight(tokens, transposed):
    generator = torch.Generator().manual_seed(11)
    blocks, scales = random_mxfp4(48, 160, low=118, high=124)
    values, (codes, tile_scales, exact) = decode_mxfp4(blocks, scales), mxfp4_to_fp8(blocks, scales)
    assert exact.all()
    # Whole numbers below 16, which FP8 holds: nothing but the weight can be off.
    x = torch.randint(-15, 16, (tokens, 160), generator=generator).bfloat16().requires_grad_()
    dy = torch.randint(-15, 16, (tokens, 48), generator=generator).bfloat16()
    master = torch.full((48, 160), torch.nan, requires_grad=True)
    y = fp8_linear(x, master, fp8_weight(codes, tile_scales, transposed=transposed))
    y.backward(dy)
    assert x.grad is not None
    assert master.grad is not None
    torch.testing.assert_close(y.double(), x.double() @ values.T, rtol=2.0**-8, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), dy.double() @ values, rtol=2.0**-8, atol=1e-6)
    assert torch.equal(master.grad.double(), dy.double().T @ x.double())


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (130, 520), (700, 128), (512, 1024)])
def test_a_weights_scales_lie_in_fours_and_its_transpose_is_the_transpose(rows, columns):
    codes, scales = fp8_quantize_tiles(torch.randn(rows, columns, generator=torch.Generator().manual_seed(12)))
    weight = fp8_weight(codes, scales, transposed=True)
    assert weight.transposed is not None
    for (found_codes, found_scales), wanted_codes, wanted_scales in (
        ((weight.codes, weight.scales), codes, scales),
        (weight.transposed, codes.t(), scales.t()),
    ):
        assert torch.equal(found_codes.float(), wanted_codes.float())
        assert found_codes.is_contiguous()
        assert found_scales.is_contiguous()
        assert found_scales.shape == (len(wanted_scales), -(-wanted_scales.shape[1] // 4) * 4)
        assert torch.equal(found_scales[:, : wanted_scales.shape[1]], wanted_scales)
        assert not found_scales[:, wanted_scales.shape[1] :].any()


def test_fp8_linear_without_weight_gradient():
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(6)).requires_grad_()
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(7))
    fp8_linear(x, w).sum().backward()
    assert x.grad is not None
    assert error(x.grad, torch.ones(20, 32).double() @ w.double()) < 0.06


SHAPES = [(576, 1536), (1536, 576), (2112, 7168), (4096, 4096), (896, 4864)]


@pytest.mark.gpu
def test_library_product_is_row_invariant():
    self_test([*SHAPES, (49152, 576)])


@pytest.mark.gpu
def test_self_test_names_the_shape(monkeypatch):
    from kernels.scaled_mm import dense

    product = dense.library_mm
    monkeypatch.setattr(dense, "library_mm", lambda x, *more: product(x, *more) + (len(x) == 257))
    with pytest.raises(ContractError, match=r"576 x 1536(.|\n)*257 rows"):
        self_test([(576, 1536)])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_products_agree_bit_for_bit(shape):
    from kernels.scaled_mm.mxfp4 import decoded_copy

    blocks, scales = random_mxfp4(*shape, low=113, device="cuda")
    weight = pack_mxfp4(blocks, scales)
    values = decoded_copy(weight)
    assert torch.equal(values.view(torch.int16), unpack_mxfp4(weight).view(torch.int16))
    x = torch.randn(1500, shape[1], device="cuda", dtype=torch.bfloat16)
    expected = row_invariant_mm(x, values)
    assert error(expected, x.double() @ values.double().T) < 3e-3
    assert torch.equal(row_invariant_mm(x, values, impl="triton"), expected)
    for rows in (1, 5, 16, 17, 32, 33, 64, 65, 96, 128, 129, 192, 200, 256, 257, 300, 511, 512, 1023, 1500):
        first = (1500 - rows) // 2
        part = slice(first, first + rows)
        assert torch.equal(mxfp4_mm(x[part], weight), expected[part]), rows
        assert torch.equal(row_invariant_mm(x[part], values), expected[part]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(130, 320), (8192, 256), (9000, 1024)])
def test_any_number_of_rows_and_any_program_give_the_same_bits(shape):
    from kernels.scaled_mm.mxfp4 import decoded_copy

    blocks, scales = random_mxfp4(*shape, low=113, device="cuda")
    weight = pack_mxfp4(blocks, scales)
    x = torch.randn(600, shape[1], device="cuda", dtype=torch.bfloat16)
    x[300] = float("nan")  # what one row holds, others do not see
    expected = row_invariant_mm(x, decoded_copy(weight))
    for rows in range(1, 600, 46):
        first = 600 - rows
        others = torch.arange(first, 600, device="cuda") != 300
        found = mxfp4_mm(x[first:], weight)
        assert torch.equal(found[others], expected[first:][others]), rows
        assert found[~others].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(320, 320), (8256, 256), (16384, 1024), (130, 512)])
def test_a_gated_product_is_the_gate_of_the_product(shape):
    from kernels.rows import silu_gate
    from kernels.scaled_mm import mxfp4

    blocks, scales = random_mxfp4(*shape, low=113, high=124, device="cuda")
    weight, half = pack_mxfp4(blocks, scales), shape[0] // 2
    x = torch.randn(300, shape[1], device="cuda", dtype=torch.bfloat16)
    y = mxfp4_mm(x, weight)
    expected = silu_gate(y[:, :half], y[:, half:])
    exact = x.double() @ mxfp4.decoded_copy(weight).double().T
    assert error(expected, gated(exact[:, :half], exact[:, half:])) < 6e-3
    for rows in (1, 16, 17, 48, 64, 65, 128, 300):
        assert torch.equal(mxfp4_gate_mm(x[:rows], weight), expected[:rows]), rows
    if half % 32 == 0:
        for block in mxfp4._GATED:
            assert torch.equal(mxfp4.product(x, weight, block), expected), block
    many = x.repeat(mxfp4.DECODED_COPY_ROWS // 300 + 1, 1)
    assert torch.equal(mxfp4_gate_mm(many, weight)[-300:], expected)
    assert mxfp4_gate_mm(x[:0], weight).shape == (0, half)


@pytest.mark.gpu
def test_mxfp4_product_in_a_graph():
    blocks, scales = random_mxfp4(8192, 1024, low=113, device="cuda")
    weight = pack_mxfp4(blocks, scales)
    for rows in (16, 100, 200):
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        mxfp4_mm(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = mxfp4_mm(x, weight)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, mxfp4_mm(x, weight))


@pytest.mark.gpu
def test_every_block_gives_the_same_bits(monkeypatch):
    from kernels.scaled_mm import mxfp4

    # Outputs that end within a tile, within eight, and in the middle of a block of 128.
    for shape in ((131, 256), (200, 320), (8256, 1024)):
        blocks, scales = random_mxfp4(*shape, low=113, device="cuda")
        weight = pack_mxfp4(blocks, scales)
        x = torch.randn(300, shape[1], device="cuda", dtype=torch.bfloat16)
        expected = row_invariant_mm(x, mxfp4.decoded_copy(weight))
        for block in mxfp4.BLOCKS:
            monkeypatch.setattr(mxfp4, "block_for", lambda *_, block=block: block)
            for rows in (1, 17, 64, 100, 300):
                assert torch.equal(mxfp4_mm(x[:rows], weight), expected[:rows]), (shape, block, rows)


@pytest.mark.gpu
def test_mxfp4_products_wait_for_what_they_read():
    # Launches overlap: each product must wait for its x, by a copy, a kernel or the product before, and for its reader.
    weights = [pack_mxfp4(*random_mxfp4(4096, 4096, low=113, high=118, device="cuda", seed=seed)) for seed in range(3)]
    source = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    held = torch.empty_like(source)

    def chain(wait):
        results, x = [], held
        for i in range(12):
            if i % 4 == 0:
                x = held.copy_(source)
            elif i % 4 == 1:
                x = x * 2.0**-4
            wait()
            x = mxfp4_mm(x, weights[i % 3])
            wait()
            results.append(x.sum(1, dtype=torch.float64))
            wait()
        return results

    expected = chain(torch.cuda.synchronize)
    found = chain(lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(lambda: None)
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(a.isfinite().all() for a in found)


def test_blocks_take_as_many_rows_as_make_few_waves():
    from kernels.scaled_mm.mxfp4 import block_for

    chosen = {rows: block_for(rows, 8192, 132).rows for rows in (1, 16, 17, 32, 64, 65, 128, 129, 256, 300, 512)}
    assert chosen == {1: 16, 16: 16, 17: 32, 32: 32, 64: 64, 65: 80, 128: 128, 129: 192, 256: 128, 300: 160, 512: 256}
    # Many rows of the weight: two blocks at once, or wider ones, rather than a second wave.
    assert [(b.rows, b.groups, b.resident) for b in (block_for(n, 16384, 132) for n in (16, 64, 128))] == [
        (16, 1, 2), (64, 1, 2), (128, 2, 1),
    ]  # fmt: skip
    # Few rows of the weight: more blocks rather than tall ones.
    few = [block_for(64, outputs, 132) for outputs in (512, 2048, 4096)]
    assert [(b.rows, b.parts) for b in few] == [(16, 1), (32, 1), (32, 2)]
    assert [block_for(256, outputs, 132).rows for outputs in (512, 2048, 4096)] == [32, 64, 128]
    assert [block_for(16, outputs, 132).parts for outputs in (2048, 4096, 6144)] == [1, 1, 2]
    assert all(block_for(rows, 16384, 132, gate=True).gate for rows in (1, 64, 300))


@pytest.mark.skipif(torch.version.cuda is None, reason="torch without NVRTC")
def test_blocks_compile_and_fit():
    from kernels.scaled_mm.cuda import compile_source
    from kernels.scaled_mm.mxfp4 import _GATED, BLOCKS, SOURCE

    narrow = {block.for_columns(2) for block in BLOCKS}
    assert {block.tiles for block in narrow} == {1, 2}
    for block in {*BLOCKS, *_GATED, *narrow}:
        assert b"mxfp4_mm" in compile_source(SOURCE, tuple(block.defines.items()))
        assert block.resident * (block.shared_bytes + 1024) <= 228 * 1024
        assert block.rows % 16 == 0
        assert block.sets in (2, 4)
        # Words are loaded two tiles ahead of those that are multiplied.
        assert block.slots * block.tiles >= 3
        assert block.rows % block.staged_rows == 0
    with pytest.raises(RuntimeError, match="ROWS"):
        compile_source(SOURCE, ())


@pytest.mark.gpu
def test_bias_and_no_rows():
    x, w = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (5, 32))
    bias = torch.randn(32, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(row_invariant_mm(x, w, bias), row_invariant_mm(x, w) + bias)
    assert row_invariant_mm(x[:0], w).shape == (0, 32)
