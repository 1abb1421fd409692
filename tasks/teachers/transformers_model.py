"""The one door to transformers' models: what one is made of, without weights, and one as a teacher.

A hidden state is what the output embedding is given. Each trajectory has a pass of its own, so that company changes no
bits, whatever the model is. A loaded model is proved on a few tokens: its logits are those that the loss rebuilds.

Letters: N tokens, E width, V vocabulary rows, T response tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ml.model_files import CONFIG, check_digest
from ml.teacher import Reading, check_reading
from ml.teacher_facts import TeacherFacts
from ml.teacher_head import fold_states, read_head_parts
from schemas.errors import ConfigError, ContractError, FormatError
from schemas.work.model import ModelSource

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: Rounding that a product, and a state of another grouping of experts, may show, as a share of the largest value.
_ROUNDING = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18}
_PROBE_TOKENS = 16
_PROBE_ROWS = 4096


@dataclass(frozen=True)
class Outline:
    """weight_names, bias_names: every name of the output embedding's parameters, tied ones too. prefix: of the names
    of the model's body. settings: of the text model, under the names that all families share."""

    weight_names: tuple[str, ...]
    bias_names: tuple[str, ...]
    prefix: str
    rows: int
    width: int
    input_rows: int
    settings: Mapping[str, Any]


@functools.lru_cache(maxsize=64)
def outline(folder: Path, _config_text: str) -> Outline:
    """What config.json says, through a model on no device; _config_text: its content, so that an edit is seen.

    Raises ConfigError for what transformers cannot make without code of the folder's own, for a model without an output
    embedding, and for one that is no plain linear.
    """
    where = str(folder / CONFIG)
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # of models, which raise what they like
        raise ConfigError(
            where, expected="a causal language model that transformers makes without code of the folder's own",
            found=f"{type(error).__name__}: {error}"[:500],
        ) from error  # fmt: skip
    head = _output_embedding(model, where)
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_encoder_decoder", False):
        raise ConfigError(where, expected="a causal language model", found=f"{type(model).__name__}, with an encoder")
    parameters = list(model.named_parameters(remove_duplicate=False))
    names = ("max_position_embeddings", "max_seq_len", "final_logit_softcapping", "logit_scale", "logits_scaling")
    return Outline(
        weight_names=_names_of(head.weight, parameters),
        bias_names=() if head.bias is None else _names_of(head.bias, parameters),
        prefix=model.base_model_prefix,
        rows=head.weight.shape[0],
        width=head.weight.shape[1],
        input_rows=model.get_input_embeddings().weight.shape[0],
        settings={name: getattr(text, name, None) for name in names},
    )


def _output_embedding(model: Any, where: str) -> nn.Linear:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(
            where, expected="an output embedding that is a plain linear layer",
            found=f"{type(model).__name__} with {'none' if head is None else type(head).__name__}",
        )  # fmt: skip
    return head


def _names_of(wanted: torch.Tensor, parameters: list[tuple[str, Any]]) -> tuple[str, ...]:
    return tuple(name for name, parameter in parameters if parameter is wanted)


