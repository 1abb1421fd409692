"""Sampling from a vocabulary of 128,256: time beside that of reading the logits, and torch's own way as the peer."""

from __future__ import annotations

from typing import Any

import torch

from kernels.sampling import sample
from kernels.testing import check, copy_gb_per_s, environment, figure, graph_us

_VOCABULARY = 128256
_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "_t0.7": {"temperature": 0.7},
    "_top_k50": {"top_k": 50},
    "_top_p0.9": {"top_p": 0.9},
    "_top_k50_p0.9": {"top_k": 50, "top_p": 0.9},
}


def run(quick: bool) -> dict:
    batches = (1024,) if quick else (64, 256, 1024)
    env = environment(f"{batches} rows x {_VOCABULARY}")
    targets = {64: "", 256: "", 1024: ">= 0.6"}
    if not torch.cuda.is_available():
        return {"figures": {f"s{s}": figure(None, "x copy", targets[s]) for s in batches}, "peers": {}, "env": env}
    copy = copy_gb_per_s()
    figures, peers = {}, {}
    peers["device_copy"] = {"value": copy, "unit": "GB/s", "version": torch.__version__}
    for options in _OPTIONS.values():
        _check_rows(options)
    for rows in batches:
        inputs = _inputs(rows)
        bytes_read = inputs[0].numel() * 4
        for name, options in _OPTIONS.items():
            microseconds = graph_us([lambda i=inputs, o=options: sample(*i, **o)])
            figures[f"s{rows}{name}_us"] = figure(microseconds, "us", "")
            if not name:
                figures[f"s{rows}"] = figure(bytes_read / microseconds / 1e3 / copy, "x copy", targets[rows])
        peers[f"torch_s{rows}_us"] = {
            "value": graph_us([lambda i=inputs: _torch_sample(i[0])]),
            "unit": "us",
            "version": torch.__version__,
        }
    return {"figures": figures, "peers": peers, "env": env}


def _inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows)
    logits_SV = torch.randn(rows, _VOCABULARY, generator=generator, device="cuda") * 3
    keys_S = torch.randint(-(2**62), 2**62, (rows,), generator=generator, device="cuda")
    return logits_SV, keys_S, torch.arange(rows, device="cuda")


def _torch_sample(logits_SV: torch.Tensor) -> torch.Tensor:
    """The exponential race that engines use, and the log-probability of its winner."""
    logprobs_SV = torch.log_softmax(logits_SV, -1)
    ids_S1 = (logprobs_SV.exp() / torch.empty_like(logits_SV).exponential_()).argmax(-1, keepdim=True)
    return logprobs_SV.gather(1, ids_S1)


def _check_rows(options: dict[str, Any]) -> None:
    """Tokens and log-probabilities of the reference, and a row's bits in other company."""
    inputs = _inputs(96)
    whole, reference = sample(*inputs, **options), sample(*inputs, **options, impl="reference")
    same = whole[0] == reference[0]
    # The two differ in the last bits of the noise, so a near tie may fall the other way.
    check(int(same.sum()) >= 95, f"tokens differ from the reference: {options}")
    # Of the distribution sampled from: a sum next to top_p may keep a token more.
    for found, wanted, bound in zip(whole[1:], reference[1:], (1e-5, 1e-4), strict=True):
        check(float((found - wanted)[same].abs().max()) < bound, f"log-probabilities differ: {options}")
    for count in (1, 17, 64):
        parts = sample(*(x[:count] for x in inputs), **options)
        check(all(torch.equal(a, b[:count]) for a, b in zip(parts, whole, strict=True)), f"bits of {count} rows")
