from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from schemas import config
from schemas.errors import ConfigError, OpdError
from tests.support.policy_gradient import PolicyGradientSettings

MINIMAL = {
    "run_id": "night-1",
    "student": {"path": "s"},
    "teachers": [{"id": "b", "path": "x"}, {"id": "a", "path": "y", "weight": 2.0}],
    "prompts": {"datasets": [{"name": "chain_sum", "size": 50, "teachers": ["a"]}]},
}


def with_change(path: str, value):
    values = copy.deepcopy(MINIMAL)
    *sections, key = path.split(".")
    node = values
    for section in sections:
        node = node.setdefault(section, {})
    node[key] = value
    return values


def test_defaults_and_derived_values():
    run = config.parse(MINIMAL)
    assert run.teacher_ids == ("a", "b")
    assert run.teacher(0).weight == 2.0
    assert run.prompts.datasets[0].domain == "chain_sum"


def test_a_teacher_is_ours_unless_it_names_another_kind():
    changed = with_change("teachers", [MINIMAL["teachers"][0], {"id": "a", "path": "y", "kind": "transformers"}])
    run = config.parse(changed)
    assert [(t.kind, t.precision) for t in map(run.teacher, (0, 1))] == [("transformers", "bf16"), ("opd", "bf16")]
    assert config.parse(run.model_dump()) == run
    old = {"teachers": [{"id": "b"}, {"id": "a"}]}
    assert [t.get("kind") for t in run.content(old)["teachers"]] == [None, "transformers"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("train.learning_rte", 1.0, "did you mean 'learning_rate'"),
        ("rollot", {}, "did you mean 'rollout'"),
        ("student.precison", "bf16", "did you mean 'precision'"),
        ("train.learning_rate", "fast", "train.learning_rate"),
        ("train.learning_rate", -1.0, "greater than 0"),
        ("rollout.top_p", 1.5, "less than or equal to 1"),
        ("run_id", "../x", "run_id"),
        ("run_id", "", "run_id"),
        ("teachers", [], "teachers"),
        ("teachers", [{"id": "a", "path": "x"}, {"id": "a", "path": "y"}], "each id once"),
        ("teachers", [{"id": "a", "path": "x", "kind": "vllm"}], "teachers.0.kind"),
        ("teachers", [{"id": "a", "path": "x", "kind": "transformer"}], "did you mean 'transformers'"),
        ("teachers", [{"id": "a", "path": "x", "precison": "bf16"}], "teachers.0.precison"),
        (
            "teachers",
            [{"id": "a", "path": "x", "kind": "transformers", "precison": "bf16"}],
            "did you mean 'precision'",
        ),
        ("teachers", [{"id": "a", "path": "x", "kind": "transformers", "precision": "mxfp4"}], "'mxfp4'"),
        ("teachers", [{"id": "a", "kind": "transformers"}], "teachers.0.path"),
        ("student", {}, "student.path"),
        ("prompts", {"datasets": [{"name": "g", "size": 1, "teachers": ["aa"]}]}, "did you mean 'a'"),
        ("prompts", {"datasets": [{"name": "g", "size": 1, "teachers": []}]}, "teachers"),
        ("train.learning_rate", float("nan"), "finite"),
        ("rollout.temperature", 1e-39, "a temperature from 1e-30"),
        ("rollout.temperature", 1e-31, "a temperature from 1e-30"),
        ("train.objective.temperature", 1e39, "a temperature from 1e-30"),
        ("rollout.top_p", 1e-40, "fp32"),
        ("train.learning_rate", 1e-40, "fp32"),
        ("train.learning_rate", 1e39, "fp32"),
        ("train.weight_decay", 1e-46, "fp32"),
        ("train.gradient_clip", 1e-45, "fp32"),
        ("train.beta2", 1 - 1e-9, "below 1 in fp32"),
        ("teachers", [{"id": "a", "path": "x", "weight": 1e-39}], "weight"),
        ("teachers", [{"id": "a", "path": "x", "weight": 1e39}], "fp32"),
        ("seed", 1 << 63, "seed"),
        ("train.compute", "fp8", "'fp8' with student.precision = 'bf16'"),
    ],
)
def test_bad_settings_are_named(path, value, message):
    with pytest.raises(ConfigError) as caught:
        config.parse(with_change(path, value))
    assert message in str(caught.value)


def test_settings_at_the_edge_of_fp32_are_taken():
    for path, value in (
        ("rollout.temperature", 1e-30), ("train.weight_decay", 0.0), ("train.learning_rate", 2.0**-126),
        ("train.gradient_clip", 3.4e38), ("train.beta1", 0.0), ("train.beta2", 0.9999999), ("seed", -(1 << 63)),
    ):  # fmt: skip
        assert np.isfinite(np.float32(value))
        config.parse(with_change(path, value))


