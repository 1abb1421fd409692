"""What the rollout engine refuses, before it samples a token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ml.rollout.requests import Request
from schemas.errors import ContractError
from tests.support.rollout_world import CONFIG, VOCABULARY, MemoryLog, engine, models, run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "empty prompt"),
        ({"max_response_tokens": 0}, "max_response_tokens"),
        ({"prompt_ids": (1,) * 150, "max_response_tokens": 12}, "160 positions"),
        ({"prompt_ids": (VOCABULARY,)}, "below 61"),
        ({"prompt_ids": (-1,)}, "below 61"),
        ({"sampling_key": 1 << 64}, "64-bit"),
        ({"logged_ids": (1,), "logged_raw": (0.0,)}, "log-probabilities"),
        ({"logged_ids": (7, 1), "logged_raw": (0.0, 0.0), "logged_sampled": (0.0, 0.0)}, "stop token"),
        ({"logged_ids": (1,) * 6, "logged_raw": (0.0,) * 6, "logged_sampled": (0.0,) * 6}, "at most 5"),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_a_request_that_could_never_run_is_refused(change, message):
    one = engine(models("llama")[1])
    with pytest.raises(ContractError, match=message) as error:
        one.add(replace(Request("odd", (1, 2), 3, 5), **change))
    assert "odd" in error.value.where
    assert not one.has_work()
    one.add(Request("odd", (1, 2), 3, 5))
    assert run(one)["odd"].response_ids


def test_a_request_larger_than_the_cache_is_refused_and_the_largest_that_fits_runs():
    one = engine(models("llama")[1], replace(CONFIG, num_pages=3))
    with pytest.raises(ContractError, match="24 positions"):
        one.add(Request("a", (1,) * 20, 3, 6))
    one.add(Request("a", (1,) * 20, 3, 5))
    assert run(one)


def test_the_last_position_of_the_model_can_be_used():
    one = engine(models("llama")[1])
    one.add(Request("a", tuple(i % 5 for i in range(160)), 3, 1))
    assert len(run(one)["a"].response_ids) == 1


def test_a_second_request_of_one_trajectory_is_refused_even_when_it_is_finished():
    one = engine(models("llama")[1])
    one.add(Request("a", (1,), 3, 1))
    with pytest.raises(ContractError, match="once"):
        one.add(Request("a", (1,), 3, 1))
    run(one)
    with pytest.raises(ContractError, match="once"):
        one.add(Request("a", (2,), 3, 1))


@pytest.mark.parametrize(
    "change", [{"page_tokens": 12}, {"num_pages": 0}, {"max_sequences": 0}, {"prefill_chunk_tokens": 0}], ids=str
)
def test_sizes_that_do_not_fit_together_are_refused(change):
    with pytest.raises(ContractError, match="rollout engine"):
        engine(models("llama")[1], replace(CONFIG, **change))


def test_nan_logits_name_trajectory_and_position():
    from copy import deepcopy

    broken = deepcopy(models("llama")[1])
    with torch.no_grad():
        broken.model.embed_tokens.weight[40] = math.nan
        broken.model.embed_tokens.weight[:40] = 0.1
    log = MemoryLog()
    one = engine(broken, log=log)
    one.add(Request("bad", (1, 2, 3), 3, 5))
    with pytest.raises(ContractError, match="trajectory bad, position 3"):
        run(one)
    assert log.tokens == {}
