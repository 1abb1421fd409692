"""The table of bad input: each case ends in one clear error of its kind, and leaves nothing half-written.

ARCHITECTURE.md prints the table. Every case is the command as a user runs it; most run in this process, those that
need a limit or an environment of their own in one of theirs.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from flows import cli
from infra import leases, store_s3, tables
from infra.store import LocalStore
from schemas import config as run_config
from schemas import keys
from schemas.errors import ConfigError, ContractError, FormatError, OpdError, StageError, StoreError
from tasks import plan, rollout, teach, train
from tasks.session import open_session
from tasks.students import student_of
from tasks.verify import verify
from tests.tiny import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.spark]

REPOSITORY = Path(__file__).parents[2]
VERIFIED = {"verifier": "tests.verifiers:as_told"}
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


class Site:
    """A user's working folder: run.toml, own.jsonl and two model folders; cases spoil it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.settings: list[str] = []
        self.command: list[str] = ["rollout", "run.toml", "--iteration", "0"]
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setenv("OPD_TEST_VERIFIER", "count_letters")
        patch.setattr(store_s3, "_FIRST_DELAY_SECONDS", 0.001)
        patch.setattr(store_s3, "_ATTEMPTS", 2)

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


def sharded(site: Site) -> None:
    """The student's weights as an index and one shard, which is not there."""
    weights = site.folder / "student" / "model.safetensors"
    names = dict.fromkeys(load_file(weights), "model-00001-of-00001.safetensors")
    (site.folder / "student/model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    weights.unlink()


def padded(text: str) -> dict[str, str]:
    return {"text": "x" * 200 + text}


CONFIGURATION = [
    case("no such configuration file", ConfigError, ("other.toml", "no such file"),
         lambda s: setattr(s, "command", ["rollout", "other.toml", "--iteration", "0"])),
    case("configuration is a folder", ConfigError, ("student", "readable TOML"),
         lambda s: setattr(s, "command", ["rollout", "student", "--iteration", "0"])),
    case("configuration is no TOML", ConfigError, "TOML", lambda s: s.config("seed = 3", "seed = = 3")),
    case("configuration is not UTF-8", ConfigError, "UTF-8",
         lambda s: (s.folder / "run.toml").write_bytes(b"run_id = '\xe9'")),
    case("unknown key", ConfigError, "did you mean 'page_tokens'",
         lambda s: s.config("page_tokens", "page_tokns")),
    case("wrong type", ConfigError, "train.learning_rate", lambda s: s.set("train.learning_rate=fast")),
    case("responses of no token", ConfigError, ("rollout.max_response_tokens", "greater than 0"),
         lambda s: s.set("rollout.max_response_tokens=0")),
    case("override without a value", ConfigError, "SECTION.KEY=VALUE", lambda s: s.set("train.learning_rate")),
    case("run_id that leaves its folder", ConfigError, "run_id", lambda s: s.set("run_id=../other")),
    case("iteration out of range", ConfigError, "0 to 0", lambda s: s.command.__setitem__(-1, "7")),
    case("no source of prompts", ConfigError, "datasets and files", lambda s: s.set("prompts.files=[]")),
    case("data set's unknown teacher", ConfigError, "did you mean 'second'",
         lambda s: s.set('prompts.datasets=[{name="chain_sum",size=9,teachers=["secnd"]}]')),
    case("unknown data set", ConfigError, "chain_sums",
         lambda s: s.set('prompts.datasets=[{name="chain_sums",size=9,teachers=["second"]}]')),
    case("root of no known kind", ConfigError, "s3://BUCKET/PREFIX", lambda s: s.set("data=gs://bucket/x")),
    case("cache smaller than one sequence", ConfigError, "rollout.kv_bytes",
         lambda s: s.set("rollout.kv_bytes=100")),
    case("teacher's template is no Jinja", ConfigError, "hinted", lambda s: s.config("{{ answer }}", "{{ answer")),
    case("teacher's template names no column", ConfigError, "'answr' is undefined",
         lambda s: s.config("{{ answer }}", "{{ answr }}")),
]  # fmt: skip

MODELS = [
    case("no such model folder", ConfigError, "no such folder", lambda s: s.set("student.path=nowhere")),
    case("folder without weights", ConfigError, "neither",
         lambda s: (s.folder / "student/model.safetensors").unlink()),
    case("folder without tokenizer", ConfigError, "tokenizer.json",
         lambda s: (s.folder / "second/tokenizer.json").unlink()),
    case("no chat template", ConfigError, "chat template",
         lambda s: s.edit("student/tokenizer_config.json", chat_template=None)),
    case("weights cut short", FormatError, "model.safetensors",
         lambda s: cut(s.folder / "student/model.safetensors")),
    case("shard of the weights missing", FormatError, "model-00001-of-00001.safetensors", sharded),
    case("config.json is no JSON", FormatError, "config.json",
         lambda s: (s.folder / "second/config.json").write_text("{")),
    case("tokenizer is no tokenizer", FormatError, "tokenizer.json",
         lambda s: (s.folder / "student/tokenizer.json").write_text("{}")),
    case("config.json without a context length", FormatError, "max_position_embeddings",
         lambda s: s.edit("second/config.json", max_position_embeddings=None)),
    case("teacher of another vocabulary", ContractError, ("teacher second", "the student's"),
         lambda s: s.config('path = "second"', 'path = "foreign"')),
    case("teacher's head cut below the vocabulary", ContractError, "a row for each of 259 tokens",
         lambda s: (s.tensors("second/model.safetensors",
                              lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:200].clone()})),
                    s.edit("second/config.json", vocab_size=200))),
    case("NaN in the weights", FormatError, ("model.norm.weight", "NaN"),
         lambda s: (s.tensors("student/model.safetensors", lambda t: t["model.norm.weight"].fill_(float("nan"))),None)),
    case("unknown architecture", ConfigError, "'gpt2'",
         lambda s: (s.edit("student/config.json", model_type="gpt2"),None)),
]  # fmt: skip

