"""What the rollout engine is asked and answers: its sizes, a request, a finished trajectory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ml.device import traits
from ml.model import Transformer
from ml.rollout.sampling import SamplingParams
from ml.rollout.spill import SpilledKv
from schemas.errors import ContractError
from schemas.interruptions import Interruptions


@dataclass(frozen=True)
class EngineConfig:
    """max_sequences: in flight at once. num_pages: KV pages of page_tokens positions.

    prefill_chunk_tokens: prefill rows of one step. split_tokens: where attention cuts keys, a multiple or a divisor
    of page_tokens; it is part of what decides the bits. student_digest: names the weights in spills.
    steps_in_flight: steps that may run while an older one is logged. graphs: replay decode steps from CUDA graphs.
    guess_tokens: most tokens guessed a trajectory and step; 0 guesses none.
    """

    max_sequences: int
    page_tokens: int
    num_pages: int
    prefill_chunk_tokens: int
    split_tokens: int
    student_digest: str = ""
    steps_in_flight: int = 0
    graphs: bool = False
    guess_tokens: int = 0

    @classmethod
    def on(
        cls, device: torch.device, *, max_sequences: int, page_tokens: int, num_pages: int, student_digest: str = ""
    ) -> EngineConfig:
        """With the values that suit a kind of device (ml.device.Traits). Guesses nothing unless told how much."""
        own = traits(device)
        return cls(
            max_sequences, page_tokens, num_pages, own.prefill_chunk_tokens, own.split_tokens, student_digest,
            own.steps_in_flight, own.graphs,
        )  # fmt: skip


@dataclass(frozen=True)
class Request:
    """sampling_key: 64 bits. logged_*: response tokens that a log holds already, with their log-probabilities.

    kv: spilled KV of the first positions, from spill.decode_kv. earlier_responses: token ids of other responses to the
    prompt, of earlier iterations, say, that this one may repeat parts of; they change no result, only how soon it is
    there. They are read once, when the request is added, and not at all by an engine that does not guess.
    """

    trajectory_id: str
    prompt_ids: tuple[int, ...]
    sampling_key: int
    max_response_tokens: int
    logged_ids: tuple[int, ...] = ()
    logged_raw: tuple[float, ...] = ()
    logged_sampled: tuple[float, ...] = ()
    kv: SpilledKv | None = None
    earlier_responses: Iterable[Sequence[int]] = ()


@dataclass(frozen=True)
class Finished:
    """A whole response, the stop token included. finish_reason: "stop" or "length".

    interruptions: how often this engine took its KV from a spill, or computed it again from tokens that were sampled
    before.
    """

    trajectory_id: str
    response_ids: tuple[int, ...]
    logprobs_raw: tuple[float, ...]
    logprobs_sampled: tuple[float, ...]
    finish_reason: str
    interruptions: Interruptions


def check_config(model: Transformer, config: EngineConfig, sampling: SamplingParams, vocab_size: int) -> None:
    sizes = (config.max_sequences, config.page_tokens, config.num_pages, config.prefill_chunk_tokens)
    split, page = config.split_tokens, config.page_tokens
    rules = (
        (all(size > 0 for size in sizes), "positive sizes", str(sizes)),
        (split > 0 and (split % page == 0 or page % split == 0), f"page_tokens that divide {split}, or a multiple",
         str(page)),
        (config.guess_tokens >= 0, "guess_tokens of at least 0", str(config.guess_tokens)),
        (0 < vocab_size <= model.config.vocab_rows, f"a vocabulary of at most {model.config.vocab_rows} ids",
         str(vocab_size)),
        (sampling.temperature > 0 and math.isfinite(sampling.temperature), "a positive temperature",
         str(sampling.temperature)),
        (sampling.top_k >= 0 and 0 < sampling.top_p <= 1, "top_k >= 0 and top_p in (0, 1]",
         f"{sampling.top_k} and {sampling.top_p}"),
    )  # fmt: skip
    for holds, expected, found in rules:
        if not holds:
            raise ContractError("rollout engine", expected=expected, found=found)
