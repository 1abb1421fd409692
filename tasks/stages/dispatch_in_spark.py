"""The plan of one iteration: a global seeded shuffle in Spark, then packs of each mini-batch.

    trajectories + prompts' teachers + hidden_shards -> checked pairs in shuffled order -> mini-batches -> packs

A pair is one (trajectory, teacher), or (trajectory, none) for an objective that needs no teacher. The order is that of
xxhash64(seed, trajectory_id), ties by id: shard i holds the i-th range of hashes, so the order, and every byte of the
plan, is the same for any number of partitions or cores. Membership of a mini-batch knows nothing of teachers or
lengths. A missing or surplus hidden state stops the stage.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from infra import tables
from infra.stores import open_store
from ml import packing
from schemas import keys, rows
from schemas.errors import ConfigError, ContractError
from schemas.objectives import ObjectiveSettings, read_objective
from schemas.rows import json_lines

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: A shard is a range of the top bits of the hash.
_SHARD_BITS = 16
#: Columns of `_Trajectory`.
_OF_TRAJECTORY = (
    "trajectory_id", "prompt_id", "split", "sample_index", "reward", "prompt_tokens", "response_tokens",
    "sampled_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class _Trajectory:
    trajectory_id: str
    split: str
    prompt_tokens: int
    response_tokens: int
    sampled_tokens: int
    prompt_id: str
    sample_index: int
    reward: float | None
    teachers: tuple[tuple[int | None, float], ...]
    """(teacher_index, weight), by teacher_index; (None, 1.0) alone for an objective that needs no teacher"""

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.response_tokens


def build_plan(
    spark: SparkSession,
    *,
    root: str,
    run_id: str,
    iteration: int,
    versions: dict[str, int],
    seed: int,
    objective: dict[str, Any],
    teachers: list[dict[str, Any]],
    mini_batch_trajectories: int,
    pack_tokens: int,
    slots: int,
    out_key: str,
) -> dict[str, Any]:
    """Write the plan of one iteration as a JSONL object of PLAN rows, in sort-key order, at `out_key`.

    versions: of tables prompts, trajectories and hidden_shards, whose slices the caller has compared with their
    manifests. objective: settings of `train.objective`, as their variant dumps them. teachers: {"teacher_id", "weight"}
    of the run's manifest, at their teacher_index. Split train has steps 0.., the last one short if need be; heldout is
    step 0. Returns {"rows_key", "rows_digest", "num_rows", "content_digest", "stats": {"steps", "trajectories",
    "heldout_trajectories", "given_up", "packs", "micro_batches", "sampled_tokens", "tokens", "fill", "seconds"}}.

    Raises ContractError when prompts, teachers and hidden states do not match one to one, when a trajectory is longer
    than pack_tokens or has no reward where the objective needs advantages, and when there is nothing to train on.
    """
    started = time.monotonic()
    asked = read_objective(objective)
    everything = _slice(spark, root, "trajectories", versions["trajectories"], run_id, iteration)
    given_up = everything.where("status <> 'finished'").count()
    if asked.needs_teacher:
        pairs = _pairs(spark, root, run_id, iteration, versions, everything, teachers)
    else:
        pairs = everything.where("status = 'finished'").select(*_OF_TRAJECTORY)
    found = _shuffled(spark, pairs, seed)
    trajectories = list(_trajectories(found, pack_tokens, needs_teacher=asked.needs_teacher))
    further = _further_columns(asked, trajectories)
    train = [t for t in trajectories if t.split == "train"]
    heldout = [t for t in trajectories if t.split == "heldout"]
    if not train:
        raise ContractError(
            f"trajectories of run {run_id}, iteration {iteration}", expected="finished ones to train on", found="none",
            next_command=f"opd show {run_id}",
        )  # fmt: skip
    batches = [
        train[first : first + mini_batch_trajectories] for first in range(0, len(train), mini_batch_trajectories)
    ]
    base = {"run_id": run_id, "iteration": iteration}
    plan = [
        {**base, **row, **further.get(row["trajectory_id"], {})}
        for step, batch in [*enumerate(batches), (0, heldout)]
        for row in _pack(batch, step, pack_tokens, slots)
    ]
    plan = rows.sort_rows(rows.PLAN, plan)
    data = json_lines(plan)
    open_store(root).put(out_key, data)
    train_rows = [row for row in plan if row["split"] == "train"]
    packs = {(row["step"], row["pack_id"]) for row in train_rows}
    tokens = sum(row["length"] for row in train_rows)
    return {
        "rows_key": out_key,
        "rows_digest": keys.digest_bytes(data),
        "num_rows": len(plan),
        "content_digest": rows.content_digest(rows.PLAN, plan),
        "stats": {
            "steps": len(batches),
            "trajectories": len(train),
            "heldout_trajectories": len(heldout),
            "given_up": given_up,
            "packs": len(packs),
            "micro_batches": len({(row["step"], row["micro_batch"]) for row in train_rows}),
            "sampled_tokens": sum(t.sampled_tokens for t in train),
            "tokens": tokens,
            "fill": tokens / (len(packs) * pack_tokens),
            "seconds": time.monotonic() - started,
        },
    }


def _table(spark: SparkSession, root: str, table: str, version: int) -> DataFrame:
    place = tables.table_uri(root, table, for_spark=True)
    return spark.read.format("delta").option("versionAsOf", version).load(place)


def _slice(spark: SparkSession, root: str, table: str, version: int, run_id: str, iteration: int) -> DataFrame:
    from pyspark.sql import functions as F

    frame = _table(spark, root, table, version)
    return frame.where((F.col("run_id") == run_id) & (F.col("iteration") == iteration))


def _pairs(
    spark: SparkSession,
    root: str,
    run_id: str,
    iteration: int,
    versions: dict[str, int],
    everything: DataFrame,
    teachers: list[dict[str, Any]],
) -> DataFrame:
    """Expected (trajectory, teacher) pairs matched with found ones. everything: trajectories of the iteration.

    Outer joins keep every mismatch as a row with nulls, which `_trajectories` refuses.
    """
    from pyspark.sql import functions as F

    prompts = _table(spark, root, "prompts", versions["prompts"])
    manifest = spark.createDataFrame(
        pa.table(
            {
                "teacher_id": pa.array([t["teacher_id"] for t in teachers], pa.string()),
                "teacher_index": pa.array(range(len(teachers)), pa.int32()),
                "manifest_weight": pa.array([t["weight"] for t in teachers], pa.float64()),
            }
        )
    )
    expected = (
        everything.where("status = 'finished'")
        .join(prompts.select("prompt_id", "teachers"), "prompt_id", "left")
        .select(*_OF_TRAJECTORY, F.explode_outer("teachers").alias("teacher"))
        .withColumn("teacher_id", F.col("teacher.teacher_id"))
        .withColumn("prompt_weight", F.col("teacher.weight"))
        .drop("teacher")
        .join(F.broadcast(manifest), "teacher_id", "left")
    )
    ranges = F.sort_array(F.collect_list(F.struct("first_token_row", "rows")))
    # End of the run of ranges that starts at row 0 and has neither gap nor overlap; -1 when there is one.
    covered = F.aggregate(
        ranges,
        F.lit(0).cast("bigint"),
        lambda end, part: F.when(part["first_token_row"] == end, end + part["rows"]).otherwise(F.lit(-1)),
    )
    found = (
        _slice(spark, root, "hidden_shards", versions["hidden_shards"], run_id, iteration)
        .groupBy("trajectory_id", "teacher_index")
        .agg(covered.alias("covered_rows"))
    )
    return expected.join(found, ["trajectory_id", "teacher_index"], "full_outer")


def _shuffled(spark: SparkSession, pairs: DataFrame, seed: int) -> list[dict[str, Any]]:
    """Pairs in shuffled order, those of a trajectory beside each other in order of their teachers; "key" is the hash.

    Raises ConfigError for a seed of more than 64 bits.
    """
    from pyspark.sql import functions as F

    if not -(1 << 63) <= seed < 1 << 63:
        raise ConfigError("seed", expected="a signed 64-bit integer", found=str(seed))
    matched = pairs.withColumn("key", F.xxhash64(F.lit(seed).cast("bigint"), F.col("trajectory_id")))
    by_teacher = [name for name in ("teacher_index", "teacher_id") if name in pairs.columns]
    num_shards = int(spark.conf.get("spark.sql.shuffle.partitions") or "1")
    top = F.shiftright("key", 64 - _SHARD_BITS) + (1 << (_SHARD_BITS - 1))
    ordered = (
        matched.withColumn("shard", F.shiftright(top * num_shards, _SHARD_BITS).cast("int"))
        .repartitionById(num_shards, "shard")
        .sortWithinPartitions("key", "trajectory_id", *by_teacher)
    )
    return ordered.drop("shard").toArrow().to_pylist()


def _trajectories(pairs: list[dict[str, Any]], pack_tokens: int, *, needs_teacher: bool) -> Iterator[_Trajectory]:
    """Pairs of each trajectory put together, in shuffled order. Raises ContractError at the first mismatch."""
    previous = (-(1 << 63) - 1, "")
    for (key, trajectory_id), group in itertools.groupby(pairs, lambda p: (p["key"], p["trajectory_id"])):
        assert previous < (key, trajectory_id), "shards of the shuffle are out of order"
        previous = (key, trajectory_id)
        found = list(group)
        first = found[0]
        trajectory = _Trajectory(
            trajectory_id, first["split"], first["prompt_tokens"], first["response_tokens"], first["sampled_tokens"],
            first["prompt_id"], first["sample_index"], first["reward"],
            _weights(found) if needs_teacher else ((None, 1.0),),
        )  # fmt: skip
        if trajectory.split not in ("train", "heldout"):
            raise ContractError(
                f"trajectory {trajectory_id}, split", expected="train or heldout", found=repr(trajectory.split)
            )
        if trajectory.length > pack_tokens:
            raise ContractError(
                f"trajectory {trajectory_id}", expected=f"at most {pack_tokens} tokens, the budget of a pack",
                found=f"{trajectory.length} tokens", safe="the trajectory, whole; nothing is cut",
                next_command=f"set dispatch.pack_tokens to {trajectory.length} or more and run dispatch again",
            )  # fmt: skip
        yield trajectory


def _weights(pairs: list[dict[str, Any]]) -> tuple[tuple[int, float], ...]:
    """(teacher_index, weight) of one trajectory's pairs. Raises ContractError for one that has no match."""
    for pair in pairs:
        _check_pair(pair)
    indices = [pair["teacher_index"] for pair in pairs]
    if len(set(indices)) != len(indices):
        raise ContractError(
            f"prompt {pairs[0]['prompt_id']}", expected="each teacher once, and the prompt once",
            found=f"teachers {[pair['teacher_id'] for pair in pairs]}",
        )  # fmt: skip
    return tuple((p["teacher_index"], p["manifest_weight"] * p["prompt_weight"]) for p in pairs)