OWN_PROMPTS = [
    case("no such prompt file", ConfigError, "none.jsonl", lambda s: s.config("own.jsonl", "none.jsonl")),
    case("prompt file of another kind", ConfigError, ".jsonl or .parquet", lambda s: s.config("own.jsonl", "run.toml")),
    case("prompts are not UTF-8", FormatError, ("own.jsonl, line 6", "UTF-8"),
         lambda s: s.prompts(b'{"text": "caf\xe9"}')),
    case("prompts in UTF-16", FormatError, ("own.jsonl, line 1", "UTF-8"),
         lambda s: (s.folder / "own.jsonl").write_text('{"text": "a"}', "utf-16")),
    case("prompts are no JSON", FormatError, "line 6", lambda s: s.prompts(b'{"text": "a"')),
    case("lone surrogate", FormatError, ("line 6", "U+DC00"), lambda s: s.prompts({"text": "a\udc00"})),
    case("NUL", FormatError, ("line 6", "a NUL"), lambda s: s.prompts({"text": "a\0b"})),
    case("empty text", FormatError, "line 6, text", lambda s: s.prompts({"text": " "})),
    case("messages and text", FormatError, ("line 6", "both"),
         lambda s: s.prompts({"text": "a", "messages": [{"role": "user", "content": "a"}]})),
    case("unknown column", FormatError, ("line 6, column 'anwser'", "did you mean 'answer'"),
         lambda s: s.prompts({"text": "a", "anwser": "b"})),
    case("unknown role", FormatError, "did you mean 'user'",
         lambda s: s.prompts({"messages": [{"role": "users", "content": "a"}]})),
    case("row's unknown teacher", ConfigError, ("line 6", "did you mean 'second'"),
         lambda s: s.prompts({"text": "a", "teachers": ["scond"]})),
    case("row without a teacher", ConfigError, "at least one",
         lambda s: s.config('teachers = ["hinted", "second"]', "teachers = []")),
    case("Parquet file cut short", FormatError, "own.parquet",
         lambda s: (pq.write_table(pa.table({"text": ["a" * 900] * 9}), s.folder / "own.parquet"),
                    cut(s.folder / "own.parquet"), s.config("own.jsonl", "own.parquet"))),
    case("fewer prompts than an iteration takes", ConfigError, ("at least 12", "found: 4"),
         lambda s: s.set("prompts.per_iteration=11")),
    case("prompt longer than the student's context", ContractError, ("the student's context", "511 tokens"),
         lambda s: (s.prompts({"text": "x" * 600}), s.set("prompts.per_iteration=4", "dispatch.pack_tokens=4096"))),
    case("prompt longer than its teacher's context", ContractError, "teacher second's context",
         lambda s: (s.edit("second/config.json", max_position_embeddings=20), None)),
    case("prompt longer than a pack", ContractError, ("dispatch.pack_tokens", "rollout.max_response_tokens"),
         lambda s: (s.prompts({"text": "x" * 300}), s.set("prompts.per_iteration=4"))),
    case("no such verifier", ConfigError, "no_such_module",
         lambda s: (s.prompts({"text": "a", "verifier": "no_such_module:f"}), s.set("prompts.per_iteration=4"))),
    case("verifier that cannot be imported", ConfigError, "broken on import",
         lambda s: (s.prompts({"text": "a", "verifier": "tests.broken_verifier:f"}))),
    case("verifier that raises", StageError, ("tests.verifiers:as_told", "no such answer", "max_verifier_failures"),
         lambda s: (s.patch.setenv("OPD_TEST_VERIFIER", "fails"))),
    case("verifier that never returns", StageError, "no answer in 0.2 s",
         lambda s: (s.patch.setenv("OPD_TEST_VERIFIER", "never_leaves_c"), s.set(
                    "prompts.verifier_timeout_seconds=0.2"))),
    case("verifier that ends its process", StageError, "status 7",
         lambda s: (s.patch.setenv("OPD_TEST_VERIFIER", "exits"))),
]  # fmt: skip

