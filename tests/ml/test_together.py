"""A rollout engine whose model two ranks share: one rank's bits, through pauses, spills and resumption."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch

from infra.launch import free_port
from ml.checkpoint import load_model
from ml.device import rank_device
from ml.rollout.requests import EngineConfig
from ml.rollout.spill import decode_kv
from ml.rollout.together import decode, dismiss, encode, follow
from ml.tensor_parallel import join_group
from schemas.errors import ContractError
from tests.support.rollout_world import CONFIG, MemoryLog, bits, engine, requests, run

REQUESTS = [replace(r, prompt_ids=r.prompt_ids[:20], max_response_tokens=24) for r in requests(7, seed=4)]
LONGER = [replace(r, max_response_tokens=70) for r in requests(7, seed=4)]
# Too few pages for all, so that KV is paused to the host and back.
SMALL = replace(CONFIG, num_pages=12, max_sequences=6, steps_in_flight=1)
SMALL_GPU = EngineConfig.on(torch.device("cuda"), max_sequences=6, page_tokens=64, num_pages=9, student_digest="s")
#: Device -> engine, requests, heads' channels.
SITES = {"cpu": (SMALL, REQUESTS, 8), "cuda": (SMALL_GPU, LONGER, 64)}


def outcome(model) -> dict:
    """Every response by an engine that is stopped midway and followed by a second one, and the spilled KV."""
    config, everything, _ = SITES[model.head_weight.device.type]
    log, spilled = MemoryLog(), {}
    first = engine(model, config, log=log)
    for request in everything:
        first.add(request)
    done = {}
    for _ in range(30):
        done |= {f.trajectory_id: f for f in first.step()}
    first.spill(lambda name, parts: spilled.update({name: b"".join(parts)}) or True, math.inf)
    second, again = first, MemoryLog()
    second.begin(again)
    for request in everything:
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
    assert any(f.interruptions.kv_restores for f in restored.values())
    return {"responses": {i: bits(f) for i, f in (done | restored).items()}, "spilled": spilled}


def listening_addresses() -> set[str]:
    """Addresses that this process listens on, by the kernel's tables."""
    inodes = {Path(f"/proc/self/fd/{fd}").readlink().name for fd in os.listdir("/proc/self/fd") if _is_socket(fd)}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                raw = bytes.fromhex(words[1].partition(":")[0])
                network_order = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.add(socket.inet_ntop(family, network_order))
    return found


def _is_socket(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except FileNotFoundError:  # of this listing itself
        return False


def test_listeners_on_every_interface_are_seen():
    with socket.create_server(("0.0.0.0", 0)):
        assert "0.0.0.0" in listening_addresses()
    assert "0.0.0.0" not in listening_addresses()


def test_commands_are_read_back_whole_and_run_nothing():
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.array([-1, 1 << 62]), np.zeros((0, 2), np.int64)]
    name, (first, rest) = decode(encode(("run", (arrays[0], [{"a": [1, True, None]}, (arrays[1], arrays[2])]))))
    assert name == "run"
    assert rest[0] == {"a": [1, True, None]}
    for want, found in zip(arrays, [first, *rest[1]], strict=True):
        assert (want.dtype, want.shape, want.tolist()) == (found.dtype, found.shape, found.tolist())
    assert decode(encode(None)) is None
    for hostile in (pickle.dumps(print), encode([{"dtype": "O", "shape": [1]}]), b"", encode(1)[:-1]):
        with pytest.raises(ValueError, match=r"JSON|Expecting|array of|buffer|decode|Unterminated"):
            decode(hostile)
    with pytest.raises(TypeError):
        encode(print)


def be_rank(rank: int, folder: Path, kind: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=(folder / "port").read_text())  # fmt: skip
    torch.set_num_threads(1)
    device = rank_device() if kind == "cuda" else torch.device("cpu")
    group = join_group(device)
    assert listening_addresses() <= {"127.0.0.1", "::1"}
    model = load_model(folder, precision="bf16", compute="bf16", device=device, group=group)
    if rank == 0:
        (folder / "outcome.pickle").write_bytes(pickle.dumps(outcome(model)))
        dismiss(group)
    else:
        follow(model)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks_roll_out_what_one_does(tmp_path, kind):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if kind == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder, everything = tmp_path, SITES[kind][1]
    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 4 * SITES[kind][2], "intermediate_size": 48 if kind == "cpu" else 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160,
    }  # fmt: skip
    Qwen2ForCausalLM(Qwen2Config(**sizes, initializer_range=0.2)).save_pretrained(folder)
    (folder / "port").write_text(str(free_port()))
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=be_rank, args=(rank, folder, kind)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    torch.set_num_threads(1)
    found = pickle.loads((folder / "outcome.pickle").read_bytes())
    model = load_model(folder, precision="bf16", compute="bf16", device=kind)
    want = outcome(model)
    assert len(want["responses"]) == len(everything)
    assert found["responses"] == want["responses"]
    # KV of two ranks has the heads of both, but says whose it is, and is not taken by one.
    assert set(found["spilled"]) == set(want["spilled"])
    name = next(iter(want["spilled"]))
    request = next(r for r in everything if f"{r.trajectory_id}.kv" == name)
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
