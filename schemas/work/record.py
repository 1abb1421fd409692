"""Records in the store: what a run is, and what a stage of an iteration is under it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunRecord:
    """One of a run's numbered records. format: None of version 0.1. from_iteration: the first that it holds for.

    config: content of the configuration. models: name -> digest. prompt_files: their names and digests. student_path:
    where a reader finds the tokenizer. made_with: versions of packages and sources of verifiers; None of version 0.1.
    """

    config: dict[str, Any]
    models: dict[str, str]
    prompt_files: tuple[str, ...]
    student_path: str
    format: int | None = None
    from_iteration: int = 0
    made_with: dict[str, str] | None = None


@dataclass(frozen=True)
class StageFacts:
    """All that a stage's result is a function of; the digest of its JSON is the stage's fingerprint.

    config: the part of the configuration that shapes it. inputs: name -> digest. scoring: verifier -> digest of its
    source. given: digest of what its ranks are given.
    """

    config: dict[str, Any]
    inputs: dict[str, str]
    scoring: dict[str, str]
    given: str
    run_id: str = ""
    iteration: int = 0
    stage: str = ""
    format: int = 0


@dataclass(frozen=True)
class StageIdentity:
    facts: StageFacts
    fingerprint: str


@dataclass(frozen=True)
class FlowRun:
    """Which run a scheduled flow run drives."""

    run_id: str
