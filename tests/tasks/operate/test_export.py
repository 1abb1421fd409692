"""The student that a run has trained, as a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.store_local import LocalStore
from schemas import keys
from schemas.errors import ContractError, FormatError
from tasks.operate.export import export
from tests.support.tiny import tiny_model

GRID = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}


@pytest.fixture
def source(tmp_path) -> Path:
    """A trained student in fp32."""
    return tiny_model(tmp_path / "source", width=64)


@pytest.fixture
def root(tmp_path, source) -> str:
    """A run of two iterations whose last one is unfinished, as version 0.1 would have left it."""
    store, base = LocalStore(tmp_path / "data"), tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\nA model.\n")
    config = {
        "student": {"precision": "mxfp4"}, "teachers": [{"id": "a", "weight": 2.0}], "rollout": {"temperature": 0.7},
        "prompts": {"datasets": [{"name": "chain_sum", "size": 60}], "per_iteration": 4, "heldout": 2, "files": []},
        "dispatch": {}, "train": {"learning_rate": 1e-5},
    }  # fmt: skip
    record = {"config": config, "models": {"student": "5" * 64, "teacher:a": "7" * 64}, "student_path": str(base),
              "prompt_files": ["/secret/place/own.jsonl"]}  # fmt: skip
    store.put(keys.run_record("r", 1), keys.canonical_json(record))
    objects = []
    for path in sorted(source.iterdir()):
        key = f"runs/r/00000/train/f/p00000/e000001/export/{path.name}"
        store.put(key, path.read_bytes())
        objects.append({"name": path.name, "key": key, "digest": keys.digest_bytes(path.read_bytes())})
    heldout = {"all": 0.9, "a": 0.9}
    stats = {
        "train": {"checkpoint": {"version": "v" * 64, "export": objects, "optimizer": []},
                  "heldout_kl_before": heldout, "heldout_kl_after": {"all": 0.5, "a": 0.5}},
        "rollout": {"trajectories": 10.0, "train_reward": 0.25},
    }  # fmt: skip
    for stage, found in stats.items():
        manifest = {"stage": stage, "iteration": 0, "fingerprint": "f", "inputs": {}, "partitions": {}, "tables": {},
                    "stats": found, "output_digest": "o"}  # fmt: skip
        store.put(f"runs/r/00000/{stage}/f/manifest.json", keys.canonical_json(manifest))
    store.put("runs/r/00001/rollout/g/p00000/epochs/000001.json", b"{}")
    return str(tmp_path / "data")


def test_bf16_holds_the_values_that_an_mxfp4_student_samples_with(root, source, tmp_path):
    done = export(root, "r", tmp_path / "out")
    assert (done.iteration, done.version) == (0, "v" * 64)
    assert done.size_bytes == sum(p.stat().st_size for p in (tmp_path / "out").iterdir())
    exported, trained = load_file(tmp_path / "out/model.safetensors"), load_file(source / "model.safetensors")
    assert set(exported) == set(trained)
    for name, weight in exported.items():
        assert weight.dtype == torch.bfloat16
        if "proj" not in name:
            assert torch.equal(weight, trained[name].to(torch.bfloat16))
            continue
        for row, wanted in zip(weight.float().reshape(-1, 32), trained[name].reshape(-1, 32), strict=True):
            largest = wanted.abs().max()
            scales = [2.0**e for e in range(-40, 10) if {float(v) / 2.0**e for v in row.abs()} <= GRID]
            assert any((row - wanted).abs().max() <= scale and largest <= 8 * scale for scale in scales), name
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("a question", return_tensors="pt")
    assert model.dtype == torch.bfloat16
    assert model.generate(**ids, max_new_tokens=3).shape[1] > ids["input_ids"].shape[1]


def test_fp32_is_the_trained_student_byte_by_byte(root, source, tmp_path):
    export(root, "r", tmp_path / "out", dtype="fp32", iteration=0)
    for path in source.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_mxfp4_is_a_quarter_of_bf16(root, tmp_path):
    export(root, "r", tmp_path / "out", dtype="mxfp4")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" in config
    names = load_file(tmp_path / "out/model.safetensors")
    assert names["model.layers.0.mlp.up_proj.weight.blocks"].dtype == torch.uint8


def test_the_card_tells_what_the_student_is_and_no_path_of_the_machine(root, tmp_path):
    export(root, "r", tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\n")
    for wanted in (
        "license: apache-2.0", "run `r`, iteration 0", "`base`", "- `a`, weight 2", "`chain_sum`, 60",
        "file `own.jsonl`", "| 0 | 10 | 0.2500 | - | 0.9000 | 0.5000 |", '"learning_rate": 1e-05',
    ):  # fmt: skip
        assert wanted in text
    assert str(tmp_path) not in text
    assert "/secret" not in text


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(root, tmp_path):
    (tmp_path / "there").mkdir()
    for given, error, words in (
        (("r", tmp_path / "there"), ContractError, "a new folder"),
        (("nobody", tmp_path / "out"), ContractError, "a run"),
        (("r", tmp_path / "out", 1), ContractError, "of iteration 1"),
    ):
        run_id, to, *iteration = given
        with pytest.raises(error, match=words):
            export(root, run_id, to, iteration=iteration[0] if iteration else None)
    damaged = next((tmp_path / "data").rglob("export/model.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(FormatError, match="SHA-256"):
        export(root, "r", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("opd-export-*"))
