"""One run that was stopped by its verifier and then cured, for all tests of bad input; S3 over a network that fails."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import waiting
from infra.store import ObjectStore
from infra.stores import open_store
from schemas import config as run_config
from schemas.errors import StageError
from tasks.runs.session import open_session
from tasks.runs.students import student_of
from tasks.stages import dispatch, rollout, teach, train
from tests.faults.bad_input import ANSWERS, Site, copy_of, make_folder, run_apart
from tests.support import s3_server
from tests.support.s3_proxy import Proxy


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", action="store_true", default=False, help="print the table of bad input that was tried")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not (ANSWERS and terminalreporter.config.getoption("table", False)):
        return
    terminalreporter.section(f"{len(ANSWERS)} cases of bad input")
    for name, kind, where in sorted(ANSWERS, key=lambda answer: answer[1].exit_status):
        terminalreporter.write_line(f"{kind.kind:15}{kind.exit_status}  {name}: {where}")


@pytest.fixture(scope="session")
def stopped(tmp_path_factory) -> tuple[Path, str]:
    """(folder, error) of a run whose rollout sampled all tokens, then stopped at a verifier that raises."""
    folder = tmp_path_factory.mktemp("stopped")
    make_folder(folder)
    done = run_apart(folder, {"OPD_TEST_VERIFIER": "fails"})
    assert done.returncode == StageError.exit_status, done.stderr
    return folder, done.stderr


@pytest.fixture
def site(stopped, tmp_path, monkeypatch) -> Iterator[Site]:
    """A copy of the stopped run, its prompts already in the table, so that hardly a case needs a JVM."""
    yield from copy_of(stopped[0], tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def cured(stopped, tmp_path_factory) -> dict[str, Path]:
    """The stopped run, driven to its end in one session with a verifier that may fail, and does on one prompt.

    rolled, planned: copies as of after that stage; run: the finished one.
    """
    folder = tmp_path_factory.mktemp("cured")
    shutil.copytree(stopped[0], folder / "run")

    def keep(name: str) -> None:
        shutil.copytree(folder / "run", folder / name)
        shutil.rmtree(folder / name / "data/runs/bad/lease")  # this session's, which lives on

    with pytest.MonkeyPatch.context() as patch:
        Site(folder / "run", patch)
        patch.setenv("OPD_TEST_VERIFIER", "fails_on_one")
        with open_session(run_config.load("run.toml", ["prompts.max_verifier_failures=2"])) as session:
            student = student_of(session, None)
            rolled = rollout.rollout(session, 0, student)
            told = {"prompt rows that repeat an earlier one, each prompt counted once": "1 of own.jsonl"}
            assert told.items() <= session.notes.items()
            keep("rolled")
            taught = teach.teach(session, 0, rolled)
            planned = dispatch.dispatch(session, 0, rolled, taught)
            keep("planned")
            train.train(session, 0, student, {"rollout": rolled, "teach": taught, "dispatch": planned})
    return {name: folder / name for name in ("rolled", "planned", "run")}


@pytest.fixture
def after(request, cured, tmp_path, monkeypatch) -> Iterator[Site]:
    yield from copy_of(cured[request.param], tmp_path, monkeypatch)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_FIRST_PAUSE_SECONDS", 0.005)


@pytest.fixture
def proxy(s3_process: s3_server.S3Server) -> Iterator[Proxy]:
    proxy = Proxy(s3_process.port)
    yield proxy
    proxy.close()


@pytest.fixture
def direct(s3: str) -> ObjectStore:
    """The store without the proxy; its client is made before the environment changes."""
    store = open_store(s3)
    assert store.list("") == []
    return store


@pytest.fixture
def lossy(direct: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The same store through the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    store = open_store(direct.root)
    assert store.list("") == []
    return store
