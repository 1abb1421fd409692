"""A rollout engine whose model two ranks share over gloo: one rank's bits, through pauses, spills and resumption."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.distributed as dist

from ml.checkpoint import load_model
from ml.rollout.spill import decode_kv
from ml.rollout.together import dismiss, follow
from ml.tensor_parallel import ALONE, Group
from schemas.errors import ContractError
from tests.rollout_world import CONFIG, MemoryLog, bits, engine, requests, run

REQUESTS = [replace(r, prompt_ids=r.prompt_ids[:20], max_response_tokens=24) for r in requests(7, seed=4)]
# Too few pages for all, so that KV is paused to the host and back.
SMALL = replace(CONFIG, num_pages=12, max_sequences=6, steps_in_flight=1)


def outcome(model) -> dict:
    """Every response by an engine that is stopped midway and followed by a second one, and the spilled KV."""
    log, spilled = MemoryLog(), {}
    first = engine(model, SMALL, log=log)
    for request in REQUESTS:
        first.add(request)
    done = {}
    for _ in range(30):
        done |= {f.trajectory_id: f for f in first.step()}
    first.spill(lambda name, data: spilled.update({name: data}) or True, math.inf)
    second = engine(model, SMALL)
    for request in REQUESTS:
        name = request.trajectory_id
        if name in done:
            continue
        tokens = log.tokens.get(name, [])
        ids, raw, sampled = (tuple(column) for column in zip(*tokens, strict=True)) if tokens else ((), (), ())
        kv = None
        if f"{name}.kv" in spilled:
            kv = decode_kv(spilled[f"{name}.kv"], name, second.kv_layout, name, [*request.prompt_ids, *ids])
        second.add(replace(request, logged_ids=ids, logged_raw=raw, logged_sampled=sampled, kv=kv))
    restored = run(second)
    assert any(f.num_kv_restores for f in restored.values())
    return {"responses": {i: bits(f) for i, f in (done | restored).items()}, "spilled": spilled}


def be_rank(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    group = Group(rank, 2, dist.group.WORLD)
    model = load_model(folder, precision="bf16", compute="bf16", group=group)
    if rank == 0:
        (folder / "outcome.pickle").write_bytes(pickle.dumps(outcome(model)))
        dismiss(group)
    else:
        follow(model)


@pytest.fixture
def folder(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160}  # fmt: skip
    Qwen2ForCausalLM(Qwen2Config(**sizes, initializer_range=0.2)).save_pretrained(tmp_path)
    return tmp_path


def test_two_ranks_roll_out_what_one_does(folder):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=be_rank, args=(rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    torch.set_num_threads(1)
    found = pickle.loads((folder / "outcome.pickle").read_bytes())
    model = load_model(folder, precision="bf16", compute="bf16", group=ALONE)
    want = outcome(model)
    assert len(want["responses"]) == len(REQUESTS)
    assert found["responses"] == want["responses"]
    # KV of two ranks has the heads of both, but says whose it is, and is not taken by one.
    assert set(found["spilled"]) == set(want["spilled"])
    name = next(iter(want["spilled"]))
    request = next(r for r in REQUESTS if f"{r.trajectory_id}.kv" == name)
    tokens = [*request.prompt_ids, *want["responses"][request.trajectory_id][1]]
    one = engine(model).kv_layout
    kept = [
        decode_kv(outcome["spilled"][name], name, replace(one, ranks=ranks), request.trajectory_id, tokens)
        for outcome, ranks in ((found, 2), (want, 1))
    ]
    assert torch.equal(kept[0].k_MLGC, kept[1].k_MLGC)
    assert torch.equal(kept[0].v_MLGC, kept[1].v_MLGC)
    with pytest.raises(ContractError, match="ranks"):
        decode_kv(found["spilled"][name], name, one, request.trajectory_id, tokens)
