"""One root, read once: what is refused, and what every client is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from schemas import config
from schemas.errors import ConfigError
from schemas.root import DataRoot

REFUSED = [
    "", "gs://bucket/x", "s3://", "s3:///prefix", "s3:/b", "http://host/x", "file:///x", "s3://Bucket/x", "s3://a_b/x",
    "s3://b/q?x=1", "s3://b/q#f", "s3://b#f", "s3://b/../x", "s3://b/./x", "s3://b/a%20b", "a%20b", "100%25",
    "s3://b/a\\b", "tick`", "s3://b/a`b", "line\n", "nul\0", "\ud800", "~no-such-user/x", "s3://b/[a]",
    "back\\slash",
]  # fmt: skip
SPELLINGS = [
    ("s3://b//q", "s3://b/q"), ("s3://b//q//r", "s3://b/q/r"), ("s3://b/q/", "s3://b/q"), ("s3://b", "s3://b"),
    ("s3://b/", "s3://b"), ("S3://b/q", "s3://b/q"), ("data/", "data"), ("a//b", "a/b"), ("./a", "a"), (".", "."),
    ("/x/../y", "/x/../y"), ("my data", "my data"), ("50%", "50%"), ("s3://b/é ☃", "s3://b/é ☃"), ("./~x", "./~x"),
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_clients_read_differently_is_refused(text: str):
    with pytest.raises(ConfigError) as caught:
        DataRoot.parse(text)
    assert repr(text) in caught.value.where


@pytest.mark.parametrize(("text", "normal"), SPELLINGS)
def test_spellings_of_one_place_have_one_normal_form(text: str, normal: str):
    root = DataRoot.parse(text)
    assert str(root) == normal
    assert DataRoot.parse(str(root)) == root
    assert root.for_delta("tables/plan").endswith("/tables/plan")
    assert "//" not in root.for_delta("x").partition("://")[2]
    assert root.for_spark("x") == root.for_delta("x").replace("s3://", "s3a://")


def test_home_and_relative_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert str(DataRoot.parse("~/x")) == f"{tmp_path}/x"
    os.symlink("real", tmp_path / "link")
    (tmp_path / "real").mkdir()
    assert DataRoot.parse("link").for_delta("t") == str((tmp_path / "real/t").resolve())
    assert DataRoot.parse("link").absolute == f"{tmp_path}/link"
    assert DataRoot.parse("s3://b//q").absolute == "s3://b/q"


def test_a_configuration_holds_the_normal_form_and_refuses_others():
    values = {"run_id": "r", "student": {"path": "m"}, "teachers": [{"id": "t", "path": "m"}],
              "prompts": {"files": [{"path": "p.jsonl"}]}}  # fmt: skip
    assert config.parse({**values, "data": "s3://b//q//"}).data == "s3://b/q"
    with pytest.raises(ConfigError, match=r"a%20b"):
        config.parse({**values, "data": "a%20b"})
