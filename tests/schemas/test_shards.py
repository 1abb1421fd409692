from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as safetensors_load

from schemas import shards
from schemas.errors import FormatError


@given(rows=st.integers(0, 600), width=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_round_trip_and_the_ecosystem_reads_it(rows, width, seed):
    rng = np.random.default_rng(seed)
    tensors = {
        "ids": ("I32", rng.integers(-5, 5, rows, dtype=np.int32)),
        "logprobs": ("F32", rng.standard_normal((rows, width), dtype=np.float32)),
        "mask": ("U8", rng.integers(0, 2, rows, dtype=np.uint8)),
    }
    data = shards.encode(tensors, {"student": "x"})
    ours, theirs = shards.decode(data, "here"), safetensors_load(data)
    for name, (_, array) in tensors.items():
        np.testing.assert_array_equal(ours[name], array)
        np.testing.assert_array_equal(theirs[name], array)


def test_a_token_range_is_one_byte_range():
    rows = np.arange(1000 * 7, dtype=np.uint16).reshape(1000, 7)
    data = shards.encode({"hidden": ("BF16", rows)})
    spec = shards.decode_header(data, "here")["hidden"]
    assert spec.start % shards.ALIGN_BYTES == 0
    part = data[spec.start + 300 * spec.row_bytes : spec.start + 310 * spec.row_bytes]
    np.testing.assert_array_equal(np.frombuffer(part, np.uint16).reshape(10, 7), rows[300:310])


@pytest.mark.parametrize("cut", [0, 3, 8, 200, 4096, 4100])
def test_cut_objects_are_refused(cut):
    data = shards.encode({"hidden": ("F32", np.ones((5, 3), np.float32))})
    with pytest.raises(FormatError, match="here"):
        shards.decode(data[:cut], "here")


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b'{"a":1}', b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
     b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', b"\xff\xff"],
)  # fmt: skip
def test_hostile_headers_are_refused(header):
    with pytest.raises(FormatError):
        shards.decode(struct.pack("<Q", len(header)) + header + b"\0" * 64, "here")


def test_a_huge_length_field_allocates_nothing():
    with pytest.raises(FormatError):
        shards.decode(struct.pack("<Q", 2**62) + b"{}", "here")


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 513])
def test_block_crcs_name_the_damaged_block(rows):
    data = np.random.default_rng(0).integers(0, 2**16, (rows, 3)).astype(np.uint16)
    crcs = shards.block_crcs(data)
    assert len(crcs) == -(-rows // 256)
    shards.check_block_crcs(data, crcs, "shard")
    damaged = data.copy()
    damaged[rows - 1, 2] ^= 1
    with pytest.raises(FormatError, match=f"block {(rows - 1) // 256} "):
        shards.check_block_crcs(damaged, crcs, "shard")
    with pytest.raises(FormatError, match="blocks"):
        shards.check_block_crcs(data, [*crcs, 0], "shard")


def test_wrong_carrier_is_our_bug():
    with pytest.raises(TypeError, match="BF16"):
        shards.encode({"h": ("BF16", np.zeros((1, 1), np.float32))})


def test_header_is_json_padded_with_spaces():
    data = shards.encode({"h": ("U8", np.zeros((2, 2), np.uint8))}, {"b": "2", "a": "1"})
    (length,) = struct.unpack_from("<Q", data)
    assert json.loads(data[8 : 8 + length])["__metadata__"] == {"a": "1", "b": "2"}
    assert data[8 : 8 + length].endswith(b" ")
