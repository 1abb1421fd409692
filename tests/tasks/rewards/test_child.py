from __future__ import annotations

import os
from dataclasses import replace

import pytest

from schemas.errors import ConfigError, StageError
from tasks.rewards.child import CallFailedError, Rewarder, VerifierProcess, VerifierSettings, check_verifiers
from tests.support.tiny import tiny_model

SETTINGS = VerifierSettings(timeout_seconds=5.0, memory_bytes=2 << 30)
PROMPT = {"prompt_id": "p1", "answer": "yes", "context": "{}"}


@pytest.fixture
def process():
    with VerifierProcess(SETTINGS) as started:
        yield started


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_values_come_back_whatever_a_verifier_prints(process):
    assert process.call("tests.support.verifiers:prints", "yes", PROMPT) == 1.0
    assert process.call("tests.support.verifiers:prints", "no", PROMPT) == 0.0
    assert process.call("tests.support.verifiers:count_letters", "é\u2028a\ud800", PROMPT) == 2 + 2 / 16


def test_a_second_scoring_gives_the_same_value():
    values = []
    for _ in range(2):
        with VerifierProcess(SETTINGS) as process:
            values.append(
                [
                    process.call(f"tests.support.verifiers:{n}", "", PROMPT)
                    for n in ("draws_lots", "hash_order", "draws_lots")
                ]
            )
    assert values[0] == values[1]
    assert values[0][0] == values[0][2]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("fails", "no such answer"),
        ("answers_in_words", "ValueError"),
        ("not_finite", "not finite"),
        ("exits", "status 7"),
        ("calls_sys_exit", "status 3"),
    ],
)
def test_a_failed_call_says_why_and_the_next_one_works(process, name, found):
    with pytest.raises(CallFailedError, match=found):
        process.call(f"tests.support.verifiers:{name}", "", PROMPT)
    assert process.call("tests.support.verifiers:count_letters", "ab", PROMPT) == 2 + 2 / 16


@pytest.mark.parametrize("name", ["sleeps", "never_leaves_c"])
def test_a_call_that_does_not_return_is_killed(name):
    with VerifierProcess(replace(SETTINGS, timeout_seconds=0.3)) as process:
        process.load(f"tests.support.verifiers:{name}")
        assert process._process is not None
        pid = process._process.pid
        with pytest.raises(CallFailedError, match=r"no answer in 0\.3 s"):
            process.call(f"tests.support.verifiers:{name}", "", PROMPT)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert process.call("tests.support.verifiers:count_letters", "", PROMPT) == 2 / 16


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tests.support.verifiers:no_such", "no_such"),
        ("no_such_module:f", "no_such_module"),
        ("tests.support.verifiers:not_callable", "is a int"),
        ("just_a_name", "just_a_name"),
        ("tests.support.verifiers:", "tests.support.verifiers:"),
        ("tests.support.broken_verifier:f", "broken on import"),
    ],
)
def test_a_verifier_that_is_not_there_is_a_config_error(name, found):
    with pytest.raises(ConfigError, match=r"package\.module:function") as caught:
        check_verifiers(["reasoning_gym", name], SETTINGS)
    assert found in caught.value.found


def test_failures_are_an_error_unless_allowed_then_null_and_counted(model):
    def rewarder(allowed: int) -> Rewarder:
        return Rewarder(model, SETTINGS, allowed)

    request = PROMPT | {"verifier": "tests.support.verifiers:fails"}
    with rewarder(0) as strict, pytest.raises(StageError, match="no such answer") as caught:
        strict(request, [70, 71])
    assert "max_verifier_failures" in caught.value.next_command
    with rewarder(2) as lenient:
        assert lenient(PROMPT | {"verifier": None}, [70]) is None
        assert lenient(PROMPT | {"verifier": "tests.support.verifiers:count_letters"}, [70, 71, 2]) == 2 + 2 / 16
        assert lenient.failures == 0
        assert [lenient(request, [70]), lenient(request, [70])] == [None, None]
        assert lenient.failures == 2
        with pytest.raises(StageError, match="2 failures allowed"):
            lenient(request, [70])
        lenient.start_partition()
        assert lenient(request, [70]) is None
