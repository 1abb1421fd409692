"""`opd upkeep` beside finished, unfinished and live work, and killed after every deletion."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from flows.cli import main
from infra import leases
from infra.store import ObjectStore
from infra.store_local import LocalStore
from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_recovery import recover
from schemas import keys
from schemas.errors import ContractError, StoreError
from tasks.operate.upkeep import Collected, upkeep

DONE = keys.stage_prefix("r", 0, "rollout", "a" * 64)
UNFINISHED = keys.stage_prefix("r", 1, "rollout", "b" * 64)
OTHER = keys.stage_prefix("s", 0, "rollout", "c" * 64)


def write_partition(store: ObjectStore, tmp_path: Path, prefix: str, partition: int, *, finish: bool) -> int:
    """Two owners, the first of them dead: logs of three segments, a spill each, results. Returns the last epoch."""
    owned = keys.partition_prefix(prefix, partition)
    for epoch in (1, 2):
        lease = leases.acquire(store, owned, owner={"stage": "rollout"}, dead_after_seconds=0.1)
        assert isinstance(lease, leases.Lease)
        assert lease.epoch == epoch
        lease.heartbeat()

        def upload(segment: int, data: bytes, epoch: int = epoch) -> None:
            assert store.put_if_absent(keys.wal_segment(owned, epoch, segment), data)

        folder = tmp_path / "node" / owned / str(epoch)
        with TokenLog(folder, LogHeader("r", 0, partition, epoch, "s"), upload=upload) as log:
            number = log.admit("t", prompt_digest=bytes(32), prompt_tokens=1)
            for step in range(2):
                log.append_step([number], [step], [7], [-1.0], [-1.0])
                log.seal()
        store.put(keys.owned_object(owned, epoch, "spill/00000.safetensors"), bytes(1000))
        store.put(keys.owned_object(owned, epoch, "checkpoints/000004/state.json"), b"state")
        store.put(keys.owned_object(owned, epoch, "tokens.safetensors"), b"tokens")
        store.put(keys.owned_object(owned, epoch, "rows.jsonl"), b"rows")
        if epoch == 2 and finish:
            # What the first owner left of this name is what the second would have written: it may name either.
            named = keys.owned_object(owned, 1, "adopted.safetensors")
            store.put(named, b"adopted")
            entries = [{"key": key, "digest": "d", "bytes": 6, "group": "export", "name": "n"}
                       for key in (named, keys.owned_object(owned, epoch, "tokens.safetensors"))]  # fmt: skip
            lease.finish(
                {
                    "objects": entries, "rows_key": keys.owned_object(owned, epoch, "rows.jsonl"), "rows_digest": "d",
                    "num_rows": 0, "given_up": {}, "checkpoint": {"version": "v"}, "fp8_inexact": [],
                    "stats": {"verifier_failures": 0},
                }
            )  # fmt: skip
            return 3
        leases.release(lease)
    return 2


def put_manifest(store: ObjectStore, prefix: str, epochs: dict[int, int]) -> None:
    body = {
        "stage": "rollout", "iteration": 0, "fingerprint": "f", "inputs": {}, "tables": {}, "stats": {},
        "output_digest": "o", "partitions": {str(p): e for p, e in epochs.items()},
    }  # fmt: skip
    assert store.put_if_absent(keys.stage_manifest(prefix), keys.canonical_json(body))


def goes(key: str) -> bool:
    """Of a finished partition: logs, spills, checkpoints in its middle, and what the first owner wrote alone."""
    left = ("/e000001/tokens.safetensors", "/e000001/rows.jsonl")
    return any(f"/{name}/" in key for name in ("wal", "spill", "checkpoints")) or key.endswith(left)


@pytest.fixture
def world(store, tmp_path) -> ObjectStore:
    """A finished stage of run r; a stage of it in progress; a finished stage of run s."""
    for prefix in (DONE, OTHER):
        put_manifest(store, prefix, {p: write_partition(store, tmp_path, prefix, p, finish=True) for p in (0, 1)})
    write_partition(store, tmp_path, UNFINISHED, 0, finish=True)
    write_partition(store, tmp_path, UNFINISHED, 1, finish=False)
    return store


def totals(collected: list[Collected]) -> dict[tuple[str, str | None], int]:
    return {(line.what, line.run_id): line.num_objects for line in collected}


def test_only_logs_and_leftovers_of_finished_stages_go(world):
    before = world.list("")
    expected = {key for key in before if goes(key) and not key.startswith(UNFINISHED)}
    assert len(expected) == 2 * 2 * (2 * (3 + 1 + 1) + 2)
    dry = upkeep(world.root, dry_run=True)
    assert world.list("") == before
    assert upkeep(world.root) == dry
    assert set(before) - set(world.list("")) == expected
    assert totals(dry) == {
        ("segments of token logs", "r"): 12, ("spilled KV", "r"): 4, ("segments of token logs", "s"): 12,
        ("spilled KV", "s"): 4, ("epochs of table leases", None): 0, ("unfinished writes", None): 0,
        ("checkpoints in the middle of plans", "r"): 4, ("checkpoints in the middle of plans", "s"): 4,
        ("objects of superseded owners", "r"): 4, ("objects of superseded owners", "s"): 4,
    }  # fmt: skip
    assert sum(line.num_bytes for line in dry if line.what == "spilled KV") == 8 * 1000
    assert set(totals(upkeep(world.root)).values()) == {0}


def test_one_run_alone(world):
    before = set(world.list(""))
    upkeep(world.root, ["s"])
    gone = before - set(world.list(""))
    assert gone == {key for key in before if goes(key) and key.startswith("runs/s/")}
    with pytest.raises(ContractError, match="run other"):
        upkeep(world.root, ["s", "other"])


def test_manifests_that_disagree_keep_their_logs(world, tmp_path):
    """The stage's manifest names another epoch than the partition's, or a partition that is taken over right now."""
    prefix = keys.stage_prefix("r", 2, "rollout", "d" * 64)
    for partition, finish in ((0, True), (1, False)):
        write_partition(world, tmp_path, prefix, partition, finish=finish)
    put_manifest(world, prefix, {0: 7, 1: 2})
    kept = world.list(prefix)
    upkeep(world.root)
    assert world.list(prefix) == kept


def test_resumed_partition_recovers_while_upkeep_runs(world):
    """The heir of the stage in progress finds each log of its partition whole."""
    upkeep(world.root)
    for epoch in (1, 2):
        names = world.list(keys.owned_object(keys.partition_prefix(UNFINISHED, 1), epoch, "wal/"))
        assert recover([(n, world.get(n)) for n in names], "log").num_tokens == 2


class Dying:
    """A local store that dies at its k-th deletion."""

    def __init__(self, store: LocalStore, k: int) -> None:
        self._store, self._left, self.root = store, k, store.root

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def delete(self, key: str) -> None:
        if self._left == 0:
            raise StoreError(key, expected="to live", found="killed")
        self._left -= 1
        self._store.delete(key)


def test_killed_after_every_deletion(tmp_path, monkeypatch):
    for k in range(100):
        store = LocalStore(tmp_path / str(k))
        put_manifest(store, DONE, {0: write_partition(store, tmp_path / f"scratch{k}", DONE, 0, finish=True)})
        kept = {key for key in store.list("") if not goes(key)}
        dying = Dying(store, k)
        with monkeypatch.context() as patch:
            patch.setattr("tasks.operate.upkeep.open_store", lambda _, dying=dying: dying)
            died = False
            try:
                upkeep(store.root)
            except StoreError:
                died = True
        for epoch in (1, 2):
            names = store.list(keys.owned_object(keys.partition_prefix(DONE, 0), epoch, "wal/"))
            assert not names or recover([(n, store.get(n)) for n in names], "log").num_tokens == len(names) - 1
        upkeep(store.root)
        assert set(store.list("")) == kept
        if not died:
            break
    assert k == 12


def aged(folder: Path, seconds: float) -> None:
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - seconds, time.time() - seconds))


def test_local_files_of_finished_partitions_go_when_they_are_old(world, tmp_path):
    scratch = tmp_path / "scratch"
    trained = keys.stage_prefix("r", 0, "train", "e" * 64)
    put_manifest(world, trained, {0: write_partition(world, tmp_path, trained, 0, finish=True)})
    folders = {}
    for name, prefix, partition in (("done", DONE, 0), ("young", DONE, 1), ("finished", UNFINISHED, 0),
                                    ("unfinished", UNFINISHED, 1), ("unknown", UNFINISHED, 2)):  # fmt: skip
        folders[name] = scratch / "r" / "wal" / keys.partition_prefix(prefix, partition)
    folders["trained"] = scratch / "r" / "train" / keys.local_name(keys.partition_prefix(trained, 0))
    folders["training"] = scratch / "r" / "train" / keys.local_name(keys.partition_prefix(UNFINISHED, 0))
    folders["models"] = scratch / "r" / "models" / "0123"
    folders["other"] = scratch / "s" / "wal" / keys.partition_prefix(OTHER, 0)
    for folder in folders.values():
        (folder / "e000001" / "wal").mkdir(parents=True)
        (folder / "e000001" / "wal" / "000000.seg").write_bytes(bytes(100))
    aged(scratch, 90_000)
    os.utime(folders["young"] / "e000001" / "wal" / "000000.seg")

    def lines(**options) -> dict[tuple[str, str | None], int]:
        found = upkeep(world.root, ["r"], scratch=scratch, **options)
        assert [line.num_bytes for line in found if line.what.startswith("local")] in ([200], [0])
        return totals(found)

    assert lines(dry_run=True)["local files of finished partitions", "r"] == 2
    assert all(folder.exists() for folder in folders.values())
    assert lines()["local files of finished partitions", "r"] == 2
    assert {name for name, folder in folders.items() if not folder.exists()} == {"done", "trained"}
    assert lines()["local files of finished partitions", "r"] == 0
    assert totals(upkeep(world.root, ["s"], scratch=tmp_path / "nowhere"))[
        "local files of finished partitions", "s"
    ] == 0  # fmt: skip


def test_abandoned_writes_go_by_the_age_that_their_file_system_tells(tmp_path):
    store = LocalStore(tmp_path / "root")
    store.put("a", b"a")
    folder = tmp_path / "root" / ".tmp"
    now = os.stat(tmp_path / "root" / "a").st_mtime
    for name, age in (("old", 90_000), ("older", 10 * 86_400), ("young", 80_000), ("new", 0)):
        (folder / name).write_bytes(bytes(10))
        os.utime(folder / name, (now - age, now - age))
    assert totals(upkeep(store.root, dry_run=True))["unfinished writes", None] == 2
    (line,) = (line for line in upkeep(store.root) if line.what == "unfinished writes")
    assert (line.num_objects, line.num_bytes) == (2, 20)
    assert sorted(path.name for path in folder.iterdir()) == ["new", "young"]


def test_old_lease_epochs_of_tables_go_and_the_next_committer_gets_the_next_number(store):
    owned = keys.table_lease("metrics")

    def commit() -> int:
        lease = leases.acquire(store, owned, owner={}, dead_after_seconds=5)
        assert isinstance(lease, leases.Lease)
        if lease.epoch % 2:
            lease.heartbeat()
        leases.release(lease)
        return lease.epoch

    for number in range(1, 71):
        assert commit() == number
    assert totals(upkeep(store.root))["epochs of table leases", None] == 12
    assert [int(k[-11:-5]) for k in store.list(keys.epochs(owned))] == list(range(7, 71))
    assert len(store.list(owned)) == 128
    assert commit() == 71


def test_command_says_what_goes(world, capsys):
    assert main(["upkeep", "r", "--data", world.root, "--scratch", "nowhere", "--dry-run"]) == 0
    assert "would go:       12 segments of token logs of r, " in capsys.readouterr().out
    assert main(["upkeep", "--data", world.root]) == 0
    assert "deleted:        4 spilled KV of s, 4,000 bytes" in capsys.readouterr().out
    assert main(["upkeep", "nobody", "--data", world.root]) == 5
    assert "run nobody" in capsys.readouterr().err