def _check_pair(pair: dict[str, Any]) -> None:
    where = f"trajectory {pair['trajectory_id']}"
    if pair["split"] is None:
        raise ContractError(
            f"hidden states of {where}", expected="a finished trajectory whose prompt names the teacher",
            found=f"states of teacher_index {pair['teacher_index']} only", next_command="opd teach, then opd dispatch",
        )  # fmt: skip
    if pair["teacher_id"] is None:
        raise ContractError(
            f"{where}, prompt {pair['prompt_id']}", expected="a prompt with at least one teacher in table prompts",
            found="none",
        )  # fmt: skip
    if pair["teacher_index"] is None:
        raise ContractError(
            f"{where}, prompt {pair['prompt_id']}", expected="a teacher of the run", found=repr(pair["teacher_id"])
        )
    if pair["covered_rows"] != pair["response_tokens"]:
        states = "none" if pair["covered_rows"] is None else (
            "ranges with a gap or an overlap" if pair["covered_rows"] < 0 else f"rows 0..{pair['covered_rows']}"
        )  # fmt: skip
        raise ContractError(
            f"hidden states of {where}, teacher {pair['teacher_id']}", expected=f"rows 0..{pair['response_tokens']}",
            found=states, safe="everything that rollout and teach have finished", next_command="opd teach",
        )  # fmt: skip


