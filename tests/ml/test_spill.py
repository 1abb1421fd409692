"""Spilled KV: what comes back is what went in, for the same tokens and weights, or it is refused."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import threading
import time
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from ml.model import ModelConfig
from ml.rollout.spill import (
    WRITERS,
    KvLayout,
    PrefillCost,
    Spillable,
    SpilledKv,
    SpillQueue,
    decode_kv,
    encode_kv,
    write_spills,
)  # fmt: skip
from schemas.errors import ContractError, FormatError, OpdError, StoreError

TOKENS = [5, 9, 1, 0, 7, 7, 2]
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def layout(dtype: str = "BF16") -> KvLayout:
    return KvLayout("a" * 64, dtype, layers=2, kv_heads=3, head_channels=4)


def kv(positions: int = 5, dtype: str = "BF16") -> SpilledKv:
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(positions, 2, 3, 4, generator=g).to(DTYPES[dtype]) for _ in range(2))
    return SpilledKv(k, v)


def encoded(*arguments) -> bytes:
    return b"".join(encode_kv(*arguments))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("positions", [1, 5, 6])
def test_round_trip(dtype, positions):
    one = kv(positions, dtype)
    one.k_MLGC[0, 0, 0, 0] = -0.0
    one.v_MLGC[0, 1, 2, 3] = float("inf")
    back = decode_kv(encoded(one, layout(dtype), "t1", TOKENS), "x.kv", layout(dtype), "t1", TOKENS)
    assert back.positions == positions
    assert same(back.k_MLGC, one.k_MLGC)
    assert same(back.v_MLGC, one.v_MLGC)


def test_any_safetensors_reader_opens_it():
    from safetensors.torch import load

    one = kv()
    data = encoded(one, layout(), "t1", TOKENS)
    tensors = load(data)
    assert tensors["ids"].tolist() == TOKENS[:5]
    assert same(tensors["k"], one.k_MLGC)
    header = json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])["__metadata__"]
    assert header["crc_k"] == str(zlib.crc32(one.k_MLGC.view(torch.int16).numpy().tobytes()))
    assert (header["trajectory_id"], header["student_digest"]) == ("t1", "a" * 64)


@pytest.mark.parametrize("known", range(1, 8))
def test_no_more_positions_than_the_log_can_use(known):
    back = decode_kv(encoded(kv(), layout(), "t1", TOKENS), "x.kv", layout(), "t1", TOKENS[:known])
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
    data = encoded(kv(), layout(), "t1", TOKENS)
    with pytest.raises(ContractError, match=r"x\.kv"):
        decode_kv(data, "x.kv", replace(layout(), **change), "t1", TOKENS)


def test_another_trajectorys_kv_is_refused():
    data = encoded(kv(), layout(), "t1", TOKENS)
    with pytest.raises(ContractError, match="t2"):
        decode_kv(data, "x.kv", layout(), "t2", TOKENS)
    for index in range(5):
        other = [*TOKENS[:index], TOKENS[index] + 1, *TOKENS[index + 1 :]]
        with pytest.raises(ContractError, match="other tokens"):
            decode_kv(data, "x.kv", layout(), "t1", other)
    # Tokens that the KV was not computed from do not matter.
    assert decode_kv(data, "x.kv", layout(), "t1", [*TOKENS[:5], 3, 3]).positions == 5


def test_every_cut_is_refused():
    data = encoded(kv(), layout(), "t1", TOKENS)
    for length in [*range(600), *range(len(data) - 600, len(data))]:
        with pytest.raises(FormatError, match=r"x\.kv"):
            decode_kv(data[:length], "x.kv", layout(), "t1", TOKENS)


def test_no_flipped_bit_changes_what_comes_back():
    one = kv()
    data = bytearray(encoded(one, layout(), "t1", TOKENS))
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
    """A store on a clock of its own: so many bytes a second for all writes that share it, and for any one of them; a
    write waits for `latency` before its first byte."""

    def __init__(self, bytes_per_s: float, latency: float = 0.0, bytes_per_s_of_one: float = math.inf) -> None:
        self.now, self.latency = 100.0, latency
        self.bytes_per_s, self.bytes_per_s_of_one = bytes_per_s, bytes_per_s_of_one
        self.most_at_once = 0

    def drain(self, queue: SpillQueue) -> list[str]:
        """Names in the order of their starts."""
        names, running = [], {}
        while True:
            while (chosen := queue.next()) is not None:
                names.append(chosen.trajectory_id)
                running[chosen] = self.now, self.now + self.latency, float(chosen.size_bytes)
            if not running:
                return names
            self.most_at_once = max(self.most_at_once, len(running))
            sending = [c for c, (_, first_byte, _) in running.items() if first_byte <= self.now]
            rate = min(self.bytes_per_s_of_one, self.bytes_per_s / max(len(sending), 1))
            ends = {c: self.now + running[c][2] / rate for c in sending}
            then = min([*ends.values(), *(first for _, first, _ in running.values() if first > self.now)])
            for c in sending:
                started, first_byte, left = running[c]
                running[c] = started, first_byte, left - rate * (then - self.now)
            self.now = then
            for c in sending:
                if ends[c] <= then:
                    queue.wrote(c, then - running.pop(c)[0])


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


@pytest.mark.parametrize("grace", [0.5, 7.0, 30.0])
@pytest.mark.parametrize("of_one", [1000.0, 250.0, 100.0])
def test_writes_at_once_use_what_the_store_gives_and_do_not_overrun(of_one, grace):
    """A store whose one write has all of its rate, a quarter, a tenth."""
    store = Uploads(bytes_per_s=1000.0, latency=0.01, bytes_per_s_of_one=of_one)
    start, share = store.now, min(1000.0, WRITERS * of_one)
    candidates = [spillable("probe", 1), *(spillable(f"{n:03}", 20) for n in range(100))]
    queue = SpillQueue(candidates, PrefillCost(1.0, 0.0), start + grace, lambda: store.now)
    names = store.drain(queue)
    assert store.now <= start + grace
    # What the first ones need to learn the rate, and the last ones to end together, is not used.
    assert len(names) >= min(100, 0.6 * share * grace / 200 - 1)
    assert store.most_at_once <= WRITERS
    if grace == 30.0:
        assert len(names) == 101
        assert store.most_at_once == WRITERS


def test_a_disk_is_not_shared_by_more_than_it_has_time_for():
    """Eight writes of 4 s each would all be late at once; five are in time."""
    store = Uploads(bytes_per_s=1000.0)
    queue = SpillQueue([spillable("probe", 5), *(spillable(str(n), 400) for n in range(8))], PrefillCost(1.0, 1.0),
                       store.now + 21.0, lambda: store.now)  # fmt: skip
    assert len(store.drain(queue)) == 1 + 5


def test_more_kv_than_the_host_should_hold_goes_alone():
    gib = 1 << 30
    store = Uploads(bytes_per_s=gib)
    sizes = [1, 1, 1, 1, 1, 9]
    queue = SpillQueue([Spillable(str(n), size, 0, size * gib) for n, size in enumerate(sizes)], PrefillCost(1.0, 1.0),
                       store.now + 100.0, lambda: store.now)  # fmt: skip
    assert store.drain(queue) == ["0", "5", "1", "2", "3", "4"]
    assert store.most_at_once == 4


def test_spills_are_read_here_and_written_on_threads_of_their_own():
    here, together = threading.get_ident(), threading.Barrier(3, timeout=30)
    candidates = [spillable("a", 1), *(spillable(name, 5) for name in "bcd")]
    queue = SpillQueue(candidates, PrefillCost(1.0, 0.0), time.monotonic() + 60)

    def read(trajectory_id: str) -> SpilledKv:
        assert threading.get_ident() == here
        return kv(1 if trajectory_id == "a" else 5)

    def encode(trajectory_id: str, one: SpilledKv) -> list[memoryview]:
        return encode_kv(one, layout(), trajectory_id, TOKENS)

    def write(name: str, parts: list[memoryview]) -> bool:
        assert threading.get_ident() != here
        written[name] = b"".join(parts)
        if name != "a.kv":
            together.wait()  # three at once, or none goes on
        return name != "c.kv"

    written: dict[str, bytes] = {}
    records = write_spills(queue, read, encode, write)
    assert [r.trajectory_id for r in records] == ["a", "b", "d"]
    for r in records:
        data = written[r.name]
        assert (r.size_bytes, r.digest) == (len(data), hashlib.sha256(data).hexdigest())
        assert decode_kv(data, r.name, layout(), r.trajectory_id, TOKENS).positions == r.positions


def test_a_write_that_came_to_nothing_teaches_no_rate():
    store = Uploads(bytes_per_s=1000.0)
    queue = SpillQueue([spillable(name, n) for name, n in (("a", 1), ("b", 90), ("c", 30), ("d", 20))],
                       PrefillCost(1.0, 1.0), store.now + 1.0, lambda: store.now)  # fmt: skip
    first = queue.next()
    assert first is not None
    store.now += 0.01
    queue.wrote(first, 0.01)
    second = queue.next()
    assert second is not None
    assert second.trajectory_id == "b"
    assert queue.next() is None  # no time beside it
    store.now += 0.01
    queue.lost(second)  # refused at once: not 900 bytes in 0.01 s
    assert store.drain(queue) == ["c", "d"]
    assert store.now == pytest.approx(100.52)


def test_a_write_that_fails_is_not_passed_over():
    queue = SpillQueue([spillable(name, 5) for name in "ab"], PrefillCost(1.0, 0.0), time.monotonic() + 60)

    def write(name: str, parts: list[memoryview]) -> bool:
        raise StoreError(name, expected="room", found="none")

    with pytest.raises(StoreError, match="room"):
        write_spills(queue, lambda _: kv(), lambda name, one: encode_kv(one, layout(), name, TOKENS), write)


def test_keys_and_values_are_not_copied():
    one = kv()
    parts = encode_kv(one, layout(), "t1", TOKENS)
    addresses = [np.frombuffer(part, np.uint8).ctypes.data for part in parts]
    assert addresses[-2:] == [one.k_MLGC.data_ptr(), one.v_MLGC.data_ptr()]


def test_what_may_be_written_is_not_copied_when_read():
    data = bytearray(encoded(kv(), layout(), "t1", TOKENS))
    back = decode_kv(memoryview(data), "x.kv", layout(), "t1", TOKENS)
    assert same(back.k_MLGC, kv().k_MLGC)
    start = np.frombuffer(data, np.uint8).ctypes.data
    for tensor in (back.k_MLGC, back.v_MLGC):
        assert start < tensor.data_ptr() < start + len(data)
    kept = decode_kv(bytes(data), "x.kv", layout(), "t1", TOKENS)
    data[:] = bytes(len(data))
    assert same(kept.v_MLGC, kv().v_MLGC)
    assert not back.v_MLGC.any()


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
    queue.wrote(first, 0.5)
    second = queue.next()
    assert second is not None
    queue.wrote(second, 5.0)
    assert queue.next() is None
