"""The contract of paged attention, and the decode kernel in Triton's interpreter against a float64 oracle.

The Gluon prefill kernel has no interpreter: its tests, and all bit comparisons between the two, need a CUDA device. To
compile it for one does not.
"""

from __future__ import annotations

import multiprocessing
import re
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.paged_attention import paged_attention, write_kv
from schemas.errors import ContractError


def make_case(kv_tokens, rows, *, kv_heads, heads, channels, page_tokens, dtype, device="cpu", seed=0):
    """Arguments of paged_attention: pages in random order, table entries past the last page out of range."""
    generator = torch.Generator(device).manual_seed(seed)
    pages = [-(-kv // page_tokens) for kv in kv_tokens]
    order = torch.randperm(sum(pages) + 2, generator=generator, device=device).tolist()
    table = torch.full((len(kv_tokens), max(pages, default=1)), 10**6, dtype=torch.int32)
    for sequence, count in enumerate(pages):
        table[sequence, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    cu_rows = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32, device=device)
    k, v = (normal(sum(pages) + 2, page_tokens, kv_heads, channels) for _ in range(2))
    kv = torch.tensor(kv_tokens, dtype=torch.int32, device=device)
    return normal(sum(rows), heads, channels), k, v, table.to(device), cu_rows, kv


def oracle(q, k, v, table, cu_rows, kv_tokens):
    """Softmax attention in float64, one row and one head at a time, keys gathered token by token."""
    output = torch.zeros(q.shape, dtype=torch.float64)
    group, page_tokens = q.shape[1] // k.shape[2], k.shape[1]
    for sequence, kv in enumerate(kv_tokens.tolist()):
        first, last = int(cu_rows[sequence]), int(cu_rows[sequence + 1])
        for row in range(first, last):
            visible = kv - (last - row) + 1
            places = [(int(table[sequence, t // page_tokens]), t % page_tokens) for t in range(visible)]
            keys = torch.stack([k[page, offset] for page, offset in places]).double().cpu()
            values = torch.stack([v[page, offset] for page, offset in places]).double().cpu()
            for head in range(q.shape[1]):
                scores = keys[:, head // group] @ q[row, head].double().cpu() / q.shape[2] ** 0.5
                output[row, head] = torch.softmax(scores, 0) @ values[:, head // group]
    return output


def error(actual, expected):
    return float((actual.double().cpu() - expected).norm() / expected.norm())


def test_write_kv_touches_only_the_named_slots():
    k_cache, v_cache = torch.full((3, 4, 2, 5), 7.0), torch.full((3, 4, 2, 5), 8.0)
    k, v = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    write_kv(k, v, k_cache, v_cache, torch.tensor([11, 0, 6]))
    assert torch.equal(k_cache[2, 3], k[0])
    assert torch.equal(k_cache[0, 0], k[1])
    assert torch.equal(v_cache[1, 2], v[2])
    assert (k_cache == 7).all(-1).all(-1).sum() == 9
    assert (v_cache == 8).all(-1).all(-1).sum() == 9


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: {"q_NHC": c[0][:, :3]}, "multiple of 2 KV heads"),
        (lambda c: {"q_NHC": c[0].bfloat16()}, "bfloat16"),
        (lambda c: {"v_cache_PTGC": c[2][1:]}, "one shape"),
        (lambda c: {"cu_rows_S1": c[4][:-1]}, "row offsets"),
        (lambda c: {"kv_tokens_S": c[5][:-1]}, "KV lengths"),
        (lambda c: {"split_tokens": 0}, "positive"),
        (lambda c: {"split_tokens": 12}, "page size 8"),
        (lambda c: {"single_rows": True}, "2 single rows"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, expected):
    case = make_case([5, 9], [1, 2], kv_heads=2, heads=4, channels=16, page_tokens=8, dtype=torch.float32)
    names = ("q_NHC", "k_cache_PTGC", "v_cache_PTGC", "page_table_SP", "cu_rows_S1", "kv_tokens_S")
    arguments = dict(zip(names, case, strict=True)) | {"split_tokens": 16}
    with pytest.raises(ContractError, match=expected):
        paged_attention(**arguments | change(case))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("split_tokens", [64, 256])
def test_decode_kernel_interpreted(triton_interpreter, monkeypatch, group, split_tokens):
    from kernels.paged_attention import kernel

    # Gluon cannot be interpreted; with single rows nothing asks for it.
    monkeypatch.delattr(kernel.prefill, "prefill")
    kv_tokens = [1, 63, 64, 65, 200, 257]
    case = make_case(kv_tokens, [1] * 6, kv_heads=2, heads=2 * group, channels=64, page_tokens=64, dtype=torch.float32)
    actual = kernel.paged_attention(*case, split_tokens=split_tokens, single_rows=True)
    assert error(actual, oracle(*case)) < 1e-6
    # A row alone in its call keeps its bits.
    q, k, v, table, _, kv = case
    alone = kernel.paged_attention(
        q[4:5], k, v, table[4:5], torch.tensor([0, 1], dtype=torch.int32), kv[4:5], split_tokens=split_tokens
    )
    assert torch.equal(alone[0], actual[4])


def test_a_narrow_page_table_spares_the_merge_and_keeps_the_bits(triton_interpreter, monkeypatch):
    from kernels.paged_attention import kernel

    monkeypatch.setattr(kernel.prefill, "prefill", lambda *arguments: None)
    case = make_case([1, 63, 128], [1] * 3, kv_heads=2, heads=6, channels=64, page_tokens=64, dtype=torch.float32)
    q, k, v, table, cu_rows, kv = case
    wide = torch.nn.functional.pad(table, (0, 3))
    narrow_result = kernel.paged_attention(q, k, v, table, cu_rows, kv, split_tokens=128)
    wide_result = kernel.paged_attention(q, k, v, wide, cu_rows, kv, split_tokens=128)
    assert error(narrow_result, oracle(*case)) < 1e-6
    assert torch.equal(narrow_result, wide_result)


def test_how_many_heads_are_merged_at_once_changes_no_bit(triton_interpreter, monkeypatch):
    from kernels.paged_attention import kernel

    monkeypatch.setattr(kernel.prefill, "prefill", lambda *arguments: None)
    case = make_case([1, 129, 300], [1] * 3, kv_heads=2, heads=6, channels=64, page_tokens=64, dtype=torch.float32)
    q, k, v, table, cu_rows, kv = case
    assert table.shape[1] * 64 <= 128 * kernel.FEW_CUTS
    few = kernel.paged_attention(*case, split_tokens=128)
    many = torch.nn.functional.pad(table, (0, 2 * kernel.FEW_CUTS))
    assert error(few, oracle(*case)) < 1e-6
    assert torch.equal(kernel.paged_attention(q, k, v, many, cu_rows, kv, split_tokens=128), few)


def test_decode_kernel_leaves_sequences_without_one_row(triton_interpreter, monkeypatch):
    from kernels.paged_attention import kernel

    monkeypatch.setattr(kernel.prefill, "prefill", lambda *arguments: None)
    monkeypatch.setattr(kernel.torch, "empty_like", lambda x: torch.full_like(x, 5.0))
    case = make_case([70, 64, 66], [0, 1, 2], kv_heads=1, heads=2, channels=64, page_tokens=64, dtype=torch.float32)
    actual = kernel.paged_attention(*case, split_tokens=64)
    assert error(actual[:1], oracle(*case)[:1]) < 1e-6
    assert (actual[1:] == 5).all()


@pytest.mark.parametrize(("page_tokens", "split_tokens"), [(16, 512), (96, 192), (128, 32)])
def test_kernel_refuses_what_it_cannot_tile(page_tokens, split_tokens):
    from kernels.paged_attention import kernel

    case = make_case([5], [1], kv_heads=1, heads=1, channels=64, page_tokens=page_tokens, dtype=torch.float32)
    with pytest.raises(ContractError, match="multiple of 64"):
        kernel.paged_attention(*case, split_tokens=split_tokens)


def paged(k_TGC, v_TGC, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches of one sequence's keys and values in pages of a size, in random order, and its table."""
    pages = -(-len(k_TGC) // page_tokens)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(page_tokens)).to(k_TGC.device)

    def cache(x_TGC):
        whole = x_TGC.new_zeros(pages * page_tokens, *x_TGC.shape[1:])
        whole[: len(x_TGC)] = x_TGC
        blocks = whole.view(pages, page_tokens, *x_TGC.shape[1:])
        return torch.empty_like(blocks).index_copy_(0, order, blocks)

    return cache(k_TGC), cache(v_TGC), order.int()[None]


@pytest.mark.parametrize("rows", [1, 90])
def test_the_size_of_pages_changes_no_bit(rows):
    q, k, v = (torch.randn(n, h, 16).bfloat16() for n, h in ((rows, 6), (200, 2), (200, 2)))
    where = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([200], dtype=torch.int32)
    found = [paged_attention(q, *paged(k, v, page), *where, split_tokens=64) for page in (8, 16, 64, 128)]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("rows", [1, 90, 1500])
def test_the_size_of_pages_changes_no_bit_on_the_gpu(channels, rows):
    q, k, v = (torch.randn(n, h, channels, device="cuda").bfloat16() for n, h in ((rows, 6), (2000, 2), (2000, 2)))
    where = (torch.tensor([0, rows], dtype=torch.int32).cuda(), torch.tensor([2000], dtype=torch.int32).cuda())
    found = [paged_attention(q, *paged(k, v, page), *where, split_tokens=512) for page in (64, 128, 256, 1024)]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("channels", "page_tokens", "split_tokens"), [(64, 64, 256), (128, 128, 512), (128, 256, 128), (64, 128, 64)]
)
def test_rows_keep_their_bits_on_the_gpu(channels, page_tokens, split_tokens):
    kv_tokens = [1, 63, 64, 65, 700, 1023, 1024, 1025, 1300, 2049, 300]
    rows = [1, 1, 1, 2, 700, 1023, 1, 1, 300, 0, 64]
    case = make_case(
        kv_tokens,
        rows,
        kv_heads=2,
        heads=6,
        channels=channels,
        page_tokens=page_tokens,
        dtype=torch.bfloat16,
        device="cuda",
    )
    q, k, v, table, cu_rows, kv = case
    together = paged_attention(*case, split_tokens=split_tokens)
    for sequence, count in enumerate(rows):
        first = int(cu_rows[sequence])
        # Each of these rows as a decode step of its own, all in one call, shuffled.
        places = [p for p in (0, 1, count // 3, count - 2, count - 1) if 0 <= p < count][::-1]
        if not places:
            continue
        chosen = [first + place for place in places]
        alone = paged_attention(
            q[chosen],
            k,
            v,
            table[sequence : sequence + 1].expand(len(places), -1).contiguous(),
            torch.arange(len(places) + 1, dtype=torch.int32, device="cuda"),
            torch.tensor([kv_tokens[sequence] - count + p + 1 for p in places], dtype=torch.int32, device="cuda"),
            split_tokens=split_tokens,
            single_rows=True,
        )
        assert torch.equal(alone, together[chosen])
        # The end of the chunk as a chunk of its own.
        rest = slice(first + count // 3, first + count)
        offsets = torch.tensor([0, rest.stop - rest.start], dtype=torch.int32, device="cuda")
        end = paged_attention(
            q[rest], k, v, table[sequence : sequence + 1], offsets, kv[sequence : sequence + 1],
            split_tokens=split_tokens,
        )  # fmt: skip
        assert torch.equal(end, together[rest])
    # One cut spares the merge.
    short = [sequence for sequence, count in enumerate(rows) if count == 1 and kv_tokens[sequence] <= split_tokens]
    for width in {split_tokens // page_tokens, table.shape[1]} - {0}:
        alone = paged_attention(
            q[cu_rows[short].long()], k, v, table[short, :width].contiguous(),
            torch.arange(len(short) + 1, dtype=torch.int32, device="cuda"), kv[short], split_tokens=split_tokens,
        )  # fmt: skip
        assert torch.equal(alone, together[cu_rows[short].long()])
    small = make_case(
        [300, 65, 1], [40, 1, 1], kv_heads=2, heads=6, channels=channels, page_tokens=page_tokens,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    assert error(paged_attention(*small, split_tokens=split_tokens), oracle(*small)) < 5e-3


def compile_prefill(heads: int, kv_heads: int, channels: int, folder: Path) -> tuple[str, int]:
    """What the assembler that ships with Triton says of the kernel for sm_90; bytes of shared memory that it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.knobs import nvidia

    from kernels.paged_attention.kernel import KEYS
    from kernels.paged_attention.prefill import STAGES, WARPS, _prefill

    box = [KEYS, channels]
    descriptor = f"tensordesc<bf16{box},{gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)!r}>"
    constants = {"HEADS": heads, "GROUP": heads // kv_heads, "C": channels, "PAGE": 64, "SPLIT": 512, "KEYS": KEYS,
                 "STAGES": STAGES[channels], "num_warps": WARPS}  # fmt: skip
    pointers = {"q_ptr": "*bf16", "table_ptr": "*i32", "cu_rows_ptr": "*i32", "kv_tokens_ptr": "*i32", "o_ptr": "*bf16"}
    types = pointers | {"k_desc": descriptor, "v_desc": descriptor, "sequences": "i32", "table_width": "i32",
                        "scale": "fp32"} | dict.fromkeys(constants, "constexpr")  # fmt: skip
    names = _prefill.arg_names
    source = GluonASTSource(
        fn=_prefill, signature={name: types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )  # fmt: skip
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
    (folder / "prefill.ptx").write_text(compiled.asm["ptx"])
    command = [nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "prefill.ptx"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr, (
        compiled.metadata.shared
    )


@pytest.mark.parametrize(("heads", "kv_heads", "channels"), [(32, 8, 64), (9, 3, 64), (16, 8, 128)])
def test_prefill_compiles_with_its_products_in_flight(tmp_path, monkeypatch, heads, kv_heads, channels):
    # In a process of its own: the interpreter of other tests leaves its marks on Triton.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        said, shared_bytes = fresh.submit(compile_prefill, heads, kv_heads, channels, tmp_path).result()
    assert re.search("Used [0-9]+ registers", said), said
    assert "0 bytes spill stores, 0 bytes spill loads" in said, said
    assert "wgmma" not in said, said  # as in "will be serialized"
    assert shared_bytes <= 227 * 1024 // 2  # two programs a multiprocessor
