"""What student and teachers read of a prompt, and whether the longest response still has room after it.

Checked before the first token is sampled: a trajectory is never cut to fit a context or a pack.
"""

from __future__ import annotations

import json
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from schemas.config import RunConfig, Teacher
from schemas.errors import ConfigError, ContractError
from tasks.models import context_tokens, resolve_model
from tasks.text import Tokenizer


def teacher_context(teacher: Teacher, tokenizer: Tokenizer, prompt: dict[str, Any]) -> list[int]:
    """Token ids that the teacher reads before the response: the prompt, with its private system message if any."""
    messages = json.loads(prompt["messages"])
    if not teacher.template:
        return tokenizer.render(messages)
    try:
        extra = (
            SandboxedEnvironment(undefined=StrictUndefined)
            .from_string(teacher.template)
            .render(prompt | {"context": json.loads(prompt["context"] or "{}")})
        )
    except TemplateError as error:
        raise ConfigError(
            f"teachers, {teacher.id}, template", expected="a Jinja template of the prompt's columns", found=str(error)
        ) from error
    return tokenizer.render(messages, system_extra=extra)


class Room:
    """Limits of one run. tokenizer: the student's, loaded from its folder."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._response, self._student = config.rollout.max_response_tokens, tokenizer
        self._pack = config.dispatch.pack_tokens
        self._context = context_tokens(tokenizer.folder)
        folders = {teacher.id: resolve_model(teacher.path) for teacher in config.teachers}
        self._teachers = {
            t.id: (t, Tokenizer.load(folders[t.id]), context_tokens(folders[t.id])) for t in config.teachers
        }

    def checked(self, prompt: dict[str, Any]) -> list[int]:
        """Token ids of the prompt as the student reads it. Raises ContractError where its response has no room."""
        ids = self._student.render(json.loads(prompt["messages"]))
        self._check(prompt, len(ids), self._context, "the student's context")
        self._check(prompt, len(ids), self._pack, "dispatch.pack_tokens")
        for entry in prompt["teachers"]:
            teacher, tokenizer, context = self._teachers[entry["teacher_id"]]
            self._check(
                prompt, len(teacher_context(teacher, tokenizer, prompt)), context, f"teacher {teacher.id}'s context"
            )
        return ids

    def _check(self, prompt: dict[str, Any], tokens: int, limit: int, what: str) -> None:
        if not 0 < tokens <= limit - self._response:
            text = json.loads(prompt["messages"])[-1]["content"]
            raise ContractError(
                f"prompt {prompt['prompt_id']} of {prompt['source']}, {text[:60]!r}",
                expected=f"1 to {limit - self._response} tokens: {limit} of {what} less {self._response} of "
                "rollout.max_response_tokens",
                found=f"{tokens} tokens", safe="nothing was sampled in this iteration",
                next_command="shorten or remove the prompt, or lower rollout.max_response_tokens",
            )  # fmt: skip
