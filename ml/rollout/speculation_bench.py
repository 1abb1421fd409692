"""What guesses win and cost: a tail of few long sequences, on text that is foreseen for the most part and on text that
is not.

Random weights at temperature 1 never repeat themselves. Text that does is made of their own responses: the same
requests are run again, each with its response as an earlier one in which every 20th token is another. A guess then
breaks off that often, and the text is found again two tokens later.
The check: responses and log-probabilities of every run are, bit for bit, those of the run without guesses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kernels.testing import check, environment, figure
from ml.bench_models import SMALL, SMOLLM2_135M, random_model
from ml.device import traits
from ml.model import Transformer
from ml.rollout.engine_bench import Run, random_requests, same
from ml.rollout.requests import Finished, Request

_PROMPT = 128
#: A guess is wrong at one token of so many.
_WRONG_EVERY = 20
#: Each way of running is timed so often; the least counts.
_TURNS = 2


def tail_figures(
    model: Transformer, *, count: int = 64, long: int = 4, most_short: int = 256, longest: int = 8192
) -> dict[str, Any]:
    """`count` sequences, of which `long` go on to `longest` tokens when the others have ended by `most_short`."""
    requests = random_requests(model, count, _PROMPT, longest)
    requests[long:] = [
        replace(request, max_response_tokens=max(1, most_short * index // count))
        for index, request in enumerate(requests[long:], 1)
    ]
    found = _compared(model, requests, count)
    return {
        "speculation_tail_repeating": figure(found["repeating"], "x plain", ">= 2"),
        "speculation_tail_other": figure(found["other"], "x plain", ">= 0.97"),
        "speculation_tail_plain": figure(found["plain"], "tokens/s", ""),
    }


def run_on_cpu(quick: bool) -> dict[str, Any]:
    """1 and 4 sequences; quick: of a model that is too small for its figures to count."""
    model = random_model(SMALL if quick else SMOLLM2_135M, "bf16", "cpu")
    new = 60 if quick else 256
    figures: dict[str, Any] = {}
    for count in (1, 4):
        found = _compared(model, random_requests(model, count, 32, new), count)
        figures[f"speculation_repeating_{count}"] = figure(found["repeating"], "x plain", ">= 1.5")
        figures[f"speculation_other_{count}"] = figure(found["other"], "x plain", ">= 0.97")
        figures[f"speculation_plain_{count}"] = figure(found["plain"], "tokens/s", "")
    if quick:
        for entry in figures.values():
            entry["holds"] = None
    shape = "a small Llama" if quick else "SmolLM2-135M shape"
    env = environment(f"{shape}, 1 and 4 sequences, prompt 32, new {new}, bf16, log on")
    return {"figures": figures, "peers": {}, "env": env | {"threads": torch.get_num_threads()}}


def _compared(model: Transformer, requests: Sequence[Request], count: int) -> dict[str, float]:
    """plain: tokens a second without guesses; repeating, other: the speed with them, as a multiple of that."""
    tokens = max(len(r.prompt_ids) + r.max_response_tokens for r in requests)
    most = traits(model.head_weight.device).guess_tokens
    with Run(model, count, tokens, guess_tokens=0) as plainly, Run(model, count, tokens, guess_tokens=most) as guessing:
        _, plain = _timed(plainly, requests, "warm ")
        foreseen = [
            replace(request, earlier_responses=(_mistaken(plain[request.trajectory_id].response_ids),))
            for request in requests
        ]
        ways = {"plain": (plainly, requests), "other": (guessing, requests), "repeating": (guessing, foreseen)}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        # By turns, since a machine's speed is not the same from one minute to the next.
        for turn in range(1 + _TURNS):
            for name, (run, wanted) in ways.items():
                taken, found = _timed(run, wanted, f"{name} {turn} ")
                check(all(same(found[i], plain[i]) for i in plain), "guesses change no bit")
                if turn:  # kernels were compiled and graphs captured in the first
                    seconds[name].append(taken)
    total = sum(len(f.response_ids) for f in plain.values())
    least = {name: min(taken) for name, taken in seconds.items()}
    return {
        "plain": total / least["plain"],
        "other": least["plain"] / least["other"],
        "repeating": least["plain"] / least["repeating"],
    }


def _mistaken(ids: Sequence[int]) -> list[int]:
    """Every _WRONG_EVERYth id is the one beside it in the vocabulary."""
    return [i ^ 1 if place % _WRONG_EVERY == _WRONG_EVERY - 1 else i for place, i in enumerate(ids)]


def _timed(run: Run, requests: Sequence[Request], prefix: str) -> tuple[float, dict[str, Finished]]:
    """Seconds of all requests, under names of this prefix, and what they gave by their own names."""
    named = [replace(request, trajectory_id=prefix + request.trajectory_id) for request in requests]
    started = time.perf_counter()
    finished = run.finish(named)
    return time.perf_counter() - started, {name.removeprefix(prefix): f for name, f in finished.items()}
