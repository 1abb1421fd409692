from __future__ import annotations

import json
from importlib import metadata

import pytest

from schemas import config, keys
from schemas.errors import ConfigError
from tasks.inputs import prompts


def run_config(**changes):
    values = {
        "run_id": "t",
        "student": {"path": "x"},
        "teachers": [{"id": "a", "path": "x"}, {"id": "b", "path": "y"}],
        "prompts": {
            "per_iteration": 4,
            "heldout": 3,
            "datasets": [
                {"name": "chain_sum", "size": 9, "teachers": ["a"]},
                {"name": "spell_backward", "size": 5, "teachers": ["b", "a"], "domain": "spelling"},
            ],
        },
    }
    values["prompts"].update(changes)
    return config.parse(values)


def test_rows_are_a_function_of_the_configuration():
    first, second = prompts.load_prompts(run_config()), prompts.load_prompts(run_config())
    assert first == second
    assert len(first) == 14
    for row in first:
        assert row["prompt_id"] == keys.prompt_id(row)
        assert json.loads(row["messages"])[0]["role"] == "user"
    assert [t["teacher_id"] for t in next(r for r in first if r["domain"] == "spelling")["teachers"]] == ["a", "b"]


def test_a_generated_source_names_the_version_of_its_generator(monkeypatch):
    before = prompts.load_prompts(run_config())
    assert {r["source"].split(", ")[0] for r in before} == {f"reasoning-gym {metadata.version('reasoning-gym')}"}
    monkeypatch.setattr(prompts.metadata, "version", lambda name: "9.9")
    after = prompts.load_prompts(run_config())
    assert {r["source"].split(", ")[0] for r in after} == {"reasoning-gym 9.9"}
    assert [r["prompt_id"] for r in after] == [r["prompt_id"] for r in before], "equal prompts of another version"


def test_too_few_prompts_is_an_error_that_counts():
    with pytest.raises(ConfigError, match=r"at least 43 distinct prompts(.|\n)*found: 14"):
        prompts.load_prompts(run_config(per_iteration=40))


def test_unknown_data_set_names_it():
    with pytest.raises(ConfigError, match="no_such_set"):
        prompts.load_prompts(run_config(datasets=[{"name": "no_such_set", "size": 50, "teachers": ["a"]}]))


def test_heldout_is_apart_and_shared_over_domains():
    rows = prompts.load_prompts(run_config())
    train, heldout = prompts.split_prompts(rows, seed=3, heldout=4)
    assert {p["prompt_id"] for p in train} | {p["prompt_id"] for p in heldout} == {p["prompt_id"] for p in rows}
    assert len(train) + len(heldout) == len(rows)
    assert sorted(p["domain"] for p in heldout) == ["chain_sum", "chain_sum", "spelling", "spelling"]


@pytest.mark.parametrize("per_iteration", [1, 3, 4, 7, 11, 25])
def test_every_prompt_is_used_once_an_epoch(per_iteration):
    train = [{"prompt_id": f"p{i}"} for i in range(11)]
    flat = []
    for iteration in range(22):
        flat += [p["prompt_id"] for p in prompts.prompts_of_iteration(train, 5, per_iteration, iteration)]
    for epoch in range(len(flat) // 11):
        assert sorted(flat[epoch * 11 : (epoch + 1) * 11]) == sorted(p["prompt_id"] for p in train)
    if per_iteration >= 11:
        assert flat[:11] != flat[11:22], "a new epoch is a new permutation"
