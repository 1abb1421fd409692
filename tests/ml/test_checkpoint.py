"""Model folders: what transformers wrote is read, what we wrote transformers reads, and damage is named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ml.checkpoint import load_model, read_head, save_model
from ml.model import PackedCausal
from ml.model_files import model_digest, read_config
from schemas.errors import ConfigError, FormatError, StoreError


def write_model(folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32, **kwargs) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder, **kwargs)
    return model


def logits(model, ids_N: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(ids_N, torch.arange(len(ids_N)), PackedCausal([0, len(ids_N)])))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_shard_size", ["5GB", "9KB"])
def test_folders_of_transformers_give_its_logits(tmp_path, tied, dtype, max_shard_size):
    theirs = write_model(tmp_path / "m", tied=tied, dtype=dtype, max_shard_size=max_shard_size).float()
    assert (tmp_path / "m" / "model.safetensors.index.json").exists() == (max_shard_size == "9KB")
    ids_N = torch.arange(40) % 60
    with torch.no_grad():
        want = theirs(ids_N[None]).logits[0]
    for trainable in (False, True):
        ours = load_model(tmp_path / "m", precision="fp32", compute="fp32", trainable=trainable)
        torch.testing.assert_close(logits(ours, ids_N), want, rtol=1e-5, atol=1e-5)
        assert all(p.requires_grad == trainable for p in ours.parameters())
        assert ours.training == trainable
    head = read_head(tmp_path / "m", precision="fp32")
    assert torch.equal(head, theirs.lm_head.weight)
    assert torch.equal(read_head(tmp_path / "m"), theirs.lm_head.weight.bfloat16())


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_inference_and_master_compute_the_same_bits(tmp_path, compute):
    write_model(tmp_path / "m")
    ids_N = torch.arange(50) % 60
    stored = load_model(tmp_path / "m", precision="bf16", compute=compute)
    master = load_model(tmp_path / "m", precision="bf16", compute=compute, trainable=True)
    assert all(p.dtype == torch.float32 for p in master.parameters())
    assert torch.equal(logits(stored, ids_N), logits(master, ids_N))


def test_what_is_saved_loads_in_transformers_bit_for_bit(tmp_path):
    theirs = write_model(tmp_path / "m", tied=True)
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    ours = load_model(tmp_path / "m", precision="bf16", compute="fp32", trainable=True)
    for shard_bytes, name in ((1 << 30, "whole"), (9000, "sharded")):
        save_model(
            tmp_path / name, read_config(tmp_path / "m"), ours.named_parameters(),
            companions=tmp_path / "m", shard_bytes=shard_bytes,
        )  # fmt: skip
        back = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert back.dtype == torch.float32
        for (key, want), found in zip(theirs.state_dict().items(), back.state_dict().values(), strict=True):
            assert torch.equal(found, want), key
        assert (tmp_path / name / "tokenizer.json").read_text() == "{}"
        assert (tmp_path / name / "generation_config.json").exists()
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert model_digest(tmp_path / "whole") == model_digest(tmp_path / "sharded") == model_digest(tmp_path / "m")


def test_equal_tensors_give_equal_bytes_and_a_folder_is_replaced_whole(tmp_path):
    tensors = [("b", torch.randn(3, 4)), ("a", torch.randn(5).bfloat16())]
    for _ in range(2):
        save_model(tmp_path / "one", {"x": 1}, tensors)
    save_model(tmp_path / "two", {"x": 1}, iter(tensors))
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    save_model(tmp_path / "one", {"x": 2}, [("c", torch.zeros(2))], shard_bytes=1)
    assert read_config(tmp_path / "one") == {"x": 2, "torch_dtype": "float32"}
    assert list(load_file(tmp_path / "one" / "model.safetensors")) == ["c"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


def test_a_failed_save_leaves_what_was_there(tmp_path):
    save_model(tmp_path / "m", {"x": 1}, [("a", torch.zeros(2))])
    before = (tmp_path / "m" / "model.safetensors").read_bytes()

    def broken():
        yield "a", torch.ones(2)
        raise RuntimeError("the source died")

    with pytest.raises(RuntimeError, match="the source died"):
        save_model(tmp_path / "m", {"x": 2}, broken())
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        save_model(tmp_path / "file" / "m", {}, [("a", torch.zeros(2))])


@pytest.fixture
def folder(tmp_path) -> Path:
    write_model(tmp_path / "m")
    return tmp_path / "m"


def load(folder: Path):
    return load_model(folder, precision="bf16", compute="fp32")


def change_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t | {"model.norm.weight": t["model.norm.weight"] * torch.nan}, "model.norm.weight"),
        (lambda t: t | {"lm_head.weight": t["lm_head.weight"] / 0}, "lm_head.weight"),
        (lambda t: t | {"model.norm.weight": torch.zeros(31)}, r"expected: shape \(32,\)"),
        (lambda t: t | {"model.norm.weight": torch.zeros(32, dtype=torch.int32)}, "F32, BF16 or F16"),
        (lambda t: t | {"model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}, "model.layers.2.mlp.up_proj.weight"),
        (lambda t: t | {"lm_head.bias": torch.zeros(60)}, "lm_head.bias"),
        (lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"}, "lm_head.weight"),
        (lambda t: {k: v for k, v in t.items() if "layers.1.self_attn.k_proj" not in k}, "layers.1.self_attn.k_proj"),
    ],
)
def test_a_tensor_at_fault_is_named(folder, change, named):
    change_tensors(folder, change)
    with pytest.raises(FormatError, match=named):
        load(folder)


def test_known_leftovers_are_passed(folder):
    change_tensors(folder, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load(folder)


def test_a_stored_head_must_agree_with_tied_embeddings(tmp_path):
    write_model(tmp_path / "m", tied=True)
    change_tensors(tmp_path / "m", lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    load(tmp_path / "m")
    change_tensors(tmp_path / "m", lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    with pytest.raises(FormatError, match=r"lm_head\.weight"):
        load(tmp_path / "m")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 3000, -1])
def test_a_cut_file_is_named(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    for read in (load, model_digest, read_head):
        with pytest.raises(FormatError, match=r"model\.safetensors"):
            read(folder)


@pytest.mark.parametrize(
    "head", [b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{]", b"\x04\0\0\0\0\0\0\0null", b"<html>error</html>"]
)
def test_bytes_that_are_not_safetensors_are_named(folder, head):
    (folder / "model.safetensors").write_bytes(head)
    for read in (load, model_digest, read_head):
        with pytest.raises(FormatError, match=r"model\.safetensors"):
            read(folder)


def test_missing_pieces_are_named(folder, tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path / "nowhere")
    (folder / "model.safetensors").rename(folder / "aside")
    with pytest.raises(ConfigError, match="neither"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(FormatError, match=r"config\.json"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(FormatError, match=r"config\.json"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m | {"model.norm.weight": "../m/secret.safetensors"}, "model.norm.weight"),
        (lambda m: m | {"model.norm.weight": 7}, "model.norm.weight"),
        (lambda m: m | {"model.norm.weight": "gone.safetensors"}, "gone.safetensors"),
        (lambda m: m | {"model.extra": m["model.norm.weight"]}, "model.extra"),
        (lambda m: {}, "weight_map"),
    ],
)
def test_a_bad_index_is_named(tmp_path, change, named):
    folder = tmp_path / "m"
    write_model(folder, max_shard_size="9KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"weight_map": change(index["weight_map"])}))
    for read in (load, model_digest):
        with pytest.raises(FormatError, match=named):
            read(folder)


@pytest.mark.parametrize("stale", [True, False])
def test_a_tensor_in_another_file_than_the_index_says_is_named(tmp_path, stale):
    folder = tmp_path / "m"
    write_model(folder, max_shard_size="9KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.norm.weight"
    file = index["weight_map"][name]
    if stale:  # a copy of other numbers, in a file after and one before the one that the index names
        others = sorted(set(index["weight_map"].values()) - {file})
        for file in (others[0], others[-1]):
            before = (folder / file).read_bytes()
            save_file(load_file(folder / file) | {name: torch.zeros(32)}, folder / file)
            for read in (load, model_digest):
                with pytest.raises(FormatError, match=rf"{file}, tensor {name}"):
                    read(folder)
            (folder / file).write_bytes(before)
        load(folder)
        return
    index["weight_map"].pop(name)
    path.write_text(json.dumps(index))
    for read in (load, model_digest):
        with pytest.raises(FormatError, match=rf"{file}, tensor {name}"):
            read(folder)


def test_a_missing_shard_is_named(tmp_path):
    folder = tmp_path / "m"
    write_model(folder, max_shard_size="9KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shutil.move(shard, tmp_path)
    for read in (load, model_digest):
        with pytest.raises(FormatError, match=shard.name):
            read(folder)
