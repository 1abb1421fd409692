"""The shipped verifier: a response scores in full if, and only if, the one answer that it ends with is right."""

from __future__ import annotations

import contextlib
import json
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.rewards.gym_scores import EVALUATORS, _gym_dataset, candidates, formula, gym, score_response

pytest.importorskip("reasoning_gym")

#: Those that need settings of their own, whose answers no text of one line gives, or that take long to make.
_LEFT_OUT = {"composite", "boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
RIGHT = (
    "{a}", " {a}\n", "The answer is {a}", "The answer is {a}.", "The final answer is: {a}", "Answer: {a}", "**{a}**",
    "The answer is **{a}**.", "I add them.\n\nAnswer: {a}", "The answer is:\n{a}", "<answer>{a}</answer>",
    "I think 99.\n<answer> {a} </answer>", '"{a}"', "`{a}`",
)  # fmt: skip
WRONG = (
    "{a} or {w}", "{w} or {a}", "The answer is {a} or {w}.", "Answer: {w}, {a}", "The answer is {a}, no, {w}.",
    "not {a}", "The answer is not {a}.", "{a}\nThe answer is {w}", "The answer is {a}.\nNo, it is {w}",
    "<answer>{w}</answer> and not {a}", "<answer>{a}</answer><answer>{w}</answer>", "{a} != {w}", "{a} and {w}",
    "{a} # {w}",
)  # fmt: skip


def names() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - _LEFT_OUT)


@cache
def entries(name: str) -> list[dict[str, Any]]:
    return list(gym().create_dataset(name, size=4, seed=5))


def score(name: str, entry: dict[str, Any], text: str) -> float:
    context = json.dumps({"dataset": name, "entry": entry}, default=str)
    return score_response(text, {"prompt_id": "p", "answer": str(entry["answer"]), "context": context})


def number(answer: str) -> dict[str, Any]:
    return {"question": "?", "answer": answer, "metadata": {}}


@pytest.mark.parametrize("name", names())
def test_right_answers_of_every_data_set_score_in_full(name):
    for entry in entries(name)[:2]:
        answer = str(entry["answer"])
        several = "\n" in answer
        for form in RIGHT[:2] + RIGHT[9:12] if several else RIGHT:
            assert score(name, entry, form.format(a=answer)) == 1.0, form


@pytest.mark.parametrize("name", names())
def test_wrong_answers_of_every_data_set_do_not(name):
    answers = [str(entry["answer"]) for entry in entries(name)]
    for entry in entries(name)[:2]:
        answer = str(entry["answer"])
        other = next((a for a in answers if a != answer), "none of them")
        for form in WRONG:
            text = form.format(a=answer, w=other)
            assert score(name, entry, text) < 1.0, text
        for text in ("", " \n", "?", "I do not know.", "The answer is"):
            assert score(name, entry, text) < 1.0, text


@given(st.integers(-999, 9999), st.integers(-999, 9999), st.sampled_from(RIGHT), st.sampled_from(WRONG))
def test_another_number_is_wrong_in_every_form(answer, other, right, wrong):
    entry = number(str(answer))
    assert score("chain_sum", entry, right.format(a=answer)) == 1.0
    if other != answer:
        assert score("chain_sum", entry, right.format(a=other)) < 1.0
        assert score("chain_sum", entry, wrong.format(a=answer, w=other)) < 1.0


@given(
    st.integers(1, 999),
    st.text("0123456789.,/%:-+eE^ ", max_size=4),
    st.text("0123456789,/%:-+eE^ ", max_size=4),
    st.sampled_from(["{}", "The answer is {}", "5 + 7 = {}.", "**{}**", "<answer>{}</answer>"]),
)
def test_a_number_inside_something_else_is_wrong(answer, before, after, form):
    text = before + str(answer) + after
    try:
        same = float(text.strip().strip(".")) == answer
    except ValueError:
        same = text.strip().lstrip("+0") == f"{answer:,}"
    if not same and text.strip(" .") != str(answer):
        assert score("chain_sum", number(str(answer)), form.format(text)) < 1.0, text


@given(st.integers(1, 9), st.integers(1, 9), st.text(max_size=30), st.text("abc ,;?!", min_size=1, max_size=9))
def test_what_follows_an_answer_is_part_of_it(answer, other, before, after):
    text = f"{before}\nThe answer is {answer}{after}x{other}"
    assert score("chain_sum", number(str(answer)), text) < 1.0


