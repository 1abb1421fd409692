"""SIGTERM to a worker whose store is slow, or that samples no more: out in time, and nothing lost."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from schemas import keys
from schemas.errors import EXIT_PREEMPTED
from tests.support.rollout_site import OWNED, Run, Site, undisturbed
from tests.support.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, model) -> tuple[bytes, str]:
    return undisturbed(tmp_path_factory.mktemp("reference"), model)


@pytest.fixture
def site(tmp_path, model) -> Site:
    return Site(tmp_path, model)


def finish(site: Site, reference: tuple[bytes, str]) -> dict:
    """What the heir, on another node, says as it goes on; it makes the same bytes."""
    shutil.rmtree(site.folder / "node")
    heir = site.start("other-node")
    assert heir.status() == 0, heir.output()
    assert site.outcome() == reference
    return heir.said("resumed")[0]


def preempt(worker: Run) -> None:
    """SIGTERM in the middle of sampling."""
    worker.until_sampling(60)
    worker.send(signal.SIGTERM)
    assert worker.status() == EXIT_PREEMPTED, worker.output()


def spills(site: Site) -> list[str]:
    return site.store.list(keys.owned_object(OWNED, 1, "spill/"))


def test_what_the_grace_is_too_short_for_is_not_spilled(site, reference):
    site.work["grace_seconds"] = 3.0
    worker = site.start(spill_seconds=0.8)
    preempt(worker)
    count = len(spills(site))
    assert 0 < count < 5
    resumed = finish(site, reference)
    assert resumed["kv_restored"] == count
    assert resumed["prefill_rebuilt"] > 0


def test_an_upload_that_hangs_is_given_up(site, reference):
    """`status` would wait a minute for the worker, the store ten."""
    site.work["grace_seconds"] = 2.0
    worker = site.start(spill_seconds=600.0)
    preempt(worker)
    assert spills(site) == []
    assert finish(site, reference)["kv_restored"] == 0


def test_a_spill_that_the_store_refuses_costs_no_other(site, reference):
    """A store may have no room for KV of a long context, and some for that of another."""
    worker = site.start(refuse_spills=2)
    preempt(worker)
    refused = worker.said("kv_refused")
    assert refused
    assert all("too large" in message["text"] for message in refused)
    count = len(spills(site))
    assert count > 0
    resumed = finish(site, reference)
    assert resumed["kv_restored"] == count
    assert resumed["prefill_rebuilt"] >= len(refused)


def test_kv_that_an_earlier_spill_restores_is_not_spilled_again(site, reference):
    first = site.start()
    preempt(first)
    before = len(spills(site))
    assert before > 0
    second = site.start()
    second.until(lambda: second.said("resumed"))
    second.send(signal.SIGTERM)
    assert second.status() == EXIT_PREEMPTED
    again = site.store.list(keys.owned_object(OWNED, 2, "spill/"))
    resumed = finish(site, reference)
    assert resumed["kv_restored"] >= before
    assert len(again) <= 5  # those alone that had gone on, and were in the cache


def test_scoring_is_left_to_the_heir(site, reference):
    """A verifier that takes its time does not use up the grace: the responses are in the log."""
    requests = site.work["partitions"][0]["requests"]
    for request in requests:
        request["prompt"]["verifier"] = "tests.support.verifiers:sleeps"
    worker = site.start()
    worker.until(lambda: worker.said("progress") and worker.said("progress")[-1]["done"] == len(requests))
    worker.send(signal.SIGTERM)
    assert worker.status() == EXIT_PREEMPTED, worker.output()
    for request in requests:
        request["prompt"]["verifier"] = "tests.support.verifiers:count_letters"
    assert set(finish(site, reference)["recovered"]) == {r["trajectory_id"] for r in requests}
