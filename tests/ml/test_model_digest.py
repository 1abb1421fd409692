"""What a model's digest covers, and that nothing of another digest is loaded."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ml.checkpoint import load_model, read_head, save_model
from ml.linear import Linear
from ml.model_files import file_header, model_digest, model_digests, settings_digest, weights_digest
from schemas.errors import ContractError, FormatError
from tasks.inputs.text import Tokenizer
from tests.support.tiny import tiny_model


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("digest") / "m", tied=False)
    for name in ("special_tokens_map.json", "added_tokens.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def folder(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "m"))


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def sha(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def test_digests_follow_their_definition(tmp_path):
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), torch.randn(4).bfloat16()
    folder = tmp_path / "m"
    save_model(folder, {"rms_norm_eps": 0.5}, [("b", b), ("lm_head.weight", torch.from_numpy(a))])
    (folder / "tokenizer.json").write_text("{ }")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "top_p": 0.9}')
    head = sha(b'["lm_head.weight","F32",[2,3]]' + a.tobytes())
    other = sha(b'["b","BF16",[4]]' + b.view(torch.uint16).numpy().tobytes())
    weights = sha(f'{{"b":"{other}","lm_head.weight":"{head}"}}'.encode())
    settings = sha(
        b'{"config.json":{"rms_norm_eps":0.5},"generation_config.json":[1,2],"tokenizer.json":"%b"}'
        % sha(b"{ }").encode()
    )
    found = model_digests(folder)
    assert (found.weights, found.settings, found.head) == (weights, settings, head)
    assert (weights_digest(folder), settings_digest(folder)) == (weights, settings)
    assert model_digest(folder) == found.model == sha(f'{{"settings":"{settings}","weights":"{weights}"}}'.encode())


def test_the_weights_digest_sees_every_change(folder):
    digests, settings = {weights_digest(folder)}, settings_digest(folder)
    tensors = load_file(folder / "model.safetensors")
    for change in (
        lambda t: t | {"model.norm.weight": t["model.norm.weight"].nextafter(torch.tensor(9.0))},
        lambda t: t | {"model.norm.weight": t["model.norm.weight"].bfloat16()},
        lambda t: t | {"model.norm.weight": t["model.norm.weight"][None]},
        lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"},
        lambda t: {k.replace("norm", "morn"): v for k, v in t.items()},
    ):
        save_file(change(tensors), folder / "model.safetensors")
        digests.add(weights_digest(folder))
        assert settings_digest(folder) == settings
    assert len(digests) == 6


SETTINGS = {
    "norm": ("config.json", {"rms_norm_eps": 0.5}),
    "rope": ("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}),
    "a setting that nobody knows": ("config.json", {"new": None}),
    "end of the configuration": ("config.json", {"eos_token_id": 5}),
    "end of generation": ("generation_config.json", {"eos_token_id": [5, 6]}),
    "template": ("tokenizer_config.json", {"chat_template": "{{ messages[0].content }}"}),
    "end token": ("tokenizer_config.json", {"eos_token": "<|im_start|>"}),
    "vocabulary": ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}),
    "special tokens": ("special_tokens_map.json", {"bos_token": "<|im_end|>"}),
    "added tokens": ("added_tokens.json", {"<x>": 300}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_digest_sees_what_changes_output_or_prompts(folder, name):
    before, weights = settings_digest(folder), weights_digest(folder)
    file, changes = SETTINGS[name]
    edit(folder / file, **changes)
    assert settings_digest(folder) != before
    assert weights_digest(folder) == weights
    with pytest.raises(ContractError, match=file):
        load_model(folder, precision="fp32", compute="fp32", digest=model_digest_of(before, weights))


def model_digest_of(settings: str, weights: str) -> str:
    return sha(f'{{"settings":"{settings}","weights":"{weights}"}}'.encode())


def test_a_template_in_a_file_of_its_own_counts(folder):
    digests = {settings_digest(folder)}
    for name in ("chat_template.jinja", "chat_template.json"):
        (folder / name).write_text("{}")
        digests.add(settings_digest(folder))
    assert len(digests) == 3


def test_who_wrote_a_folder_and_in_which_dtype_is_no_setting(folder):
    before = model_digest(folder)
    edit(folder / "config.json", transformers_version="9", _name_or_path="/x", architectures=["X"], dtype="float16")
    edit(folder / "generation_config.json", transformers_version="9", temperature=0.1)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()), indent=7))
    (folder / "README.md").write_text("new")
    assert model_digest(folder) == before


def test_a_configuration_without_finite_numbers_has_no_digest(folder):
    edit(folder / "config.json", rms_norm_eps=float("nan"))
    with pytest.raises(FormatError, match=r"config\.json"):
        model_digest(folder)


_watched: list[tuple[Path, set[str]]] = []


def _on_open(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _watched and isinstance(arguments[0], str | Path):
        folder, opened = _watched[-1]
        if Path(arguments[0]).parent == folder:
            opened.add(Path(arguments[0]).name)


@contextmanager
def files_opened(folder: Path) -> Iterator[set[str]]:
    if not _watched:
        sys.addaudithook(_on_open)  # for good: hooks cannot be taken back
    _watched.append((folder, set()))
    yield _watched[-1][1]


def test_every_file_that_is_read_is_covered(folder):
    for name in ("chat_template.jinja", "chat_template.json"):
        (folder / name).write_text("{}")
    with files_opened(folder) as opened:
        load_model(folder, precision="fp32", compute="fp32")
        Tokenizer.load(folder)
    assert {"config.json", "tokenizer_config.json", "chat_template.jinja"} <= opened
    before = settings_digest(folder)
    for name in opened - {"model.safetensors"}:
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        if name != "config.json":
            assert settings_digest(folder) != before, name
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("options", [
    {"precision": "fp32", "compute": "fp32"},
    {"precision": "bf16", "compute": "bf16"},
    {"precision": "bf16", "compute": "bf16", "trainable": True},
])  # fmt: skip
def test_the_model_of_the_digest_loads_and_no_other(folder, options):
    found = model_digests(folder)
    plain, checked = load_model(folder, **options), load_model(folder, **options, digest=found.model)
    for (name, want), have in zip(plain.state_dict().items(), checked.state_dict().values(), strict=True):
        assert torch.equal(want, have), name
    change_tensors(folder, lambda t: t | {"model.norm.weight": t["model.norm.weight"] * 2})
    with pytest.raises(ContractError, match=r"model\.safetensors"):
        load_model(folder, **options, digest=found.model)


def test_a_head_is_checked_by_its_own_digest(folder):
    found = model_digests(folder)
    assert found.head is not None
    want = read_head(folder)
    change_tensors(folder, lambda t: t | {"model.norm.weight": t["model.norm.weight"] * 2})
    assert torch.equal(read_head(folder, digest=found.head), want)
    change_tensors(folder, lambda t: t | {"lm_head.weight": t["lm_head.weight"].roll(1, 0)})
    with pytest.raises(ContractError, match="head of digest"):
        read_head(folder, digest=found.head)


def test_a_head_that_becomes_the_embedding_is_another(folder):
    head = model_digests(folder).head
    edit(folder / "config.json", tie_word_embeddings=True)
    with pytest.raises(ContractError, match="head of digest"):
        read_head(folder, digest=head)


def test_bytes_that_change_after_they_were_hashed_are_not_loaded(folder, monkeypatch):
    digest = model_digest(folder)
    want = load_model(folder, precision="fp32", compute="fp32").state_dict()
    path, set_weight = folder / "model.safetensors", Linear.set_weight
    following = file_header(path)["model.layers.0.mlp.gate_proj.weight"]

    def overwrite_the_next(self: Linear, weight: torch.Tensor) -> None:
        if self.weight.shape == (48, 96):  # the first linear by name is a down_proj, and the second is hashed by now
            time.sleep(0.2)
            with path.open("r+b") as file:  # in place: the mapped pages change
                file.seek(following.start)
                file.write(bytes(following.length))
        set_weight(self, weight)

    monkeypatch.setattr(Linear, "set_weight", overwrite_the_next)
    found = load_model(folder, precision="fp32", compute="fp32", digest=digest).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
