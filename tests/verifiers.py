"""Verifiers of the tests, good ones and bad ones; a module of its own, so that their process starts fast."""

from __future__ import annotations

import os
import random
import sys
import time

not_callable = 3


def count_letters(text: str, prompt: dict) -> float:
    return sum(c.isalpha() for c in text) + len(prompt["prompt_id"]) / 16


def prints(text: str, prompt: dict) -> float:
    print("noise on stdout", flush=True)
    os.system("echo noise of a child")
    return float(text == prompt["answer"])


def draws_lots(_text: str, _prompt: dict) -> float:
    return random.random()


def hash_order(_text: str, _prompt: dict) -> float:
    return float("".join({"1", "2", "3", "4", "5", "6", "7"}))


def fails(_text: str, _prompt: dict) -> float:
    raise KeyError("no such answer")


def fails_on_one(text: str, prompt: dict) -> float:
    """Of the prompts of tests/faults/test_bad_input.py."""
    return {"2": 0.5, "4": float(len(text))}[prompt["answer"]]


def answers_in_words(_text: str, _prompt: dict):
    return "good"


def not_finite(_text: str, _prompt: dict) -> float:
    return float("nan")


def exits(_text: str, _prompt: dict) -> float:
    os._exit(7)


def calls_sys_exit(_text: str, _prompt: dict) -> float:
    sys.exit(3)


def sleeps(_text: str, _prompt: dict) -> float:
    time.sleep(600)
    return 1.0


def never_leaves_c(_text: str, _prompt: dict) -> float:
    return float(9 ** (9**9))


def as_told(text: str, prompt: dict) -> float:
    """Behaves like the verifier that the environment names."""
    return globals()[os.environ["OPD_TEST_VERIFIER"]](text, prompt)
