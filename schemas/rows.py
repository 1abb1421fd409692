"""Columns of every table, as data: Spark, delta-rs and pyarrow schemas are all built from these.

A column is content or *observed* (worker, times, keys, counts of pre-emptions). Digests, and the promise that a
rerun is byte-identical, cover content only. Each table but prompts starts with run_id and iteration.

A table's schema has a version, which its Delta properties name. It rises with each column that is added: such a column
says since which version it is there, is nullable, and stands last. Rows and digests made before are those of its null.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.keys import canonical_json, digest

#: Column types, spelt as Spark SQL spells them.
TYPES = ("string", "int", "bigint", "float", "double", "boolean", "array<bigint>",
         "array<struct<teacher_id:string,weight:double>>")  # fmt: skip


@dataclass(frozen=True)
class Column:
    """since: version of the table's schema that brought the column in; all after the first are nullable."""

    name: str
    type: str
    note: str
    observed: bool = False
    nullable: bool = False
    since: int = 1


@dataclass(frozen=True)
class Table:
    """sort_key: the columns that order rows, uniquely, within a slice. slice_key: what one commit replaces."""

    name: str
    columns: tuple[Column, ...]
    sort_key: tuple[str, ...]
    slice_key: tuple[str, ...]

    @property
    def content_columns(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.columns if not c.observed)

    @property
    def version(self) -> int:
        """Of the schema, from 1."""
        return max(c.since for c in self.columns)

    @property
    def added_columns(self) -> tuple[str, ...]:
        """Columns that tables and rows of an older version lack; there they are null."""
        return tuple(c.name for c in self.columns if c.since > 1)

    def column_names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.columns)


def _table(name: str, sort_key: str, slice_key: str, *columns: Column) -> Table:
    return Table(name, columns, tuple(sort_key.split()), tuple(slice_key.split()))


_RUN = Column("run_id", "string", "the run")
_ITERATION = Column("iteration", "int", "pass rollout..train, from 0")

PROMPTS = _table(
    "prompts", "prompt_id", "source",
    Column("prompt_id", "string", "digest of every other column but source"),
    Column("source", "string", "file or generator that brought it first, and a digest of the prompts added with it"),
    Column("domain", "string", "the user's grouping"),
    Column("teachers", "array<struct<teacher_id:string,weight:double>>", "who teaches it; weights are not normalised"),
    Column("messages", "string", "JSON list of {role, content}"),
    Column("answer", "string", "what the verifier compares with; null when there is none", nullable=True),
    Column("verifier", "string", "shipped name or package.module:function; null when there is none", nullable=True),
    Column("context", "string", "JSON object for teacher templates and verifiers"),
)  # fmt: skip

TRAJECTORIES = _table(
    "trajectories", "trajectory_id", "run_id iteration",
    _RUN, _ITERATION,
    Column("trajectory_id", "string", "digest of (run_id, iteration, prompt_id, sample_index)"),
    Column("prompt_id", "string", ""),
    Column("sample_index", "int", "0..samples_per_prompt-1"),
    Column("split", "string", "train or heldout"),
    Column("status", "string", "finished or given_up"),
    Column("finish_reason", "string", "stop (a stop token), length (the limit) or error"),
    Column("prompt_tokens", "int", ""),
    Column("response_tokens", "int", "everything after the prompt: sampled tokens, stop token, observations"),
    Column("sampled_tokens", "int", "response tokens that the student sampled"),
    Column("reward", "double", "verifier's value; null without one", nullable=True),
    Column("student_version", "string", "digest of the student that sampled it"),
    Column("partition", "int", "unit of work of the rollout stage"),
    Column("first_prompt_row", "bigint", "row of its first prompt token in the shard's prompt_ids"),
    Column("first_row", "bigint", "row of its first response token in the shard's response columns"),
    Column("shard_digest", "string", "SHA-256 of the token shard"),
    Column("shard_key", "string", "object of its tokens", observed=True),
    Column("worker", "string", "host and process that finished it", observed=True),
    Column("num_preemptions", "int", "times it was stopped and resumed", observed=True),
    Column("num_prefill_rebuilds", "int", "resumptions that recomputed KV from the log", observed=True),
    Column("num_kv_restores", "int", "resumptions that restored spilled KV", observed=True),
)  # fmt: skip

HIDDEN_SHARDS = _table(
    "hidden_shards", "trajectory_id teacher_index first_token_row", "run_id iteration",
    _RUN, _ITERATION,
    Column("trajectory_id", "string", ""),
    Column("teacher_index", "int", "dense, in order of teacher_id"),
    Column("teacher_id", "string", ""),
    Column("first_token_row", "bigint", "response token that the first row predicts"),
    Column("first_object_row", "bigint", "row inside the object"),
    Column("rows", "bigint", ""),
    Column("dtype", "string", "safetensors name"),
    Column("width", "int", "teacher width"),
    Column("block_crcs", "array<bigint>", "CRC-32 of each block of 256 rows, counted from first_object_row"),
    Column("object_digest", "string", "SHA-256 of the object"),
    Column("object_key", "string", "", observed=True),
)  # fmt: skip