def test_operational_settings_do_not_change_content():
    run = config.parse(MINIMAL)
    other = config.parse(with_change("rollout.workers", 7) | {"data": "elsewhere", "iterations": 9})
    assert run.content() == other.content()
    assert run.content() != config.parse(with_change("rollout.temperature", 0.5)).content()


@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        ("divergence", "forward", "divergence"),
        ("temperature", 2.0, "temperature"),
        ("kl_precision", "fp8", "precision"),
    ],
)
def test_kl_settings_of_the_section_train_mean_what_they_did(old, value, new):
    run = config.parse(with_change(f"train.{old}", value))
    assert run == config.parse(with_change(f"train.objective.{new}", value))
    assert run.train.objective.type == "kl"
    values = with_change(f"train.{old}", value)
    values["train"]["objective"] = {new: value}
    with pytest.raises(ConfigError, match=f"train.objective.{new} in its place"):
        config.parse(values)


def test_an_objective_has_the_teachers_that_it_needs():
    for change in ({"teachers": []}, {"prompts": {"datasets": [{"name": "chain_sum", "size": 9}]}}):
        with pytest.raises(ConfigError, match="teachers"):
            config.parse(copy.deepcopy(MINIMAL) | change)

    class Train(config.Train):
        objective: PolicyGradientSettings = PolicyGradientSettings.model_validate({})

    class RunConfig(config.RunConfig):
        train: Train = Train.model_validate({})

    alone = {"teachers": [], "prompts": {"datasets": [{"name": "chain_sum", "size": 9}]}}
    assert RunConfig.model_validate(copy.deepcopy(MINIMAL) | alone).teacher_ids == ()
    with pytest.raises(ConfigError, match="none, which"):
        RunConfig.model_validate(copy.deepcopy(MINIMAL))


def test_load_reads_toml_with_a_bom_and_overrides(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(
        b'\xef\xbb\xbfrun_id = "r"\r\n[student]\r\npath="s"\r\n[[teachers]]\r\nid="a"\r\npath="x"\r\n'
        b'[[prompts.datasets]]\r\nname="chain_sum"\r\nsize=9\r\nteachers=["a"]\r\n'
    )
    run = config.load(path, ["train.learning_rate=1e-4", "run_id=tonight", "rollout.top_k=5"])
    assert (run.run_id, run.train.learning_rate, run.rollout.top_k) == ("tonight", 1e-4, 5)


@pytest.mark.parametrize("setting", ["train.learning_rate", "=3", "run_id.x=3"])
def test_a_bad_override_says_its_form(tmp_path, setting):
    path = tmp_path / "run.toml"
    path.write_text('run_id = "r"\n')
    with pytest.raises(ConfigError, match="--set"):
        config.load(path, [setting])


@pytest.mark.parametrize(
    ("data", "message"), [(None, "no such file"), (b"run_id = ", "TOML"), (b"\xff\xfe", "UTF-8"), (b"a=1\nb=2\n", "")]
)
def test_bad_files_are_named(tmp_path, data, message):
    path = tmp_path / "run.toml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_errors_survive_pickling():
    error = ConfigError("here", expected="a", found="b", safe="all", next_command="opd run")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, OpdError)
    assert (str(again), again.exit_status) == (str(error), 2)


def test_the_list_of_settings_changes_only_on_purpose():
    names: list[str] = []

    def walk(model, prefix):
        for name, field in model.model_fields.items():
            nested = config.sections_of(field.annotation)
            for section in nested:
                walk(section, f"{prefix}{name}.")
            if not nested:
                names.append(prefix + name)

    walk(config.RunConfig, "")
    frozen = (Path(__file__).parents[1] / "golden" / "settings.txt").read_text().split()
    assert sorted(set(names)) == frozen


def examples() -> list:
    """The configurations that users start from: files of infra/runs and the README's."""
    root = Path(__file__).parents[2]
    found = [pytest.param(p.read_text(), id=p.name) for p in sorted((root / "infra/runs").glob("*.toml"))]
    blocks = re.findall(r"^```toml\n(.*?)^```", (root / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return found + [pytest.param(text, id=f"README {i}") for i, text in enumerate(blocks)]


@pytest.mark.parametrize("text", examples())
def test_every_example_loads(tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    run = config.load(tmp_path / "run.toml")
    assert run.prompts.files or run.prompts.datasets
