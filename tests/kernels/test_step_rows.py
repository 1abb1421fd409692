"""Integers around a decode step, against loops in Python."""

from __future__ import annotations

import pytest
import torch

from kernels.step_rows import decode_rows, keep_results
from schemas.errors import ContractError

PAGE = 64


def inputs(rows, pages, device, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def integers(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    slots = rows + 3
    tables, last_ids = integers(500, slots, pages).int(), integers(1000, slots)
    keys = integers(1 << 62, slots)
    chosen = torch.randperm(slots, generator=generator)[:rows]
    ids = torch.where(integers(2, rows) == 1, integers(1000, rows), -1)
    table = torch.stack([ids, integers(pages * PAGE, rows), chosen, integers(500, rows)]).int()
    table = torch.cat([table, table[:, -2:]], 1) if rows > 1 else table  # what fills up a graph repeats
    return [x.to(device) for x in (table, tables, last_ids, keys)]


def check(rows, pages, width, device, impl):
    table, tables, last_ids, keys = inputs(rows, pages, device)
    expected_tables = tables.tolist()
    for _, position, slot, page in table.T.tolist():
        expected_tables[slot][position // PAGE] = page
    found = decode_rows(table, tables, last_ids, keys, page_tokens=PAGE, width=width, impl=impl)
    assert tables.tolist() == expected_tables
    columns = table.T.tolist()
    assert found.ids_N.tolist() == [i if i >= 0 else int(last_ids[slot]) for i, _, slot, _ in columns]
    assert found.positions_N.tolist() == [position for _, position, _, _ in columns]
    assert found.kv_slots_N.tolist() == [page * PAGE + position % PAGE for _, position, _, page in columns]
    assert found.slots_N.tolist() == [slot for _, _, slot, _ in columns]
    assert found.keys_N.tolist() == [int(keys[slot]) for _, _, slot, _ in columns]
    assert found.next_positions_N.tolist() == [position + 1 for _, position, _, _ in columns]
    assert found.table_NW.tolist() == [expected_tables[slot][:width] for _, _, slot, _ in columns]
    assert found.cu_rows_N1.tolist() == list(range(len(columns) + 1))
    assert found.kv_tokens_N.tolist() == [position + 1 for _, position, _, _ in columns]
    assert {found.table_NW.dtype, found.cu_rows_N1.dtype, found.kv_tokens_N.dtype} == {torch.int32}

    ids, slots = found.ids_N + 7, found.slots_N
    raw = torch.linspace(-9, 0, len(columns), device=device)
    ids[-2:], raw[-2:] = ids[:1], raw[:1]  # results of one slot are alike
    slots[-2:] = slots[:1]
    before = last_ids.tolist()
    out = keep_results(ids, raw, raw * 2, slots, last_ids, impl=impl)
    for token, slot in zip(ids.tolist(), slots.tolist(), strict=True):
        before[slot] = token
    assert last_ids.tolist() == before
    assert out.dtype == torch.int32
    assert out[0].tolist() == ids.tolist()
    assert torch.equal(out[1].view(torch.float32), raw)
    assert torch.equal(out[2].view(torch.float32), raw * 2)


CASES = [(1, 1, 1), (1, 5, 4), (7, 12, 12), (150, 40, 24)]


@pytest.mark.parametrize(("rows", "pages", "width"), CASES)
def test_reference(rows, pages, width):
    check(rows, pages, width, "cpu", "reference")


@pytest.mark.parametrize(("rows", "pages", "width"), CASES)
def test_kernel_interpreted(triton_interpreter, rows, pages, width):
    check(rows, pages, width, "cpu", "kernel")


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "pages", "width"), [*CASES, (16, 5000, 4096), (1024, 16, 16)])
def test_kernel_on_the_gpu(rows, pages, width):
    check(rows, pages, width, "cuda", None)


def test_what_does_not_fit_is_refused():
    table, tables, last_ids, keys = inputs(4, 8, "cpu")
    for changed, expected in (
        ((table.long(), tables, last_ids, keys), "int32"),
        ((table[:3], tables, last_ids, keys), "4, N"),
        ((table, tables[:, :2], last_ids, keys), "table of 3 pages"),
        ((table, tables, last_ids[:2], keys), "for each of 7 slots"),
        ((table, tables, last_ids.int(), keys), "int64"),
    ):
        with pytest.raises(ContractError, match=expected):
            decode_rows(*changed, page_tokens=PAGE, width=3)
    out = keep_results(torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0),
                       torch.empty(0, dtype=torch.int64), last_ids)  # fmt: skip
    assert out.shape == (3, 0)
