"""Whether a run may start: compares its configuration with the run's records.

Every start compares with the newest record. A difference is an error that names `--from-iteration K`, which writes the
next record and deletes the rows of iterations from K on. Stages whose facts did not change commit their rows again. A
run that has made nothing yet accepts a changed configuration.

A setting that the newest record does not know and that is at its default is no difference and enters no fingerprint.
Records of version 0.1 have no "format": their digests saw tensors alone. A run that began with one is continued by a
record of today's from its first unfinished iteration on.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra import tables
from infra.store import ObjectStore
from ml.model_files import stored_tensors
from schemas import keys
from schemas.errors import ConfigError, ContractError
from schemas.typed_json import encode
from schemas.work.record import RunRecord
from tasks.inputs.models import resolve_model
from tasks.inputs.prompt_files import file_source
from tasks.rewards.verifiers import source_digest
from tasks.runs.finished import past_stage
from tasks.runs.manifests import read_record
from tasks.runs.records import History, differences, read_history

if TYPE_CHECKING:
    from tasks.runs.session import Session

FORMAT = 2
#: Packages that turn prompts into ids and responses into rewards.
_PACKAGES = ("jinja2", "reasoning-gym", "tokenizers", "transformers")
_READ_BYTES = 8 << 20


def admit(session: Session, from_iteration: int | None) -> History:
    """The run's records once this start's configuration is one of them.

    Raises ContractError for another configuration without from_iteration, and for iterations below it that are not
    finished.
    """
    history = read_history(session.store, session.run_id)
    if from_iteration is not None and not 0 <= from_iteration <= session.config.iterations:
        raise ConfigError(
            "--from-iteration", expected=f"0 to {session.config.iterations}, the run's iterations",
            found=str(from_iteration),
        )  # fmt: skip
    if not history.records:
        session.spark.start()  # everything is still to be made: its JVM starts beside Prefect's server
        return _put(session, history, _record(session, None, 0))
    number, old = history.newest
    record = _record(session, old.config, from_iteration or 0)
    now = record if old.format is not None else replace(record, models=_weights_of_0_1(session))
    found = differences(_compared(old), _compared(now))
    if from_iteration is None:
        if found and not _has_made_anything(session):
            # Nothing stands on the old record: what failed was the first start, and its cure is no change.
            return _put(session, history, record)
        if found:
            raise ContractError(
                f"run {session.run_id}, record {number}", expected="the configuration that the run began with",
                found="; ".join(found[:5]), safe="everything that the run has made",
                next_command="opd run CONFIG --from-iteration K, or another run_id",
            )  # fmt: skip
        return history if old.format is not None else _upgraded(session, history, record)
    if old.format is not None and not found and old.made_with == record.made_with:
        session.notes["--from-iteration"] = "nothing differs from the run's record: it goes on where it stands"
        return history
    first = _first_unfinished(session, history)
    if from_iteration > first:
        raise ContractError(
            f"run {session.run_id}, --from-iteration {from_iteration}",
            expected="every iteration below it to be finished, as they stay what they are",
            found=f"iteration {first} is not", safe="everything that the run has made",
            next_command=f"opd run CONFIG --from-iteration {first}",
        )  # fmt: skip
    session.check_owner()
    deleted = session.spark.call(
        tables.delete_slices_from, root=session.config.data, run_id=session.run_id, iteration=from_iteration
    )
    session.notes["deleted"] = deleted
    return _put(session, history, record)


def _compared(record: RunRecord) -> dict[str, Any]:
    return {"config": record.config, "models": record.models, "prompt_files": list(record.prompt_files)}


def _record(session: Session, known: Mapping[str, Any] | None, from_iteration: int) -> RunRecord:
    config = session.config
    return RunRecord(
        config=json.loads(keys.canonical_json(config.content(known))),
        models=session.model_digests,
        prompt_files=tuple(file_source(file) for file in config.prompts.files),
        student_path=config.student.path,
        format=FORMAT,
        from_iteration=from_iteration,
        made_with=made_with(session),
    )


def made_with(session: Session) -> dict[str, str]:
    """Versions and sources that may change between two starts without a word of the user's.

    Each stage compares those that shape it; `--from-iteration` accepts them as they are now.
    """
    prompts, _ = session.prompts
    verifiers = sorted({prompt["verifier"] for prompt in prompts if prompt["verifier"] is not None})
    return {
        **{name: _version(name) for name in _PACKAGES},
        **{f"verifier {name}": source_digest(name) for name in verifiers},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _put(session: Session, history: History, record: RunRecord) -> History:
    """Raises ContractError when another process has written another record of this number."""
    after = history.and_next(record)
    number, _ = after.newest
    key = keys.run_record(session.run_id, number)
    session.check_owner()
    if not session.store.put_if_absent(key, encode(record)) and read_record(session.store, key) != record:
        raise ContractError(
            key, expected="the record of this start", found="that of another", safe="everything that the run has made",
            next_command="the same command again",
        )  # fmt: skip
    return after


def _has_made_anything(session: Session) -> bool:
    """Has any stage of the run written more than who owned what?"""
    prefix = keys.run_prefix(session.run_id) + "/"
    bookkeeping = ("record", "records", "lease", "epochs", "heartbeats")
    return any(
        not {*key.removeprefix(prefix).split("/")[:-1]}.intersection(bookkeeping) for key in session.store.list(prefix)
    )


def first_unfinished(store: ObjectStore, history: History, run_id: str, iterations: int) -> int:
    """The first iteration whose training is not finished under the record that it belongs to; `iterations` if none."""
    for iteration in range(iterations):
        if past_stage(store, history, run_id, iteration, "train") is None:
            return iteration
    return iterations


def _first_unfinished(session: Session, history: History) -> int:
    return first_unfinished(session.store, history, session.run_id, session.config.iterations)


def _upgraded(session: Session, history: History, record: RunRecord) -> History:
    """A record of today's for a run that began with version 0.1: finished iterations stay that version's."""
    first = _first_unfinished(session, history)
    session.notes["record of version 0.1"] = f"finished iterations stay as they are; from {first} on by this version"
    return _put(session, history, replace(record, from_iteration=first))


def _weights_of_0_1(session: Session) -> dict[str, str]:
    models = {"student": session.config.student.path}
    models |= {f"teacher:{teacher.id}": teacher.path for teacher in session.config.teachers}
    return {name: weights_digest_of_0_1(resolve_model(path)) for name, path in models.items()}


def weights_digest_of_0_1(folder: Path) -> str:
    """SHA-256 over each tensor's name, dtype, shape and bytes, in order of names."""
    whole = hashlib.sha256()
    for name, tensor in stored_tensors(folder).items():
        spec = tensor.spec
        whole.update(keys.canonical_json([name, spec.dtype, list(spec.shape)]))
        with open(tensor.path, "rb") as file:
            file.seek(spec.start)
            left = spec.length
            while left and (part := file.read(min(left, _READ_BYTES))):
                whole.update(part)
                left -= len(part)
    return whole.hexdigest()
