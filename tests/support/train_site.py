"""Work files for the train rank over a made-up iteration, and groups of ranks that do them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from infra.launch import free_port
from infra.leases import FinishedEpoch, finished
from infra.store_local import LocalStore
from infra.stores import open_store
from ml.model_files import model_digest, model_digests
from schemas import keys
from schemas.config import Train
from schemas.typed_json import to_json
from schemas.work.train import TeacherHead
from tasks.stages.train import train_settings
from tasks.teachers.opd import head_source
from tests.support.forked import FORKS, leave, redirect
from tests.support.tiny import tiny_model
from tests.support.training_world import make_world, plan_rows, write_store

STEPS = 6
_DISTURBANCES = ("slow", "slow_checkpoints", "pause")
OWNED = "runs/tiny/00000/train/f/p00000"


def write_base(base: Path) -> Path:
    """Models, objects and rows of an iteration of STEPS steps of three packs, and of one held-out pack."""
    tiny_model(base / "student")
    tiny_model(base / "teacher-0", seed=1, width=32, tied=False)
    tiny_model(base / "teacher-1", seed=2)
    world = make_world([(5, 9), (3, 20), (8, 4), (4, 12), (6, 6), (7, 15)], {0: 32, 1: 48}, vocab=259)
    write_store(world, base / "objects")
    items = [(f"t{i:03d}", i % 2, 1.0) for i in (0, 2, 4, 1, 3)]
    steps = [[[items[0], items[1]], [items[2], items[3]], [items[4]]] for _ in range(STEPS)]
    plan = plan_rows(world, steps, slots=2) + plan_rows(world, [[[("t005", 1, 1.0)]]], slots=2, split="heldout")
    for name, rows in (("plan", plan), ("trajectories", world.trajectory_rows), ("hidden", world.hidden_rows)):
        (base / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return base


def own_head(teacher_index: int, folder: Path, digest_of: Path | None = None) -> TeacherHead:
    """The head of a teacher of kind "opd", with its own digest or that of another folder."""
    digest = model_digests(digest_of or folder).head
    return TeacherHead(teacher_index, dataclasses.replace(head_source(folder), digest=digest))


def settings(**changes: Any) -> dict[str, Any]:
    """The settings of a work file."""
    chosen = {"save_every_steps": 1, "learning_rate": 1e-3} | changes
    return to_json(train_settings(Train.model_validate(chosen)))


def write_work(base: Path, name: str, **options: Any) -> Path:
    """A work file with a store and a partition of its own. options: its fields, the student's, and disturbances."""
    root = base / name
    (root / "store").mkdir(parents=True)
    for folder in ("rollout", "teach"):
        (root / "store" / folder).symlink_to(base / "objects" / folder)
    student = Path(options.get("folder", base / "student"))
    work = {
        "root": str(root / "store"), "run_id": "tiny", "iteration": 0, "owned": OWNED, "run_epoch": 1,
        "student": {"folder": str(student), "digest": model_digest(student), "precision": "bf16", "compute": "bf16"},
        "optimizer_from": None, "plan_rows_path": str(base / "plan.jsonl"),
        "trajectory_rows_path": str(base / "trajectories.jsonl"), "hidden_rows_path": str(base / "hidden.jsonl"),
        "teachers": [to_json(own_head(i, base / f"teacher-{i}")) for i in (0, 1)],
        "vocab_size": 259, "page_tokens": 64, "threads": 1, "dead_after_seconds": 5.0,
        "scratch": str(root / "scratch"), "settings": settings(),
    }  # fmt: skip
    path = root / "work.json"
    path.write_text(json.dumps(work))
    change_work(path, **options)
    return path


def change_work(work: Path, **options: Any) -> None:
    """Fields of the work or of its student, and the disturbances that `_disturb` knows."""
    known = json.loads(work.read_text())
    disturbances = _disturbances(work)
    for name, value in options.items():
        place = disturbances if name in _DISTURBANCES else known["student"] if name in known["student"] else known
        place[name] = value
    work.write_text(json.dumps(known))
    work.with_name("disturbances.json").write_text(json.dumps(disturbances))


def _disturbances(work: Path) -> dict[str, Any]:
    path = work.with_name("disturbances.json")
    return json.loads(path.read_text()) if path.exists() else {}


