"""The table of bad input, second half: damage to what a run has made, and a machine that is not as it should be."""

from __future__ import annotations

import http.server
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import cli
from infra import leases, tables
from infra.store_local import LocalStore
from schemas import keys
from schemas.errors import ConfigError, ContractError, FormatError, StageError, StoreError
from tasks.operate.verify import verify
from tests.faults.bad_input import (
    REPOSITORY,
    Case,
    Site,
    answered,
    assert_answer,
    assert_goes_on,
    case,
    flip,
    run_apart,
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.spark]


def drop_field(path: Path, name: str) -> None:
    value = json.loads(path.read_text())
    del value[name]
    path.write_text(json.dumps(value))


def no_room_in_shared_memory(site: Site) -> None:
    """For the rank processes: as a full /dev/shm, which a test had better not fill, answers them."""
    (site.folder / "sitecustomize.py").write_text(
        "import errno, os\n"
        "def refuse(fd, offset, length):\n"
        "    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
        "os.posix_fallocate = refuse\n"
    )
    site.patch.setenv("PYTHONPATH", f"{site.folder}{os.pathsep}{REPOSITORY}")


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
    case("run record without a field", FormatError, ("record/000001.json", "a field 'models'"),
         lambda s: drop_field(s.folder / "data/runs/bad/record/000001.json", "models")),
    case("damaged epoch object", FormatError, "epochs/000001.json",
         lambda s: flip(s.only("data/runs/bad/00000/rollout/*/p00000/epochs/000001.json"), 0.0)),
    case("damaged log", FormatError, ("000001.seg", "offset"),
         lambda s: (shutil.rmtree(s.only("scratch/bad/*/wal")),
                    flip(s.only("data/runs/bad/00000/rollout/*/p00000/e*/wal/000001.seg"), 0.6))),
    case("missing segment of the log", FormatError, ".seg",
         lambda s: (shutil.rmtree(s.only("scratch/bad/*/wal")),
                    s.only("data/runs/bad/00000/rollout/*/p00000/e*/wal/000000.seg").unlink())),
    case("damaged table", FormatError, ("tables/prompts", "opd repair RUN"),
         lambda s: flip(s.only("data/tables/prompts/_delta_log/00000000000000000000.json"), 0.0)),
]  # fmt: skip


ROLLED = [
    case("damaged stage manifest", FormatError, "manifest.json",
         lambda s: flip(s.only("data/runs/bad/00000/rollout/*/manifest.json"), 0.0)),
    case("stage manifest without a field", FormatError, ("manifest.json", "a field 'output_digest'"),
         lambda s: drop_field(s.only("data/runs/bad/00000/rollout/*/manifest.json"), "output_digest")),
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
    case("/dev/shm full", StoreError, ("/dev/shm", "No space left"),
         lambda s: (s.command.__setitem__(0, "train"), no_room_in_shared_memory(s))),
]  # fmt: skip


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
    assert_answer(
        capfd.readouterr().err,
        status,
        Case("run that is live", ContractError, (f"process {os.getpid()}",), lambda _: None),
    )


def test_no_java_is_said_before_anything_is_sampled(site, capfd):
    site.prompts({"text": "not in the table yet", "answer": 1})
    site.set("run_id=new")
    site.patch.setenv("PATH", "/nonexistent")
    site.patch.delenv("JAVA_HOME", raising=False)
    status = cli.main(site.arguments())
    assert_answer(capfd.readouterr().err, status, Case("no Java", ConfigError, ("Java", "JAVA_HOME"), lambda _: None))
    assert not list(site.folder.glob("data/runs/new/00000/rollout/*/p00000/e*"))
    assert_goes_on(site, "new")


