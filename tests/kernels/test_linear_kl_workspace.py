"""linear_kl's memory: what lies in dW's memory is not overwritten before it is used, and the workspace is bounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kernels.linear_kl import Plan, Precision, products, workspace
from kernels.linear_kl.workspace import Room, Sizes, Workspace
from tests.kernels.test_linear_kl import Case, error, random_case, run

GPU = pytest.mark.gpu
BF16 = torch.bfloat16


def plan(V, chunk_bytes, want_w=True, precision: Precision = "exact"):
    return Plan("reverse", 1.0, V, chunk_bytes, want_h=True, want_w=want_w, precision=precision)


def span(tensor):
    """(first, last + 1) byte of what a tensor reaches."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def apart(a, b):
    return a[1] <= b[0] or b[1] <= a[0]


@settings(max_examples=200, deadline=None)
@given(
    slice_columns=st.sampled_from([16, 48, 100]),
    V=st.integers(100, 3000),
    D=st.integers(40, 150),
    dtype=st.sampled_from([BF16, torch.float32]),
    late_parts=st.integers(1, 4),
    more_bytes=st.integers(0, 400_000),
    spare_rows=st.integers(0, 40),
)
def test_a_written_part_of_the_head_gradient_never_touches_unread_logit_gradients(
    slice_columns, V, D, dtype, late_parts, more_bytes, spare_rows
):
    rows = 4 * D // dtype.itemsize // 16 * 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "SLICE", slice_columns)
        part_bytes = rows * Sizes.of(1, D, D, dtype.itemsize, plan(V, 1)).part_columns * dtype.itemsize
        want = plan(V, late_parts * part_bytes + 4 * rows * D + more_bytes)
        sizes = Sizes.of(rows, D, D, dtype.itemsize, want)
    assume(sizes.one_slab)
    assert rows <= sizes.slab_rows
    assert (sizes.parts - 1) * sizes.part_columns < V <= sizes.columns <= sizes.parts * sizes.part_columns
    grad_w = torch.empty(max(V + spare_rows, sizes.head_rows(want)), D)
    logits = span(Room(grad_w).take(sizes.chunk_rows, sizes.columns, torch.float32))
    early = workspace.early_parts(grad_w, sizes, dtype)
    assert early.shape == (sizes.parts - sizes.late_parts, sizes.slab_rows, sizes.part_columns)
    unread, whole = [span(part) for part in early], span(grad_w)
    assert all(whole[0] <= first and end <= whole[1] for first, end in (*unread, logits))
    assert all(apart(logits, part) for part in unread)
    assert all(apart(a, b) for i, a in enumerate(unread) for b in unread[:i])
    for part in range(sizes.parts):
        written = span(grad_w[part * sizes.part_columns :][: sizes.part_columns])
        assert all(apart(written, other) for other in unread[part:])


@pytest.mark.parametrize(
    ("precision", "chunk_bytes", "in_room"),
    [
        ("exact", 1 << 18, []),
        ("exact", 1_000_000, ["student_LV"]),
        ("fp8_gradients", 1 << 18, []),
        ("fp8_gradients", 460_000, ["student_LV", "teacher_LV"]),
        ("fp8", 460_000, ["student_LV", "teacher_LV"]),
    ],
)
@pytest.mark.parametrize("V", [1031, 1152])
def test_everything_lies_apart_and_where_it_belongs(V, precision, chunk_bytes, in_room, monkeypatch):
    monkeypatch.setattr(workspace, "SLICE", 150)
    monkeypatch.setattr(workspace, "buffers", {})
    monkeypatch.setattr(products, "stream", lambda device: 0)
    N, D, E, want = 300, 256, 64, plan(V, chunk_bytes, precision=precision)
    h, t = torch.empty(N, D, dtype=BF16), torch.empty(N, E, dtype=BF16)
    sizes = Sizes.of(N, D, E, 2, want)
    assert sizes.one_slab == bool(in_room)
    early_parts = sizes.parts - 2 if in_room == ["student_LV"] else 0
    grad_w = torch.empty(max(V, sizes.head_rows(want)), D)
    room = Room(grad_w) if sizes.one_slab else None
    codes = []
    if room and precision == "fp8":  # the heads go first
        codes = [room.take(sizes.columns, width, torch.float8_e4m3fn) for width in (D, E)]
    space = Workspace.of(h, t, sizes, want, grad_w, room)
    (buffer,) = workspace.buffers.values()

    views = {name: view for name, view in vars(space).items() if isinstance(view, torch.Tensor)}
    views |= {f"early {i}": view for i, view in enumerate(space.dz.early_PGS)} | {"late": space.dz.late_GV}
    views |= {f"head {i}": view for i, view in enumerate(codes)}
    assert views["student_LV"].shape == views["teacher_LV"].shape == (sizes.chunk_rows, sizes.columns)
    assert (len(space.dz.early_PGS), sizes.late_parts) == (early_parts, sizes.parts - early_parts)
    assert [matrix.shape[1] for matrix in space.dz.matrices()] == [sizes.part_columns] * early_parts + [
        sizes.late_parts * sizes.part_columns
    ]
    assert all(space.dz.part(i).shape == (sizes.slab_rows, sizes.part_columns) for i in range(sizes.parts))
    for i in range(sizes.parts):
        space.dz.part(i).view(torch.uint8).fill_(i)
    for i in range(sizes.late_parts):
        columns = slice(i * sizes.part_columns, (i + 1) * sizes.part_columns)
        assert bool((space.dz.late_GV[:, columns].view(torch.uint8) == early_parts + i).all())
    outside = {name for name in views if name.startswith(("early", "head")) or name in in_room}
    for name, view in views.items():
        first, end = span(view)
        home = span(grad_w if name in outside else buffer)
        assert home[0] <= first
        assert end <= home[1], name
    # Gradients take the place of logits, in the workspace and in dW's memory.
    with_gradients = {name for name in views if name.startswith("turned") or name == "grad_h_GD"}
    with_logits = {name for name in views if name.startswith("head") or name.endswith("_LV")}
    for alive in (views.keys() - with_gradients, views.keys() - with_logits):
        for a in alive:
            assert all(a == b or apart(span(views[a]), span(views[b])) for b in alive), a


