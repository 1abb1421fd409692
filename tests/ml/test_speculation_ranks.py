"""Guesses by ranks that share a model: rank 0 alone guesses, and every rank computes its rows."""

from __future__ import annotations

import multiprocessing
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infra.launch import free_port
from ml.checkpoint import load_model
from tests.ml import test_together
from tests.ml.test_speculation import Known
from tests.support.rollout_world import (
    alone,
)

# --- ranks that share a model


def be_guessing_rank(rank: int, folder: Path) -> None:
    """Only rank 0 guesses, and it makes mistakes: the other computes what it is told."""
    if rank == 0:
        import ml.rollout.engine

        known = Known(pickle.loads((folder / "responses.pickle").read_bytes()), 3)
        ml.rollout.engine.Guesser = known.made  # pyright: ignore[reportAttributeAccessIssue]
    guess_in_sites()
    test_together.be_rank(rank, folder, "cpu")
    assert rank or known.guessed > 50


def guess_in_sites() -> None:
    config, _, channels = test_together.SITES["cpu"]
    guessing = replace(config, guess_tokens=4, num_pages=30, max_sequences=3)
    test_together.SITES["cpu"] = guessing, test_together.LONGER, channels


def test_two_ranks_take_the_same_guesses(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160,
    }  # fmt: skip
    Qwen2ForCausalLM(Qwen2Config(**sizes, initializer_range=0.2)).save_pretrained(tmp_path)
    (tmp_path / "port").write_text(str(free_port()))
    model = load_model(tmp_path, precision="bf16", compute="bf16")
    wanted = {r.trajectory_id: alone(model, r) for r in test_together.LONGER}
    (tmp_path / "responses.pickle").write_bytes(pickle.dumps({i: w[1] for i, w in wanted.items()}))
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=be_guessing_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    found = pickle.loads((tmp_path / "outcome.pickle").read_bytes())
    assert found["responses"] == wanted
