"""Text and token ids: a model folder's tokenizer and chat template, as transformers' AutoTokenizer reads them.

Which of tokenizer.json, tokenizer_config.json, special_tokens_map.json, added_tokens.json and chat_template.jinja wins
over which depends on the tokenizer's class; AutoTokenizer knows, and what serves a model elsewhere asks it too.
generation_config.json and config.json give the stop tokens. Templates run in our own sandbox (tasks.inputs.templates)
and see no clock, so ids depend on the files and the messages alone.
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
from schemas.keys import canonical_json, digest, digest_bytes
from tasks.inputs.templates import chat_template, render

#: Files that change ids; the first two must be there. transformers says little of one that it cannot read.
_NEEDED = ("tokenizer.json", "tokenizer_config.json")
_OPTIONAL = ("special_tokens_map.json", "added_tokens.json", "config.json")


@dataclass(frozen=True)
class Tokenizer:
    """One model's text side. vocab_size: one more than the largest id. stop_ids: ascending, at least one."""

    folder: Path
    vocab_size: int
    stop_ids: tuple[int, ...]
    _backend: tokenizers.Tokenizer
    _source: str
    _template: Template
    _special: Mapping[str, str]

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Raises ConfigError (missing file, template or stop token) and FormatError (a file that does not parse)."""
        folder = Path(folder)
        theirs = _read_files(folder)
        backend = theirs.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        vocab_size = max(vocabulary.values(), default=-1) + 1
        special = dict(theirs.special_tokens_map)  # names that templates use ("eos_token") -> token
        source = _template_source(folder, theirs)
        return cls(
            folder=folder,
            vocab_size=vocab_size,
            stop_ids=_stop_ids(folder, vocabulary, special, vocab_size),
            _backend=backend,
            _source=source,
            _template=chat_template(source, f"{folder}, chat template"),
            _special=special,
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the (id, token) pairs: models of equal fingerprint mean the same by the same id."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return digest(sorted([index, token] for token, index in vocabulary.items()))

    @functools.cached_property
    def behaviour_digest(self) -> str:
        """SHA-256 over all that decides which ids a conversation becomes, and where a response ends.

        Vocabulary, merges, normalizer, pre-tokenizer, added tokens with their flags, chat template, special tokens,
        stop ids: as they are in effect, so a library that reads the same files otherwise changes it.
        """
        state = [self._backend.to_str(), self._backend.encode_special_tokens, self._source, dict(self._special)]
        return digest_bytes(canonical_json([*state, list(self.stop_ids)]))

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


def _read_files(folder: Path) -> Any:
    """transformers' tokenizer of a folder. Raises ConfigError and FormatError."""
    for name in _NEEDED:
        read_json(folder / name)
    for name in _OPTIONAL:
        if (folder / name).exists():
            read_json(folder / name)
    from transformers import AutoTokenizer  # a second and torch, which most commands need not pay

    try:
        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of libraries in Python and Rust, which raise what they like
        raise FormatError(
            f"{folder}, tokenizer.json and the files beside it",
            expected="a tokenizer that transformers reads without code of the folder's own",
            found=f"{type(error).__name__}: {error}"[:500],
        ) from error
    if not isinstance(getattr(theirs, "backend_tokenizer", None), tokenizers.Tokenizer):
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}, tokenizer_class", expected="a class that stands on tokenizer.json",
            found=type(theirs).__name__,
        )  # fmt: skip
    return theirs


def _template_source(folder: Path, theirs: Any) -> str:
    try:
        return theirs.get_chat_template()
    except ValueError:  # none, or several without a default
        raise ConfigError(str(folder), expected="a chat template", found="none in its tokenizer files") from None


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
