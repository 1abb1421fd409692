"""`opd upkeep` beside rollout workers that live, and beside zombies that have been superseded."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from schemas import keys
from schemas.errors import OpdError
from tasks.operate.upkeep import upkeep
from tests.support.rollout_site import OWNED, PREFIX, Site, undisturbed
from tests.support.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, model) -> tuple[bytes, str]:
    return undisturbed(tmp_path_factory.mktemp("reference"), model)


@pytest.fixture
def site(tmp_path, model) -> Site:
    """Its workers' scratch is that of run `kills` under folder `scratch`."""
    return Site(tmp_path, model)


def put_manifest(site: Site, partitions: dict[str, int]) -> None:
    body = {"stage": "rollout", "iteration": 0, "fingerprint": "f", "inputs": {}, "tables": {}, "stats": {},
            "output_digest": "o", "partitions": partitions}  # fmt: skip
    site.store.put(keys.stage_manifest(PREFIX), keys.canonical_json(body))


def old_upkeep(site: Site) -> list[tuple[str, int]]:
    """As a day later, when nobody has written since."""
    scratch = site.folder / "scratch"
    for path in (scratch, *scratch.rglob("*")):
        os.utime(path, (time.time() - 90_000, time.time() - 90_000))
    return [(line.what, line.num_objects) for line in upkeep(site.work["root"], ["kills"], scratch=scratch)]


def test_a_live_worker_keeps_its_log_and_folder(site, reference):
    """Whatever manifest of its stage stands: its partition's does not, or another epoch's."""
    worker = site.start("scratch/kills/wal")
    worker.until_sampling(40)
    worker.send(signal.SIGSTOP)
    worker.until_stopped()
    before = site.store.list("")
    files = sorted((site.folder / "scratch").rglob("*"))
    for partitions in ({}, {"3": 2}, {"3": 3}):
        put_manifest(site, partitions)
        assert {count for _, count in old_upkeep(site)} == {0}
    site.store.delete(keys.stage_manifest(PREFIX))
    assert site.store.list("") == before
    assert sorted((site.folder / "scratch").rglob("*")) == files
    worker.send(signal.SIGCONT)
    assert worker.status() == 0, worker.output()
    assert site.outcome() == reference


@pytest.mark.parametrize("when", ["sampling", "finishing"])
def test_a_zombie_loses_only_what_nobody_reads(site, reference, when):
    """It finds its folder and objects gone, and ends as it would have; what it writes then is found the next time."""
    zombie = site.start_zombie(when, "scratch/kills/wal")
    heir = site.start("other-node")
    assert heir.status() == 0, heir.output()
    put_manifest(site, {"3": 3})
    left = dict(old_upkeep(site))
    assert left["segments of token logs"] > 2
    assert left["objects of superseded owners"] == (2 if when == "finishing" else 0)
    assert left["local files of finished partitions"] > 1
    assert not (site.folder / "scratch/kills/wal" / OWNED).exists()
    assert not [key for key in site.store.list(OWNED) if "/e000001/" in key]
    zombie.send(signal.SIGCONT)
    assert zombie.status() in {kind.exit_status for kind in OpdError.__subclasses__()}, zombie.output()
    assert zombie.said("finished") == []
    assert site.outcome() == reference
    old_upkeep(site)
    assert not [key for key in site.store.list(OWNED) if "/e000001/" in key]
    assert {count for _, count in old_upkeep(site)} == {0}
    assert site.outcome() == reference
