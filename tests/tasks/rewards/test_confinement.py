"""Verifiers that mean harm, or run what does: what they reach, and what they leave behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.rewards import child as rewards
from tasks.rewards.child import CallFailedError, VerifierProcess, VerifierSettings, no_namespaces

PROMPT = {"prompt_id": "p1", "answer": "yes", "context": "{}"}
SETTINGS = VerifierSettings(timeout_seconds=20.0, memory_bytes=1 << 30)
needs_namespaces = pytest.mark.skipif("no_namespaces() != ''", reason="this kernel gives no namespaces")


@pytest.fixture(params=["namespaces", "without"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without what the kernel may refuse."""
    if request.param == "without":
        monkeypatch.setattr(rewards, "no_namespaces", lambda: "as told by a test")
    elif no_namespaces():
        pytest.skip(no_namespaces())
    return request.param


def sleepers(seconds: str) -> set[int]:
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:2] == [b"sleep", seconds.encode()]:
                found.add(int(folder.name))
    return found


def gone(seconds: str) -> bool:
    deadline = time.monotonic() + 10
    while sleepers(seconds) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not sleepers(seconds)


def test_a_timeout_ends_all_that_a_call_started(either: str) -> None:
    with VerifierProcess(replace(SETTINGS, timeout_seconds=1.0)) as process:
        process.load("tests.support.verifiers:starts")
        with pytest.raises(CallFailedError, match="no answer in 1 s"):
            process.call("tests.support.verifiers:starts", "98701!", PROMPT)
        assert gone("98701")
        assert process.call("tests.support.verifiers:count_letters", "ab", PROMPT) == 2 + 2 / 16


def test_the_end_of_the_process_ends_all_that_calls_started(either: str) -> None:
    with VerifierProcess(SETTINGS) as process:
        assert process.call("tests.support.verifiers:starts", "98702", PROMPT) == 1.0
        assert len(sleepers("98702")) == 3  # until then they are the verifier's own business
    assert gone("98702")


def test_a_verifier_that_ends_itself_leaves_nothing(either: str) -> None:
    with VerifierProcess(SETTINGS) as process:
        process.call("tests.support.verifiers:starts", "98703", PROMPT)
        with pytest.raises(CallFailedError, match="status 7"):
            process.call("tests.support.verifiers:exits", "", PROMPT)
        assert gone("98703")


def test_a_killed_owner_leaves_nothing(either: str) -> None:
    code = (
        "import os, sys\nfrom tasks.rewards import child as rewards\n"
        f"if {either == 'without'}: rewards.no_namespaces = lambda: 'told'\n"
        "process = rewards.VerifierProcess(rewards.VerifierSettings(60.0, 1 << 30))\n"
        f"process.call('tests.support.verifiers:starts', '98704', {PROMPT!r})\nprint('started', flush=True)\n"
        f"process.call('tests.support.verifiers:sleeps', '', {PROMPT!r})\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout:
        assert owner.stdout.readline() == b"started\n"
        assert len(sleepers("98704")) == 3
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert gone("98704")


@needs_namespaces
def test_no_environment_of_processes_around_it_can_be_read() -> None:
    secret = f"a-secret-{os.getpid()}"
    around = subprocess.Popen(["sleep", "98705"], env={"AWS_SECRET_ACCESS_KEY": secret, "PATH": os.environ["PATH"]})
    try:
        while not (seen := Path(f"/proc/{around.pid}/environ").read_bytes()):
            time.sleep(0.01)
        assert secret.encode() in seen
        with VerifierProcess(SETTINGS) as process:
            assert process.call("tests.support.verifiers:environment", "", PROMPT | {"answer": secret}) == 0.0
    finally:
        around.kill()
        around.wait()


def test_own_environment_is_small(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PREFECT_API_KEY", "HF_TOKEN", "JUDGE"):
        monkeypatch.setenv(name, "x")
    with VerifierProcess(replace(SETTINGS, env=("JUDGE",))) as process:
        process.load("tests.support.verifiers:count_letters")
        assert process._process is not None
        names = {v.partition(b"=")[0] for v in Path(f"/proc/{process._process.pid}/environ").read_bytes().split(b"\0")}
    assert {b"JUDGE", b"PATH"} <= names
    assert not {n for n in names if n.startswith((b"AWS", b"PREFECT", b"HF"))}


def test_a_memory_hog_and_a_large_file_are_failed_calls(either: str) -> None:
    with VerifierProcess(SETTINGS) as process:
        with pytest.raises(CallFailedError, match="MemoryError"):
            process.call("tests.support.verifiers:hoards", "", PROMPT)
        with pytest.raises(CallFailedError, match=r"File too large|signal 25"):
            process.call("tests.support.verifiers:writes_a_large_file", "", PROMPT)
        assert process.call("tests.support.verifiers:count_letters", "ab", PROMPT) == 2 + 2 / 16


@pytest.fixture
def listener() -> Iterator[str]:
    """Port of a server on loopback that greets with x."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"x")

        threading.Thread(target=greet, daemon=True).start()
        yield str(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)


@needs_namespaces
def test_nobody_can_be_reached_unless_the_settings_say_so(listener: str) -> None:
    with VerifierProcess(SETTINGS) as process, pytest.raises(CallFailedError, match="OSError"):
        process.call("tests.support.verifiers:dials", listener, PROMPT)
    with VerifierProcess(replace(SETTINGS, network=True)) as process:
        assert process.call("tests.support.verifiers:dials", listener, PROMPT) == 1.0


@needs_namespaces
def test_root_of_the_namespace_has_no_rights() -> None:
    with VerifierProcess(SETTINGS) as process:
        assert process.call("tests.support.verifiers:gains_rights", "", PROMPT) == 0.0


def test_what_a_verifier_starts_reads_no_requests(either: str) -> None:
    with VerifierProcess(SETTINGS) as process:
        assert process.call("tests.support.verifiers:reads_requests", "", PROMPT) == 0.0


def test_its_home_goes_with_it(either: str) -> None:
    before = set(Path(tempfile.gettempdir()).glob("opd-confined-*"))
    with VerifierProcess(SETTINGS) as process:
        process.load("tests.support.verifiers:count_letters")
        (home,) = (p for p in Path(tempfile.gettempdir()).glob("opd-confined-*") if p not in before)
    assert not home.exists()
