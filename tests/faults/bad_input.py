"""A user's working folder, ways to spoil it, and what an answer must say: what tests of bad input stand on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows import cli
from schemas import config as run_config
from schemas.errors import OpdError
from tasks.runs.session import open_session
from tests.support.tiny import tiny_model

REPOSITORY = Path(__file__).parents[2]
VERIFIED = {"verifier": "tests.support.verifiers:as_told"}
#: Legal, if unusual: a byte order mark, CRLF, U+2028, no verifier, a row that stands twice.
PROMPTS = b"\xef\xbb\xbf" + b"".join(
    json.dumps(row, ensure_ascii=False).encode() + b"\r\n"
    for row in (
        {"text": "What is 1+1?", "answer": 2} | VERIFIED,
        {"text": "One line\u2028or two?", "answer": "one"} | VERIFIED,
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}], "answer": "?"},
        {"text": "What is 2+2?", "answer": 4} | VERIFIED,
        {"answer": 4, "text": "What is 2+2?"} | VERIFIED,
    )
)
CONFIG = f"""
run_id = "bad"
seed = 3
data = "data"
scratch = "scratch"
[student]
path = "student"
[[teachers]]
id = "hinted"
path = "student"
template = "The answer is {{{{ answer }}}}."
[[teachers]]
id = "second"
path = "second"
[prompts]
per_iteration = 3
heldout = 1
verifiers = ["tests.support.verifiers:as_told"]
verifier_env = ["OPD_TEST_VERIFIER"]
verifier_timeout_seconds = 5
[[prompts.files]]
path = "own.jsonl"
teachers = ["hinted", "second"]
[rollout]
samples_per_prompt = 2
max_response_tokens = 1
threads = 1
page_tokens = 16
[dispatch]
mini_batch_trajectories = 3
pack_tokens = 256
[train]
threads = 1
[spark]
cores = 1
driver_memory = "1g"
jars = "{REPOSITORY}/jars"
"""


#: What the user made, which a cure puts back.
USER_FILES = ("run.toml", "own.jsonl", "student", "second", "foreign")
#: (case, kind, where) of every case that was answered, for the table that `make bad-input` prints.
ANSWERS: list[tuple[str, type[OpdError], str]] = []


class Site:
    """A user's working folder: run.toml, own.jsonl and model folders; cases spoil it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.settings = ["store_patience_seconds=0.2"]
        self.command: list[str] = ["rollout", "run.toml", "--iteration", "0"]
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setenv("OPD_TEST_VERIFIER", "count_letters")

    def arguments(self) -> list[str]:
        configured = "run.toml" in self.command
        return [*self.command, *(a for s in self.settings for a in ("--set", s) if configured)]

    def set(self, *settings: str) -> None:
        self.settings += settings

    def config(self, old: str, new: str) -> None:
        text = (self.folder / "run.toml").read_text()
        assert old in text
        (self.folder / "run.toml").write_text(text.replace(old, new, 1))

    def prompts(self, *rows: object) -> None:
        """Rows after the good ones: bytes as they are, anything else as JSON."""
        with open(self.folder / "own.jsonl", "ab") as file:
            for row in rows:
                file.write((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")

    def edit(self, name: str, **changes: object) -> None:
        path = self.folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def tensors(self, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        tensors = load_file(self.folder / name)
        change(tensors)
        save_file(tensors, self.folder / name, metadata={"format": "pt"})

    def only(self, pattern: str) -> Path:
        (found,) = sorted(self.folder.glob(pattern))
        return found


@dataclass(frozen=True)
class Case:
    """What a user did, the error that answers, and words of it."""

    name: str
    kind: type[OpdError]
    says: tuple[str, ...]
    spoil: Callable[[Site], object]


def case(name: str, kind: type[OpdError], says: str | tuple[str, ...], spoil: Callable[[Site], object]):
    return pytest.param(Case(name, kind, (says,) if isinstance(says, str) else says, spoil), id=name)


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0xFF
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def pad_vocabulary(model: Path, rows: int) -> None:
    """Rows beyond the tokenizer, as models are padded for speed; loud ones, to be heard if they are not left out."""
    tensors = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        extra = torch.full((rows - len(tensors[name]), tensors[name].shape[1]), 9.0)
        tensors[name] = torch.cat([tensors[name], extra])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))


def make_folder(folder: Path) -> None:
    tiny_model(folder / "student", seed=0)
    tiny_model(folder / "second", seed=1, tied=False, width=64)
    pad_vocabulary(folder / "second", 272)
    shutil.copytree(folder / "second", folder / "foreign")
    tokenizer = json.loads((folder / "foreign/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (folder / "foreign/tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "run.toml").write_text(CONFIG)
    (folder / "own.jsonl").write_bytes(PROMPTS)


def run_apart(
    folder: Path, environment: dict[str, str], command: tuple[str, ...] = ("rollout", "run.toml", "--iteration", "0"),
    before: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *command], cwd=folder, text=True, capture_output=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment, preexec_fn=before, check=False,
    )  # fmt: skip


def copy_of(folder: Path, tmp_path: Path, patch: pytest.MonkeyPatch) -> Iterator[Site]:
    before = signal.getsignal(signal.SIGTERM)
    shutil.copytree(folder, tmp_path / "site")
    yield Site(tmp_path / "site", patch)
    signal.signal(signal.SIGTERM, before)


def assert_answer(text: str, status: int, expected: Case) -> None:
    """One error of the kind, said once, in its five parts."""
    assert "Traceback" not in text
    start = text.rindex(f"\n{expected.kind.kind}: ") + 1 if f"\n{expected.kind.kind}: " in text else 0
    said = text[start:].rstrip()
    parts = {name: said.find(f"\n{name}: ") for name in ("expected", "found", "safe", "next")}
    assert status == expected.kind.exit_status, text
    assert text.count(f"{expected.kind.kind}: ") == 1, "one error, said once"
    assert said.startswith(f"{expected.kind.kind}: "), text
    assert 0 < parts["expected"] < parts["found"] < parts["safe"] < parts["next"], text
    for words in expected.says:
        assert words in said
    ANSWERS.append((expected.name, expected.kind, said.splitlines()[0].removeprefix(f"{expected.kind.kind}: ")))


def half_written(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and (".tmp" in p.parts or p.name.endswith(".partial"))]


def answered(site: Site, bad: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Spoil, run the command, and hold that it answers and that nothing new has finished or is half-written."""
    manifests = set(site.folder.glob("data/runs/*/00000/*/*/manifest.json"))
    bad.spoil(site)
    status = cli.main(site.arguments())
    assert_answer(capfd.readouterr().err, status, bad)
    assert half_written(site.folder) == []
    assert set(site.folder.glob("data/runs/*/00000/*/*/manifest.json")) == manifests, "nothing new has finished"


def cure(site: Site, good: Path) -> None:
    """The user's files as they were, a file in a folder's place removed; what the run has made stays as it is."""
    for name in USER_FILES:
        path = site.folder / name
        if path.is_dir():
            shutil.rmtree(path)
        (shutil.copytree if (good / name).is_dir() else shutil.copyfile)(good / name, path)
    for folder in (site.folder / "data", site.folder / "scratch"):
        if folder.is_file():
            folder.unlink()


def assert_goes_on(site: Site, run_id: str) -> None:
    """The cured configuration is taken for this run: nothing of the failed start stands in its way."""
    with open_session(run_config.load("run.toml", [f"run_id={run_id}"])) as session:
        assert session.run_id == run_id
