"""The rollout bench's parts: chosen by name, told as they end."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kernels.bench import main
from kernels.testing import figure
from ml.bench import BENCHES, OPTIONS, ROLLOUT_PARTS
from ml.rollout import engine_bench_gpu, speculation_bench
from schemas.errors import ContractError


def test_the_names_offered_are_the_benchs_own():
    assert tuple(engine_bench_gpu.PARTS) == ROLLOUT_PARTS


def test_an_unknown_part_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["rollout", "--parts", "decode,prefil"], BENCHES, "bench", OPTIONS)
    assert f"no part 'prefil'; there are {', '.join(ROLLOUT_PARTS)}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has parts")
def test_parts_need_a_gpu():
    with pytest.raises(ContractError, match="expected: a GPU"):
        main(["rollout", "--parts", "decode"], BENCHES, "bench", OPTIONS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has its own")
def test_a_cpu_has_the_part_of_guesses(monkeypatch, capsys):
    """Of a few tokens; that guesses change no bit is checked in it."""
    compared = speculation_bench._compared

    def few(model, requests, count):
        return compared(model, [replace(r, max_response_tokens=6) for r in requests], count)

    monkeypatch.setattr(speculation_bench, "_compared", few)
    assert main(["rollout", "--parts", "speculation", "--quick", "--json"], BENCHES, "bench", OPTIONS) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    kinds = ("repeating", "other", "plain")
    assert set(figures) == {f"speculation_{kind}_{count}" for kind in kinds for count in (1, 4)}
    assert all(entry["holds"] is None and entry["value"] > 0 for entry in figures.values())


def test_only_the_chosen_parts_run_and_each_tells_its_figures_at_its_end(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine_bench_gpu, "environment", lambda shape: {"shape": shape})
    for name in ROLLOUT_PARTS:
        monkeypatch.setitem(engine_bench_gpu.PARTS, name, lambda name=name: {f"{name}_s": figure(2.5, "s")})
    assert main(["rollout", "--parts", "log,decode", "--json"], BENCHES, "bench", OPTIONS) == 0
    out, err = capsys.readouterr()
    assert list(json.loads(out)["figures"]) == ["log_s", "decode_s"]
    assert err.splitlines() == ["1/2 log, 0 s: log_s 2.5 s", "2/2 decode, 0 s: decode_s 2.5 s"]
