"""Digests of verifiers see what decides a reward, and run nothing."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from schemas.errors import ConfigError
from tasks.rewards import gym_scores, verifiers
from tasks.rewards.verifiers import source_digest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a verifier that imports a neighbour and a package; running either would be seen."""
    monkeypatch.chdir(tmp_path)
    files = {
        "own_rewards.py": "import own_helper, numpy, json\nfrom own_package import part\nraise SystemExit(9)\n",
        "own_helper.py": "from own_deeper import x\n",
        "own_deeper.py": "x = 1\n",
        "own_package/__init__.py": "",
        "own_package/part.py": "from . import other\n",
        "own_package/other.py": "y = 1\n",
        "own_other.py": "z = 1\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "counts"),
    [("own_rewards.py", True), ("own_helper.py", True), ("own_deeper.py", True), ("own_package/__init__.py", True),
     ("own_package/part.py", True), ("own_package/other.py", True), ("own_other.py", False)],
)  # fmt: skip
def test_a_digest_follows_every_file_that_the_verifier_imports_and_no_other(folder, file, counts):
    before = source_digest("own_rewards:exact")
    assert source_digest("own_rewards:exact") == before
    path = folder / file
    path.write_text(path.read_text() + "# another byte\n")
    assert (source_digest("own_rewards:exact") != before) == counts
    assert not any(name.startswith("own_") for name in sys.modules)


def test_another_function_is_another_verifier(folder):
    assert source_digest("own_rewards:exact") != source_digest("own_rewards:nearly")


def test_a_module_of_a_package_counts_with_the_package_around_it(folder):
    before = source_digest("own_package.part:f")
    (folder / "own_package" / "__init__.py").write_text("# another byte\n")
    assert source_digest("own_package.part:f") != before


@pytest.mark.parametrize("name", ["reasoning_gym", "own_rewards:exact", "numpy.linalg:norm"])
def test_another_version_of_an_installed_package_is_another_digest(folder, monkeypatch, name):
    before, of_builtins = source_digest(name), source_digest("builtins:len")
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda package: real(package) + ".post1")
    assert source_digest(name) != before
    assert source_digest("builtins:len") == of_builtins


def test_the_shipped_verifier_counts_its_own_rules(tmp_path, monkeypatch):
    before = source_digest("reasoning_gym")
    edited = tmp_path / "gym_scores.py"
    with open(gym_scores.__file__) as source:
        edited.write_text(source.read() + "# another rule\n")
    monkeypatch.setattr(verifiers.gym_scores, "__file__", str(edited))
    assert source_digest("reasoning_gym") != before


@pytest.mark.parametrize("name", ["no_such_module:f", "own_package.no_such:f", "just_a_name", "", "a..b:f", "../x:f"])
def test_a_module_that_is_not_there_is_a_config_error(folder, name):
    with pytest.raises(ConfigError, match=r"package\.module:function"):
        source_digest(name)


def test_a_source_that_does_not_parse_has_a_digest(folder):
    before = source_digest("own_rewards:exact")
    (folder / "own_rewards.py").write_text("def (")
    assert source_digest("own_rewards:exact") != before


def test_a_module_below_folders_without_init_has_a_digest(folder):
    deep = folder / "own_folder" / "deeper" / "deepest"
    deep.mkdir(parents=True)
    (deep / "rewards.py").write_text("def f(text, prompt): return 1.0\n")
    before = source_digest("own_folder.deeper.deepest.rewards:f")
    (deep / "rewards.py").write_text("def f(text, prompt): return 2.0\n")
    assert source_digest("own_folder.deeper.deepest.rewards:f") != before
