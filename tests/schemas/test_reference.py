"""The reference of settings: complete, in step with the page, and general enough for sections that are unions."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from schemas import config, reference
from schemas.section import Section, operational

REPOSITORY = Path(__file__).parents[2]


def test_the_page_is_what_the_command_prints():
    page = (REPOSITORY / "docs" / "settings.md").read_text()
    assert page == reference.markdown(), "opd config --reference > docs/settings.md"


def test_every_setting_and_section_says_what_it_means():
    for part in reference.parts():
        assert part.meaning, part.header
        for setting in part.settings:
            assert setting.meaning, f"{part.header} {setting.name}"


def test_the_reference_names_every_setting():
    frozen = (REPOSITORY / "tests" / "golden" / "settings.txt").read_text().split()
    names = set()
    for part in reference.parts():
        names |= {f"{part.header.strip('[]')}.{setting.name}".lstrip(".") for setting in part.settings}
    assert sorted(names) == frozen


class Near(Section):
    """A near one."""

    kind: Literal["near"] = "near"
    steps: int = Field(3, gt=0, description="how far")


class Far(Section):
    """A far one."""

    kind: Literal["far"]
    host: str | None = operational(None, description="where")


class Journey(Section):
    """A journey."""

    goal: Annotated[Near | Far, Field(discriminator="kind")]
    stops: tuple[Annotated[Near | Far, Field(discriminator="kind")], ...] = ()
    names: tuple[str, ...] = Field((), description="words")


def test_each_variant_of_a_union_has_a_part_of_its_own():
    found = {(part.header, part.variant): part for part in reference.parts(Journey)}
    assert list(found) == [
        ("", ""), ("[goal]", 'kind = "near"'), ("[goal]", 'kind = "far"'), ("[[stops]]", 'kind = "near"'),
        ("[[stops]]", 'kind = "far"'),
    ]  # fmt: skip
    near, far = found["[goal]", 'kind = "near"'], found["[goal]", 'kind = "far"']
    assert [(s.name, s.type, s.default, s.content) for s in near.settings] == [
        ("kind", '"near"', '"near"', True), ("steps", "integer, > 0", "3", True),
    ]  # fmt: skip
    assert [(s.name, s.type, s.default, s.content) for s in far.settings] == [
        ("kind", '"far"', None, True), ("host", "text", "none", False),
    ]  # fmt: skip
    assert found["", ""].settings == (reference.Setting("names", "list of text", "[]", "words", content=True),)


@pytest.mark.parametrize("name", ["demo.toml", "own.toml"])
def test_a_printed_configuration_is_read_as_the_same_one(name):
    run = config.load(REPOSITORY / "infra" / "runs" / name)
    assert config.parse(tomllib.loads(reference.toml(run))) == run


def test_text_and_tables_of_any_kind_survive_printing():
    run = config.parse(
        {
            "run_id": "r", "student": {"path": 'a "b" \\ ü'},
            "teachers": [{"id": "t", "path": "x", "template": "line\n\tnext \x7f é"}],
            "prompts": {"datasets": [{"name": "g", "size": 1, "teachers": ["t"], "params": {"a b": [1, 2], "c": {}}}]},
        }
    )  # fmt: skip
    assert config.parse(tomllib.loads(reference.toml(run))) == run
