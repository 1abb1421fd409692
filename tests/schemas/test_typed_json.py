"""Dataclasses as JSON: round trips, and hostile input that is refused with its path."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import keys
from schemas.errors import FormatError
from schemas.typed_json import decode, encode, from_json, to_json


@dataclass(frozen=True)
class Leaf:
    name: str
    count: int
    share: float = 0.5


@dataclass(frozen=True)
class Tree:
    leaf: Leaf
    leaves: tuple[Leaf, ...]
    ids: list[int]
    counts: dict[str, int]
    kind: Literal["a", "b", 3]
    maybe: str | None
    either: int | float | Leaf | tuple[str, ...] | bool
    row: dict[str, Any] = field(default_factory=dict)


texts = st.text(st.characters(exclude_categories=[]), max_size=8)
integers = st.integers(-(1 << 70), 1 << 70)
floats = st.floats(allow_nan=False, allow_infinity=False)
leaves = st.builds(Leaf, texts, integers, floats)
json_values = st.recursive(
    st.none() | st.booleans() | integers | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
trees = st.builds(
    Tree,
    leaf=leaves,
    leaves=st.lists(leaves, max_size=3).map(tuple),
    ids=st.lists(integers, max_size=4),
    counts=st.dictionaries(texts, integers, max_size=3),
    kind=st.sampled_from(["a", "b", 3]),
    maybe=st.none() | texts,
    either=integers | floats | leaves | st.lists(texts, max_size=2).map(tuple) | st.booleans(),
    row=st.dictionaries(texts, json_values, max_size=3),
)
TREE = Tree(Leaf("x", 1), (Leaf("y", 2), Leaf("z", 3)), [1, 2], {"n": 1}, "a", None, 2.0)


@given(trees)
@settings(deadline=None)
def test_round_trip_in_canonical_bytes(tree: Tree):
    data = encode(tree)
    assert data == keys.canonical_json(json.loads(data))
    read = decode(Tree, data, "it")
    assert read == tree
    assert type(read.either) is type(tree.either)
    assert encode(read) == data


@given(json_values)
@settings(deadline=None)
def test_any_other_value_is_refused_or_is_one(value: Any):
    kinds: list[Any] = [Tree, Leaf, tuple[int, ...], dict[str, str], Literal["a"], float | None]
    for kind in kinds:
        try:
            read = from_json(kind, value, "it")
        except FormatError:
            continue
        assert to_json(read) == value


@given(trees, st.data())
@settings(deadline=None)
def test_one_wrong_field_is_named(tree: Tree, data: st.DataObject):
    value = to_json(tree)
    name = data.draw(st.sampled_from(["leaf", "leaves", "ids", "counts", "kind", "maybe"]))
    value[name] = data.draw(st.sampled_from([True, {"a": None}, ["1", 1, None], 7.5]))
    with pytest.raises(FormatError) as caught:
        from_json(Tree, value, "it")
    assert caught.value.where.startswith(f"it, {name}")


def changed(**fields: Any) -> dict[str, Any]:
    return to_json(TREE) | fields


@pytest.mark.parametrize(
    ("value", "where", "text"),
    [
        ({k: v for k, v in changed().items() if k != "maybe"}, "it", "a field 'maybe'"),
        (changed(further=1), "it, further", "'further'"),
        (changed(leaf={"name": "x"}), "it, leaf", "a field 'count'"),
        (changed(leaves=[{"name": "", "count": 1}, {"name": "", "count": True}]), "it, leaves, item 1, count", "True"),
        (changed(leaves={"name": "x", "count": 1}), "it, leaves", "a list"),
        (changed(ids=[1, 2.0]), "it, ids, item 1", "2.0"),
        (changed(ids="12"), "it, ids", "a list"),
        (changed(counts={"n": "1"}), "it, counts, n", "'1'"),
        (changed(kind="c"), "it, kind", "'a', 'b', 3"),
        (changed(kind=3.0), "it, kind", "3.0"),
        (changed(kind=[]), "it, kind", "[]"),
        (changed(maybe=1), "it, maybe", "null"),
        (changed(either={"name": 1, "count": 1}), "it, either, name", "a string"),
        (changed(either=["a", 1]), "it, either, item 1", "a string"),
        (changed(either=None), "it, either", "None"),
        ([], "it", "an object"),
        (None, "it", "None"),
    ],
)  # fmt: skip
def test_what_is_refused(value: Any, where: str, text: str):
    with pytest.raises(FormatError) as caught:
        from_json(Tree, value, "it")
    assert caught.value.where == where
    assert text in f"{caught.value.expected} {caught.value.found}"


def test_unknown_fields_of_stored_objects_may_be_passed_over():
    value = changed(further=1, leaf={"name": "x", "count": 1, "further": {}})
    assert from_json(Tree, value, "it", pass_over_unknown=True) == TREE


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"nul", b"NaN", b'{"a":1,"a":2}', b"[" * 100_000, b"1" * 5000, b"\xff", b'{"a":Infinity}', b"{} {}"],
)
def test_text_that_is_no_json(data: bytes):
    with pytest.raises(FormatError) as caught:
        decode(dict[str, Any], data, "runs/x/manifest.json")
    assert caught.value.where == "runs/x/manifest.json"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("data", [b"1e999", b"-1e999", b"1" * 400, b'"1"', b"true", b"null"])
def test_text_that_is_no_finite_number(data: bytes):
    with pytest.raises(FormatError):
        decode(float, data, "it")


def test_an_integer_is_a_float_where_one_is_wanted():
    assert decode(float, b"3", "it") == 3.0
    assert isinstance(decode(float, b"3", "it"), float)
    either: Any = int | float
    assert isinstance(decode(either, b"3", "it"), int)


@pytest.mark.parametrize("kind", [set[int], dict[int, str], Leaf | dict[str, int], tuple[int, str], bytes])
def test_types_without_a_json_form_are_a_mistake_of_ours(kind: Any):
    with pytest.raises(TypeError):
        from_json(kind, {}, "it")


def test_numbers_that_are_not_finite_are_not_written():
    with pytest.raises(ValueError, match="Out of range"):
        encode(Leaf("x", 1, float("inf")))
