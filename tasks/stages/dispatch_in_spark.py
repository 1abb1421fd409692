"""The plan of one iteration: a global seeded shuffle in Spark, then packs of each mini-batch.

    trajectories + prompts' teachers + hidden_shards -> checked pairs in shuffled order -> mini-batches -> packs

A pair is one (trajectory, teacher). The order is that of xxhash64(seed, trajectory_id), ties by id: shard i holds the
i-th range of hashes, so the order, and every byte of the plan, is the same for any number of partitions or cores.
Membership of a mini-batch knows nothing of teachers or lengths. A missing or surplus hidden state stops the stage.
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
from schemas.rows import json_lines

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: A shard is a range of the top bits of the hash.
_SHARD_BITS = 16


@dataclass(frozen=True)
class _Trajectory:
    trajectory_id: str
    split: str
    prompt_tokens: int
    response_tokens: int
    sampled_tokens: int
    teachers: tuple[tuple[int, float], ...]
    """(teacher_index, weight), by teacher_index"""

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
    teachers: list[dict[str, Any]],
    mini_batch_trajectories: int,
    pack_tokens: int,
    slots: int,
    out_key: str,
) -> dict[str, Any]:
    """Write the plan of one iteration as a JSONL object of PLAN rows, in sort-key order, at `out_key`.

    versions: of tables prompts, trajectories and hidden_shards, whose slices the caller has compared with their
    manifests. teachers: {"teacher_id", "weight"} of the run's manifest, at their teacher_index. Split train has steps
    0.., the last one short if need be; split heldout is step 0. Returns {"rows_key", "rows_digest", "num_rows",
    "content_digest", "stats": {"steps", "trajectories", "heldout_trajectories", "given_up", "packs", "micro_batches",
    "sampled_tokens", "tokens", "fill", "seconds"}}.

    Raises ContractError when prompts, teachers and hidden states do not match one to one, when a trajectory is longer
    than pack_tokens, and when there is nothing to train on.
    """
    started = time.monotonic()
    pairs, given_up = _pairs(spark, root, run_id, iteration, versions, seed, teachers)
    trajectories = list(_trajectories(pairs, pack_tokens))
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
        {**base, **row} for step, batch in enumerate(batches) for row in _pack(batch, step, pack_tokens, slots)
    ] + [{**base, **row} for row in _pack(heldout, 0, pack_tokens, slots)]  # fmt: skip
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
    seed: int,
    teachers: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], int]:
    """Expected (trajectory, teacher) pairs matched with found ones, in shuffled order; and the count of given-up ones.

    Outer joins keep every mismatch as a row with nulls, which `_trajectories` refuses.
    """
    from pyspark.sql import functions as F

    if not -(1 << 63) <= seed < 1 << 63:
        raise ConfigError("seed", expected="a signed 64-bit integer", found=str(seed))
    everything = _slice(spark, root, "trajectories", versions["trajectories"], run_id, iteration)
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
        .select(
            "trajectory_id", "prompt_id", "split", "prompt_tokens", "response_tokens", "sampled_tokens",
            F.explode_outer("teachers").alias("teacher"),
        )
        .withColumn("teacher_id", F.col("teacher.teacher_id"))
        .withColumn("prompt_weight", F.col("teacher.weight"))
        .drop("teacher")
        .join(F.broadcast(manifest), "teacher_id", "left")
    )  # fmt: skip
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
    matched = expected.join(found, ["trajectory_id", "teacher_index"], "full_outer").withColumn(
        "key", F.xxhash64(F.lit(seed).cast("bigint"), F.col("trajectory_id"))
    )
    num_shards = int(spark.conf.get("spark.sql.shuffle.partitions") or "1")
    top = F.shiftright("key", 64 - _SHARD_BITS) + (1 << (_SHARD_BITS - 1))
    ordered = (
        matched.withColumn("shard", F.shiftright(top * num_shards, _SHARD_BITS).cast("int"))
        .repartitionById(num_shards, "shard")
        .sortWithinPartitions("key", "trajectory_id", "teacher_index", "teacher_id")
    )
    return ordered.drop("shard").toArrow().to_pylist(), everything.where("status <> 'finished'").count()


def _trajectories(pairs: list[dict[str, Any]], pack_tokens: int) -> Iterator[_Trajectory]:
    """Pairs of each trajectory put together, in shuffled order. Raises ContractError at the first mismatch."""
    previous = (-(1 << 63) - 1, "")
    for (key, trajectory_id), group in itertools.groupby(pairs, lambda p: (p["key"], p["trajectory_id"])):
        assert previous < (key, trajectory_id), "shards of the shuffle are out of order"
        previous = (key, trajectory_id)
        found = list(group)
        for pair in found:
            _check_pair(pair)
        indices = [pair["teacher_index"] for pair in found]
        if len(set(indices)) != len(indices):
            raise ContractError(
                f"prompt {found[0]['prompt_id']}", expected="each teacher once, and the prompt once",
                found=f"teachers {[pair['teacher_id'] for pair in found]}",
            )  # fmt: skip
        weights = tuple((p["teacher_index"], p["manifest_weight"] * p["prompt_weight"]) for p in found)
        first = found[0]
        trajectory = _Trajectory(
            trajectory_id, first["split"], first["prompt_tokens"], first["response_tokens"], first["sampled_tokens"],
            weights,
        )  # fmt: skip
        if trajectory.length > pack_tokens:
            raise ContractError(
                f"trajectory {trajectory_id}", expected=f"at most {pack_tokens} tokens, the budget of a pack",
                found=f"{trajectory.length} tokens", safe="the trajectory, whole; nothing is cut",
                next_command=f"set dispatch.pack_tokens to {trajectory.length} or more and run dispatch again",
            )  # fmt: skip
        yield trajectory


def _check_pair(pair: dict[str, Any]) -> None:
    where = f"trajectory {pair['trajectory_id']}"
    if pair["split"] is None:
        raise ContractError(
            f"hidden states of {where}", expected="a finished trajectory whose prompt names the teacher",
            found=f"states of teacher_index {pair['teacher_index']} only", next_command="opd teach, then opd dispatch",
        )  # fmt: skip
    if pair["split"] not in ("train", "heldout"):
        raise ContractError(f"{where}, split", expected="train or heldout", found=repr(pair["split"]))
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
        [index for _, index, _ in items],
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