AROUND = [
    case("data root is a file", StoreError, "data",
         lambda s: (shutil.rmtree(s.folder / "data"), (s.folder / "data").write_text("not a folder"))),
    case("scratch is a file", StoreError, "scratch",
         lambda s: (shutil.rmtree(s.folder / "scratch"), (s.folder / "scratch").write_text("not a folder"),None)),
    case("no S3 credentials", StoreError, "AWS_ACCESS_KEY_ID",
         lambda s: (s.set("data=s3://bucket/x"), s.patch.setenv("AWS_EC2_METADATA_DISABLED", "true"),
                    s.patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9"), s.patch.setenv("HOME", str(s.folder)))),
    case("unreachable S3 endpoint", StoreError, "http://127.0.0.1:9",
         lambda s: (s.set("data=s3://bucket/x"), s.patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
                    s.patch.setenv("AWS_ACCESS_KEY_ID", "a"), s.patch.setenv("AWS_SECRET_ACCESS_KEY", "b"),
                    s.patch.setenv("AWS_REGION", "us-east-1"))),
    case("stage before its inputs", StageError, "opd rollout CONFIG --iteration 0",
         lambda s: s.command.__setitem__(0, "dispatch")),
    case("unknown run", ContractError, ("run other", "bad"),
         lambda s: setattr(s, "command", ["verify", "other"])),
    case("texts of an unknown run", ContractError, ("run other", "bad"),
         lambda s: setattr(s, "command", ["show", "other"])),
]  # fmt: skip

#: On a run whose rollout sampled everything and was stopped by its verifier.
STOPPED = [
    case("changed configuration", ContractError, ("rollout.temperature", "--from-iteration"),
         lambda s: s.set("rollout.temperature=0.5")),
    case("changed prompt file", ContractError, ("prompt_files", "--from-iteration"),
         lambda s: s.prompts({"text": "one more"})),
    case("changed weights", ContractError, ("models.teacher:second", "--from-iteration"),
         lambda s: s.tensors("second/model.safetensors", lambda t: t["model.norm.weight"].mul_(2))),
    case("damaged run record", FormatError, "record/000001.json",
         lambda s: flip(s.folder / "data/runs/bad/record/000001.json", 0.0)),
    case("damaged epoch object", FormatError, "epochs/000001.json",
         lambda s: flip(s.only("data/runs/bad/00000/rollout/*/p00000/epochs/000001.json"), 0.0)),
    case("damaged log", FormatError, ("000001.seg", "offset"),
         lambda s: (shutil.rmtree(s.folder / "scratch/bad/wal"),
                    flip(s.only("data/runs/bad/00000/rollout/*/p00000/e*/wal/000001.seg"), 0.6))),
    case("missing segment of the log", FormatError, ".seg",
         lambda s: (shutil.rmtree(s.folder / "scratch/bad/wal"),
                    s.only("data/runs/bad/00000/rollout/*/p00000/e*/wal/000000.seg").unlink())),
    case("damaged table", StoreError, "tables/prompts",
         lambda s: flip(s.only("data/tables/prompts/_delta_log/00000000000000000000.json"), 0.0)),
]  # fmt: skip


def pad_vocabulary(model: Path, rows: int) -> None:
    """Rows beyond the tokenizer, as models are padded for speed; loud ones, to be heard if they are not left out."""
    tensors = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        extra = torch.full((rows - len(tensors[name]), tensors[name].shape[1]), 9.0)
        tensors[name] = torch.cat([tensors[name], extra])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))


