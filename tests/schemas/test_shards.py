from __future__ import annotations

import json
import struct
import zlib

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


@pytest.mark.parametrize("rows", [0, 1, 256, 700])
def test_a_token_shard_says_the_crcs_of_its_blocks(rows):
    rng = np.random.default_rng(rows)
    columns = {
        "prompt_ids": ("I32", rng.integers(0, 9, 3).astype(np.int32)),
        "logprobs_raw": ("F32", rng.standard_normal(rows).astype(np.float32)),
        "sampled_mask": ("U8", rng.integers(0, 2, rows).astype(np.uint8)),
    }
    data = shards.encode_tokens(columns)
    assert {name: column.tolist() for name, column in safetensors_load(data).items()} == {
        name: column.tolist() for name, (_, column) in columns.items()
    }
    (length,) = struct.unpack_from("<Q", data)
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    expected = {
        name: [zlib.crc32(column[i : i + 256].tobytes()) for i in range(0, len(column), 256)]
        for name, (_, column) in columns.items()
    }
    assert metadata == {"format": "opd-tokens-2"} | {
        f"crcs.{name}": "".join(f"{crc:08x}" for crc in crcs) for name, crcs in expected.items()
    }
    crcs = shards.decode_token_crcs(data, "here")
    assert crcs is not None
    assert {name: found.tolist() for name, found in crcs.items()} == expected


@pytest.mark.parametrize("crcs", ["", "0" * 7, "0" * 16, "0000000x", "-0000001"])
def test_crcs_that_are_not_one_a_block_are_refused(crcs):
    ids = np.zeros(3, np.int32)
    data = shards.encode({"prompt_ids": ("I32", ids)}, {"format": "opd-tokens-2", "crcs.prompt_ids": crcs})
    with pytest.raises(FormatError, match="here, header, column prompt_ids"):
        shards.decode_token_crcs(data, "here")
    assert shards.decode_token_crcs(shards.encode({"prompt_ids": ("I32", ids)}), "here") is None


class OneObject:
    def __init__(self, data: bytes) -> None:
        self.data, self.lengths = data, []

    def get(self, key: str) -> bytes:
        return self.data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.lengths.append(length)
        return self.data[start : start + length]


@pytest.mark.parametrize(("rows", "reads"), [(5, [4096]), (256 * 2000, [4096, 12288])])
def test_a_head_is_read_whole_and_nothing_else(rows, reads):
    data = shards.encode_tokens({"sampled_mask": ("U8", np.zeros(rows, np.uint8))})
    read = OneObject(data)
    head = shards.read_head(read, "here")
    assert read.lengths == reads
    assert shards.decode_header(head, "here") == shards.decode_header(data, "here")
    assert len(head) == shards.decode_header(head, "here")["sampled_mask"].start


def test_the_head_of_a_huge_length_is_not_read():
    read = OneObject(struct.pack("<Q", 2**62) + b"{}".ljust(4096))
    with pytest.raises(FormatError, match="header"):
        shards.read_head(read, "here")
    assert read.lengths == [4096]


def test_wrong_carrier_is_our_bug():
    with pytest.raises(TypeError, match="BF16"):
        shards.encode({"h": ("BF16", np.zeros((1, 1), np.float32))})


def test_header_is_json_padded_with_spaces():
    data = shards.encode({"h": ("U8", np.zeros((2, 2), np.uint8))}, {"b": "2", "a": "1"})
    (length,) = struct.unpack_from("<Q", data)
    assert json.loads(data[8 : 8 + length])["__metadata__"] == {"a": "1", "b": "2"}
    assert data[8 : 8 + length].endswith(b" ")
