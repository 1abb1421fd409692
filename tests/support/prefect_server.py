"""A real Prefect server on loopback for tests, and questions to its API."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.launch import free_port


@contextlib.contextmanager
def running(folder: Path) -> Iterator[str]:
    """URL of the API, which the environment of the block names, for child processes too."""
    port = free_port()
    quiet = {"PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    with (
        open(folder / "server.log", "wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | quiet, stdout=log, stderr=log, start_new_session=True,
        ) as server,
    ):  # fmt: skip
        url = f"http://127.0.0.1:{port}/api"
        try:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in {**quiet, "PREFECT_API_URL": url, "NO_COLOR": "1", "COLUMNS": "200"}.items():
                    patch.setenv(name, value)
                deadline = time.monotonic() + 180
                while not _answers(f"{url}/health"):
                    assert server.poll() is None, (folder / "server.log").read_text()
                    assert time.monotonic() < deadline, (folder / "server.log").read_text()
                    time.sleep(0.1)
                yield url
        finally:
            os.killpg(server.pid, signal.SIGTERM)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def ask(url: str, body: dict[str, Any]) -> Any:
    """Answer to a POST of JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