@pytest.mark.parametrize(
    ("text", "full"),
    [("1,012", True), ("1012.0", True), ("+1012", True), ("$1012$", True), ("\\(1012\\)", True), ("1,0,1,2", False),
     ("1,01,2", False), ("10,12", False), ("1012%", False), ("1012,000", False), ("1012.5", False),
     ("$\\boxed{1012}$", True), ("\\boxed{1012} or \\boxed{1013}", False), ("506 + 506 = 1012", True),
     ("506 + 506 \u2260 1012", False), ("506 + 506 != 1012", False), ("It isn't 1012", False),
     ("1012 is wrong", False), ("Is it 1012?", False)],
)  # fmt: skip
def test_numbers(text, full):
    assert (score("chain_sum", number("1012"), text) == 1.0) == full


def test_puzzle24_takes_the_given_numbers_and_24_itself():
    entry = {"question": "?", "answer": "10*(8 - 5) - 6", "metadata": {"numbers": [8, 5, 10, 6]}}
    assert score("puzzle24", entry, "10*(8 - 5) - 6") == 1.0
    assert score("puzzle24", entry, "The answer is (8 - 5)*10 - 6.") == 1.0
    for text in ("6*4*1*1", "10 + 8 + 6", "(10*8 - 5)/6 + 12", "6*10/8 + 5 + 12"):
        assert score("puzzle24", entry, text) < 1.0
    truncated = {"question": "?", "answer": "?", "metadata": {"numbers": [3, 4, 9, 10]}}
    assert score("puzzle24", truncated, "(10*9 + 9)/4") < 1.0
    assert score("puzzle24", truncated, "10*9/4 + 3") < 1.0  # 25.5
    assert score("puzzle24", truncated, "(9*10 + 4)/3 - 7") < 1.0


def test_text_that_is_no_number_is_wrong_and_no_failure():
    entry = {"question": "?", "answer": "2 × 3", "metadata": {"factors": [2, 3]}}
    assert score("prime_factorization", entry, "2 × 3") == 1.0
    assert score("prime_factorization", entry, "I do not know.") == 0.0


def test_a_marked_answer_stands_alone():
    assert candidates("12 <answer>13</answer> 14") == ["13"]
    assert candidates("12 \\boxed{\\frac{1}{2}} 14") == ["\\frac{1}{2}"]


EVALUATES = re.compile(r"(?<![\w.])(?:eval|exec)\(|parse_expr\(|sympify\(|\bsp\.S\(|parse_latex\(|\b__import__\(")


def test_every_module_that_evaluates_text_is_known():
    """The package's sources are the list: a new version that evaluates somewhere else fails here."""
    folder = Path(gym().__file__ or "").parent
    found = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if EVALUATES.search(path.read_text())
    }
    # It has a function of that name, which takes logical formulas apart and runs none.
    assert found - {"logic.propositional_logic"} == set(EVALUATORS)


HOSTILE = (
    "__import__('pathlib').Path('{mark}').touch()", "[__import__('pathlib').Path('{mark}').touch()]",
    "open('{mark}', 'w')", "exec(\"open('{mark}', 'w')\")", "().__class__.__base__", "x.__class__", "lambda: 0",
    "[open('{mark}', 'w') for _ in [1]]", "sin.__globals__", "Symbol('x')", "9**9**9**9", "(9**100)**(9**100)",
    "((((9**99)**99)**99)**99)**99", "9" * 5000, "factorial(10**10)", "2**(10**10)", "1 << 10**10",
)  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", sorted(name.rpartition(".")[2] for name, (_, safe) in EVALUATORS.items() if safe))
@pytest.mark.parametrize("text", HOSTILE)
def test_no_scorer_runs_what_a_model_wrote(name, text, tmp_path):
    mark = tmp_path / "mark"
    text = text.format(mark=mark)
    begun = time.monotonic()
    for entry in entries(name)[:1]:
        assert _gym_dataset(name).score_answer(text, entry) < 1.0
        assert score(name, entry, text) < 1.0
        # What a row of prompts names as the answer, the problem or the integrand is no more to be trusted.
        changed = {k: text for k, v in entry["metadata"].items() if isinstance(v, str)} if entry["metadata"] else {}
        spoilt = entry | {"answer": text, "metadata": entry["metadata"] | changed}
        with contextlib.suppress(Exception):
            _gym_dataset(name).score_answer("[1, 2]", spoilt)
    assert not mark.exists()
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("text", "value"), [("2*x**3 - x/2", "2*x**3 - x/2"), ("-exp(-x)*sin(2*x) + C", "C - exp(-x)*sin(2*x)"),
                        ("(3 + 5)*6/2", "24"), ("log(x)**2", "log(x)**2"), ("x**(3/2)", "x**(3/2)")],
)  # fmt: skip
def test_formulas_are_read_as_sympy_reads_them(text, value):
    assert str(formula(text)) == value
