"""Rollout workers that are killed, stopped, pre-empted and robbed of their disk: the same bytes in the end.

Workers are real processes of the real entry point, forked from a server that has torch imported already; the
uninterrupted reference is `python -m tasks.ranks.rollout`. Everything they say is in a file, as a parent would see it.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from infra import leases
from schemas import keys, shards
from schemas.errors import EXIT_PREEMPTED, ConfigError, ContractError, FormatError
from tests.support.rollout_site import OWNED, PREFIX, Site
from tests.support.tiny import tiny_model

ROOT = Path(__file__).parents[2]


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


def test_spilled_kv_that_is_damaged_cut_or_gone_is_computed_again(site, reference):
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
    site.store.put(spills[2], site.store.get(spills[2])[:-1])
    second = site.start()
    assert second.status() == 0, second.output()
    assert len(second.said("kv_refused")) == 3
    (resumed,) = second.said("resumed")
    assert (resumed["kv_restored"], resumed["prefill_rebuilt"]) == (len(spills) - 3, 3)
    rows = assert_same(site, reference)
    assert sum(r["num_prefill_rebuilds"] for r in rows) == 3


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
    zombie = site.start_zombie(when)
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
    digest = site.work["student"]["digest"]
    site.work["student"] = site.work["student"] | {"digest": "e" * 64}
    refused = site.start()
    assert refused.status() == ContractError.exit_status
    assert digest in refused.said("error")[0]["text"]


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
