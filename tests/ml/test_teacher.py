"""Hidden states of teachers: alignment against transformers' own states, and rows free of their batch."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import AutoModelForCausalLM

from ml.checkpoint import load_model
from ml.model_files import read_config
from ml.teacher import Reading, hidden_states
from schemas.errors import ContractError
from tests.support.tiny import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("teacher") / "m", seed=4, tied=False)


def some_readings(seed: int = 0) -> list[Reading]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [(1, 1), (5, 1), (1, 9), (40, 33), (64, 64), (3, 2), (100, 7)]
    return [Reading(*(torch.randint(0, 259, (n,), generator=generator).tolist() for n in pair)) for pair in lengths]


def test_row_i_is_the_state_that_predicts_response_token_i(folder):
    model = load_model(folder, precision="fp32", compute="fp32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    readings = some_readings()
    found = list(hidden_states(model, readings, batch_tokens=100))
    assert len(found) == len(readings)
    for reading, hidden_TE in zip(readings, found, strict=True):
        ids = torch.tensor([[*reading.context_ids, *reading.response_ids]])
        with torch.no_grad():
            states = theirs.model(ids).last_hidden_state[0]
        first = len(reading.context_ids) - 1
        want = states[first : first + len(reading.response_ids)]
        assert hidden_TE.dtype == torch.bfloat16
        assert hidden_TE.shape == (len(reading.response_ids), read_config(folder)["hidden_size"])
        torch.testing.assert_close(hidden_TE.float(), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_rows_do_not_depend_on_the_batch(folder, compute):
    model = load_model(folder, precision="bf16", compute=compute)
    readings = some_readings()
    alone = [next(hidden_states(model, [r], batch_tokens=1)) for r in readings]
    for batch_tokens in (1, 90, 130, 100_000):
        found = list(hidden_states(model, readings, batch_tokens=batch_tokens))
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
    found = list(hidden_states(model, readings[::-1], batch_tokens=200))
    assert all(torch.equal(a, b) for a, b in zip(found[::-1], alone, strict=True))


def test_the_last_response_token_is_not_read(folder):
    model = load_model(folder, precision="bf16", compute="bf16")
    one, two = (next(hidden_states(model, [Reading([5, 6], [7, 8, last])], batch_tokens=9)) for last in (9, 10))
    assert torch.equal(one, two)


def test_nothing_in_nothing_out(folder):
    model = load_model(folder, precision="bf16", compute="bf16")
    assert list(hidden_states(model, [], batch_tokens=10)) == []


@pytest.mark.parametrize(
    ("context", "response", "named"),
    [
        ([], [1], "empty"),
        ([1], [], "empty"),
        ([1] * 500, [2] * 14, "512 positions"),
        ([1, 259], [2], "ids below 259"),
        ([1], [2, 259], "ids below 259"),
        ([-1], [2], "ids below 259"),
    ],
)
def test_what_cannot_be_read_is_refused(folder, context, response, named):
    model = load_model(folder, precision="bf16", compute="bf16")
    with pytest.raises(ContractError, match=named):
        list(hidden_states(model, [Reading([1], [2]), Reading(context, response)], batch_tokens=100))


def test_the_longest_sequence_is_read(folder):
    model = load_model(folder, precision="bf16", compute="bf16")
    (hidden_TE,) = hidden_states(model, [Reading([1] * 500, [2] * 13)], batch_tokens=10)
    assert hidden_TE.shape[0] == 13


def test_states_that_are_not_finite_are_refused(folder):
    model = load_model(folder, precision="fp32", compute="fp32")
    with torch.no_grad():
        model.model.norm.weight[3] = torch.inf
    with pytest.raises(ContractError, match="NaN or infinity"):
        list(hidden_states(model, [Reading([1], [2])], batch_tokens=10))
