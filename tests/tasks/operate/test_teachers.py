"""`opd teachers` as a user calls it, its figures against transformers with weights quantised by ml_dtypes."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import AutoModelForCausalLM

from flows.cli import main
from ml.checkpoint import load_model
from schemas import config
from tasks.inputs.models import check_models
from tasks.inputs.prompts import load_prompts
from tasks.inputs.text import Tokenizer
from tests.ml.test_mxfp4_loop import oracle_values
from tests.support.families import family_model
from tests.support.random_models import random_model
from tests.support.tiny import tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("teachers")
    tiny_model(base / "student", width=64)
    tiny_model(base / "teacher", width=32, layers=1, tied=False, seed=1)
    tiny_model(base / "ragged", width=48, layers=1)
    (base / "run.toml").write_text(
        f"""
run_id = "r"
scratch = "{base}/scratch"
[student]
path = "{base}/student"
[[teachers]]
id = "told"
path = "{base}/teacher"
template = "The answer is {{{{ answer }}}}."
[[prompts.datasets]]
name = "chain_sum"
size = 60
teachers = ["told"]
"""
    )
    return base


def oracle(folder: Path, contexts: list[list[int]]) -> tuple[float, float, float]:
    """(mean KL, largest KL, top-1 agreement) of MXFP4 against plain weights, in float64 throughout."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for _ in range(2)]
    with torch.no_grad():
        for name, parameter in models[0].named_parameters():
            if "_proj." in name:
                parameter.copy_(torch.from_numpy(oracle_values(parameter.float().numpy())))
        kls, agreed = [], []
        for ids in contexts:
            four, plain = (torch.log_softmax(m(torch.tensor([ids])).logits[0], -1) for m in models)
            kls.append((four.exp() * (four - plain)).sum(-1))
            agreed.append(four.argmax(-1) == plain.argmax(-1))
    kl = torch.cat(kls)
    return float(kl.mean()), float(kl.max()), float(torch.cat(agreed).double().mean())


def test_the_report_equals_transformers_with_quantised_weights(base, capsys):
    assert main(["teachers", "report", str(base / "run.toml"), "--json", "--prompts", "5"]) == 0
    student, told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    run = config.load(base / "run.toml")
    tokenizer = Tokenizer.load(base / "student")
    by_length: dict[int, list[list[int]]] = {}
    for prompt in load_prompts(run):
        ids = tokenizer.render(json.loads(prompt["messages"]))
        by_length.setdefault(len(ids), []).append(ids)
    assert (student["model"], student["prompts"], student["linears"]) == ("student", 5, 14)
    assert (told["model"], told["prompts"], told["linears"]) == ("teacher told", 5, 7)
    # A teacher reads more: its own system message.
    assert told["positions"] > student["positions"]
    work = json.loads((base / "scratch" / "r" / "work" / "report.json").read_text())
    for row, model in zip((student, told), work["models"], strict=True):
        contexts = model["contexts"]
        assert row["positions"] == sum(map(len, contexts))
        mean, largest, agreement = oracle(Path(model["folder"]), contexts)
        # bf16 products on one side of the comparison, float64 on the other.
        assert row["kl_mean"] == pytest.approx(mean, rel=0.05)
        assert row["kl_max"] == pytest.approx(largest, rel=0.1)
        assert row["top1_agreement"] == pytest.approx(agreement, abs=0.05)
        assert mean > 0.01
    for ids in work["models"][0]["contexts"]:
        assert ids in by_length[len(ids)]
    answers = {str(p["answer"]) for p in load_prompts(run)}
    texts = [tokenizer.decode(ids) for ids in work["models"][1]["contexts"]]
    assert all(any(f"The answer is {answer}." in text for answer in answers) for text in texts)


def test_a_packed_teacher_is_smaller_loads_the_same_and_is_told_apart(base, tmp_path, capsys):
    assert main(["teachers", "pack", str(base / "teacher"), "--to", str(tmp_path / "packed")]) == 0
    assert "of weights" in capsys.readouterr().out
    weights = [(f / "model.safetensors").stat().st_size for f in (base / "teacher", tmp_path / "packed")]
    assert weights[1] < weights[0] / 2
    found, want = (
        load_model(f, precision="mxfp4", compute="bf16").state_dict() for f in (tmp_path / "packed", base / "teacher")
    )
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert Tokenizer.load(tmp_path / "packed").fingerprint == Tokenizer.load(base / "student").fingerprint
    toml = tmp_path / "run.toml"
    toml.write_text((base / "run.toml").read_text().replace(f"{base}/teacher", f"{tmp_path}/packed"))
    assert main(["teachers", "report", str(toml)]) == 2
    assert "MXFP4 weights" in capsys.readouterr().err