class Group:
    """Ranks of one start. die_after: rank 0 kills itself once the checkpoint of that many steps is whole."""

    def __init__(self, work: Path, ranks: int = 1, die_after: int = 0) -> None:
        port = str(free_port())
        start = len(list(work.parent.glob("said-*-0")))
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        self._said = [work.parent / f"said-{start}-{rank}" for rank in range(ranks)]
        self.processes = [
            FORKS.Process(
                target=_rank, args=(str(work), str(path), group | {"RANK": str(r), "LOCAL_RANK": str(r)}, die_after)
            )
            for r, path in enumerate(self._said)
        ]
        for process in self.processes:
            process.start()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def statuses(self) -> list[int | None]:
        """Exit status of each rank, or minus its signal, once rank 0 has ended; ranks left alone by it are killed."""
        self.processes[0].join(240)
        if self.processes[0].exitcode == -signal.SIGKILL:
            self.kill()
        for process in self.processes:
            process.join(60)
        return [process.exitcode for process in self.processes]

    def told(self) -> list[dict[str, Any]]:
        """Messages of rank 0 so far; every line on its stdout must be one."""
        whole = self._said[0].read_text().rpartition("\n")[0] if self._said[0].exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def output(self) -> str:
        return "\n".join(path.with_suffix(".err").read_text()[-3000:] for path in self._said)


def _rank(work: str, said: str, group: dict[str, str], die_after: int) -> None:
    redirect(said, said + ".err")
    os.environ.update(group)
    from tasks.ranks import checkpoints, train

    if die_after:
        save = checkpoints.save_state

        def dying(folder, tensors, facts):
            save(folder, tensors, facts)
            if facts["steps"] == die_after:
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoints.save_state = dying
    _disturb(_disturbances(Path(work)))
    leave(train.main([work]))


def _disturb(work: dict[str, Any]) -> None:
    """slow: seconds before each micro-batch. slow_checkpoints: seconds that the store takes for each of their objects.
    pause: name of a signal that rank 0 sends itself before it would finish.
    """
    from infra import leases
    from ml.train import loader

    if work.get("slow"):
        load = loader.RankBatches._load

        def slowly(self, index, frame):
            time.sleep(work["slow"])
            return load(self, index, frame)

        loader.RankBatches._load = slowly
    if work.get("slow_checkpoints"):
        put = LocalStore.put

        def put_slowly(self, key, data):
            if "/checkpoints/" in key:
                time.sleep(work["slow_checkpoints"])
            put(self, key, data)

        LocalStore.put = put_slowly
    if work.get("pause"):
        finish = leases.Lease.finish

        def pausing(self, manifest):
            os.kill(os.getpid(), getattr(signal, work["pause"]))
            finish(self, manifest)

        leases.Lease.finish = pausing


def events(work: Path, ranks: int = 1, status: int = 0) -> list[dict[str, Any]]:
    """Messages of rank 0 of a whole run."""
    group = Group(work, ranks)
    assert group.statuses() == [status] * ranks, group.output()
    return group.told()


def manifest_of(work: Path) -> dict[str, Any]:
    found = finished(open_store(json.loads(work.read_text())["root"]), OWNED)
    assert isinstance(found, FinishedEpoch)
    return found.manifest


def rows_of(work: Path) -> list[dict[str, Any]]:
    store, manifest = open_store(json.loads(work.read_text())["root"]), manifest_of(work)
    data = store.get(manifest["rows_key"])
    assert keys.digest_bytes(data) == manifest["rows_digest"]
    rows = [json.loads(line) for line in data.splitlines()]
    assert len(rows) == manifest["num_rows"]
    return rows


def content(work: Path) -> list[tuple[str, str, str]]:
    """Digests of what the partition holds: equal for equal bytes."""
    return [(o["group"], o["name"], o["digest"]) for o in manifest_of(work)["objects"]]


def fetch(work: Path, group: str, folder: Path) -> Path:
    """Objects of one group as a folder, as the next iteration copies them."""
    folder.mkdir(parents=True)
    store = open_store(json.loads(work.read_text())["root"])
    for entry in manifest_of(work)["objects"]:
        if entry["group"] == group:
            data = store.get(entry["key"])
            assert (len(data), keys.digest_bytes(data)) == (entry["bytes"], entry["digest"])
            (folder / entry["name"]).write_bytes(data)
    return folder
