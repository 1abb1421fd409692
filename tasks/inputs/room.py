"""What student and teachers read of a prompt, and whether the longest response still has room after it.

Checked before the first token is sampled: a trajectory is never cut to fit a context or a pack.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

from schemas.config import RunConfig
from schemas.config_teachers import Teacher
from schemas.errors import ContractError
from tasks.inputs.models import context_tokens, resolve_model, teacher_facts
from tasks.inputs.prompt_files import load_json
from tasks.inputs.templates import render_row, teacher_template
from tasks.inputs.text import Tokenizer


def teacher_context(teacher: Teacher, tokenizer: Tokenizer, prompt: dict[str, Any]) -> list[int]:
    """Token ids that the teacher reads before the response: the prompt, with its private system message if any.

    Raises ConfigError, naming teacher or model folder, template and prompt, for a template that fails or prints a null.
    """
    messages, name = json.loads(prompt["messages"]), f"teacher {teacher.id}, {_name(prompt)}"
    if not teacher.template:
        return tokenizer.render(messages, prompt=name)
    template = _compiled(teacher.template, f"teachers, {teacher.id}, template")
    # Not where it comes from: what a teacher reads is a function of the prompt's content.
    columns = {name: value for name, value in prompt.items() if name != "source"}
    columns["context"] = load_json(prompt["context"] or "{}")
    extra = render_row(template, columns, f"teachers, {teacher.id}, template, {_name(prompt)}")
    return tokenizer.render(messages, system_extra=extra, prompt=name)


#: A template serves a whole data set.
_compiled = functools.lru_cache(maxsize=256)(teacher_template)


def _name(prompt: dict[str, Any]) -> str:
    """What an error calls a prompt: where it comes from, its identity, how its last message begins."""
    text = json.loads(prompt["messages"])[-1]["content"]
    return f"prompt {prompt.get('prompt_id', '')} ({prompt.get('source')}), {text[:60]!r}"


class Room:
    """Limits of one run. tokenizer: the student's, loaded from its folder."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._response, self._student = config.rollout.max_response_tokens, tokenizer
        self._pack = config.dispatch.pack_tokens
        self._context = context_tokens(tokenizer.folder)
        self._teachers = {
            t.id: (t, Tokenizer.load(resolve_model(t.path)), teacher_facts(t).context_tokens) for t in config.teachers
        }

    def check(self, prompts: Iterable[dict[str, Any]]) -> None:
        """Raises, as `checked` does, for the first prompt that some reader cannot take."""
        for prompt in prompts:
            self.checked(prompt)

    def checked(self, prompt: dict[str, Any]) -> list[int]:
        """Token ids of the prompt as the student reads it.

        Raises ContractError where its response has no room, ConfigError as `teacher_context` does.
        """
        ids = self._student.render(json.loads(prompt["messages"]), prompt=_name(prompt))
        self._has_room(prompt, len(ids), self._context, "the student's context")
        self._has_room(prompt, len(ids), self._pack, "dispatch.pack_tokens")
        for entry in prompt["teachers"]:
            teacher, tokenizer, context = self._teachers[entry["teacher_id"]]
            self._has_room(
                prompt, len(teacher_context(teacher, tokenizer, prompt)), context, f"teacher {teacher.id}'s context"
            )
        return ids

    def _has_room(self, prompt: dict[str, Any], tokens: int, limit: int, what: str) -> None:
        if not 0 < tokens <= limit - self._response:
            raise ContractError(
                _name(prompt),
                expected=f"1 to {limit - self._response} tokens: {limit} of {what} less {self._response} of "
                "rollout.max_response_tokens",
                found=f"{tokens} tokens", safe="nothing was sampled in this iteration",
                next_command="shorten or remove the prompt, or lower rollout.max_response_tokens",
            )  # fmt: skip
