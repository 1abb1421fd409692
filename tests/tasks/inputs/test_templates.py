"""Templates of users and model folders: nulls that would be printed, failures of every kind, templates without end."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas import config
from schemas.config import PromptFile
from schemas.config_teachers import OpdTeacher
from schemas.errors import ConfigError
from tasks.inputs.prompt_files import file_rows
from tasks.inputs.room import Room, teacher_context
from tasks.inputs.templates import chat_template, render, render_row, teacher_template
from tasks.inputs.text import Tokenizer
from tests.support.tiny import tiny_model

ROW = {"answer": None, "domain": "d", "context": {"n": 1, "null": None, "list": [1, None], "items": ["a"]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("templates") / "m", layers=1, width=16)


def rendered(source: str, row: dict | None = None) -> str:
    return render_row(teacher_template(source, "the template"), row or ROW, "the template")


def refusal(source: str) -> str:
    with pytest.raises(ConfigError) as caught:
        rendered(source)
    assert caught.value.where == "the template"
    return caught.value.found


@pytest.mark.parametrize(
    "source",
    [
        "The correct answer is {{ answer }}.",
        "{{ 'It is ' ~ answer }}",
        "{{ answer | upper }}",
        "{{ answer | string }}",
        "{{ '%s' % answer }}",
        "{{ '%r' | format(answer) }}",
        "{{ '{}'.format(answer) }}",
        "{{ [answer] }}",
        "{{ answer | tojson }}",
        "{{ answer | int }}",
        "{{ answer | e }}",
        "{{ answer | pprint }}",
        "{{ context.null }}",
        "{{ context }}",
        "{{ context.list | join(' ') }}",
        "{{ context.get('null') }}",
        "{{ 'It is ' ~ context.get('absent') }}",
        "{% for c in answer %}{{ c }}{% endfor %}",
        "{{ none }}",
        "{% set s = namespace(x=none) %}{{ s.x }}",
    ],
)
def test_a_null_is_never_printed(source):
    assert "null" in refusal(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if answer %}yes{% else %}no{% endif %}", "no"),
        ("{{ answer or 'unknown' }}", "unknown"),
        ("{{ answer | default('unknown') }}", "unknown"),
        ("{{ answer is none }} {{ answer is defined }} {{ answer == none }} {{ answer in ['a'] }}",
         "True False True False"),
        ("{{ context.get('absent', 'other') }}", "other"),
        ("{{ context.list | tojson }}", "[1, null]"),
        ("{{ context | tojson(indent=1, sort_keys=true) | length > 9 }}", "True"),
        ("{{ context.items | first }} {{ context | items | list | length }}", "a 4"),
        ("{{ {'b': '<é>'} | tojson }}", '{"b": "<é>"}'),
    ],
)  # fmt: skip
def test_a_null_can_be_asked_for(source, text):
    assert rendered(source) == text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ answr }}", "'answr' is undefined"),
        ("{{ context.hint }}", "context has no 'hint' in this prompt, but items, list, n, null"),
        ("{{ domain + 1 }}", "TypeError"),
        ("a\nb {{ 1 // 0 }}", "ZeroDivisionError: integer division or modulo by zero (line 2 of the template)"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{% for a, b in [1] %}{% endfor %}", "cannot unpack"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "turns of its loops"),
        ("{% for a in range(9999) %}{{ domain * 9999 }}{% endfor %}", "characters"),
        ("{{ 2 ** 99999999 }}", "a power"),
        ("{{ domain * 10 ** 12 }}", "a product"),
        ("{{ 10 ** 12 * [1] }}", "a product"),
        ("{{ 10.0 ** 999 }}", "OverflowError"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ context.list | map('upper') }}", "it prints a generator"),
        ("{{ context.keys }}", "it prints a builtin_function_or_method"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
        ("{{ ''.__class__ }}", "unsafe"),
        ("{% include 'other' %}", "TypeError"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
    ],
)
def test_a_template_that_fails_is_one_error_soon(source, says):
    begun = time.monotonic()
    assert says in refusal(source)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "source", ["{{ answer", "{% if %}", "{{ [1] | random }}", "{{ " + "(" * 500 + ")" * 500 + " }}"]
)
def test_what_is_no_template_is_named(source):
    for kind in (teacher_template, chat_template):
        with pytest.raises(ConfigError, match="whose") as caught:
            kind(source, "whose")
        assert caught.value.expected == "a Jinja template"


def test_a_chat_template_has_an_end_too():
    for source in (
        "{% for m in messages %}{{ m * 10 ** 12 }}{% endfor %}",
        "{{ raise_exception('never') }}",
        "{{ 1/0 }}",
    ):
        with pytest.raises(ConfigError, match="whose"):
            render(chat_template(source, "whose"), {"messages": ["a"]}, "whose")
    shown = "{% for m in messages %}{{ loop.index }} of {{ loop.length }}{{ loop.last }} {% endfor %}"
    assert render(chat_template(shown, "whose"), {"messages": ["a", "b"]}, "whose") == "1 of 2False 2 of 2True "


def test_rows_of_both_kinds_of_file_reach_templates_alike(folder, tmp_path):
    """Parquet gives all rows one set of names: each gets the others' as null, at any depth."""
    tokenizer = Tokenizer.load(folder)
    rows = [
        {
            "answer": None,
            "messages": [{"role": "user", "content": "first"}],
            "context": {"hint": "add", "deep": [{"a": 1}, {"b": 2}]},
        },
        {"messages": [{"role": "user", "content": "second"}], "context": {"note": "n"}, "answer": "4"},
        {"messages": [{"role": "user", "content": "third"}]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    templates = ("{{ context.hint }}", "{{ answer }}", "{{ context | tojson }}", "{{ context.deep }}", "{{ context }}",
                 "{% if context.hint is defined %}{{ context.hint }}{% else %}No hint.{% endif %}")  # fmt: skip
    read: dict[str, list[str]] = {}
    for name in ("a.jsonl", "a.parquet"):
        for row in file_rows(PromptFile.model_validate({"path": str(tmp_path / name), "teachers": ("t",)}), ("t",)):
            for template in templates:
                teacher = OpdTeacher.model_validate({"id": "t", "path": "x", "template": template})
                try:
                    text = tokenizer.decode(teacher_context(teacher, tokenizer, row))
                except ConfigError as error:
                    text = f"refused: {error.found}"
                read.setdefault(name, []).append(text)
    assert read["a.jsonl"] == read["a.parquet"]
    assert not any("None" in text for text in read["a.jsonl"])
    assert sum("refused" in text for text in read["a.jsonl"]) == 6


def run_config(folder: Path, template: str) -> config.RunConfig:
    return config.parse(
        {
            "run_id": "t", "student": {"path": str(folder)}, "prompts": {"files": [{"path": "own.jsonl"}]},
            "teachers": [{"id": "math", "path": str(folder), "template": template}],
        }
    )  # fmt: skip


def prompt(text: str, answer: str | None) -> dict:
    return {
        "prompt_id": f"id-{text}", "source": "own.jsonl, line 7", "domain": "d", "verifier": None, "context": "{}",
        "messages": json.dumps([{"role": "user", "content": text}]), "answer": answer,
        "teachers": [{"teacher_id": "math", "weight": 1.0}],
    }  # fmt: skip


def test_the_prompt_at_fault_is_named(folder, tmp_path):
    room = Room(run_config(folder, "The correct answer is {{ answer }}."), Tokenizer.load(folder))
    room.check([prompt("a", "1")])
    with pytest.raises(ConfigError, match="answer is null") as caught:
        room.check([prompt("a", "1"), prompt("b", None)])
    for name in ("teachers, math, template", "id-b", "own.jsonl, line 7", "'b'"):
        assert name in caught.value.where


def test_a_chat_template_that_refuses_one_prompt_names_it(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    refuses = "{% if messages[-1].content == 'b' %}{{ raise_exception('no b') }}{% endif %}x"
    (tmp_path / "chat_template.jinja").write_text(refuses)
    for student, teacher, who in ((tmp_path, folder, f"{tmp_path}, chat template"), (folder, tmp_path, "teacher math")):
        room = Room(run_config(teacher, ""), Tokenizer.load(student))
        with pytest.raises(ConfigError, match="no b") as caught:
            room.check([prompt("a", "1"), prompt("b", "1")])
        for name in (who, f"{tmp_path}, chat template", "id-b", "own.jsonl, line 7"):
            assert name in caught.value.where
