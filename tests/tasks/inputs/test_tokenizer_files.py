"""Every file of a model folder that changes ids: the same ids as AutoTokenizer's, and a digest that sees the change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from transformers import AutoTokenizer

from schemas.errors import ConfigError, FormatError
from tasks.inputs.text import Tokenizer
from tests.support.tiny import CHAT_TEMPLATE, tiny_model

FLAGS = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
TEXTS = ["", "plain", " two  spaces ", "a<|new|>b", "a <|new|> b", "x<|im_end|>  y", "<|im_end|>\n<|im_end|>",
         "ça va? e\u0301 東京 🙂", "1234567", "<|endoftext|> <|IM_END|>", "</s><s>",
         "new<|new|>new <|new|>new"]  # fmt: skip
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be  brief. "}, {"role": "user", "content": "a <|new|> b <|im_end|> c\n"}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{'é': \"<b>\"}"},
     {"role": "user", "content": "東京"}],
]  # fmt: skip


def settings(**values: Any) -> Callable[[Path], None]:
    return changed("tokenizer_config.json", **values)


def changed(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | values))

    return change


def text(name: str, content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return change


def merged(folder: Path) -> None:
    path = folder / "tokenizer.json"
    backend = json.loads(path.read_text())
    backend["model"]["vocab"]["ai"] = 259
    backend["model"]["merges"] = [["a", "i"]]
    path.write_text(json.dumps(backend))


def added(**flags: Any) -> Callable[[Path], None]:
    return settings(added_tokens_decoder={"259": {"content": "<|new|>", **FLAGS, **flags}})


def template(source: str) -> Callable[[Path], None]:
    return settings(chat_template=source)


VARIANTS: dict[str, Callable[[Path], None]] = {
    "as it is": lambda folder: None,
    "added_tokens_decoder": added(),
    "lstrip": added(lstrip=True),
    "rstrip": added(rstrip=True),
    "single_word": added(single_word=True),
    "normalized": added(normalized=True),
    "no special": added(special=False),
    "rstrip of a known token": settings(added_tokens_decoder={"2": {"content": "<|im_end|>", **FLAGS, "rstrip": True}}),
    "additional_special_tokens": settings(additional_special_tokens=["<|new|>"]),
    "extra_special_tokens": settings(extra_special_tokens=["<|new|>"]),
    "added_tokens.json": changed("added_tokens.json", **{"<|new|>": 259}),
    "bos in special_tokens_map.json": lambda folder: (
        changed("special_tokens_map.json", bos_token="<|endoftext|>")(folder),
        template("{{ bos_token }}" + CHAT_TEMPLATE)(folder),
    )[0],
    "new bos": lambda folder: (
        settings(bos_token="<s>")(folder), template("{{ bos_token }}" + CHAT_TEMPLATE)(folder))[0],
    "split_special_tokens": settings(split_special_tokens=True),
    "add_bos_token": settings(add_bos_token=True),
    "add_prefix_space": settings(add_prefix_space=True),
    "clean_up_tokenization_spaces": settings(clean_up_tokenization_spaces=True),
    "normalizer": changed("tokenizer.json", normalizer={"type": "Lowercase"}),
    "pre-tokenizer": changed("tokenizer.json", pre_tokenizer={
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}),
    "merges": merged,
    "LlamaTokenizerFast": settings(tokenizer_class="LlamaTokenizerFast"),
    "Qwen2Tokenizer": settings(tokenizer_class="Qwen2Tokenizer"),
    "Qwen2Tokenizer of a Qwen2": lambda folder: (
        settings(tokenizer_class="Qwen2Tokenizer")(folder), changed("config.json", model_type="qwen2")(folder),
        changed("tokenizer.json", normalizer={"type": "Lowercase"})(folder))[0],
    "GPT2TokenizerFast": settings(tokenizer_class="GPT2TokenizerFast"),
    "unknown class": settings(tokenizer_class="NoSuchTokenizer"),
    "chat_template.jinja": text("chat_template.jinja", "{{ messages[0].content }}!{{ eos_token }}"),
    "further chat templates": lambda folder: (
        text("chat_template.jinja", "default")(folder),
        text("additional_chat_templates/tool_use.jinja", "tools")(folder))[0],
    "tojson": template(
        "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{{ m | tojson(ensure_ascii=true) }}"
        "{{ m | tojson(separators=(',', ':')) }}{{ m | tojson(sort_keys=true, indent=1) }}{% endfor %}"),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "m", layers=1, width=16)


def variant(base: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    for path in base.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    change(folder)
    return folder


def assert_same_ids(folder: Path) -> Tokenizer:
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    for conversation in CONVERSATIONS:
        expected = theirs.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
        assert ours.render(conversation) == expected
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    return ours


@pytest.mark.parametrize("name", VARIANTS)
def test_ids_are_those_of_auto_tokenizer(base, tmp_path, name):
    assert_same_ids(variant(base, tmp_path, VARIANTS[name]))


@pytest.mark.parametrize("folder", sorted(Path("models").glob("*/tokenizer.json")), ids=lambda path: path.parent.name)
def test_ids_of_models_at_hand_are_those_of_auto_tokenizer(folder):
    assert_same_ids(folder.parent)


def test_a_token_that_one_file_alone_names_is_one_id(base, tmp_path):
    """Held without AutoTokenizer: the files say it."""
    for number, name in enumerate(("added_tokens_decoder", "additional_special_tokens", "added_tokens.json")):
        folder = tmp_path / str(number)
        folder.mkdir()
        tokenizer = Tokenizer.load(variant(base, folder, VARIANTS[name]))
        assert tokenizer.encode("<|new|><|new|>") == [259, 259], name
        assert tokenizer.vocab_size == 260
    bare = Tokenizer.load(base)
    assert len(bare.encode("<|new|>")) == 7
    folder = tmp_path / "rstrip"
    folder.mkdir()
    stripping = Tokenizer.load(variant(base, folder, VARIANTS["rstrip of a known token"]))
    assert stripping.encode("x<|im_end|>  y") == bare.encode("x<|im_end|>y")


SEEN = ["added_tokens_decoder", "lstrip", "rstrip of a known token", "bos in special_tokens_map.json", "normalizer",
        "pre-tokenizer", "merges", "split_special_tokens", "chat_template.jinja", "tojson"]  # fmt: skip


def test_the_behaviour_digest_sees_what_changes_ids(base, tmp_path):
    digests = {"base": Tokenizer.load(base).behaviour_digest}
    for name in SEEN:
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        digests[name] = Tokenizer.load(variant(base, folder, VARIANTS[name])).behaviour_digest
    folder = tmp_path / "stop"
    folder.mkdir()
    stops = variant(base, folder, changed("generation_config.json", eos_token_id=[0, 2]))
    digests["stop ids"] = Tokenizer.load(stops).behaviour_digest
    assert len(set(digests.values())) == len(digests)
    assert Tokenizer.load(base).behaviour_digest == digests["base"]
    folder = tmp_path / "spelling"
    folder.mkdir()
    respelt = variant(base, folder, VARIANTS["as it is"])
    backend = json.loads((respelt / "tokenizer.json").read_text())
    (respelt / "tokenizer.json").write_text(json.dumps(backend, indent=3))
    assert Tokenizer.load(respelt).behaviour_digest == digests["base"]


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (text("special_tokens_map.json", "{"), FormatError, "special_tokens_map.json"),
        (text("added_tokens.json", "[1]"), FormatError, "added_tokens.json"),
        (settings(eos_token={"content": 3}), FormatError, "tokenizer.json and the files beside it"),
        (settings(auto_map={"AutoTokenizer": ["code.Own", None]}, tokenizer_class="Own"), FormatError, "code"),
        (settings(chat_template=[{"name": "tool_use", "template": "x"}]), ConfigError, "chat template"),
    ],
)
def test_files_that_cannot_be_read_are_refused(base, tmp_path, change, kind, says):
    with pytest.raises(kind, match=says):
        Tokenizer.load(variant(base, tmp_path, change))
