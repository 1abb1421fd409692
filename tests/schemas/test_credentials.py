"""A password inside a URL reaches no message, whatever program it was told to."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from infra import waiting
from schemas.errors import OpdError, StoreError, error_from_json, without_credentials
from tests.faults.bad_input import run_apart
from tests.support.tiny import tiny_model

URL = "http://user:s3cr3t@127.0.0.1:9"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f'Could not connect to "{URL}/bucket/key"', 'Could not connect to "http://127.0.0.1:9/bucket/key"'),
        ("https://a:p@ss@host/x and ftp://b:c@d", "https://host/x and ftp://d"),
        ("s3://bucket/user@host", "s3://bucket/user@host"),
        ("mail@host // nothing@here", "mail@host // nothing@here"),
    ],
)
def test_urls_lose_their_credentials(text: str, clean: str):
    assert without_credentials(text) == clean


def test_no_part_of_an_error_holds_a_password():
    error = StoreError(URL, expected=URL, found=URL, safe=URL, next_command=f"curl {URL}")
    for form in (str(error), repr(error), repr(error.args), json.dumps(error.to_json()), repr(vars(error))):
        assert "s3cr3t" not in form
    assert "s3cr3t" not in str(pickle.loads(pickle.dumps(error)))
    read = error_from_json({**error.to_json(), "found": URL})
    assert isinstance(read, OpdError)
    assert "s3cr3t" not in str(read)


def test_words_of_a_wait_hold_none(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(waiting, "WORD_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "_voice", said.append)
    with waiting.waiting("s3://bucket/k", 5.0) as wait:
        wait.trouble = f"no connection to {URL}"
        while not said:
            wait.pause(f"no connection to {URL}")
    assert "127.0.0.1" in said[0]
    assert "s3cr3t" not in said[0]


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "PREFECT_API_URL"])
def test_a_planted_password_is_on_no_stream_and_in_no_file(tmp_path: Path, name: str):
    tiny_model(tmp_path / "student", seed=0)
    (tmp_path / "own.jsonl").write_text('{"text": "one", "teachers": ["t"]}\n')
    (tmp_path / "run.toml").write_text(
        'run_id = "r"\n[student]\npath = "student"\n[[teachers]]\nid = "t"\npath = "student"\n'
        '[[prompts.files]]\npath = "own.jsonl"\n'
    )
    data = [] if name.startswith("PREFECT") else ["--set", "data=s3://bucket/x"]
    settings = {name: f"{URL}/api" if name.startswith("PREFECT") else URL, "AWS_ACCESS_KEY_ID": "a",
                "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}  # fmt: skip
    done = run_apart(tmp_path, settings, ("run", "run.toml", "--set", "store_patience_seconds=0.2", *data))
    assert done.returncode in (2, 4), done.stderr
    assert name.removesuffix("_S3") in done.stderr
    assert "s3cr3t" not in done.stderr + done.stdout
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"s3cr3t" not in path.read_bytes(), path