ROLLED = [
    case("damaged stage manifest", FormatError, "manifest.json",
         lambda s: flip(s.only("data/runs/bad/00000/rollout/*/manifest.json"), 0.0)),
    case("damaged token shard", FormatError, ("tokens.safetensors", "SHA-256"),
         lambda s: (flip(s.only("data/runs/bad/00000/rollout/*/p00000/e000002/tokens.safetensors"), 0.99),
                    s.command.__setitem__(0, "teach"))),
    case("missing token shard", StoreError, "tokens.safetensors",
         lambda s: (s.only("data/runs/bad/00000/rollout/*/p00000/e000002/tokens.safetensors").unlink(),
                    s.command.__setitem__(0, "teach"))),
    case("student changed between stages", ContractError, "models.student",
         lambda s: (s.tensors("student/model.safetensors", lambda t: t["model.norm.weight"].mul_(2)),
                    s.command.__setitem__(0, "teach"))),
]  # fmt: skip

PLANNED = [
    case("damaged hidden states", FormatError, "CRC",
         lambda s: (flip(sorted(s.folder.glob("data/runs/bad/00000/teach/*/p*/e*/*.safetensors"))[0], 0.99),
                    s.command.__setitem__(0, "train"))),
    case("loader too small for one pack", ConfigError, "train.loader_bytes",
         lambda s: (s.command.__setitem__(0, "train"), s.set("train.loader_bytes=64"))),
]  # fmt: skip


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


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> tuple[Path, str]:
    """(folder, error) of a run whose rollout sampled all tokens, then stopped at a verifier that raises."""
    folder = tmp_path_factory.mktemp("stopped")
    make_folder(folder)
    done = run_apart(folder, {"OPD_TEST_VERIFIER": "fails"})
    assert done.returncode == StageError.exit_status, done.stderr
    return folder, done.stderr


def run_apart(
    folder: Path, environment: dict[str, str], command: tuple[str, ...] = ("rollout", "run.toml", "--iteration", "0"),
    before: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *command], cwd=folder, text=True, capture_output=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment, preexec_fn=before, check=False,
    )  # fmt: skip


@pytest.fixture
def site(stopped, tmp_path, monkeypatch) -> Iterator[Site]:
    """A copy of the stopped run, its prompts already in the table, so that hardly a case needs a JVM."""
    yield from copy_of(stopped[0], tmp_path, monkeypatch)


@pytest.fixture(scope="module")
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
            assert session.notes == {"repeated prompt rows, each counted once": 1}
            keep("rolled")
            taught = teach.teach(session, 0, rolled)
            planned = plan.dispatch(session, 0, rolled, taught)
            keep("planned")
            train.train(session, 0, student, {"rollout": rolled, "teach": taught, "dispatch": planned})
    return {name: folder / name for name in ("rolled", "planned", "run")}


@pytest.fixture
def after(request, cured, tmp_path, monkeypatch) -> Iterator[Site]:
    yield from copy_of(cured[request.param], tmp_path, monkeypatch)


def copy_of(folder: Path, tmp_path: Path, patch: pytest.MonkeyPatch) -> Iterator[Site]:
    before = signal.getsignal(signal.SIGTERM)
    shutil.copytree(folder, tmp_path / "site")
    yield Site(tmp_path / "site", patch)
    signal.signal(signal.SIGTERM, before)


def assert_answer(text: str, status: int, expected: Case) -> None:
    assert "Traceback" not in text
    lines = text.strip().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(expected.kind.kind + ": "))
    assert status == expected.kind.exit_status, text
    assert not any(line.startswith(expected.kind.kind + ": ") for line in lines[first + 1 :]), "one error, said once"
    assert any(line.startswith(("expected: ", "found: ")) for line in lines[first + 1 :]), text
    for words in expected.says:
        assert words in text


def half_written(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and (".tmp" in p.parts or p.name.endswith(".partial"))]


def answered(site: Site, bad: Case, capfd: pytest.CaptureFixture[str]) -> None:
    manifests = set(site.folder.glob("data/runs/*/00000/*/*/manifest.json"))
    bad.spoil(site)
    status = cli.main(site.arguments())
    assert_answer(capfd.readouterr().err, status, bad)
    assert half_written(site.folder) == []
    assert set(site.folder.glob("data/runs/*/00000/*/*/manifest.json")) == manifests, "nothing new has finished"


@pytest.mark.parametrize("bad", CONFIGURATION + MODELS + OWN_PROMPTS + AROUND)
def test_bad_input_of_a_new_run_has_one_clear_answer(site, bad, capfd):
    site.set("run_id=new")
    answered(site, bad, capfd)


@pytest.mark.parametrize("bad", STOPPED)
def test_damage_to_a_stopped_run_has_one_clear_answer(site, bad, capfd):
    answered(site, bad, capfd)


