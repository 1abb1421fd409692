"""Text and token ids: a model folder's tokenizer and chat template, read from its own files.

tokenizer.json gives the ids, chat_template.jinja or tokenizer_config.json the template, generation_config.json and
config.json the stop tokens. Templates run in Jinja's sandbox and see no clock, so ids depend on the files and the
messages alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template

from ml.model_files import read_json
from schemas.errors import ConfigError, FormatError
from schemas.keys import digest
from tasks.templates import chat_template, render

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Tokenizer:
    """One model's text side. vocab_size: one more than the largest id. stop_ids: ascending, at least one."""

    folder: Path
    vocab_size: int
    stop_ids: tuple[int, ...]
    _backend: tokenizers.Tokenizer
    _template: Template
    _special: Mapping[str, str]

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Raises ConfigError (missing file, template or stop token) and FormatError (a file that does not parse)."""
        folder = Path(folder)
        backend = _read_backend(folder / "tokenizer.json")
        settings = read_json(folder / "tokenizer_config.json")
        vocabulary = backend.get_vocab(with_added_tokens=True)
        special = _special_tokens(folder, settings)
        vocab_size = max(vocabulary.values(), default=-1) + 1
        return cls(
            folder=folder,
            vocab_size=vocab_size,
            stop_ids=_stop_ids(folder, vocabulary, special, vocab_size),
            _backend=backend,
            _template=_read_template(folder, settings),
            _special=special,
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the (id, token) pairs: models of equal fingerprint mean the same by the same id."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return digest(sorted([index, token] for token, index in vocabulary.items()))

    def render(
        self, messages: Sequence[Mapping[str, Any]], system_extra: str | None = None, *, prompt: str = ""
    ) -> list[int]:
        """Ids of a conversation, up to where the assistant's answer begins.

        system_extra joins the system message, after a blank line, or becomes one when there is none. prompt: whose
        messages they are, for errors. Raises ConfigError, naming it, when the template refuses or fails.
        """
        conversation = [dict(message) for message in messages]
        if system_extra:
            if conversation and conversation[0]["role"] == "system":
                conversation[0]["content"] = f"{conversation[0]['content']}\n\n{system_extra}"
            else:
                conversation.insert(0, {"role": "system", "content": system_extra})
        values: dict[str, Any] = {
            "messages": conversation, "tools": None, "documents": None, "add_generation_prompt": True, **self._special,
        }  # fmt: skip
        where = ", ".join(filter(None, [f"{self.folder}, chat template", prompt]))
        return self.encode(render(self._template, values, where))

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands: nothing is put before or after it."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=not keep_special)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    read_json(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise FormatError(str(path), expected="a tokenizer", found=str(error)) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_template(folder: Path, settings: Mapping[str, Any]) -> Template:
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.exists() else settings.get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ConfigError(str(folder), expected="a chat template", found="none in its tokenizer files")
    return chat_template(source, f"{folder}, chat template")


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Names that templates use ("eos_token") -> token."""
    path = folder / "special_tokens_map.json"
    values = (read_json(path) if path.exists() else {}) | {k: v for k, v in settings.items() if v is not None}
    tokens = {}
    for name in _SPECIAL_NAMES:
        value = values.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _stop_ids(
    folder: Path, vocabulary: Mapping[str, int], special: Mapping[str, str], vocab_size: int
) -> tuple[int, ...]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id") if (folder / name).exists() else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if any(not isinstance(i, int) or not 0 <= i < vocab_size for i in ids):
                raise ConfigError(f"{folder / name}, eos_token_id", expected=f"ids below {vocab_size}", found=repr(ids))
            found.update(ids)
            break
    if special.get("eos_token") in vocabulary:
        found.add(vocabulary[special["eos_token"]])
    if not found:
        raise ConfigError(str(folder), expected="a stop token", found="no eos_token_id and no eos_token")
    return tuple(sorted(found))
