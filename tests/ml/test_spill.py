"""Spilled KV: what comes back is what went in, for the same tokens and weights, or it is refused."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace

import pytest
import torch

from ml.rollout.spill import KvLayout, SpilledKv, decode_kv, encode_kv
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
    [{"student_digest": "b" * 64}, {"dtype": "F32"}, {"layers": 3}, {"kv_heads": 2}, {"head_channels": 8}],
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