@pytest.mark.parametrize("tokens", [5000, 8192])
@pytest.mark.parametrize(
    ("D", "V", "chunk_bytes", "slab_chunk_rows", "chunk_rows"),
    [
        (4096, 151936, 623_000_000, 256, 512),
        (4096, 151936, 1_245_000_000, 512, 1024),
        (7168, 129280, 1_060_000_000, 512, 896),
    ],
)
def test_one_slab_has_longer_chunks_in_the_same_memory(D, V, chunk_bytes, slab_chunk_rows, chunk_rows, tokens):
    want = plan(V, chunk_bytes)
    one, slabs = Sizes.of(tokens, D, D, 2, want), Sizes.of(100_000, D, D, 2, want)
    assert (slabs.one_slab, slabs.chunk_rows, slabs.slab_rows) == (False, slab_chunk_rows, 4 * slab_chunk_rows)
    assert (one.one_slab, one.chunk_rows, one.slab_rows) == (True, chunk_rows, 2 * D)
    for sizes, logits in ((one, 1), (slabs, 2)):
        size = 4 * logits * sizes.chunk_rows * sizes.columns
        dz = 2 * sizes.late_parts * sizes.slab_rows * sizes.part_columns
        assert max(size, 4 * sizes.slab_rows * D) + dz <= chunk_bytes
    assert Sizes.of(tokens, D, D, 2, plan(V, chunk_bytes, want_w=False)) == slabs


def test_parts_follow_from_the_vocabulary_alone():
    for V in (5, 8191, 50257, 151936):
        sizes = [
            Sizes.of(tokens, D, 64, itemsize, plan(V, chunk_bytes))
            for tokens in (1, 8192)
            for D in (64, 4096)
            for itemsize in (2, 4)
            for chunk_bytes in (1, 1 << 28, 1 << 30)
        ]
        assert len({(x.part_columns, x.parts) for x in sizes}) == 1
        assert sizes[0].parts == 1 or sizes[0].part_columns >= workspace.SLICE


@GPU
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("vocab_size", "chunk_bytes"), [(50257, 15_100_000), (50257, 40_000_000), (16384, 12_000_000)])
def test_one_slab_in_the_head_gradients_memory_has_the_same_bits(vocab_size, chunk_bytes, dtype):
    D = 256 if dtype == BF16 else 512
    case = random_case(N=510, V=vocab_size + 900, D=D, E=64).to("cuda", dtype)
    case.w_VD[vocab_size:], case.u_VE[vocab_size:] = float("nan"), float("inf")
    case.weight_N[3::7] = 0
    case.h_ND[3::7], case.t_NE[3::7] = float("nan"), float("inf")
    if dtype == torch.float32:
        chunk_bytes *= 2
    expected = run(case, vocab_size=vocab_size, chunk_bytes=1 << 30)
    for rows in (510, 400):
        assert Sizes.of(rows, D, 64, dtype.itemsize, plan(vocab_size, chunk_bytes)).one_slab
        part = Case(case.h_ND[:rows], case.w_VD, case.t_NE[:rows], case.u_VE, case.weight_N[:rows])
        results = []
        for _ in range(2):
            for buffer in workspace.buffers.values():
                buffer.fill_(255)  # NaN in every dtype
            results.append(run(part, vocab_size=vocab_size, chunk_bytes=chunk_bytes))
        for ours, again in zip(*results, strict=True):
            assert torch.equal(ours, again)
        assert torch.equal(results[0][1], expected[1][:rows])
        assert torch.equal(results[0][2], expected[2][:rows])
        assert not results[0][3][vocab_size:].any()
        whole = run(part, vocab_size=vocab_size, chunk_bytes=1 << 30)
        assert error(results[0][3], whole[3]) < 1e-5


@GPU
def test_one_slab_leaves_addresses_and_reserved_memory_as_they_are():
    case = random_case(N=512, V=50257, D=256, E=64).to("cuda", BF16)
    addresses, reserved = set(), set()
    for step in range(300):
        rows = 100 + step * 37 % 413
        part = Case(case.h_ND[:rows], case.w_VD, case.t_NE[:rows], case.u_VE, case.weight_N[:rows])
        assert Sizes.of(rows, 256, 64, 2, plan(50257, 15_100_000)).one_slab
        run(part, chunk_bytes=15_100_000)
        if step >= 10:
            addresses |= {buffer.data_ptr() for buffer in workspace.buffers.values()}
        if step >= 100:
            reserved.add(torch.cuda.memory_reserved())
    assert len(addresses) == len(workspace.buffers)
    assert len(reserved) == 1