PLAN = _table(
    "plan", "split step rank_slot micro_batch pack_id offset", "run_id iteration",
    _RUN, _ITERATION,
    Column("split", "string", "train, or heldout (step 0 only; measured, never trained on)"),
    Column("step", "int", "mini-batch: one optimizer step"),
    Column("rank_slot", "int", "virtual rank, 0..slots-1"),
    Column("micro_batch", "int", "order inside a slot"),
    Column("pack_id", "int", "dense within (split, step)"),
    Column("offset", "int", "first token of the trajectory inside the pack"),
    Column("length", "int", "prompt and response tokens"),
    Column("trajectory_id", "string", ""),
    Column("teacher_index", "int", "whose hidden states it is trained on; null without a teacher", nullable=True),
    Column("weight", "double", "manifest weight x prompt weight; 1 without a teacher"),
    Column("denominator_tokens", "bigint", "sampled tokens of the step over all slots, each counted once"),
    Column("objective", "string", "what it is trained for; null: kl", nullable=True, since=2),
    Column("advantage", "double", "of the trajectory in its group; null where not needed", nullable=True, since=2),
)  # fmt: skip

CHECKPOINTS = _table(
    "checkpoints", "version", "run_id iteration",
    _RUN, _ITERATION,
    Column("version", "string", "digest of the exported weights"),
    Column("parent", "string", "version that was trained"),
    Column("format", "string", "huggingface"),
    Column("config_digest", "string", ""),
    Column("steps", "int", "optimizer steps of this iteration"),
    Column("keys", "string", "JSON: object keys of the export and of the optimizer state", observed=True),
)  # fmt: skip

METRICS = _table(
    "metrics", "stage step name teacher_index", "run_id iteration stage",
    _RUN, _ITERATION,
    Column("stage", "string", ""),
    Column("step", "int", ""),
    Column("name", "string", ""),
    Column("teacher_index", "int", "null when the value is over all teachers", nullable=True),
    Column("value", "double", ""),
)  # fmt: skip

STAGE_RUNS = _table(
    "stage_runs", "stage partition epoch", "run_id iteration stage",
    _RUN, _ITERATION,
    Column("stage", "string", ""),
    Column("partition", "int", ""),
    Column("epoch", "int", "", observed=True),
    Column("status", "string", "finished, superseded or preempted", observed=True),
    Column("fingerprint", "string", ""),
    Column("rows", "bigint", ""),
    Column("bytes", "bigint", ""),
    Column("seconds", "double", "", observed=True),
    Column("error", "string", "null when there is none", observed=True, nullable=True),
)  # fmt: skip

TABLES: dict[str, Table] = {
    t.name: t for t in (PROMPTS, TRAJECTORIES, HIDDEN_SHARDS, PLAN, CHECKPOINTS, METRICS, STAGE_RUNS)
}


def json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Rows as an object holds them: canonical JSON, one a line."""
    return b"".join(canonical_json(row) + b"\n" for row in rows)


def metric_row(
    run_id: str, iteration: int, stage: str, name: str, value: float, *, step: int = 0, teacher_index: int | None = None
) -> dict[str, Any]:
    """A row of opd.metrics. teacher_index: None of a value that is no teacher's own."""
    return {
        "run_id": run_id, "iteration": iteration, "stage": stage, "step": step, "name": name,
        "teacher_index": teacher_index, "value": value,
    }  # fmt: skip


def _canonical(value: Any) -> Any:
    # A float's bits, not its decimal text, so that the digest does not depend on who printed it.
    if isinstance(value, float):
        return "f" + struct.pack("<d", value).hex()
    if isinstance(value, Mapping):
        return {k: _canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(v) for v in value]
    return value


def sort_rows(table: Table, rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows in the order of the table's sort key, nulls first."""
    return sorted(rows, key=lambda r: tuple((r[k] is not None, r[k]) for k in table.sort_key))


def content_digest(table: Table, rows: Iterable[Mapping[str, Any]], *, observed: bool = False) -> str:
    """SHA-256 over the content columns of the rows in sort-key order; order and observed columns do not matter.

    observed=True takes the observed columns in: equal only when a reader could not tell the slices apart. An added
    column (`Table.added_columns`) counts where it is not null, so that digests made before it was added still hold.
    Raises KeyError for a row that lacks another column.
    """
    columns = [c for c in table.columns if observed or not c.observed]

    def values(row: Mapping[str, Any]) -> list[Any]:
        first = [_canonical(row[c.name]) for c in columns if c.since == 1]
        added = {c.name: _canonical(row[c.name]) for c in columns if c.since > 1 and row.get(c.name) is not None}
        return [*first, added] if added else first

    return digest([values(row) for row in sort_rows(table, rows)])
