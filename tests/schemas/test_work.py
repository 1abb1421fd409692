"""Work files and messages of ranks: written by one process, read whole by another, refused by the name of a field."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError, FormatError
from schemas.typed_json import decode, encode, to_json
from schemas.work import messages
from schemas.work.report import ReportWork
from schemas.work.rollout import Life, RolloutWork
from schemas.work.teach import TeachWork
from schemas.work.train import TrainWork

FINITE = st.floats(allow_nan=False, allow_infinity=False)
OPEN = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4) | st.none(), max_size=2)
KINDS = sorted(messages._KINDS.values(), key=lambda kind: kind.event)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a dataclass."""
    hints = get_type_hints(kind)
    known = {float: FINITE, dict[str, Any]: OPEN, list[dict[str, Any]]: st.lists(OPEN, max_size=2)}
    known[dict[str, str | int | float]] = st.dictionaries(st.text(max_size=4), st.integers() | FINITE, max_size=2)
    scalars = st.text(max_size=4) | st.integers() | FINITE | st.booleans() | st.none()
    known[dict[str, str | int | float | bool | None]] = st.dictionaries(st.text(max_size=4), scalars, max_size=2)
    chosen = {}
    for field in fields(kind):
        hint = hints[field.name]
        inner = getattr(hint, "__args__", ())
        if hint in known:
            chosen[field.name] = known[hint]
        elif hasattr(hint, "__dataclass_fields__"):
            chosen[field.name] = values(hint)
        elif inner and hasattr(inner[0], "__dataclass_fields__"):
            several = inner[1:] == (Ellipsis,)
            chosen[field.name] = st.lists(values(inner[0]), max_size=2).map(tuple) if several else values(inner[0])
    return st.builds(kind, **chosen)


@pytest.mark.parametrize("kind", [TrainWork, TeachWork, RolloutWork, ReportWork, Life], ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_work_comes_back_whole(kind: Any, data: st.DataObject):
    work = data.draw(values(kind))
    assert decode(kind, encode(work), "work.json") == work
    value = to_json(work)
    gone = data.draw(st.sampled_from([f.name for f in fields(kind)]))
    with pytest.raises(FormatError, match=f"'{gone}'"):
        decode(kind, json.dumps({k: v for k, v in value.items() if k != gone}), "work.json")
    with pytest.raises(FormatError, match=r"work\.json, further"):
        decode(kind, json.dumps(value | {"further": 1}), "work.json")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.event)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_message_is_one_line_that_its_parent_reads(kind: Any, data: st.DataObject):
    message = data.draw(values(kind))
    line = messages.write(message)
    assert line.isascii()
    assert line.index("\n") == len(line) - 1
    assert messages.read(json.loads(line), "rank 0") == message


def test_events_are_named_once():
    assert len({kind.event for kind in messages.Message.__subclasses__()}) == len(messages.Message.__subclasses__())
    assert set(messages._KINDS.values()) == set(messages.Message.__subclasses__())


def test_an_error_arrives_with_all_its_parts():
    error = ConfigError("prompts.files", expected="a file", found="none", safe="all", next_command="opd run")
    failed = messages.read(json.loads(messages.write(messages.Failed.of(error))), "rank 0")
    assert isinstance(failed, messages.Failed)
    assert (failed.kind, failed.where, failed.text) == ("config error", "prompts.files", str(error))


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ({}, "rank 3"),
        ({"event": "hello"}, "rank 3"),
        ({"event": ["ack"]}, "rank 3"),
        ({"event": "stored"}, "rank 3, message 'stored'"),
        ({"event": "stored", "steps": "4"}, "rank 3, message 'stored', steps"),
        ({"event": "stored", "steps": 4, "more": 0}, "rank 3, message 'stored', more"),
        ({"event": "resumed_at", "steps": True}, "rank 3, message 'resumed_at', steps"),
    ],
)
def test_what_is_no_message_is_refused(line: dict[str, Any], where: str):
    with pytest.raises(FormatError) as caught:
        messages.read(line, "rank 3")
    assert caught.value.where == where
