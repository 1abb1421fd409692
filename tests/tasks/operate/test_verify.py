"""Every check of `opd verify` must be able to fail: each breach is planted in rows that pass."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from infra.store_local import LocalStore
from schemas import shards
from tasks.operate import invariants


@pytest.fixture
def store(tmp_path):
    store = LocalStore(tmp_path)
    hidden = np.arange(9 * 4, dtype=np.uint16).reshape(9, 4)
    store.put("h", shards.encode({"hidden": ("BF16", hidden)}))
    columns = {
        "prompt_ids": ("I32", np.arange(6, dtype=np.int32)),
        "response_ids": ("I32", np.arange(9, dtype=np.int32)),
        "sampled_mask": ("U8", np.ones(9, np.uint8)),
    }
    store.put("t", shards.encode(columns))
    return store


def trajectory(trajectory_id, prompt_id, sample_index, first_row, tokens):
    return {
        "iteration": 0, "split": "train", "trajectory_id": trajectory_id, "prompt_id": prompt_id,
        "sample_index": sample_index, "prompt_tokens": 3, "response_tokens": tokens, "sampled_tokens": tokens,
        "shard_key": "t", "first_row": first_row,
    }  # fmt: skip


def rows():
    trajectories = [trajectory("a", "p", 0, 0, 4), trajectory("b", "p", 1, 4, 5)]
    block = np.arange(9 * 4, dtype=np.uint16).reshape(9, 4).view(np.uint8)
    hidden = [
        {"iteration": 0, "trajectory_id": i, "teacher_index": 0, "first_token_row": 0, "first_object_row": first,
         "rows": n, "object_key": "h", "block_crcs": shards.block_crcs(block[first : first + n])}
        for i, first, n in (("a", 0, 4), ("b", 4, 5))
    ]  # fmt: skip
    plan = [
        {"iteration": 0, "split": "train", "step": 0, "rank_slot": 0, "micro_batch": 0, "pack_id": 0, "offset": offset,
         "length": length, "trajectory_id": i, "teacher_index": 0, "denominator_tokens": 9}
        for i, offset, length in (("a", 0, 7), ("b", 7, 8))
    ]  # fmt: skip
    return trajectories, hidden, plan


def breaches(store, trajectories, hidden, plan):
    by_id = {t["trajectory_id"]: t for t in trajectories}
    checks = [
        *invariants.check_trajectories(store, trajectories, {"p"}),
        *invariants.check_hidden(store, hidden, {i: t["response_tokens"] for i, t in by_id.items()}),
        *invariants.check_plan(plan, by_id, hidden),
    ]
    return {check.name for check in checks if check.breaches}


def test_rows_that_are_right_pass(store):
    assert breaches(store, *rows()) == set()


@pytest.mark.parametrize(
    ("table", "index", "change", "name"),
    [
        (0, 1, {"sample_index": 0}, "every prompt exactly once a sample index"),
        (0, 1, {"sample_index": 2}, "every prompt exactly once a sample index"),
        (0, 0, {"prompt_id": "q"}, "every trajectory's prompt is in opd.prompts"),
        (0, 0, {"sampled_tokens": 3}, "token shards hold each trajectory's tokens"),
        (0, 1, {"first_row": 5}, "token shards hold each trajectory's tokens"),
        (1, 0, {"trajectory_id": "z"}, "no hidden state without a trajectory"),
        (1, 1, {"rows": 4}, "one hidden row a response token and teacher"),
        (1, 1, {"first_object_row": 3}, "hidden-state blocks match their CRCs"),
        (1, 0, {"block_crcs": [1]}, "hidden-state blocks match their CRCs"),
        (1, 0, {"object_key": "missing"}, "hidden-state blocks match their CRCs"),
        (2, 1, {"trajectory_id": "a"}, "every token in exactly one pack a teacher"),
        (2, 1, {"teacher_index": 1}, "every token in exactly one pack a teacher"),
        (2, 1, {"offset": 6}, "packs are filled without gap or overlap"),
        (2, 1, {"length": 9}, "packs are filled without gap or overlap"),
        (2, 1, {"denominator_tokens": 10}, "denominators count each sampled token once"),
    ],
)
def test_each_breach_is_found(store, table, index, change, name):
    tables = copy.deepcopy(rows())
    tables[table][index] |= change
    assert name in breaches(store, *tables)


def test_a_prompt_with_fewer_samples_than_the_others_is_found(store):
    trajectories, _hidden, _plan = rows()
    alone = trajectory("c", "q", 0, 0, 4)
    checks = invariants.check_trajectories(store, [*trajectories, alone], {"p", "q"})
    assert any("differ in their number" in b for check in checks for b in check.breaches)


def test_a_trajectory_that_one_of_its_teachers_has_not_read_is_found():
    trajectories = [
        {"iteration": i, "trajectory_id": f"t{i}", "prompt_id": "p", "status": status}
        for i, status in ((0, "finished"), (1, "given_up"), (2, "finished"))
    ]
    read = [{"iteration": 0, "trajectory_id": "t0", "teacher_id": teacher} for teacher in ("a", "b")]

    def breaches(hidden: list[dict]) -> tuple[str, ...]:
        return invariants.check_taught(trajectories, hidden, {"p": {"a", "b"}}, taught={0, 1}).breaches

    assert breaches(read) == ()
    assert breaches(read[1:]) == ("t0: not read by a",)
    assert breaches([*read, read[0] | {"teacher_id": "c"}]) == ("t0: read by c, which it has not",)
    assert breaches([*read, read[0] | {"iteration": 1, "trajectory_id": "t1"}]) == ("t1: read by a, which it has not",)


OTHER = shards.encode({"other": ("U8", np.zeros(3, np.uint8))})


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 64, OTHER], ids=["empty", "short", "garbled", "other"])
@pytest.mark.parametrize(("key", "name"), [("t", "token shards hold"), ("h", "hidden-state blocks")])
def test_an_object_of_any_bytes_is_a_breach(store, key, name, data):
    store.put(key, data)
    assert any(found.startswith(name) for found in breaches(store, *rows()))