def _further_columns(
    objective: ObjectiveSettings, trajectories: list[_Trajectory]
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """trajectory_id -> columns that the objective adds to its rows. Raises ContractError for a missing reward."""
    if objective.name_in_plan is None:
        return {}
    columns: dict[str, dict[str, Any]] = {t.trajectory_id: {"objective": objective.name_in_plan} for t in trajectories}
    groups: dict[str, list[_Trajectory]] = {}
    for trajectory in trajectories if "advantage" in objective.needs else ():
        if trajectory.reward is None:
            raise ContractError(
                f"trajectory {trajectory.trajectory_id}, reward", expected=f"a number, for objective {objective.type}",
                found="null", safe="the trajectory", next_command="a verifier for every prompt, in a new run",
            )  # fmt: skip
        groups.setdefault(trajectory.prompt_id, []).append(trajectory)
    for group in groups.values():
        group.sort(key=lambda t: t.sample_index)
        advantages = objective.advantages([t.reward for t in group if t.reward is not None])
        for trajectory, advantage in zip(group, advantages, strict=True):
            columns[trajectory.trajectory_id]["advantage"] = advantage
    return columns


def _pack(batch: list[_Trajectory], step: int, pack_tokens: int, slots: int) -> Iterator[dict[str, Any]]:
    """Plan rows of one mini-batch. The denominator counts a trajectory once, however many teachers it has."""
    if not batch:
        return
    denominator = sum(trajectory.sampled_tokens for trajectory in batch)
    if denominator < 1:
        raise ContractError(
            f"{batch[0].split}, step {step}", expected="at least one sampled token", found="none",
            next_command="a larger dispatch.mini_batch_trajectories",
        )  # fmt: skip
    items = [(trajectory, index, weight) for trajectory in batch for index, weight in trajectory.teachers]
    placements = packing.place(
        [-1 if index is None else index for _, index, _ in items],
        [trajectory.length for trajectory, _, _ in items],
        capacity_tokens=pack_tokens,
        slots=slots,
    )
    for placed in placements:
        trajectory, teacher_index, weight = items[placed.item]
        yield {
            "split": trajectory.split,
            "step": step,
            "rank_slot": placed.rank_slot,
            "micro_batch": placed.micro_batch,
            "pack_id": placed.pack_id,
            "offset": placed.offset,
            "length": trajectory.length,
            "trajectory_id": trajectory.trajectory_id,
            "teacher_index": teacher_index,
            "weight": weight,
            "denominator_tokens": denominator,
        }