@pytest.mark.parametrize(
    ("bad", "after"),
    [
        pytest.param(*c.values, name, id=c.id)
        for name, cases in (("rolled", ROLLED), ("planned", PLANNED))
        for c in cases
    ],
    indirect=["after"],
)
def test_damage_between_stages_has_one_clear_answer(after, bad, capfd):
    answered(after, bad, capfd)


def test_a_live_run_names_its_owner(site, capfd):
    site.set("run_id=live")
    lease = leases.acquire(
        LocalStore(site.folder / "data"), keys.run_lease("live"), owner={"run": "live"}, dead_after_seconds=20
    )
    assert isinstance(lease, leases.Lease)
    with lease:
        status = cli.main(site.arguments())
    assert_answer(capfd.readouterr().err, status, Case("", ContractError, (f"process {os.getpid()}",), lambda _: None))


def test_no_java_is_said_before_anything_is_sampled(site, capfd):
    site.prompts({"text": "not in the table yet"})
    site.set("run_id=new")
    site.patch.setenv("PATH", "/nonexistent")
    site.patch.delenv("JAVA_HOME", raising=False)
    status = cli.main(site.arguments())
    assert_answer(capfd.readouterr().err, status, Case("", ConfigError, ("Java", "JAVA_HOME"), lambda _: None))
    assert not list(site.folder.glob("data/runs/new/00000/rollout/*/p00000/e*"))


def test_a_full_disk_leaves_nothing_behind(site):
    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    before = {p for p in site.folder.rglob("*") if p.is_file()}
    done = run_apart(site.folder, {}, before=full)
    assert_answer(done.stderr, done.returncode, Case("", StoreError, ("room for the object",), lambda _: None))
    assert {p for p in site.folder.rglob("*") if p.is_file()} == before


@pytest.mark.s3
@pytest.mark.parametrize(
    ("bucket", "secret", "says"), [("no-such-bucket", None, "no-such-bucket"), (None, "wrong", "AWS_SECRET_ACCESS_KEY")]
)
def test_a_store_that_refuses_is_named(site, s3, capfd, bucket, secret, says):
    site.set(f"data=s3://{bucket}/x" if bucket else f"data={s3}", "run_id=new")
    if secret:
        site.patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    status = cli.main(site.arguments())
    assert_answer(capfd.readouterr().err, status, Case("", StoreError, (says,), lambda _: None))


def test_a_verifier_stops_the_stage_with_every_token_logged(stopped):
    folder, error = stopped
    assert_answer(error, 6, Case("", StageError, ("no such answer", "the response is in the log"), lambda _: None))
    assert list(folder.glob("data/runs/bad/00000/rollout/*/p00000/e000001/wal/000001.seg"))
    assert not list(folder.glob("data/runs/bad/00000/rollout/*/p00000/e000001/rows.jsonl"))


def test_the_cured_run_continues_and_what_is_legal_works(cured):
    """Responses of one token, a padded head, and a prompt file with all that is allowed, through the whole loop."""
    data = str(cured["run"] / "data")
    rows = tables.read_rows(data, "trajectories", {"run_id": "bad"})
    assert len(rows) == 3 * 2 + 1
    assert {(r["response_tokens"], r["sampled_tokens"]) for r in rows} == {(1, 1)}
    prompts = {p["prompt_id"]: p for p in tables.read_rows(data, "prompts", {})}
    assert sorted(json.loads(p["messages"])[-1]["content"] for p in prompts.values()) == [
        "One line\u2028or two?", "What is 1+1?", "What is 2+2?", "Why?",
    ]  # fmt: skip
    rewards = {p["answer"]: [r["reward"] for r in rows if r["prompt_id"] == i] for i, p in prompts.items()}
    assert set(rewards["2"]) == {0.5}
    assert all(value >= 0 for value in rewards["4"])
    assert set(rewards["one"]) == set(rewards["?"]) == {None}, "a failed call, and no verifier"
    (failures,) = tables.read_rows(data, "metrics", {"run_id": "bad", "name": "verifier_failures"})
    assert failures["value"] == len(rewards["one"])
    segments = sorted(p.parts[-3] for p in (cured["run"] / "data").glob("runs/bad/00000/rollout/*/p00000/e*/wal/*.seg"))
    assert segments.count("e000001") == 2, "the first worker sampled"
    assert set(segments) > {"e000001"}, "its heir only took over"
    checks = verify(data, "bad")
    assert [c for c in checks if c.breaches] == []
    trained = tables.read_rows(data, "metrics", {"run_id": "bad", "stage": "train"})
    assert trained
    assert all(math.isfinite(m["value"]) for m in trained)
