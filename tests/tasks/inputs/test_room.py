"""Whether every reader of a prompt has room for it and the longest response: at the limit, one token past it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schemas import config
from schemas.errors import ContractError
from tasks.inputs.room import Room, teacher_context
from tasks.inputs.text import Tokenizer
from tests.support.tiny import tiny_model

RESPONSE = 32
TEMPLATE = "It is {{ answer }}."


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """student: a context of 512 tokens; narrow: the same tokenizer, a context of 64."""
    folder = tmp_path_factory.mktemp("room")
    tiny_model(folder / "student", layers=1, width=16)
    narrow = tiny_model(folder / "narrow", layers=1, width=16) / "config.json"
    narrow.write_text(json.dumps(json.loads(narrow.read_text()) | {"max_position_embeddings": 64}))
    return folder


def room_of(models: Path, **dispatch: int) -> Room:
    teachers = [
        {"id": "a", "path": str(models / "student"), "template": TEMPLATE},
        {"id": "b", "path": str(models / "narrow")},
    ]
    run = config.parse({
        "run_id": "r", "data": "d", "student": {"path": str(models / "student")}, "teachers": teachers,
        "prompts": {"per_iteration": 1, "heldout": 0, "files": [{"path": "own.jsonl", "teachers": ["a"]}]},
        "rollout": {"max_response_tokens": RESPONSE}, "dispatch": dispatch,
    })  # fmt: skip
    return Room(run, Tokenizer.load(models / "student"))


def prompt(text: str, *teachers: str) -> dict:
    return {
        "prompt_id": "p", "source": "own.jsonl:1", "messages": json.dumps([{"role": "user", "content": text}]),
        "teachers": [{"teacher_id": t, "weight": 1.0} for t in teachers], "answer": "42", "context": None,
    }  # fmt: skip


def longest(models: Path, tokens: int) -> str:
    """A text whose prompt has exactly so many tokens: one a letter, after those of an empty one."""
    empty = len(Tokenizer.load(models / "student").render([{"role": "user", "content": ""}]))
    return "x" * (tokens - empty)


@pytest.mark.parametrize(
    ("limit", "dispatch", "teachers", "what"),
    [
        (512, {"pack_tokens": 4096}, (), "the student's context"),
        (200, {"pack_tokens": 200}, (), "dispatch.pack_tokens"),
        (64, {"pack_tokens": 4096}, ("b",), "teacher b's context"),
    ],
)
def test_the_limit_holds_the_prompt_and_the_longest_response(models, limit, dispatch, teachers, what):
    room = room_of(models, **dispatch)
    most = limit - RESPONSE
    assert len(room.checked(prompt(longest(models, most), *teachers))) == most
    with pytest.raises(ContractError) as caught:
        room.check([prompt("fits", *teachers), prompt(longest(models, most + 1), *teachers)])
    assert f"1 to {most} tokens: {limit} of {what}" in caught.value.expected
    assert caught.value.found == f"{most + 1} tokens"
    assert "own.jsonl:1" in caught.value.where


def test_a_teacher_reads_the_prompt_and_what_its_template_adds(models):
    room, tokenizer = room_of(models), Tokenizer.load(models / "student")
    asked = prompt("What?", "a")
    plain = tokenizer.render([{"role": "user", "content": "What?"}])
    assert room.checked(asked) == plain, "the student sees nothing of it"
    teacher = room._teachers["a"][0]
    read = tokenizer.decode(teacher_context(teacher, tokenizer, asked))
    assert "It is 42." in read
    # The longer context of the teacher decides, though the student's own would fit.
    most = 512 - RESPONSE - (len(teacher_context(teacher, tokenizer, asked)) - len(plain))
    assert len(room.checked(prompt(longest(models, most), "a"))) == most
    with pytest.raises(ContractError, match="teacher a's context"):
        room.checked(prompt(longest(models, most + 1), "a"))
