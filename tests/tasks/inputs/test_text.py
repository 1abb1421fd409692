"""Tokenizers and chat templates against transformers', and what is missing or broken named."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from transformers import AutoTokenizer

from schemas.errors import ConfigError, FormatError
from tasks.inputs.text import Tokenizer
from tests.support.tiny import tiny_model

CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 = ?\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "ça va? 東京 🙂"},
    ],
    [{"role": "user", "content": "<|im_end|> {{ 7 * 6 }} {% if %} <b>&amp;</b> 'quoted' \"twice\""}],
    [{"role": "user", "content": ""}],
]
TEMPLATES = [
    # Blocks on lines of their own: trim_blocks and lstrip_blocks decide what is left.
    """{{ bos_token }}{% for message in messages %}
    {% if message.role == 'system' %}
[SYS]{{ message.content | trim }}
    {% else %}
[{{ message.role }}] {{ message['content'] }}{{ eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}""",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{{ ns.n }}:{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{{ m['content'].split(' ') | join('_') }}|{{ pad_token }}{% endfor %}"
    "{{ {'b': [1, 'é<'], 'a': none} | tojson(indent=2) }}{{ tools is none }}{{ documents is none }}",
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{% generation %}<{{ m.content }}>{% endgeneration %}{% endif %}{% endfor %} end",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("text") / "m", layers=1, width=16)


def edit(path: Path, **changes) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    values = {k: v for k, v in (values | changes).items() if v is not None}
    path.write_text(json.dumps(values))


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    for path in folder.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def oracle(folder: Path, conversation) -> list[int]:
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(conversation, add_generation_prompt=True)[
        "input_ids"
    ]


@pytest.mark.parametrize("template", [None, *TEMPLATES])
def test_rendering_equals_transformers(copy, template):
    if template is not None:
        edit(copy / "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer.load(copy)
    for conversation in CONVERSATIONS:
        ids = tokenizer.render(conversation)
        assert ids == oracle(copy, conversation)
        assert len(ids) > 3


def test_a_template_file_wins_over_the_settings(copy):
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Tokenizer.load(copy).render([{"role": "user", "content": "x"}]) == Tokenizer.load(copy).encode("x!")
    assert oracle(copy, CONVERSATIONS[0]) == Tokenizer.load(copy).render(CONVERSATIONS[0])


def test_named_templates_have_a_default(copy):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit(copy / "tokenizer_config.json", chat_template=named)
    assert Tokenizer.load(copy).render(CONVERSATIONS[0]) == Tokenizer.load(copy).encode("d")


def test_a_private_system_message_joins_or_becomes_the_system_message(folder):
    tokenizer = Tokenizer.load(folder)
    user, system = {"role": "user", "content": "q"}, {"role": "system", "content": "s"}
    assert tokenizer.render([user], system_extra="x") == tokenizer.render([{"role": "system", "content": "x"}, user])
    joined = {"role": "system", "content": "s\n\nx"}
    assert tokenizer.render([system, user], system_extra="x") == tokenizer.render([joined, user])
    assert tokenizer.render([system, user], system_extra="") == tokenizer.render([system, user])
    assert system["content"] == "s"


def test_text_survives_the_way_to_ids_and_back(folder):
    tokenizer = Tokenizer.load(folder)
    for text in ("", "plain", " two  spaces ", "ça va? 東京 🙂\n\t", "0123"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("a<|im_end|>")
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, keep_special=True) == "a<|im_end|>"


def test_sizes_and_stop_ids(copy):
    assert Tokenizer.load(copy).vocab_size == 259
    assert Tokenizer.load(copy).stop_ids == (2,)
    edit(copy / "generation_config.json", eos_token_id=[7, 2, 0])
    assert Tokenizer.load(copy).stop_ids == (0, 2, 7)
    (copy / "generation_config.json").unlink()
    edit(copy / "config.json", eos_token_id=9)
    assert Tokenizer.load(copy).stop_ids == (2, 9)
    edit(copy / "config.json", eos_token_id=None)
    assert Tokenizer.load(copy).stop_ids == (2,)
    edit(
        copy / "tokenizer_config.json", eos_token={"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
    )
    assert Tokenizer.load(copy).stop_ids == (0,)
    edit(copy / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match="stop token"):
        Tokenizer.load(copy)
    edit(copy / "config.json", eos_token_id=259)
    with pytest.raises(ConfigError, match="ids below 259"):
        Tokenizer.load(copy)


def test_stored_truncation_and_padding_are_off(copy):
    edit(copy / "tokenizer.json",
         truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
         padding={"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                  "pad_type_id": 0, "pad_token": "<|endoftext|>"})  # fmt: skip
    assert len(Tokenizer.load(copy).encode("abcdef")) == 6


def test_the_fingerprint_is_of_ids_and_tokens(folder, copy):
    same = Tokenizer.load(folder).fingerprint
    edit(copy / "tokenizer_config.json", chat_template="{{ messages }}")
    assert Tokenizer.load(copy).fingerprint == same
    backend = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = backend["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    edit(copy / "tokenizer.json", **backend)
    assert Tokenizer.load(copy).fingerprint != same
    vocabulary["a"], vocabulary["b"], vocabulary["new"] = vocabulary["b"], vocabulary["a"], 259
    edit(copy / "tokenizer.json", **backend)
    assert Tokenizer.load(copy).fingerprint != same
    assert Tokenizer.load(copy).vocab_size == 260


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{% if %}", "Jinja template"),
        ("{{ raise_exception('no systems') }}", "no systems"),
        ("{{ messages[3].content }}", "line 1 of the template"),
        ("{{ messages.append(1) }}", "line 1 of the template"),
        ("{{ ''.__class__.__mro__ }}", "line 1 of the template"),
        ("{{ strftime_now('%Y') }}", "strftime_now"),
        (None, "chat template"),
    ],
)
def test_a_template_at_fault_is_named(copy, template, named):
    edit(copy / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ConfigError, match=named):
        Tokenizer.load(copy).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("tokenizer.json", None, ConfigError),
        ("tokenizer.json", "{", FormatError),
        ("tokenizer.json", "{}", FormatError),
        ("tokenizer_config.json", None, ConfigError),
        ("tokenizer_config.json", "[1]", FormatError),
    ],
)
def test_a_file_at_fault_is_named(copy, name, content, kind):
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_text(content)
    with pytest.raises(kind, match=name):
        Tokenizer.load(copy)
