"""A driver that stands still (Ctrl-Z): nobody hears its workers, whose partitions pass to those of the next driver."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from pathlib import Path

import pytest

from infra import leases
from schemas.errors import ContractError
from tests.faults.test_rollout_kill import OWNED, Site, assert_same, model, reference
from tests.support.forked import FORKS
from tests.support.rollout_site import run_talkative_worker

__all__ = ["model", "reference"]


def beats(site: Site) -> int:
    found = leases._heartbeat(site.store, OWNED, 1)
    return found["counter"] if found else 0


def wait_for_silence(site: Site) -> None:
    """No beat in a second, of three that a live owner would have put."""
    quiet, before = 0.0, -1
    deadline = time.monotonic() + 60
    while quiet < 1.0:
        assert time.monotonic() < deadline
        quiet, before = (quiet + 0.1 if before == beats(site) else 0.0), beats(site)
        time.sleep(0.1)


@pytest.mark.parametrize("run_epoch", [None, 7])
def test_workers_that_nobody_hears_give_way(tmp_path: Path, model, reference, run_epoch: int | None) -> None:
    site = Site(tmp_path, model)
    known = {} if run_epoch is None else {"run_epoch": run_epoch, "dead_after_seconds": 600.0}
    path = tmp_path / "unheard.json"
    path.write_text(json.dumps(site.work | known | {"scratch": str(tmp_path / "node")}))
    said = tmp_path / "said"
    os.mkfifo(said)
    pipe = os.open(said, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
    patience_seconds = 1.0 if run_epoch is None else 600.0
    arguments = (str(path), str(said), str(tmp_path / "errors"), patience_seconds)
    unheard = FORKS.Process(target=run_talkative_worker, args=arguments)
    unheard.start()
    try:
        deadline = time.monotonic() + 60
        while not beats(site):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if run_epoch is None:
            wait_for_silence(site)
        else:
            site.work |= {"run_epoch": run_epoch + 1, "dead_after_seconds": 600.0}
        assert unheard.is_alive()
        began = time.monotonic()
        heir = site.start("other-node")
        assert heir.status() == 0, heir.output()
        assert time.monotonic() - began < 60
        assert site.finished_epoch() == 3
        assert_same(site, reference)
    finally:
        # The driver goes on, and hears that it has lost the partition.
        os.set_blocking(pipe, True)
        heard: list[bytes] = []
        reading = threading.Thread(target=lambda: heard.extend(iter(lambda: os.read(pipe, 65536), b"")), daemon=True)
        reading.start()
        unheard.join(60)
        if unheard.is_alive():
            unheard.kill()
    assert unheard.exitcode == ContractError.exit_status
    reading.join(60)
    last = json.loads(b"".join(heard).decode().splitlines()[-1])
    assert (last["event"], last["kind"]) == ("error", "contract error")
    os.close(pipe)


def test_a_worker_of_the_driver_that_lost_the_run_takes_nothing(tmp_path: Path, model, reference) -> None:
    """It starts late, when the heir's worker has died: not even that it may continue."""
    site = Site(tmp_path, model)
    site.work["run_epoch"] = 8
    dead = site.start()
    dead.until_sampling()
    dead.send(9)
    dead.status()
    site.work["run_epoch"] = 7
    late = site.start()
    assert late.status() == ContractError.exit_status
    assert "under epoch 8" in late.output()
    site.work["run_epoch"] = 8
    heir = site.start()
    assert heir.status() == 0, heir.output()
    assert site.finished_epoch() == 3
    assert_same(site, reference)


def test_who_waits_for_a_partition_tells_the_driver(tmp_path: Path, model) -> None:
    site = Site(tmp_path, model)
    owner = site.start_zombie("sampling")
    site.work["dead_after_seconds"] = 6.0
    heir = site.start("other-node")
    heir.until(lambda: heir.said("waiting"))
    text = heir.said("waiting")[0]["text"]
    assert text.startswith(f"waiting for {OWNED}, held by partition 3, stage rollout, process {owner._process.pid} on ")
    assert text.endswith("taken over after 6 s of silence")
    assert heir.status() == 0, heir.output()
    owner.send(9)
    owner.status()
