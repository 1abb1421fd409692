"""The shipped verifier: what a response to a prompt of a reasoning-gym data set is worth."""

from __future__ import annotations

import functools
import importlib
import json
import re
import warnings
from collections.abc import Callable
from decimal import Decimal
from types import ModuleType
from typing import Any

from schemas.errors import ConfigError

#: What stands before an answer in a line. All that follows is the answer.
_PHRASE = re.compile(r"\banswer\s*:|\b(?:is|equals|equal to)\b:?|(?<![!<>:=])=(?!=)", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
#: Emphasis, quotes and mathematical brackets around an answer.
_DECORATION = re.compile(r"^(?:[\s*`\"'$]|\\[(\[])+|(?:[\s*`\"'$]|\\[)\]])+$")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)


@functools.cache
def gym() -> ModuleType:
    """reasoning-gym, without the syntax warnings of what it imports. Raises ConfigError when it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError("prompts", expected="package reasoning-gym (extra: demo)", found=str(error)) from error


@functools.cache
def _gym_dataset(name: str):
    return gym().create_dataset(name, size=1, seed=0)


def candidates(text: str) -> list[str]:
    """Ways to read the answer that a response ends with.

    Of the last <answer> or \\boxed{}, else of the response: all of it, its last line, and what follows an answer phrase
    of that line, each with and without decoration. All reach to the end, so "12 or 13" is not 12.
    """
    for marked in (_TAGGED, _BOXED):
        if found := marked.findall(text):
            text = found[-1]
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].rstrip().endswith(":"):
        lines = lines[1:]
    read = ["\n".join(lines), *lines[-1:], *(line[at.end() :] for line in lines[-1:] for at in _PHRASE.finditer(line))]
    bare = [_DECORATION.sub("", candidate) for candidate in read]
    plain = [_DECORATION.sub("", candidate.removesuffix(".")) for candidate in bare]
    return list(dict.fromkeys(candidate.strip() for candidate in read + bare + plain if candidate.strip()))


def _equal(found: str, expected: str) -> bool:
    """As text but for white space, or as decimal numbers."""
    if _NUMBER.fullmatch(found) and _NUMBER.fullmatch(expected.strip()):
        return Decimal(found.replace(",", "")) == Decimal(expected.replace(",", ""))
    return found.split() == expected.split()


def _form(pattern: str) -> Callable[[str, dict[str, Any]], bool]:
    compiled = re.compile(pattern, re.ASCII | re.DOTALL)
    return lambda found, _entry: compiled.fullmatch(found) is not None


def _makes_24(found: str, entry: dict[str, Any]) -> bool:
    """With each given number once. `found` holds digits and operators alone."""
    import sympy

    numbers = sorted(int(number) for number in re.findall(r"\d+", found))
    return numbers == sorted(entry["metadata"]["numbers"]) and sympy.parse_expr(found) == 24


def _as_many(separator: str | None) -> Callable[[str, dict[str, Any]], bool]:
    return lambda found, entry: len(found.split(separator)) == len(entry["answer"].split(separator))


_ARITHMETIC = _form(r"[\d\s+*/()-]+")
_EXPRESSION = _form(r"(?!.*\b(?:and|else|for|if|in|is|lambda|not|or)\b)[\w\s+*/^().-]+")
#: What an answer must look like for a full score by a data set's own scorer, where that passes over what it cannot
#: read: it finds the right answer in "UURD or LLD", in the first of two, or in any text at all.
_LENIENT: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    "advanced_geometry": _form(r"\(?\s*-?[\d.]+\s*,\s*-?[\d.]+\s*\)?|-?[\d.]+\s*\u00b0?"),
    "countdown": _ARITHMETIC,
    "cryptarithm": _form(r"(?!.*\b(\w)\s*=.*\b\1\s*=)[\w\s=,]+"),
    "fraction_simplification": _form(r"\$?\s*(?:\\d?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|\d+\s*/\s*\d+)\s*\$?"),
    "game_of_life_halting": lambda _found, _entry: False,
    "gsm_symbolic": _form(r"\d+(?:\.\d+)?"),
    "intermediate_integration": _EXPRESSION,
    "kakurasu": _form(r"[01\s]+"),
    "knights_knaves": _form(r"\w+ is an? \w+(?:(?:,| and|, and) \w+ is an? \w+)*\.?"),
    "letter_jumble": _as_many(None),
    "polynomial_equations": _as_many(","),
    "polynomial_multiplication": _EXPRESSION,
    "puzzle24": lambda found, entry: _ARITHMETIC(found, entry) and _makes_24(found, entry),
    "quantum_lock": _form(r"[A-Ca-c](?:[\s,>\u2192-]+[A-Ca-c])*"),
    "rush_hour": _form(r"[A-Z][+-]\d+(?:[\s,]+[A-Z][+-]\d+)*"),
    "simple_integration": _EXPRESSION,
    "sokoban": _form(r"[DLRU]+"),
    "survo": _form(r"[\d\s]+"),
    "time_intervals": _form(r"\d+(?: days?)?|(?:\d+ days?, )?\d+:\d\d(?::\d\d(?:\.\d+)?)?"),
    "tower_of_hanoi": _form(r"Move disk \d+ from Peg \d+ to Peg \d+(?:\s+Move disk \d+ from Peg \d+ to Peg \d+)*"),
    "word_sorting": _as_many(","),
}


def _score(name: str, found: str, entry: dict[str, Any], expected: str | None) -> float:
    """expected: None where the data set knows no answer and only its scorer can tell."""
    if expected is not None and _equal(found, expected):
        return 1.0
    try:
        score = float(_gym_dataset(name).score_answer(found, entry))
    except ValueError:  # of scorers that take every text for numbers
        return 0.0
    several = "," in found and not _NUMBER.fullmatch(found)
    if score >= 1.0 and several and expected is not None and _NUMBER.fullmatch(expected):
        return 0.0  # scorers that leave commas out take 1,2 for 12
    if score >= 1.0 and name in _LENIENT and not _LENIENT[name](found, entry):
        return 0.0
    return score


def score_response(text: str, prompt: dict[str, Any]) -> float:
    """1 for the right answer; for another one what the data set's scorer gives it, which may be a part of 1."""
    context = json.loads(prompt["context"])
    name, entry = context["dataset"], context["entry"]
    expected = None if entry["answer"] is None else prompt["answer"]
    return max((_score(name, found, entry, expected) for found in candidates(text)), default=0.0)
