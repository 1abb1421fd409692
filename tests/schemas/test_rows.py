from __future__ import annotations

import hashlib
import random

import pytest

from schemas import keys, rows


def metric(**changes):
    return {"run_id": "r", "iteration": 0, "stage": "train", "step": 1, "name": "kl", "teacher_index": None,
            "value": 0.1} | changes  # fmt: skip


def test_order_and_observed_columns_do_not_matter():
    values = [metric(step=i, teacher_index=t) for i in range(5) for t in (None, 0, 1)]
    shuffled = values[:]
    random.Random(1).shuffle(shuffled)
    assert rows.content_digest(rows.METRICS, values) == rows.content_digest(rows.METRICS, shuffled)
    run = {"run_id": "r", "iteration": 0, "stage": "s", "partition": 0, "epoch": 1, "status": "finished",
           "fingerprint": "f", "rows": 1, "bytes": 2, "seconds": 3.0, "error": None}  # fmt: skip
    assert rows.content_digest(rows.STAGE_RUNS, [run]) == rows.content_digest(
        rows.STAGE_RUNS, [run | {"epoch": 9, "seconds": 1.0}]
    )


def test_any_content_change_changes_the_digest():
    base = rows.content_digest(rows.METRICS, [metric()])
    for change in ({"value": 0.1 + 2**-55}, {"name": "kl2"}, {"step": 2}, {"teacher_index": 0}, {"value": -0.0}):
        assert rows.content_digest(rows.METRICS, [metric(**change)]) != base


def test_a_missing_column_is_not_passed_over():
    row = metric()
    del row["value"]
    with pytest.raises(KeyError):
        rows.content_digest(rows.METRICS, [row])


def test_every_table_but_prompts_starts_with_run_and_iteration():
    for table in rows.TABLES.values():
        names = table.column_names()
        assert len(set(names)) == len(names)
        assert {c.type for c in table.columns} <= set(rows.TYPES)
        assert set(table.sort_key) | set(table.slice_key) <= set(names)
        assert not {c.name for c in table.columns if c.observed} & (set(table.sort_key) - {"epoch"})
        if table.name != "prompts":
            assert names[:2] == ("run_id", "iteration")


def test_identities_are_fixed():
    """Digests that runs on disk rely on; a change here orphans them."""
    assert keys.trajectory_id("run", 3, "p", 1) == "9b9ed2ac9cf49b637c27a5377b798e56"
    assert keys.canonical_json({"b": [1, None], "a": "é"}) == '{"a":"é","b":[1,null]}'.encode()
    assert keys.canonical_json("\ud800") == b'"\xed\xa0\x80"'
    assert keys.sampling_key(7, "abc") == 15695096328655988615
    assert hashlib.sha256(b"7:abc").hexdigest()[:16] == f"{keys.sampling_key(7, 'abc'):016x}"
