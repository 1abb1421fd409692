"""Two of a kind at the same moment, on an empty root: campaigns of one run, workers of one partition."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from infra.store import ObjectStore
from schemas import keys
from schemas.errors import ContractError
from tests.faults.test_rollout_kill import OWNED, Site, assert_same, model, reference
from tests.support.tiny import tiny_model

__all__ = ["model", "reference"]
REPOSITORY = Path(__file__).parents[2]

CAMPAIGN = """
import sys, time
from schemas import config
from schemas.errors import OpdError
from tasks.runs.session import open_session
values, moment = {values!r}, {moment!r}
parsed = config.parse(values)
time.sleep(max(0.0, moment - time.time()))
try:
    with open_session(parsed):
        print("owner", flush=True)
        sys.stdin.read()
except OpdError as error:
    print(repr(str(error)), flush=True)
    sys.exit(error.exit_status)
"""


def campaign(values: dict, moment: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CAMPAIGN.format(values=values, moment=moment)],
        cwd=REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def test_campaigns_of_one_run_started_in_the_same_second_have_one_owner(store: ObjectStore, tmp_path: Path) -> None:
    student = str(tiny_model(tmp_path / "student"))
    moment = time.time() + 8
    started = {}
    for seed in (1, 2, 3):
        values = {
            "run_id": "twice", "seed": seed, "data": store.root, "scratch": str(tmp_path / "scratch"),
            "student": {"path": student}, "teachers": [{"id": "t", "path": student}],
            "prompts": {"datasets": [{"name": "chain_sum", "size": 60, "teachers": ["t"]}]},
        }  # fmt: skip
        started[seed] = campaign(values, moment)
    first_lines = {}
    for seed, process in started.items():
        assert process.stdout is not None
        first_lines[seed] = process.stdout.readline()
    (owner,) = [seed for seed, line in first_lines.items() if line == "owner\n"]
    for seed, process in started.items():
        process.communicate("")
        if seed == owner:
            assert process.returncode == 0
        else:
            assert process.returncode == ContractError.exit_status
            assert f"process {started[owner].pid} on" in first_lines[seed]
            assert "heartbeat moves" in first_lines[seed]

    # All that is there is the owner's: its one record, its one lease, and no table; and what the store has promised.
    assert [key for key in store.list("") if not key.startswith("promises/")] == [
        keys.epoch(keys.run_lease("twice"), 1), keys.heartbeat(keys.run_lease("twice"), 1), keys.run_record("twice", 1),
    ]  # fmt: skip
    assert json.loads(store.get(keys.run_record("twice", 1)))["config"]["seed"] == owner


def test_two_workers_on_one_partition_make_it_once(tmp_path: Path, model, reference) -> None:
    site = Site(tmp_path, model)
    workers = [site.start(node) for node in ("node", "other-node")]
    assert [worker.status() for worker in workers] == [0, 0], [worker.output() for worker in workers]
    assert [len(worker.said("finished")) for worker in workers] == [1, 1]
    assert sorted(len(worker.said("resumed")) for worker in workers) == [0, 1]
    assert site.finished_epoch() == 2
    others = [k for k in site.store.list(OWNED) if not k.startswith(keys.owned_object(OWNED, 1, ""))]
    assert others == [keys.epoch(OWNED, 1), keys.epoch(OWNED, 2), keys.heartbeat(OWNED, 1)]
    assert_same(site, reference)
