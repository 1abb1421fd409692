"""The shipped verifier: what a response to a prompt of a reasoning-gym data set is worth."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import operator
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


_MOST_DIGITS, _LARGEST_EXPONENT = 30, 1000
#: What a formula may call.
_FORMULAS = {
    "Abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "exp", "ln", "log", "sec",
    "sin", "sinh", "sqrt", "tan", "tanh",
}  # fmt: skip


def literal(text: str) -> Any:
    """For eval of a list: a Python literal, nothing that runs. Raises ValueError or SyntaxError."""
    return ast.literal_eval(text.strip())


def integer(text: str) -> int:
    """For eval of arithmetic on integers. Raises ValueError or SyntaxError for anything else."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return _UNARY[type(node.op)](value(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.LShift | ast.RShift) and right > _LARGEST_EXPONENT:
                raise ValueError(f"a shift by {right}")
            return _BINARY[type(node.op)](left, right)
        raise ValueError(f"no arithmetic on integers: {ast.dump(node)[:80]}")

    return value(ast.parse(text.strip(), mode="eval").body)


_UNARY: dict[type[ast.AST], Callable[[int], int]] = {
    ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert,
}  # fmt: skip
_BINARY: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip


def formula(text: str, *arguments: Any, **settings: Any) -> Any:
    """For sympy's parse_expr, which evaluates its text as Python: numbers, names, + - * / **, and functions by name.

    Raises ValueError for anything else, and for powers that take for ever.
    """
    import sympy

    def check(node: ast.AST, exponent: float) -> None:
        """exponent: bound of what the node's value is raised to in all."""
        match node:
            case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right):
                check(left, exponent)
                check(right, exponent)
            case ast.BinOp(left, ast.Pow(), right):
                for part in ast.walk(right):
                    if isinstance(part, ast.Constant) and isinstance(part.value, int | float):
                        exponent *= max(1, abs(part.value))
                    if isinstance(part, ast.Pow) or exponent > _LARGEST_EXPONENT:
                        raise ValueError("a large power")
                check(left, exponent)
                check(right, 1)
            case ast.UnaryOp(ast.UAdd() | ast.USub(), operand):
                check(operand, exponent)
            case ast.Call(ast.Name(name), [argument], []) if name in _FORMULAS:
                check(argument, exponent)
            case ast.Constant(int() | float() as number) if len(str(number)) <= _MOST_DIGITS:
                pass
            case ast.Name(name) if not name.startswith("_"):
                pass
            case _:
                raise ValueError(f"no formula: {ast.dump(node)[:80]}")

    check(ast.parse(text.strip(), mode="eval").body, 1)
    return sympy.parse_expr(text, *arguments, **settings)


class _SafeSympy:
    """sympy, as a module sees it whose texts are parsed by `formula`."""

    parse_expr = staticmethod(formula)

    def __getattr__(self, name: str) -> Any:
        import sympy

        return getattr(sympy, name)


#: Modules of reasoning-gym that evaluate text: the name that they do it by, and what stands under that name here, since
#: the text is the model's or a prompt row's. None: what is evaluated is the package's own text, when prompts are made.
EVALUATORS: dict[str, tuple[str, Any]] = {
    "algebra.intermediate_integration": ("sympy", _SafeSympy()),
    "algebra.polynomial_multiplication": ("sp", _SafeSympy()),
    "algebra.simple_integration": ("sympy", _SafeSympy()),
    "algorithmic.binary_matrix": ("eval", literal),
    "algorithmic.number_sorting": ("eval", literal),
    "algorithmic.spiral_matrix": ("eval", literal),
    "algorithmic.string_insertion": ("eval", literal),
    "arithmetic.basic_arithmetic": ("eval", None),
    "arithmetic.bitwise_arithmetic": ("eval", integer),
    "arithmetic.gsm_symbolic.generators_00_49": ("eval", None),
    "arithmetic.gsm_symbolic.generators_50_99": ("eval", None),
    "code.codeio": ("exec", None),
    "games.countdown": ("parse_expr", formula),
    "games.n_queens": ("eval", literal),
    "games.puzzle24": ("parse_expr", formula),
}


@functools.cache
def gym() -> ModuleType:
    """reasoning-gym, without the syntax warnings of what it imports. Raises ConfigError when it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            package = importlib.import_module("reasoning_gym")
            for module, (name, safe) in EVALUATORS.items():
                if safe is not None:
                    setattr(importlib.import_module(f"reasoning_gym.{module}"), name, safe)
    except ImportError as error:
        raise ConfigError("prompts", expected="package reasoning-gym (extra: demo)", found=str(error)) from error
    return package


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
    numbers = sorted(int(number) for number in re.findall(r"\d+", found))
    return numbers == sorted(entry["metadata"]["numbers"]) and formula(found) == 24


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