class TransformersTeacher:
    """A loaded model as `ml.teacher.Teacher`. Made by `load`."""

    def __init__(self, facts: TeacherFacts, model: Any, where: str) -> None:
        self._facts, self._model, self._where = facts, model, where
        self._head = _output_embedding(model, where)
        self._given: list[torch.Tensor] = []
        self._whole = False
        self._head.register_forward_pre_hook(self._take)

    @property
    def facts(self) -> TeacherFacts:
        return self._facts

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    def _take(self, _head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._given.append(inputs[0])
        # Logits of one position are made, for which nobody asks, instead of all positions'.
        return None if self._whole else (inputs[0][:, -1:], *inputs[1:])

    @torch.no_grad()
    def states(self, ids: Sequence[int]) -> torch.Tensor:
        """[N, E] in the model's dtype, on its device: what the output embedding is given at each of N >= 1 tokens."""
        return self._pass(ids)[0]

    def _pass(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(states [N, E], logits [1, N or 1, V])."""
        ids_1N = torch.tensor([list(ids)], device=self.device)
        self._given.clear()
        logits = self._model(input_ids=ids_1N, attention_mask=torch.ones_like(ids_1N), use_cache=False).logits
        shapes, wanted = [tuple(given.shape) for given in self._given], (1, len(ids), self._facts.head.width)
        if shapes != [wanted]:
            raise ConfigError(
                self._where, expected=f"an output embedding that is called once, with {wanted}",
                found=f"{type(self._model).__name__} calls it with {shapes}",
            )  # fmt: skip
        return self._given.pop()[0], logits

    @torch.no_grad()
    def hidden_states(self, readings: Iterable[Reading], *, batch_tokens: int) -> Iterator[torch.Tensor]:
        """As `Teacher.hidden_states`; a pass takes one reading, whatever batch_tokens is."""
        has_bias = self._facts.head.bias is not None
        for index, reading in enumerate(readings):
            check_reading(reading, index, context_tokens=self._facts.context_tokens, input_rows=self._facts.input_rows)
            h_NE = self.states([*reading.context_ids, *reading.response_ids][:-1])
            h_TE = h_NE[len(reading.context_ids) - 1 :].to(torch.bfloat16)
            if not torch.isfinite(h_TE).all():
                raise ContractError("the teacher's hidden states", expected="finite numbers", found="NaN or infinity")
            yield fold_states(h_TE, has_bias=has_bias).cpu()

    @torch.no_grad()
    def prove(self) -> None:
        """States and head, as the loss has them, give the model's own logits, and no state knows later tokens.

        Raises ConfigError for a model of which that is not so: the loss would teach another distribution than its.
        """
        count = min(_PROBE_TOKENS, self._facts.context_tokens)
        ids = [(7919 * i + 1) % self._facts.input_rows for i in range(count)]
        made: list[torch.Tensor] = []

        def keep(_head: nn.Module, _inputs: Any, output: Any) -> None:
            made.append(output)

        handle = self._head.register_forward_hook(keep)
        self._whole = True
        try:
            h_NE, logits_1NV = self._pass(ids)
        finally:
            self._whole = False
            handle.remove()
        (made_1NV,) = made
        # A power of two rounds nothing: what the model returns must be these very numbers.
        scaled_1NV = made_1NV.float() * self._facts.head.scale
        if scaled_1NV.shape != logits_1NV.shape or not torch.equal(scaled_1NV, logits_1NV.float()):
            raise self._refused(
                f"logits that are {self._facts.head.scale:g} x what its output embedding gives",
                "other numbers: a cap, a scale or a mask that this kind does not know",
            )
        self._prove_linear(h_NE, made_1NV[0])
        others = [(i + 1) % self._facts.input_rows for i in ids[count // 2 :]]
        again_NE = self._pass([*ids[: count // 2], *others])[0]
        if not self._near(again_NE[: count // 2].double(), h_NE[: count // 2].double()):
            raise self._refused("states that do not depend on later tokens", "states that do")

    def _prove_linear(self, h_NE: torch.Tensor, made_NV: torch.Tensor) -> None:
        weight_VE, bias_V = self._head.weight, self._head.bias
        for first in range(0, len(weight_VE), _PROBE_ROWS):
            rows = slice(first, first + _PROBE_ROWS)
            want_NV = h_NE.double() @ weight_VE[rows].double().T
            if bias_V is not None:
                want_NV += bias_V[rows].double()
            if not self._near(made_NV[:, rows].double(), want_NV):
                raise self._refused("hidden state times head", f"other logits in rows {first} and on")

    def _near(self, found: torch.Tensor, want: torch.Tensor) -> bool:
        tolerance = _ROUNDING[self._head.weight.dtype] * float(want.abs().max())
        return bool(((found - want).abs() <= tolerance).all())

    def _refused(self, expected: str, found: str) -> ConfigError:
        return ConfigError(
            self._where, expected=f"{type(self._model).__name__} to give {expected}", found=found,
            next_command="another teacher: the loss would not teach this one's distribution",
        )  # fmt: skip


def load(
    folder: Path, facts: TeacherFacts, source: ModelSource, device: torch.device, found_digest: Callable[[], str]
) -> TransformersTeacher:
    """The folder's model, proved. source: precision and digest; found_digest: the folder's, asked after loading.

    Raises ConfigError as `prove` does and for a precision that this kind does not have, ContractError for another
    digest, FormatError for tensors that are missing, unused, misshapen, not finite, or not what the head is read as.
    """
    if source.precision not in _DTYPES:
        raise ConfigError(str(folder), expected=f"one of {sorted(_DTYPES)}", found=repr(source.precision))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=_DTYPES[source.precision], local_files_only=True, trust_remote_code=False,
            use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
        model, info = loaded
    except Exception as error:  # of models and files, which raise what they like
        raise FormatError(
            str(folder), expected="a model that transformers loads", found=f"{type(error).__name__}: {error}"[:500]
        ) from error
    _check_loaded(folder, model, info)
    teacher = TransformersTeacher(facts, model.eval().requires_grad_(False).to(device), str(folder))
    _check_head(folder, facts, _output_embedding(model, str(folder)))
    check_digest(folder, source.digest, found_digest(), "model")
    teacher.prove()
    return teacher


def _check_loaded(folder: Path, model: Any, info: Mapping[str, Any]) -> None:
    for name, what in (
        ("missing_keys", "tensors that the model needs and the folder lacks"),
        ("unexpected_keys", "tensors that the model does not use"),
        ("mismatched_keys", "tensors of another shape"),
        ("error_msgs", "errors of reading"),
    ):
        if info.get(name):
            few = ", ".join(map(str, sorted(info[name], key=str)[:3]))
            raise FormatError(str(folder), expected=f"the tensors of {type(model).__name__}", found=f"{what}: {few}")
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise FormatError(f"{folder}, tensor {name}", expected="finite numbers", found="NaN or infinity")


def _check_head(folder: Path, facts: TeacherFacts, head: nn.Linear) -> None:
    """What training will read by name is what the model uses."""
    weight_VE, bias_V = read_head_parts(facts.head)
    same = torch.equal(weight_VE.to(head.weight), head.weight)
    if bias_V is not None:
        same = same and torch.equal(bias_V.to(head.bias), head.bias)
    if not same or (bias_V is None) != (head.bias is None):
        raise FormatError(
            f"{folder}, tensor {facts.head.weight}", expected="the output embedding that the model uses",
            found="other numbers",
        )  # fmt: skip
