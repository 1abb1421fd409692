"""Rollout workers that are killed, stopped, pre-empted and robbed of their disk: the same bytes in the end.

Workers are real processes of the real entry point, forked from a server that has torch imported already; the
uninterrupted reference is `python -m tasks.ranks.rollout`. Everything they say is in a file, as a parent would see it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from infra import leases
from infra.store import LocalStore
from schemas import keys, shards
from schemas.errors import EXIT_PREEMPTED, ConfigError, ContractError, FormatError
from schemas.rows import TRAJECTORIES, content_digest
from tests.forked import FORKS, leave, redirect
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
DEAD_AFTER_SECONDS = 1.5
PREFIX = keys.stage_prefix("kills", 0, "rollout", "f" * 64)
OWNED = keys.partition_prefix(PREFIX, 3)


def run_worker(work: str, said: str, errors: str, pause: str) -> None:
    """In the worker: its output into files; `pause` names a signal that it sends itself before it would finish."""
    redirect(said, errors)
    from tasks.ranks import rollout

    if pause:
        finish = leases.Lease.finish

        def pausing(self, manifest):
            os.kill(os.getpid(), getattr(signal, pause))
            finish(self, manifest)

        leases.Lease.finish = pausing
    leave(rollout.main([work]))


class Site:
    """A root folder and workers on it. `scratch` is the disk of one node."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.store = folder, LocalStore(folder / "data")
        self.acknowledged: dict | None = None
        self._starts = 0
        requests = []
        for i in range(9):
            trajectory_id = keys.trajectory_id("kills", 0, f"prompt{i // 3}", i % 3)
            requests.append({
                "trajectory_id": trajectory_id, "prompt_id": f"prompt{i // 3}", "sample_index": i % 3,
                "split": "train", "prompt_ids": [1, *range(20, 20 + 7 * (i // 3 + 1))],
                "sampling_key": keys.sampling_key(5, trajectory_id), "max_response_tokens": 110 if i else 1,
                "prompt": {"prompt_id": f"prompt{i // 3}", "verifier": "tests.verifiers:count_letters"},
            })  # fmt: skip
        self.work = {
            "root": str(folder / "data"), "run_id": "kills", "iteration": 0, "stage_prefix": PREFIX,
            "student": {"folder": str(model), "precision": "bf16", "digest": "d" * 64}, "compute": "bf16",
            "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0}, "stop_ids": [2], "vocab_size": 259,
            "engine": {"max_sequences": 5, "page_tokens": 16, "kv_bytes": 1 << 22}, "threads": 1,
            "seal_seconds": 0.1, "grace_seconds": 20.0, "dead_after_seconds": DEAD_AFTER_SECONDS,
            "verifier": {"timeout_seconds": 30.0, "max_failures": 0},
            "partitions": [{"partition": 3, "requests": requests}],
        }  # fmt: skip

    def start(self, scratch: str = "node", pause: str = "") -> Run:
        self._starts += 1
        entry = self.work["partitions"][0] | ({"acknowledged": self.acknowledged} if self.acknowledged else {})
        work = self.work | {"scratch": str(self.folder / scratch), "partitions": [entry, *self.work["partitions"][1:]]}
        path = self.folder / f"work{self._starts}.json"
        path.write_text(json.dumps(work))
        return Run(path, pause)

    def result(self) -> tuple[bytes, list[dict], str]:
        """(shard, rows, digest of content columns) of the finished partition, its digests checked."""
        found = leases.finished(self.store, OWNED)
        assert found is not None
        (shard_object,) = found.manifest["objects"]
        shard, rows = self.store.get(shard_object["key"]), self.store.get(found.manifest["rows_key"])
        assert keys.digest_bytes(shard) == shard_object["digest"]
        assert keys.digest_bytes(rows) == found.manifest["rows_digest"]
        for key in (shard_object["key"], found.manifest["rows_key"]):
            assert key.startswith(keys.owned_object(OWNED, found.epoch - 1, ""))
        parsed = [json.loads(line) for line in rows.splitlines()]
        assert len(parsed) == found.manifest["num_rows"] == 9
        return shard, parsed, content_digest(TRAJECTORIES, parsed)

    def finished_epoch(self) -> int | None:
        found = leases.finished(self.store, OWNED)
        return found and found.epoch

    def told(self, run: Run) -> None:
        """What a parent keeps of a worker that is gone."""
        acks = run.said("ack")
        if acks:
            self.acknowledged = {"epoch": acks[-1]["epoch"], "tokens": acks[-1]["tokens"]}


class Run:
    """One started worker."""

    def __init__(self, work: Path, pause: str) -> None:
        self._said, self._errors = work.with_suffix(".out"), work.with_suffix(".err")
        arguments = (str(work), str(self._said), str(self._errors), pause)
        self._process = FORKS.Process(target=run_worker, args=arguments)
        self._process.start()

    def said(self, event: str) -> list[dict]:
        whole = self._said.read_text().rpartition("\n")[0] if self._said.exists() else ""
        return [m for m in map(json.loads, whole.splitlines()) if m["event"] == event]

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.output()
            assert self._process.exitcode is None, self.output()
            time.sleep(0.005)

    def until_sampling(self, tokens: int = 1) -> None:
        self.until(lambda: self.has_sampled(tokens))

    def has_sampled(self, tokens: int) -> bool:
        return any(sum(m["tokens"].values()) >= tokens for m in self.said("ack"))

    def until_stopped(self) -> None:
        self.until(lambda: Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def send(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def status(self) -> int:
        self._process.join(60)
        assert self._process.exitcode is not None, self.output()
        return self._process.exitcode

    def output(self) -> str:
        return "".join(p.read_text() for p in (self._said, self._errors) if p.exists())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, model) -> tuple[bytes, list[dict], str]:
    """What an uninterrupted worker makes of the partition."""
    site = Site(tmp_path_factory.mktemp("reference"), model)
    path = site.folder / "work.json"
    path.write_text(json.dumps(site.work | {"scratch": str(site.folder / "node")}))
    done = subprocess.run([sys.executable, "-m", "tasks.ranks.rollout", str(path)], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert [m["event"] for m in (messages[0], messages[-1])] == ["resumed", "finished"]
    assert not (site.folder / "node" / OWNED).exists()
    return site.result()


@pytest.fixture
def site(tmp_path, model) -> Site:
    return Site(tmp_path, model)


def assert_same(site: Site, reference: tuple[bytes, list[dict], str]) -> list[dict]:
    shard, rows, digest = site.result()
    assert shard == reference[0]
    assert digest == reference[2]
    return rows


def test_reference_holds_what_its_rows_say(reference):
    shard, rows, _ = reference
    columns = shards.decode(shard, "shard")
    assert [r["trajectory_id"] for r in rows] == sorted(r["trajectory_id"] for r in rows)
    assert {r["finish_reason"] for r in rows} == {"stop", "length"}
    next_prompt, next_row = 0, 0
    for row in rows:
        assert (row["first_prompt_row"], row["first_row"]) == (next_prompt, next_row)
        ids = columns["response_ids"][next_row : next_row + row["response_tokens"]]
        prompt = columns["prompt_ids"][next_prompt : next_prompt + row["prompt_tokens"]]
        assert prompt[0] == 1
        assert list(prompt[1:]) == list(range(20, 19 + row["prompt_tokens"]))
        assert (ids[-1] == 2) == (row["finish_reason"] == "stop")
        assert 2 not in ids[:-1]
        assert row["reward"] % 1 == len("prompt0") / 16
        next_prompt, next_row = next_prompt + row["prompt_tokens"], next_row + row["response_tokens"]
    assert next_row == len(columns["response_ids"]) == len(columns["logprobs_raw"])
    assert next_prompt == len(columns["prompt_ids"])
    assert (columns["sampled_mask"] == 1).all()
    # At temperature 1 with nothing cut the two distributions are one.
    assert np.array_equal(columns["logprobs_raw"], columns["logprobs_sampled"])
    assert (columns["logprobs_raw"] < 0).all()


def test_killed_again_and_again_gives_the_same_bytes(site, reference):
    rng = random.Random(11)
    before: dict[str, int] = {}
    kills = 0
    for epoch in range(1, 7):
        run = site.start()
        run.until(lambda run=run: run.said("resumed"))
        (resumed,) = run.said("resumed")
        assert resumed["epoch"] == epoch
        for trajectory_id, tokens in (site.acknowledged or {"tokens": {}})["tokens"].items():
            assert resumed["recovered"][trajectory_id] >= tokens
        assert all(resumed["recovered"][i] >= tokens for i, tokens in before.items())
        before = resumed["recovered"]
        goal = sum(before.values()) + 1
        run.until(lambda run=run, goal=goal: run.has_sampled(goal) or run.said("finished"))
        time.sleep(rng.uniform(0, 0.03))
        with contextlib.suppress(ProcessLookupError):
            run.send(signal.SIGKILL)
        site.told(run)
        if run.status() == 0:  # a fast machine was done before the kill
            break
        assert run.status() == -signal.SIGKILL
        kills += 1
    assert kills >= 2
    run = site.start()
    assert run.status() == 0, run.output()
    rows = assert_same(site, reference)
    assert sum(r["num_prefill_rebuilds"] for r in rows) > 0
    assert sum(r["num_kv_restores"] for r in rows) == 0


def test_lost_node_continues_from_the_store(site, reference):
    first = site.start()
    first.until_sampling(40)
    first.until(lambda: len(site.store.list(keys.owned_object(OWNED, 1, "wal/"))) >= 3)
    first.send(signal.SIGKILL)
    first.status()
    shutil.rmtree(site.folder / "node")
    second = site.start("other-node")
    assert second.status() == 0, second.output()
    assert sum(second.said("resumed")[0]["recovered"].values()) > 0
    assert_same(site, reference)


def test_preempted_worker_spills_and_its_heir_restores(site, reference):
    first = site.start()
    first.until_sampling(40)
    first.send(signal.SIGTERM)
    assert first.status() == EXIT_PREEMPTED, first.output()
    site.told(first)
    spills = site.store.list(keys.owned_object(OWNED, 1, "spill/"))
    assert spills
    shutil.rmtree(site.folder / "node")
    started = time.monotonic()
    second = site.start("other-node")
    second.until(lambda: second.said("resumed"))
    assert time.monotonic() - started < 30
    (resumed,) = second.said("resumed")
    assert resumed["kv_restored"] == len(spills)
    assert resumed["prefill_rebuilt"] == 0
    # Everything told before a clean stop is in the store, so another node has it too.
    assert site.acknowledged is not None
    assert all(resumed["recovered"][i] >= n for i, n in site.acknowledged["tokens"].items())
    assert second.status() == 0, second.output()
    rows = assert_same(site, reference)
    assert sum(r["num_kv_restores"] for r in rows) == len(spills)
    assert sum(r["num_prefill_rebuilds"] for r in rows) == 0


def test_spilled_kv_that_is_damaged_or_gone_is_computed_again(site, reference):
    first = site.start()
    first.until_sampling(40)
    first.send(signal.SIGTERM)
    assert first.status() == EXIT_PREEMPTED
    spills = site.store.list(keys.owned_object(OWNED, 1, "spill/"))
    assert len(spills) >= 3
    data = bytearray(site.store.get(spills[0]))
    data[-1] ^= 1
    site.store.put(spills[0], bytes(data))
    site.store.delete(spills[1])
    second = site.start()
    assert second.status() == 0, second.output()
    assert len(second.said("kv_refused")) == 2
    (resumed,) = second.said("resumed")
    assert (resumed["kv_restored"], resumed["prefill_rebuilt"]) == (len(spills) - 2, 2)
    rows = assert_same(site, reference)
    assert sum(r["num_prefill_rebuilds"] for r in rows) == 2


def test_kv_restored_then_killed_is_restored_again(site, reference):
    """The heir's base segment carries the spill records on, so its own sudden death costs no prefill."""
    first = site.start()
    first.until_sampling(40)
    first.send(signal.SIGTERM)
    assert first.status() == EXIT_PREEMPTED
    second = site.start()
    second.until(lambda: second.said("resumed"))
    second.send(signal.SIGKILL)
    second.status()
    third = site.start()
    assert third.status() == 0, third.output()
    (resumed,) = third.said("resumed")
    assert resumed["kv_restored"] > 0
    assert resumed["prefill_rebuilt"] == 0
    rows = assert_same(site, reference)
    assert max(r["num_kv_restores"] for r in rows) == 2


def test_sigterm_while_starting_keeps_everything_as_it_was(site, reference):
    run = site.start()
    run.until(lambda: site.store.list(keys.epochs(OWNED)))
    run.send(signal.SIGTERM)
    assert run.status() == EXIT_PREEMPTED
    again = site.start()
    assert again.status() == 0, again.output()
    assert_same(site, reference)


def test_killed_between_objects_and_manifest(site, reference):
    first = site.start(pause="SIGKILL")
    assert first.status() == -signal.SIGKILL
    assert site.store.list(keys.owned_object(OWNED, 1, "tokens"))
    assert site.finished_epoch() is None
    second = site.start()
    assert second.status() == 0, second.output()
    (resumed,) = second.said("resumed")
    assert (resumed["kv_restored"], resumed["prefill_rebuilt"]) == (0, 0)
    assert_same(site, reference)
    third = site.start()
    assert third.status() == 0
    assert third.said("resumed") == []
    assert site.finished_epoch() == 3


@pytest.mark.parametrize("when", ["sampling", "finishing"])
def test_zombie_is_refused_and_nothing_of_it_is_read(site, reference, when):
    zombie = site.start("node", pause="SIGSTOP" if when == "finishing" else "")
    if when == "sampling":
        zombie.until_sampling(40)
        zombie.send(signal.SIGSTOP)
    zombie.until_stopped()
    heir = site.start("other-node")
    assert heir.status() == 0, heir.output()
    made = {key: site.store.get(key) for key in site.store.list(OWNED) if "/heartbeats/" not in key}
    zombie.send(signal.SIGCONT)
    assert zombie.status() == ContractError.exit_status, zombie.output()
    (error,) = zombie.said("error")
    assert error["kind"] == "contract error"
    assert zombie.said("finished") == []
    late = set(site.store.list(OWNED)) - set(made)
    assert all(key.startswith(keys.owned_object(OWNED, 1, "")) or "/heartbeats/" in key for key in late)
    assert {key: site.store.get(key) for key in made} == made
    assert site.finished_epoch() == 3
    assert_same(site, reference)


def test_damaged_local_log_is_refused_until_it_is_moved_away(site, reference):
    first = site.start()
    first.until_sampling(40)
    first.until(lambda: len(site.store.list(keys.owned_object(OWNED, 1, "wal/"))) >= 3)
    first.send(signal.SIGKILL)
    first.status()
    local = site.folder / "node" / keys.wal_segment(OWNED, 1, 1)
    data = bytearray(local.read_bytes())
    data[600] ^= 1
    local.write_bytes(data)
    refused = site.start()
    assert refused.status() == FormatError.exit_status
    (error,) = refused.said("error")
    assert f"{local}, offset 512" in error["text"]
    assert local.read_bytes() == data
    shutil.rmtree(local.parent)
    again = site.start()
    assert again.status() == 0, again.output()
    assert sum(again.said("resumed")[0]["recovered"].values()) > 0
    assert_same(site, reference)


def test_log_that_lost_acknowledged_tokens_is_refused(site):
    first = site.start()
    first.until_sampling(40)
    first.send(signal.SIGKILL)
    first.status()
    site.told(first)
    shutil.rmtree(site.folder / "data" / keys.owned_object(OWNED, 1, "wal"))
    for path in sorted((site.folder / "node" / keys.wal_segment(OWNED, 1, 0)).parent.glob("*.seg"))[1:]:
        path.unlink()
    refused = site.start()
    assert refused.status() == FormatError.exit_status
    assert "acknowledged tokens" in refused.said("error")[0]["text"]


def test_log_of_another_student_is_refused(site):
    first = site.start()
    first.until_sampling(40)
    first.send(signal.SIGKILL)
    first.status()
    site.work["student"] = site.work["student"] | {"digest": "e" * 64}
    refused = site.start()
    assert refused.status() == ContractError.exit_status
    assert "d" * 64 in refused.said("error")[0]["text"]


def test_no_time_to_spill_still_keeps_every_token(site, reference):
    site.work["grace_seconds"] = 0.0
    first = site.start()
    first.until_sampling(40)
    first.send(signal.SIGTERM)
    assert first.status() == EXIT_PREEMPTED
    site.told(first)
    assert site.acknowledged is not None
    assert site.store.list(keys.owned_object(OWNED, 1, "spill/")) == []
    shutil.rmtree(site.folder / "node")
    second = site.start("other-node")
    assert second.status() == 0, second.output()
    (resumed,) = second.said("resumed")
    assert all(resumed["recovered"][i] >= n for i, n in site.acknowledged["tokens"].items())
    assert resumed["prefill_rebuilt"] > 0
    assert_same(site, reference)


def test_short_cache_pauses_sequences_and_changes_no_byte(site, reference):
    page_bytes = 2 * 2 * 16 * 2 * 12 * 2  # keys and values, layers, tokens, kv heads, channels, bf16
    site.work["engine"]["kv_bytes"] = 12 * page_bytes
    run = site.start()
    assert run.status() == 0, run.output()
    rows = assert_same(site, reference)
    assert sum(r["num_kv_restores"] for r in rows) > 0
    assert sum(r["num_prefill_rebuilds"] for r in rows) == 0
    assert sum(r["num_preemptions"] for r in rows) == 0


def test_cache_that_cannot_hold_one_sequence_is_refused(site):
    site.work["engine"]["kv_bytes"] = 8 * 2 * 2 * 16 * 2 * 12 * 2
    run = site.start()
    assert run.status() == ConfigError.exit_status
    assert "rollout.kv_bytes" in run.said("error")[0]["text"]


def test_partitions_of_one_work_file_and_their_stop(site, reference):
    """Cut otherwise, the same trajectories; a stop in the first partition leaves the second to the next worker."""
    requests = site.work["partitions"][0]["requests"]
    site.work["partitions"] = [{"partition": 3, "requests": requests[:4]}, {"partition": 4, "requests": requests[4:]}]
    first = site.start()
    first.until_sampling()
    first.send(signal.SIGTERM)
    assert first.status() == EXIT_PREEMPTED
    assert site.store.list(keys.partition_prefix(PREFIX, 4)) == []
    second = site.start()
    assert second.status() == 0, second.output()
    assert [m["partition"] for m in second.said("finished")] == [3, 4]
    want = by_trajectory(*reference[:2])
    for partition, count in ((3, 4), (4, 5)):
        found = leases.finished(site.store, keys.partition_prefix(PREFIX, partition))
        assert found is not None
        shard = site.store.get(found.manifest["objects"][0]["key"])
        rows = [json.loads(line) for line in site.store.get(found.manifest["rows_key"]).splitlines()]
        assert len(rows) == count
        for trajectory_id, columns in by_trajectory(shard, rows).items():
            assert columns == want.pop(trajectory_id)
    assert want == {}


def by_trajectory(shard: bytes, rows: list[dict]) -> dict[str, list]:
    columns = shards.decode(shard, "shard")
    names = ("response_ids", "logprobs_raw", "logprobs_sampled", "sampled_mask")
    return {
        r["trajectory_id"]: [columns[n][r["first_row"] : r["first_row"] + r["response_tokens"]].tolist() for n in names]
        for r in rows
    }
