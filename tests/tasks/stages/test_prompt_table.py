"""Prompts of several runs in one root: each once, however they overlap, race, or find a damaged object."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter

import pytest

from infra import tables
from infra.row_objects import read_jsonl
from infra.store import ObjectStore
from infra.stores import open_store
from schemas import keys
from schemas.errors import FormatError
from schemas.rows import PROMPTS
from tasks.stages.prompt_table import prompt_entries


def prompt(number: int, source: str) -> dict:
    row = {
        "source": source, "domain": "d", "teachers": [{"teacher_id": "a", "weight": 1.0}], "answer": None,
        "messages": json.dumps([{"role": "user", "content": f"question {number}"}]), "verifier": None, "context": "{}",
    }  # fmt: skip
    return row | {"prompt_id": keys.prompt_id(row)}


def file(name: str, *numbers: int) -> list[dict]:
    return [prompt(number, f"folder/{name}, line {line}") for line, number in enumerate(numbers, 1)]


def rows_of(store: ObjectStore) -> list[dict]:
    return [row for key in store.list("prompts/") for row in read_jsonl(store, PROMPTS, key)]


def test_a_second_run_adds_what_is_new_and_takes_the_rest_as_it_is(store):
    first = prompt_entries(store, file("a.jsonl", 1, 2, 3))
    assert [entry.num_rows for entry in first] == [3]
    assert prompt_entries(store, file("a.jsonl", 1, 2, 3)) == first
    assert prompt_entries(store, file("copy of a.jsonl", 3, 2)) == first, "one object: what is needed of it is in it"
    both = prompt_entries(store, file("a.jsonl", 2) + file("b.jsonl", 3, 4, 5))
    assert [entry.num_rows for entry in both] == [3, 2]
    assert Counter(row["prompt_id"] for row in rows_of(store)) == {prompt(n, "")["prompt_id"]: 1 for n in range(1, 6)}
    for entry in both:
        (key,) = entry.row_keys
        assert {row["source"] for row in read_jsonl(store, PROMPTS, key)} == {entry.slice["source"]}
    assert sorted(str(entry.slice["source"]).split(".")[0] for entry in both) == ["a", "b"]


def test_runs_that_add_at_once_hold_each_prompt_once(store):
    """Eight drivers of overlapping sets; every order of their calls must end in disjoint objects."""
    begin, failed = threading.Barrier(8), []

    def run(number: int) -> None:
        numbers = random.Random(number).sample(range(40), 25)
        begin.wait()
        try:
            for _ in range(2):
                entries = prompt_entries(store, file(f"{number}.jsonl", *numbers))
                assert sum(entry.num_rows for entry in entries) >= len(numbers)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert set(Counter(row["prompt_id"] for row in rows_of(store)).values()) == {1}


def test_a_damaged_object_comes_back_or_is_named(tmp_path):
    store = open_store(str(tmp_path))
    ours, theirs = file("a.jsonl", 1, 2), file("b.jsonl", 3, 4)
    (first,) = prompt_entries(store, ours)
    (key,) = first.row_keys
    whole = store.get(key)
    store.put(key, whole[:40])
    assert prompt_entries(store, ours) == [first]
    assert store.get(key) == whole
    (second,) = prompt_entries(store, theirs)
    store.put(key, whole[:40])
    assert prompt_entries(store, theirs) == [second], "what others hold damaged is no matter"
    with pytest.raises(FormatError, match=key):
        prompt_entries(store, file("c.jsonl", 1, 7))
    store.put(key, whole.replace(b"question 2", b"question 9"))
    assert prompt_entries(store, ours) == [first], "a row that is not the one its id names is damage too"
    assert store.get(key) == whole


def test_rows_of_version_0_1_stay_as_they_are(tmp_path):
    store = open_store(str(tmp_path))
    old = {name: value for name, value in prompt(1, "file:0123").items() if name != "prompt_id"}
    old["prompt_id"] = keys.digest(old)[:32]
    store.put("prompts/0123456789abcdef.jsonl", keys.canonical_json(old) + b"\n")
    assert keys.is_prompt_id_of(old)
    assert not keys.is_prompt_id_of(old | {"answer": "5"})
    (entry,) = prompt_entries(store, file("a.jsonl", 1, 2))
    assert entry.num_rows == 2, "the same prompt under its new id"


@pytest.mark.spark
def test_a_join_finds_one_row_a_prompt(spark, tmp_path):
    root = str(tmp_path)
    store = open_store(root)
    for run in (file("a.jsonl", 1, 2, 3), file("b'` é.jsonl", 3, 4), file("a.jsonl", 1, 2, 3)):
        for entry in prompt_entries(store, run):
            tables.commit_slice(spark, root, "prompts", entry.slice, entry.row_keys, entry.num_rows, entry.digest)
            assert len(tables.read_rows(root, "prompts", entry.slice)) == entry.num_rows
    found = Counter(row["prompt_id"] for row in tables.read_rows(root, "prompts", {}))
    assert found == {prompt(n, "")["prompt_id"]: 1 for n in range(1, 5)}
