"""A partition of nine trajectories, and real workers on it: what the rollout's fault tests kill, stop and rob.

Workers are of the real entry point, forked from a server that has torch imported already. Everything that they say is
in a file, as a parent would see it.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra import leases
from infra.store_local import LocalStore
from infra.stores import open_store
from ml.model_files import model_digest
from schemas import keys
from schemas.errors import StoreError
from schemas.rows import TRAJECTORIES, content_digest
from tests.support.forked import FORKS, leave, redirect

DEAD_AFTER_SECONDS = 1.5
PREFIX = keys.stage_prefix("kills", 0, "rollout", "f" * 64)
OWNED = keys.partition_prefix(PREFIX, 3)


def run_worker(
    work: str, said: str, errors: str, pause: str, spill_seconds: float, refuse_spills: int, settings: dict[str, str]
) -> None:
    """In the worker: its output into files; `pause` names a signal that it sends itself before it would finish.

    spill_seconds: that the store takes for each spill. refuse_spills: N: every N-th is refused; 0: none. settings: of
    the environment, which the server of forks does not share.
    """
    redirect(said, errors)
    os.environ |= settings
    from tasks.ranks import rollout

    if spill_seconds or refuse_spills:
        put, spills = LocalStore.put, itertools.count(1)

        def put_spill(self, key, data):
            if "/spill/" in key:
                time.sleep(spill_seconds)
                if refuse_spills and next(spills) % refuse_spills == 0:
                    raise StoreError(key, expected="an object that is not too large", found="too large")
            put(self, key, data)

        LocalStore.put = put_spill
    if pause:
        finish = leases.Lease.finish

        def pausing(self, manifest):
            os.kill(os.getpid(), getattr(signal, pause))
            finish(self, manifest)

        leases.Lease.finish = pausing
    leave(rollout.main([work]))


def run_talkative_worker(work: str, said: str, errors: str, patience_seconds: float) -> None:
    """A worker that reports every step, and whose heartbeat stops patience_seconds after the last one."""
    redirect(said, errors)
    from tasks.ranks import rollout, rollout_partition

    rollout_partition._REPORT_SECONDS = 0.0
    assert leases.acquire.__kwdefaults__ is not None
    leases.acquire.__kwdefaults__["patience_seconds"] = patience_seconds
    leave(rollout.main([work]))


class Site:
    """A root folder and workers on it. `scratch` is the disk of one node."""

    def __init__(self, folder: Path, model: Path, root: str | None = None) -> None:
        """root: of the data; None: a folder beside the workers' own."""
        root = root or str(folder / "data")
        self.folder, self.store = folder, open_store(root)
        self.acknowledged: dict | None = None
        self.settings: dict[str, str] = {}
        self._starts = 0
        requests = []
        for i in range(9):
            trajectory_id = keys.trajectory_id("kills", 0, f"prompt{i // 3}", i % 3)
            requests.append({
                "trajectory_id": trajectory_id, "prompt_id": f"prompt{i // 3}", "sample_index": i % 3,
                "split": "train", "prompt_ids": [1, *range(20, 20 + 7 * (i // 3 + 1))],
                "sampling_key": keys.sampling_key(5, trajectory_id), "max_response_tokens": 110 if i else 1,
                "prompt": {"prompt_id": f"prompt{i // 3}", "verifier": "tests.support.verifiers:count_letters"},
            })  # fmt: skip
        self.work = {
            "root": root, "run_id": "kills", "iteration": 0, "stage_prefix": PREFIX, "run_epoch": 1, "scoring": {},
            "student": {
                "folder": str(model), "precision": "bf16", "digest": model_digest(model), "compute": "bf16",
            },
            "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0}, "stop_ids": [2], "vocab_size": 259,
            "engine": {"max_sequences": 5, "page_tokens": 16, "kv_bytes": 1 << 22}, "ranks": 1, "threads": 1,
            "seal_seconds": 0.1, "grace_seconds": 20.0, "dead_after_seconds": DEAD_AFTER_SECONDS,
            "verifier": {"timeout_seconds": 30.0, "memory_bytes": 4 << 30}, "max_verifier_failures": 0,
            "partitions": [{"partition": 3, "requests": requests}],
        }  # fmt: skip

    def start(self, scratch: str = "node", pause: str = "", spill_seconds: float = 0.0, refuse_spills: int = 0) -> Run:
        self._starts += 1
        entry = self.work["partitions"][0] | ({"acknowledged": self.acknowledged} if self.acknowledged else {})
        work = self.work | {"scratch": str(self.folder / scratch), "partitions": [entry, *self.work["partitions"][1:]]}
        path = self.folder / f"work{self._starts}.json"
        path.write_text(json.dumps(work))
        return Run(path, pause, spill_seconds, refuse_spills, self.settings)

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

    def outcome(self) -> tuple[bytes, str]:
        """`result` without its rows."""
        shard, _, content = self.result()
        return shard, content

    def start_zombie(self, when: str, scratch: str = "node") -> Run:
        """A worker that stands still, to be sent SIGCONT: amid "sampling", or "finishing" with all but its manifest."""
        zombie = self.start(scratch, pause="SIGSTOP" if when == "finishing" else "")
        if when == "sampling":
            zombie.until_sampling(40)
            zombie.send(signal.SIGSTOP)
        zombie.until_stopped()
        return zombie

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

    def __init__(self, work: Path, *options: Any) -> None:
        """options: those of `run_worker`."""
        self._said, self._errors = work.with_suffix(".out"), work.with_suffix(".err")
        arguments = (str(work), str(self._said), str(self._errors), *options)
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


def undisturbed(folder: Path, model: Path) -> tuple[bytes, str]:
    """`Site.outcome` of a worker that nobody disturbs."""
    site = Site(folder, model)
    run = site.start()
    assert run.status() == 0, run.output()
    return site.outcome()