def test_a_lock_whose_owner_was_killed_stands_in_nobodys_way(stopped, site):
    """The run's lease and the files of table locks, left by a process that got SIGKILL."""
    assert list((stopped[0] / "data/tables").glob("*.lock"))
    code = (
        "import os, signal; from schemas import config; from tasks.runs.session import open_session\n"
        "with open_session(config.load('run.toml')): os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=site.folder, check=False)
    assert killed.returncode == -signal.SIGKILL
    newest = sorted(site.folder.glob("data/runs/bad/lease/epochs/*.json"))[-1]
    assert json.loads(newest.read_text())["kind"] == "lease"
    assert_goes_on(site, "bad")


@pytest.mark.parametrize("taken", [False, True], ids=["nobody", "another program"])
def test_a_port_where_no_prefect_server_answers_is_named(site, taken):
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        address = f"127.0.0.1:{server.server_port}/api"
        if taken:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        else:
            server.server_close()
        environment = {"PREFECT_API_URL": f"http://name:secret@{address}", "PREFECT_CLIENT_MAX_RETRIES": "0"}
        done = run_apart(site.folder, environment, ("run", "run.toml"))
        if taken:
            server.shutdown()
    name, found = ("port of another program", "404") if taken else ("no Prefect server", "refused")
    says = (f"http://{address}", "prefect server start", found)
    assert_answer(done.stderr, done.returncode, Case(name, StoreError, says, lambda _: None))
    assert "secret" not in done.stderr


def test_a_full_disk_leaves_nothing_behind(site):
    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    before = {p for p in site.folder.rglob("*") if p.is_file()}
    done = run_apart(site.folder, {}, before=full)
    assert_answer(done.stderr, done.returncode, Case("full disk", StoreError, ("room for the object",), lambda _: None))
    assert {p for p in site.folder.rglob("*") if p.is_file()} == before
    assert_goes_on(site, "bad")


@pytest.mark.s3
@pytest.mark.parametrize(
    ("bucket", "secret", "says"), [("no-such-bucket", None, "no-such-bucket"), (None, "wrong", "AWS_SECRET_ACCESS_KEY")]
)
def test_a_store_that_refuses_is_named(site, s3, capfd, bucket, secret, says):
    site.set(f"data=s3://{bucket}/x" if bucket else f"data={s3}", "run_id=new")
    if secret:
        site.patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    status = cli.main(site.arguments())
    assert_answer(
        capfd.readouterr().err,
        status,
        Case("no such S3 bucket" if bucket else "wrong S3 credentials", StoreError, (says,), lambda _: None),
    )


SPOIL_FINISHED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "stage manifest": ("rollout/*/manifest.json", lambda p: flip(p, 0.0), "stage manifests are whole"),
    "field of a manifest": ("train/*/manifest.json", lambda p: drop_field(p, "tables"), "stage manifests are whole"),
    "partition manifest": ("teach/*/p00000/epochs/000002.json", lambda p: flip(p, 0.0), "partition manifests are"),
    "field of a partition": (
        "teach/*/p00000/epochs/000002.json",
        lambda p: p.write_text(p.read_text().replace('"rows_key"', '"rows_kay"')),
        "partition manifests are whole",
    ),
    "token shard": ("rollout/*/p00000/e*/tokens.safetensors", lambda p: p.unlink(), "token shards hold"),
    "head of a token shard": ("rollout/*/p00000/e*/tokens.safetensors", lambda p: flip(p, 0.0), "token shards hold"),
    "hidden states": ("teach/*/p00000/e*/hidden-00000.safetensors", lambda p: flip(p, 0.99), "hidden-state blocks"),
}  # fmt: skip


@pytest.mark.parametrize("damage", SPOIL_FINISHED)
def test_verify_lists_damage_and_goes_on(cured, tmp_path, damage):
    """One damaged object: its breach is listed, every check is made, and none stops for it."""
    shutil.copytree(cured["run"], tmp_path / "run")
    pattern, spoil, breach = SPOIL_FINISHED[damage]
    spoil(sorted((tmp_path / "run/data/runs/bad/00000").glob(pattern))[-1])
    checks = verify(str(tmp_path / "run/data"), "bad")
    assert [c.name for c in checks] == [c.name for c in verify(str(cured["run"] / "data"), "bad")]
    assert any(c.name.startswith(breach) for c in checks if c.breaches)


def test_verify_lists_a_damaged_table_and_goes_on(cured, tmp_path):
    shutil.copytree(cured["run"], tmp_path / "run")
    flip(tmp_path / "run/data/tables/metrics/_delta_log/00000000000000000000.json", 0.0)
    found = {c.name: c.breaches for c in verify(str(tmp_path / "run/data"), "bad")}
    assert len(found["tables can be read"]) == 1
    assert "tables/metrics" in found["tables can be read"][0]
    assert found["token shards hold each trajectory's tokens"] == ()


def test_a_verifier_stops_the_stage_with_every_token_logged(stopped):
    folder, error = stopped
    assert_answer(
        error,
        6,
        Case(
            "failing verifier, all tokens logged",
            StageError,
            ("no such answer", "the response is in the log"),
            lambda _: None,
        ),
    )
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
