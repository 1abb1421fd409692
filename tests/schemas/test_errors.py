"""The family of errors: every part is said, and an error arrives whole in another process."""

from __future__ import annotations

import json
import pickle

import pytest

from schemas import errors
from schemas.errors import ConfigError, ContractError, FormatError, OpdError, StageError, StoreError, error_from_json

KINDS = {ConfigError: 2, FormatError: 3, StoreError: 4, ContractError: 5, StageError: 6}


def test_each_kind_has_a_status_of_its_own():
    family = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, OpdError)}
    assert family == {OpdError, *KINDS}
    assert {kind.exit_status: kind.kind for kind in family} == {1: "error"} | {n: k.kind for k, n in KINDS.items()}
    assert errors.EXIT_PREEMPTED not in KINDS.values()


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_says_five_parts_in_order_also_when_two_are_the_kind_s_own(kind):
    given = kind("here", expected="this", found="that", safe="all", next_command="opd run x.toml")
    assert str(given).splitlines() == [
        f"{kind.kind}: here", "expected: this", "found: that", "safe: all", "next: opd run x.toml",
    ]  # fmt: skip
    usual = kind("here", expected="this", found="that")
    assert [line.split(": ")[0] for line in str(usual).splitlines()] == [
        kind.kind, "expected", "found", "safe", "next",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_arrives_whole(kind):
    sent = kind("where\nit: happened", expected="é: a", found="", safe="next: no", next_command="x")
    for came in (
        error_from_json(json.loads(json.dumps({"event": "error"} | sent.to_json()))),
        pickle.loads(pickle.dumps(sent)),
    ):
        assert type(came) is kind
        assert (came.to_json(), str(came)) == (sent.to_json(), str(sent))
