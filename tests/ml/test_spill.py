"""Spilled KV: what comes back is what went in, for the same tokens and weights, or it is refused."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace

import pytest
import torch

from ml.model import ModelConfig
from ml.rollout.spill import KvLayout, PrefillCost, Spillable, SpilledKv, SpillQueue, decode_kv, encode_kv
from schemas.errors import ContractError, FormatError, OpdError

TOKENS = [5, 9, 1, 0, 7, 7, 2]
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def layout(dtype: str = "BF16") -> KvLayout:
    return KvLayout("a" * 64, dtype, layers=2, kv_heads=3, head_channels=4)


def kv(positions: int = 5, dtype: str = "BF16") -> SpilledKv:
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(positions, 2, 3, 4, generator=g).to(DTYPES[dtype]) for _ in range(2))
    return SpilledKv(k, v)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("positions", [1, 5, 6])
def test_round_trip(dtype, positions):
    one = kv(positions, dtype)
    one.k_MLGC[0, 0, 0, 0] = -0.0
    one.v_MLGC[0, 1, 2, 3] = float("inf")
    back = decode_kv(encode_kv(one, layout(dtype), "t1", TOKENS), "x.kv", layout(dtype), "t1", TOKENS)
    assert back.positions == positions
    assert same(back.k_MLGC, one.k_MLGC)
    assert same(back.v_MLGC, one.v_MLGC)


def test_any_safetensors_reader_opens_it():
    from safetensors.torch import load

    one = kv()
    data = encode_kv(one, layout(), "t1", TOKENS)
    tensors = load(data)
    assert tensors["ids"].tolist() == TOKENS[:5]
    assert same(tensors["k"], one.k_MLGC)
    header = json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])["__metadata__"]
    assert header["crc_k"] == str(zlib.crc32(one.k_MLGC.view(torch.int16).numpy().tobytes()))
    assert (header["trajectory_id"], header["student_digest"]) == ("t1", "a" * 64)


@pytest.mark.parametrize("known", range(1, 8))
def test_no_more_positions_than_the_log_can_use(known):
    back = decode_kv(encode_kv(kv(), layout(), "t1", TOKENS), "x.kv", layout(), "t1", TOKENS[:known])
    assert back.positions == min(5, known - 1)
    assert same(back.k_MLGC, kv().k_MLGC[: back.positions])


@pytest.mark.parametrize(
    "change",
    [
        {"student_digest": "b" * 64},
        {"dtype": "F32"},
        {"layers": 3},
        {"kv_heads": 2},
        {"head_channels": 8},
        {"ranks": 2},
    ],
    ids=str,
)
def test_another_students_kv_is_refused(change):
    data = encode_kv(kv(), layout(), "t1", TOKENS)
    with pytest.raises(ContractError, match=r"x\.kv"):
        decode_kv(data, "x.kv", replace(layout(), **change), "t1", TOKENS)


def test_another_trajectorys_kv_is_refused():
    data = encode_kv(kv(), layout(), "t1", TOKENS)
    with pytest.raises(ContractError, match="t2"):
        decode_kv(data, "x.kv", layout(), "t2", TOKENS)
    for index in range(5):
        other = [*TOKENS[:index], TOKENS[index] + 1, *TOKENS[index + 1 :]]
        with pytest.raises(ContractError, match="other tokens"):
            decode_kv(data, "x.kv", layout(), "t1", other)
    # Tokens that the KV was not computed from do not matter.
    assert decode_kv(data, "x.kv", layout(), "t1", [*TOKENS[:5], 3, 3]).positions == 5


def test_every_cut_is_refused():
    data = encode_kv(kv(), layout(), "t1", TOKENS)
    for length in [*range(600), *range(len(data) - 600, len(data))]:
        with pytest.raises(FormatError, match=r"x\.kv"):
            decode_kv(data[:length], "x.kv", layout(), "t1", TOKENS)


def test_no_flipped_bit_changes_what_comes_back():
    one = kv()
    data = bytearray(encode_kv(one, layout(), "t1", TOKENS))
    text_end = 8 + len(bytes(data[8:4096]).rstrip())
    refused = 0
    for at in [*range(text_end), *range(4096, len(data))]:
        for bit in (0, 3, 7):
            data[at] ^= 1 << bit
            try:
                back = decode_kv(bytes(data), "x.kv", layout(), "t1", TOKENS)
                assert same(back.k_MLGC, one.k_MLGC), at
                assert same(back.v_MLGC, one.v_MLGC), at
            except OpdError:
                refused += 1
            data[at] ^= 1 << bit
    assert refused > 3 * (len(data) - 4096)


def test_layout_of_a_model_names_its_compute_dtype():
    from ml.model import ModelConfig, Transformer

    config = {
        "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 8, "vocab_size": 11, "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }  # fmt: skip
    model = Transformer(ModelConfig.from_hf(config, "c"), precision="bf16", compute=torch.bfloat16, trainable=False)
    assert KvLayout.of(model, "d") == KvLayout("d", "BF16", layers=2, kv_heads=2, head_channels=4)


class Uploads:
    """A store of so many bytes a second after a latency, on a clock of its own."""

    def __init__(self, bytes_per_s: float, latency: float = 0.0) -> None:
        self.now, self.bytes_per_s, self.latency = 100.0, bytes_per_s, latency

    def drain(self, queue: SpillQueue) -> list[str]:
        names = []
        while (chosen := queue.next()) is not None:
            seconds = self.latency + chosen.size_bytes / self.bytes_per_s
            self.now += seconds
            queue.wrote(chosen.size_bytes, seconds)
            names.append(chosen.trajectory_id)
        return names


def spillable(name: str, positions: int, stored: int = 0) -> Spillable:
    return Spillable(name, positions, stored, 10 * positions)


def test_prefill_cost_counts_the_products_of_a_llama():
    """Against the operations of a forward pass counted by torch; attention computes both halves of the square."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaModel

    shape = LlamaConfig(vocab_size=50, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
                        num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    shape._attn_implementation = "eager"
    cost = PrefillCost.of(ModelConfig.from_hf(shape.to_dict(), "test"))
    for positions in (1, 7, 64):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            LlamaModel(shape)(torch.arange(positions)[None] % 50)
        counted = counter.get_total_flops() / 2
        assert cost.linear * positions + 2 * cost.quadratic * positions**2 == counted


@pytest.mark.parametrize("quadratic", [0.0, 0.5])
def test_spills_go_by_saved_prefill_a_byte(quadratic):
    """Without attention every position is worth the same, so ids decide; with it, long contexts are worth more."""
    store = Uploads(bytes_per_s=1e9)
    candidates = [spillable("d", 20), spillable("b", 50), spillable("a", 30), spillable("c", 50), spillable("e", 10)]
    queue = SpillQueue(candidates, PrefillCost(3.0, quadratic), store.now + 60, lambda: store.now)
    order = ["e", "b", "c", "a", "d"] if quadratic else ["e", "a", "b", "c", "d"]
    assert store.drain(queue) == order


def test_kv_that_lies_in_the_store_already_is_worth_only_its_growth():
    store = Uploads(bytes_per_s=1e9)
    candidates = [spillable("grown", 100, stored=90), spillable("same", 100, stored=100), spillable("new", 60),
                  spillable("less", 50, stored=80), spillable("none", 0), spillable("probe", 5)]  # fmt: skip
    queue = SpillQueue(candidates, PrefillCost(1.0, 1.0), store.now + 60, lambda: store.now)
    assert store.drain(queue) == ["probe", "new", "grown"]


@pytest.mark.parametrize("latency", [0.0, 0.05])
@pytest.mark.parametrize("grace", [0.0, 0.3, 1.0, 5.0, 100.0])
def test_no_write_overruns_the_grace(grace, latency):
    """Whatever fits is written; what does not is passed over for what does."""
    store = Uploads(bytes_per_s=1000.0, latency=latency)
    sizes = [4, 40, 70, 110, 250, 900]
    start = store.now
    queue = SpillQueue([spillable(str(n), n) for n in sizes], PrefillCost(1.0, 1.0), start + grace, lambda: store.now)
    names = store.drain(queue)
    assert store.now <= start + max(grace, 0.0)
    assert names[:1] == (["4"] if grace else [])
    if grace == 100.0:
        assert (
            names == ["4", "900", "250", "110", "70", "40"] if not latency else sorted(names) == sorted(map(str, sizes))
        )
    if grace == 1.0 and not latency:
        assert names == ["4", "70"]


def test_a_rate_that_latency_hides_shows_as_writes_grow():
    """4 positions in a latency of 1 s look like 40 bytes/s; each larger write teaches a better rate."""
    store = Uploads(bytes_per_s=10_000.0, latency=1.0)
    sizes = [4, 30, 200, 1500]
    queue = SpillQueue(
        [spillable(str(n), n) for n in sizes], PrefillCost(1.0, 1.0), store.now + 14.0, lambda: store.now
    )
    assert store.drain(queue) == ["4", "30", "200", "1500"]


def test_a_store_that_slows_down_is_noticed():
    store = Uploads(bytes_per_s=1000.0)
    candidates = [spillable("a", 50), spillable("b", 50), spillable("c", 50)]
    queue = SpillQueue(candidates, PrefillCost(1.0, 1.0), store.now + 3.0, lambda: store.now)
    first = queue.next()
    assert first is not None
    queue.wrote(first.size_bytes, 0.5)
    second = queue.next()
    assert second is not None
    queue.wrote(second.size_bytes, 5.0)
    assert queue.next() is None
