"""One iteration with everything on a real S3 server, by settings alone, started twice in the same moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.stores import open_store
from tests.e2e.test_iteration import REPOSITORY, opd, write_config

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.s3]

SMALL = {"iterations": 1, "rollout.max_response_tokens": 8, "prompts.per_iteration": 3, "prompts.heldout": 1}


@pytest.fixture
def options(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    return [f"--set={name}={value}" for name, value in {"data": s3, **SMALL}.items()]


def test_two_campaigns_started_at_once_on_an_empty_bucket(s3: str, options: list[str], tmp_path: Path) -> None:
    config = write_config(tmp_path, kill="0")
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "run", str(config), *options],
            cwd=REPOSITORY, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]  # fmt: skip
    said = {process.wait(400): process for process in started}
    texts = {status: process.communicate()[0] for status, process in said.items()}
    assert set(texts) == {0, 5}, texts
    assert "expected: no live owner" in texts[5]
    assert f"process {said[0].pid} on" in texts[5]

    assert not (tmp_path / "data").exists()
    keys = open_store(s3).list("")
    names = {key.rpartition("/")[2] for key in keys}
    assert {"tokens.safetensors", "manifest.json", "000000.seg"} <= names
    assert {key.split("/")[1] for key in keys if key.startswith("tables/")} == {
        "prompts", "trajectories", "hidden_shards", "plan", "checkpoints", "metrics", "stage_runs",
    }  # fmt: skip
    assert "0 breaches" in opd("verify", "tiny", "--data", s3)
    counted = opd(
        "sql", "SELECT split, count(*) n FROM opd.trajectories GROUP BY split ORDER BY split", "--json", "--data", s3,
    )  # fmt: skip
    assert '{"split": "heldout", "n": 1}' in counted
    assert '{"split": "train", "n": 6}' in counted


def test_the_doctor_tries_the_server(s3: str, tmp_path: Path) -> None:
    report = opd("doctor", "--data", s3, "--scratch", tmp_path)
    assert "BROKEN" not in report
    assert "log entries are created once" in report
    assert open_store(s3).list("") == []
