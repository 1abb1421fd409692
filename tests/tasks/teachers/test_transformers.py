"""Teachers of kind "transformers": families that ours does not know, against their own logits."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ml.teacher import Reading
from ml.teacher_head import fold_head, fold_states, read_head_parts, read_teacher_head
from schemas.errors import ConfigError, ContractError, FormatError
from schemas.work.model import ModelSource
from tasks.teachers import kinds
from tasks.teachers.transformers import TransformersKind
from tests.support.families import FAMILIES, family_model
from tests.support.tiny import tiny_model

KIND = TransformersKind()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("student") / "m")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    return {name: family_model(base / name, name, tokenizer=tokenizer) for name in FAMILIES}


def source(folder: Path, precision: Literal["fp32", "bf16"] = "fp32", digest: str | None = None) -> ModelSource:
    return ModelSource(str(folder), digest or KIND.digests(folder).model, precision, precision)


def loaded(folder: Path, precision: Literal["fp32", "bf16"] = "fp32"):
    return KIND.load(source(folder, precision), torch.device("cpu"))


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def some_readings() -> list[Reading]:
    generator = torch.Generator().manual_seed(0)
    lengths = [(1, 1), (5, 1), (1, 9), (40, 33), (3, 2)]
    return [Reading(*(torch.randint(3, 259, (n,), generator=generator).tolist() for n in pair)) for pair in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_state_times_head_is_the_models_own_logit(folders, family):
    teacher = loaded(folders[family])
    head = teacher.facts.head
    theirs = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32).eval()
    ids = torch.randint(3, 259, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want_NV = theirs(ids[None]).logits[0]
    weight_VE, bias_V = read_head_parts(head)
    found_NV = teacher.states(ids.tolist()) @ weight_VE.T
    if bias_V is not None:
        found_NV = found_NV + bias_V
    found_NV = found_NV * head.scale
    assert want_NV.std() > 0.05
    torch.testing.assert_close(found_NV, want_NV, rtol=1e-5, atol=1e-5)
    assert torch.equal(found_NV.argmax(1), want_NV.argmax(1))
    assert (bias_V is not None) == (family == "Phi")
    assert head.scale == {"Cohere": 0.25, "Granite": 0.125}.get(family, 1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_states_and_head_give_the_logits_of_a_bf16_model(tmp_path, tokenizer, family):
    folder = family_model(tmp_path / "m", family, tokenizer=tokenizer, dtype="bfloat16")
    teacher, theirs = loaded(folder, "bf16"), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    head_VW = read_teacher_head(teacher.facts.head)
    assert head_VW.shape == (259, teacher.facts.stored_width)
    readings = some_readings()
    found = list(teacher.hidden_states(readings, batch_tokens=100))
    for reading, hidden_TW in zip(readings, found, strict=True):
        assert (hidden_TW.dtype, hidden_TW.shape) == (
            torch.bfloat16, (len(reading.response_ids), teacher.facts.stored_width),
        )  # fmt: skip
        logits_TV = hidden_TW.double() @ head_VW.double().T
        with torch.no_grad():
            own_NV = theirs(torch.tensor([[*reading.context_ids, *reading.response_ids][:-1]])).logits[0].double()
        own_TV = own_NV[len(reading.context_ids) - 1 :]
        # Theirs are rounded to bf16, twice where a bias or a scale comes after the product.
        torch.testing.assert_close(logits_TV, own_TV, rtol=2**-7, atol=2**-8 * float(own_TV.abs().max()))


def test_rows_do_not_depend_on_company_or_batch_tokens(folders):
    for family in ("GPT2", "Mixtral"):
        teacher, readings = loaded(folders[family], "bf16"), some_readings()
        alone = [next(teacher.hidden_states([r], batch_tokens=1)) for r in readings]
        for batch_tokens in (1, 10_000):
            found = list(teacher.hidden_states(readings, batch_tokens=batch_tokens))
            assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_a_bias_is_folded_to_the_last_bit_and_a_scale_exactly():
    generator = torch.Generator().manual_seed(3)
    weight_VE, bias_V = torch.randn(50, 30, generator=generator), torch.randn(50, generator=generator) * 7
    hidden_TE = torch.randn(4, 30, generator=generator).bfloat16()
    for scale in (1.0, 2.0**-5):
        head_VW = fold_head(weight_VE, bias_V, scale)
        assert (head_VW.dtype, head_VW.shape) == (torch.bfloat16, (50, 48))
        stored_TW = fold_states(hidden_TE, has_bias=True)
        want_TV = (hidden_TE.double() @ weight_VE.bfloat16().double().T + bias_V.double()) * scale
        found_TV = stored_TW.double() @ head_VW.double().T
        torch.testing.assert_close(found_TV, want_TV, rtol=0, atol=2.0**-22 * scale * float(bias_V.abs().max()))
    assert torch.equal(fold_head(weight_VE, None, 0.5), weight_VE.bfloat16() / 2)
    with pytest.raises(ConfigError, match="a power of two"):
        fold_head(weight_VE, None, 0.3)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("Gemma2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("Cohere", {"logit_scale": 0.3}, "logit_scale"),
        ("Granite", {"logits_scaling": 6.0}, "logits_scaling"),
    ],
)
def test_logits_that_the_loss_cannot_rebuild_are_refused_by_setting(
    tmp_path, tokenizer, family, changes, named, monkeypatch
):
    monkeypatch.setitem(FAMILIES, "Gemma2", FAMILIES["Gemma"])
    folder = family_model(tmp_path / "m", family, tokenizer=tokenizer, **changes)
    with pytest.raises(ConfigError, match=named) as caught:
        KIND.facts(folder)
    assert "linear_kl" in caught.value.next_command


def test_what_a_model_does_after_its_head_is_found_by_its_logits(folders):
    """Falcon knows no logit scale: a model that does something that its settings do not say."""
    teacher = loaded(folders["Falcon"])
    teacher.prove()
    model = teacher._model
    before = model.forward

    def other(*arguments, **named):
        out = before(*arguments, **named)
        out.logits = out.logits * 1.001
        return out

    model.forward = other
    with pytest.raises(ConfigError, match="FalconForCausalLM to give logits"):
        teacher.prove()
    model.forward = before
    teacher.prove()
    with torch.no_grad():

        def higher(_module: Any, _inputs: Any, output: Any) -> Any:
            return output + 0.5

        teacher._head.register_forward_hook(higher)
        with pytest.raises(ConfigError, match="hidden state times head"):
            teacher.prove()


def test_a_model_that_sees_later_tokens_is_refused(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(
        FAMILIES, "Bert",
        {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
         "intermediate_size": 64, "max_position_embeddings": 512, "initializer_range": 0.15},
    )  # fmt: skip
    folder = family_model(tmp_path / "m", "Bert", tokenizer=tokenizer, is_decoder=False)
    with pytest.raises(ConfigError, match="later tokens"):
        loaded(folder)


def test_folders_that_cannot_teach_are_refused_by_name(folders, tmp_path):
    def copy(name: str, family: str = "Phi") -> Path:
        return Path(shutil.copytree(folders[family], tmp_path / name))

    pickled = copy("pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin, a pickle"):
        KIND.facts(pickled)
    adapter = copy("adapter")
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        KIND.facts(adapter)
    quantised = copy("quantised")
    edit(quantised / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match="quantization_config"):
        KIND.facts(quantised)
    unknown = copy("unknown")
    edit(unknown / "config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Model"})
    with pytest.raises(ConfigError, match="code of the folder's own"):
        KIND.facts(unknown)
    other = copy("other")
    edit(other / "config.json", vocab_size=300)
    with pytest.raises(FormatError, match=r"lm_head\.weight"):
        KIND.facts(other)
    for name, change in (("missing", "pop"), ("spare", "add"), ("nan", "nan"), ("headless", "head")):
        folder = copy(name)
        tensors = load_file(folder / "model.safetensors")
        if change == "pop":
            del tensors["model.layers.1.mlp.fc1.weight"]
        elif change == "add":
            tensors["model.layers.1.mlp.fc9.weight"] = torch.ones(3)
        elif change == "nan":
            tensors["model.layers.1.mlp.fc1.weight"][1, 2] = torch.nan
        else:
            del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, match in (("missing", "lacks: model.layers.1.mlp.fc1"), ("spare", "does not use"), ("nan", "NaN"),
                        ("headless", "the output embedding as one of lm_head.weight")):  # fmt: skip
        with pytest.raises(FormatError, match=match):
            loaded(tmp_path / name)


def test_a_model_without_a_context_length_is_refused_until_its_config_says_one(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(FAMILIES, "Bloom", {"vocab_size": 259, "hidden_size": 32, "n_layer": 2, "n_head": 4})
    folder = family_model(tmp_path / "m", "Bloom", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="how many positions"):
        KIND.facts(folder)
    edit(folder / "config.json", max_position_embeddings=300)
    assert loaded(folder).facts.context_tokens == 300


def test_what_cannot_be_read_is_refused(folders):
    teacher = loaded(folders["GPT2"])
    assert (teacher.facts.context_tokens, teacher.facts.input_rows) == (512, 259)
    for context, response, named in (([1] * 500, [2] * 14, "512 positions"), ([1, 259], [2], "ids below 259")):
        with pytest.raises(ContractError, match=named):
            list(teacher.hidden_states([Reading(context, response)], batch_tokens=100))
    with torch.no_grad():
        teacher._model.transformer.ln_f.weight[3] = torch.inf
    with pytest.raises(ContractError, match="NaN or infinity"):
        list(teacher.hidden_states([Reading([1], [2])], batch_tokens=10))


def test_the_digest_covers_all_of_config_json_weights_tokenizer_and_transformers(folders, tmp_path, monkeypatch):
    before = KIND.digests(folders["Phi"])
    folder = Path(shutil.copytree(folders["Phi"], tmp_path / "m"))
    assert KIND.digests(folder) == before
    edit(folder / "config.json", partial_rotary_factor=0.25)
    changed = KIND.digests(folder)
    assert changed.weights == before.weights
    assert changed.model != before.model
    with pytest.raises(ContractError, match="of digest"):
        KIND.load(source(folder, digest=before.model), torch.device("cpu"))
    shutil.copyfile(folders["Phi"] / "config.json", folder / "config.json")
    edit(folder / "tokenizer_config.json", padding_side="left")
    assert KIND.digests(folder).model != before.model
    shutil.copyfile(folders["Phi"] / "tokenizer_config.json", folder / "tokenizer_config.json")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.bias"][7] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert KIND.digests(folder).head != before.head
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "9.9")
    assert KIND.digests(folders["Phi"]).model != before.model


def test_an_unknown_kind_is_named():
    with pytest.raises(ContractError, match="one of opd, transformers"):
        kinds.of("vllm")
