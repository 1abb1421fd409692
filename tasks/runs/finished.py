"""Finished stages, as the run record in force for their iteration has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infra.store import ObjectStore
from schemas import keys
from schemas.errors import ContractError
from schemas.work.manifest import StageManifest
from schemas.work.record import StageIdentity
from tasks.runs.manifests import read_identity, read_stage
from tasks.runs.records import History

STAGES = ("rollout", "teach", "dispatch", "train")


@dataclass(frozen=True)
class StageResult:
    """A small reference to what a stage made: the manifest, and a digest of content for the next fingerprint."""

    stage: str
    iteration: int
    fingerprint: str
    output_digest: str
    manifest: StageManifest

    @property
    def stats(self) -> dict[str, Any]:
        return self.manifest.stats

    def reference(self) -> dict[str, Any]:
        """What a flow passes on: a few strings and numbers."""
        return {
            "stage": self.stage,
            "iteration": self.iteration,
            "fingerprint": self.fingerprint,
            "output_digest": self.output_digest,
            "rows": {name: entry.num_rows for name, entry in self.manifest.tables.items()},
        }


def past_stage(store: ObjectStore, history: History, run_id: str, iteration: int, stage: str) -> StageResult | None:
    """A finished stage as the record in force for its iteration has it; None when it is not finished.

    Raises ContractError where version 0.1 finished it twice and nothing says which one counts.
    """
    number = history.in_force(iteration)
    known = identity_at(store, keys.stage_identity(run_id, iteration, stage, number))
    if known is not None:
        prefix = keys.stage_prefix(run_id, iteration, stage, known.fingerprint)
    else:
        record = dict(history.records).get(number)
        of_0_1 = record is None or record.format is None
        found = _finished_by_0_1(store, run_id, iteration, stage) if of_0_1 else []
        if len(found) > 1:
            raise ContractError(
                f"{stage} of iteration {iteration}", expected="one finished stage", found=f"{len(found)} of them",
                safe="all of them", next_command=f"opd run CONFIG --from-iteration {iteration}",
            )  # fmt: skip
        if not found:
            return None
        prefix = found[0]
    key = keys.stage_manifest(prefix)
    if store.head(key) is None:
        return None
    manifest = read_stage(store, key)
    return StageResult(stage, iteration, manifest.fingerprint, manifest.output_digest, manifest)


def _finished_by_0_1(store: ObjectStore, run_id: str, iteration: int, stage: str) -> list[str]:
    """Prefixes under which version 0.1, which wrote no identities, finished a stage."""
    folder = keys.stage_folder(run_id, iteration, stage)
    return [key.removesuffix("/manifest.json") for key in store.list(folder)
            if key.endswith("/manifest.json") and key.count("/") == folder.count("/") + 1]  # fmt: skip


def identity_at(store: ObjectStore, key: str) -> StageIdentity | None:
    """What a stage of an iteration is under a run record; None before its first start under it."""
    return read_identity(store, key) if store.head(key) is not None else None
