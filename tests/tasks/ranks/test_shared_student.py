"""Rollout workers whose model two ranks share: the same bytes as one rank's, refusals, and deaths of a rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from schemas.errors import EXIT_PREEMPTED, ConfigError
from tests.support.rollout_site import Run, Site, undisturbed
from tests.support.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, model) -> tuple[bytes, str]:
    return undisturbed(tmp_path_factory.mktemp("reference"), model)


@pytest.fixture
def site(tmp_path, model) -> Site:
    site = Site(tmp_path, model)
    site.work["ranks"] = 2
    return site


def other_ranks(run: Run) -> list[int]:
    """Processes that the worker started with this module."""
    pid = run._process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"shared_student" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_two_ranks_write_the_bytes_of_one(site, reference):
    run = site.start()
    assert run.status() == 0, run.output()
    assert site.outcome() == reference


def test_a_dead_rank_ends_its_worker_and_the_heir_goes_on(site, reference):
    run = site.start()
    run.until_sampling(30)
    (other,) = other_ranks(run)
    os.kill(other, signal.SIGKILL)
    assert run.status() not in (0, EXIT_PREEMPTED)
    site.told(run)
    heir = site.start()
    assert heir.status() == 0, heir.output()
    assert sum(heir.said("resumed")[0]["recovered"].values()) >= 30
    assert site.outcome() == reference


@pytest.mark.parametrize("ranks", [1, 2])
def test_kv_is_resumed_by_as_many_ranks_and_rebuilt_by_another_number(site, reference, ranks):
    run = site.start()
    run.until_sampling(60)
    run.send(signal.SIGTERM)
    assert run.status() == EXIT_PREEMPTED, run.output()
    site.told(run)
    site.work["ranks"] = ranks
    heir = site.start()
    assert heir.status() == 0, heir.output()
    (resumed,) = heir.said("resumed")
    assert (resumed["kv_restored"] > 0) == (ranks == 2)
    assert (resumed["prefill_rebuilt"] > 0) == (ranks == 1)
    assert all("ranks" in message["text"] for message in heir.said("kv_refused"))
    assert site.outcome() == reference


def test_heads_that_the_ranks_cannot_share_are_refused(site):
    site.work["ranks"] = 3
    run = site.start()
    assert run.status() == ConfigError.exit_status
    text = run.said("error")[0]["text"]
    assert "2 KV heads" in text
    assert "3 ranks" in text