def test_packing_replaces_nothing_but_what_it_made(base, tmp_path, capsys):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "thesis.txt").write_text("years of work")
    before = (base / "student" / "model.safetensors").read_bytes()
    for target in (kept, base / "student", base / "teacher"):
        assert main(["teachers", "pack", str(base / "student"), "--to", str(target)]) == 2
        assert f"--to {target}" in capsys.readouterr().err
    assert (kept / "thesis.txt").read_text() == "years of work"
    assert (base / "student" / "model.safetensors").read_bytes() == before
    again = [main(["teachers", "pack", str(base / "student"), "--to", str(tmp_path / "new")]) for _ in range(2)]
    assert again == [0, 0]
    assert main(["teachers", "pack", str(tmp_path / "new"), "--to", str(tmp_path / "new")]) == 2
    assert main(["teachers", "pack", str(base / "ragged"), "--to", str(tmp_path / "odd")]) == 2
    assert "32 columns" in capsys.readouterr().err
    assert not (tmp_path / "odd").exists()


def test_teachers_that_keep_their_own_dtype_are_left_out_of_the_report_by_name(base, tmp_path, capsys):
    family_model(tmp_path / "phi", "Phi", tokenizer=base / "student")
    toml = tmp_path / "run.toml"
    other = f'[[teachers]]\nid = "phi"\nkind = "transformers"\npath = "{tmp_path}/phi"\n'
    toml.write_text((base / "run.toml").read_text() + other)
    assert main(["teachers", "report", str(toml), "--json", "--prompts", "2"]) == 0
    found = capsys.readouterr()
    assert [json.loads(line)["model"] for line in found.out.splitlines()] == ["student", "teacher told"]
    assert "left out: teacher phi" in found.err


def test_a_report_on_nothing_is_refused(base, capsys):
    assert main(["teachers", "report", str(base / "run.toml"), "--prompts", "0"]) == 2
    assert "--prompts" in capsys.readouterr().err


def test_a_student_whose_linears_fp8_cannot_multiply_is_named_before_anything_runs(base):
    settings = ["student.precision=mxfp4", "train.compute=fp8"]
    check_models(base / "student", config.load(base / "run.toml", settings))
    random_model(base / "narrow", "small", seed=1, num_attention_heads=8, num_key_value_heads=1, head_dim=8)
    run = config.load(base / "run.toml", [*settings, f"student.path={base / 'narrow'}"])
    with pytest.raises(config.ConfigError, match=r"train\.compute[^\0]*16 rows[^\0]*8 in model\.layers\.0.*k_proj"):
        check_models(base / "narrow", run)


@pytest.mark.parametrize(
    ("student", "teacher", "precisions", "message"),
    [
        ("student", "teacher", ("mxfp4", "mxfp4"), None),
        ("student", "ragged", ("bf16", "bf16"), None),
        ("ragged", "teacher", ("mxfp4", "bf16"), r"student, precision[^\0]*48 in model\.layers\.0"),
        ("student", "ragged", ("bf16", "mxfp4"), r"teachers, told, precision[^\0]*multiple of 32"),
        ("student", "packed", ("bf16", "mxfp4"), None),
        ("student", "packed", ("bf16", "bf16"), r"teachers, told, precision[^\0]*mxfp4"),
        ("packed", "teacher", ("mxfp4", "bf16"), r"student\.path[^\0]*float weights"),
    ],
)
def test_precisions_that_a_folder_cannot_have_are_named_before_anything_runs(
    base, student, teacher, precisions, message
):
    if not (base / "packed").exists():
        assert main(["teachers", "pack", str(base / "teacher"), "--to", str(base / "packed")]) == 0
    settings = [f"student.path={base / student}", f"student.precision={precisions[0]}"]
    values = config.load(base / "run.toml", settings).model_dump()
    values["teachers"] = [{"id": "told", "path": str(base / teacher), "precision": precisions[1]}]
    run = config.parse(json.loads(json.dumps(values)))
    if message is None:
        check_models(base / student, run)
        return
    with pytest.raises(config.ConfigError, match=message):
        check_models(base / student, run)
