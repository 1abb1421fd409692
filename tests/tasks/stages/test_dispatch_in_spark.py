"""Dispatch on real tables: the shuffle against a second xxHash64, the plan against the promises of its contract."""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from infra import tables
from infra.spark import SparkChild
from infra.stores import open_store
from schemas import keys, rows
from schemas.errors import ContractError, OpdError
from schemas.rows import PLAN, TABLES
from tasks.stages.dispatch_in_spark import build_plan
from tests.support.spark_session import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
TEACHERS = [{"teacher_id": "algebra", "weight": 1.0}, {"teacher_id": "poetry", "weight": 0.25}]
MASK = (1 << 64) - 1
P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip


def xxhash64(data: bytes, seed: int) -> int:
    """XXH64 from its published description, for any length."""

    def rotate(value: int, bits: int) -> int:
        return (value << bits | value >> (64 - bits)) & MASK

    def stir(lane: int, word: int) -> int:
        return rotate((lane + word * P2) & MASK, 31) * P1 & MASK

    position = 0
    if len(data) >= 32:
        lanes = [(seed + P1 + P2) & MASK, (seed + P2) & MASK, seed, (seed - P1) & MASK]
        while position + 32 <= len(data):
            words = struct.unpack_from("<4Q", data, position)
            lanes = [stir(lane, word) for lane, word in zip(lanes, words, strict=True)]
            position += 32
        value = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            value = ((value ^ stir(0, lane)) * P1 + P4) & MASK
    else:
        value = (seed + P5) & MASK
    value = (value + len(data)) & MASK
    while position + 8 <= len(data):
        (word,) = struct.unpack_from("<Q", data, position)
        value = (rotate(value ^ stir(0, word), 27) * P1 + P4) & MASK
        position += 8
    if position + 4 <= len(data):
        (word,) = struct.unpack_from("<I", data, position)
        value = (rotate(value ^ word * P1 & MASK, 23) * P2 + P3) & MASK
        position += 4
    for byte in data[position:]:
        value = rotate(value ^ byte * P5 & MASK, 11) * P1 & MASK
    value = (value ^ value >> 33) * P2 & MASK
    value = (value ^ value >> 29) * P3 & MASK
    return value ^ value >> 32


def shuffled(seed: int, ids: list[str]) -> list[str]:
    """Spark chains hashes from 42: the seed as eight bytes, then the text; and orders them as signed numbers."""
    start = xxhash64(struct.pack("<q", seed), 42)

    def key(trajectory_id: str) -> tuple[int, str]:
        value = xxhash64(trajectory_id.encode(), start)
        return value - (1 << 64) if value >> 63 else value, trajectory_id

    return sorted(ids, key=key)


def test_the_second_hash_gives_the_published_values() -> None:
    assert xxhash64(b"", 0) == 0xEF46DB3751D8E999
    assert xxhash64(b"a", 0) == 0xD24EC4F1A98C6E5B
    assert xxhash64(b"abc", 0) == 0x44BC2CF5AD770999


def make_tables(run_id: str, num_prompts: int, *, samples: int = 2, teachers: int = 2, seed: int = 0) -> dict:
    """Rows of the three tables: prompts by turns of one teacher, the other, and both; a fifth of them held out."""
    rng = random.Random(seed)
    content: dict[str, list[dict[str, Any]]] = {"prompts": [], "trajectories": [], "hidden_shards": []}
    choices = [[0], [1], [1, 0]] if teachers == 2 else [[0]]
    for number in range(num_prompts):
        taught = choices[number % len(choices)]
        columns = {
            "source": run_id, "domain": "d", "messages": "[]", "answer": None, "verifier": None,
            "context": json.dumps({"n": number}),
            "teachers": [{"teacher_id": TEACHERS[i]["teacher_id"], "weight": 1.0 + number % 3} for i in taught],
        }  # fmt: skip
        prompt = {"prompt_id": keys.digest(columns)[:32], **columns}
        content["prompts"].append(prompt)
        prompt_tokens = rng.randint(1, 30)
        for sample in range(samples):
            response = rng.randint(1, 60)
            trajectory = {c.name: {"string": "x", "double": 0.0}.get(c.type, 0) for c in rows.TRAJECTORIES.columns}
            trajectory |= {
                "run_id": run_id, "iteration": 0, "prompt_id": prompt["prompt_id"], "sample_index": sample,
                "trajectory_id": keys.trajectory_id(run_id, 0, prompt["prompt_id"], sample),
                "split": "heldout" if number % 5 == 4 else "train", "status": "finished", "finish_reason": "stop",
                "prompt_tokens": prompt_tokens, "response_tokens": response,
                "sampled_tokens": response - (response > 40), "reward": None,
            }  # fmt: skip
            content["trajectories"].append(trajectory)
            for teacher_index in taught:
                first = 0
                for part in [response // 2, response - response // 2] if response > 50 else [response]:
                    content["hidden_shards"].append(
                        {
                            "run_id": run_id, "iteration": 0, "trajectory_id": trajectory["trajectory_id"],
                            "teacher_index": teacher_index, "teacher_id": TEACHERS[teacher_index]["teacher_id"],
                            "first_token_row": first, "first_object_row": 0, "rows": part, "dtype": "BF16",
                            "width": 8, "block_crcs": [1], "object_digest": "x", "object_key": "x",
                        }
                    )  # fmt: skip
                    first += part
    return content


def append_all(spark: SparkSession, root: str, contents: Iterable[dict[str, list[dict[str, Any]]]]) -> None:
    """One commit a table for all runs of this module: what dispatch reads does not depend on how it was committed."""
    contents = list(contents)
    for table in ("prompts", "trajectories", "hidden_shards"):
        new_rows = [row for content in contents for row in content[table]]
        frame = spark.createDataFrame(pa.Table.from_pylist(new_rows, schema=tables.arrow_schema(TABLES[table])))
        frame.write.format("delta").mode("append").save(tables.table_uri(root, table))


def arguments(root: str, run_id: str, **changes: Any) -> dict[str, Any]:
    return {
        "root": root, "run_id": run_id, "iteration": 0, "seed": 7, "objective": {"type": "kl"},
        "teachers": TEACHERS,
        "mini_batch_trajectories": 16, "pack_tokens": 128, "slots": 3,
        "versions": {t: tables.table_version(root, t) for t in ("prompts", "trajectories", "hidden_shards")},
        "out_key": f"test/{run_id}/plan.jsonl", **changes,
    }  # fmt: skip


def read_plan(root: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in open_store(root).get(result["rows_key"]).splitlines()]


@pytest.fixture(scope="module", autouse=True)
def run(spark: SparkSession, spark_root: str) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """A run of 35 prompts, its rows committed in reverse order, beside the smaller runs of the other tests."""
    content = make_tables("dispatch", 35)
    backwards = {table: new_rows[::-1] for table, new_rows in content.items()}
    small = [broken(make_tables(run_name(name), 3, samples=1, teachers=1), name) for name in BREACHES]
    append_all(spark, spark_root, [backwards, make_tables("golden", 6), given_up(), *small])
    return "dispatch", content


def test_the_plan_keeps_every_promise(spark: SparkSession, spark_root: str, run: tuple[str, dict]) -> None:
    run_id, content = run
    result = build_plan(spark, **arguments(spark_root, run_id))
    plan = read_plan(spark_root, result)
    trajectories = {t["trajectory_id"]: t for t in content["trajectories"]}
    prompts = {p["prompt_id"]: p for p in content["prompts"]}
    pairs = [(row["trajectory_id"], row["teacher_index"]) for row in plan]
    assert sorted(pairs) == sorted((h["trajectory_id"], h["teacher_index"]) for h in content["hidden_shards"]
                                   if h["first_token_row"] == 0)  # fmt: skip
    assert plan == rows.sort_rows(PLAN, plan)
    assert result["num_rows"] == len(plan)
    assert result["content_digest"] == rows.content_digest(PLAN, plan)

    train_order = shuffled(7, [i for i, t in trajectories.items() if t["split"] == "train"])
    batches = [train_order[i : i + 16] for i in range(0, len(train_order), 16)]
    assert result["stats"]["steps"] == len(batches)
    expected = {("train", step): batch for step, batch in enumerate(batches)}
    expected["heldout", 0] = [i for i, t in trajectories.items() if t["split"] == "heldout"]
    for (split, step), batch in expected.items():
        members = [row for row in plan if (row["split"], row["step"]) == (split, step)]
        assert {row["trajectory_id"] for row in members} == set(batch)
        denominator = sum(trajectories[i]["sampled_tokens"] for i in batch)
        assert {row["denominator_tokens"] for row in members} == {denominator}
        check_packs(members)
    for row in plan:
        trajectory = trajectories[row["trajectory_id"]]
        teacher = TEACHERS[row["teacher_index"]]
        (wanted,) = [
            t["weight"]
            for t in prompts[trajectory["prompt_id"]]["teachers"]
            if t["teacher_id"] == teacher["teacher_id"]
        ]
        assert row["weight"] == teacher["weight"] * wanted
        assert row["length"] == trajectory["prompt_tokens"] + trajectory["response_tokens"]
        assert row["split"] == trajectory["split"]


def check_packs(members: list[dict[str, Any]]) -> None:
    packs = defaultdict(list)
    for row in members:
        packs[row["pack_id"]].append(row)
        assert (row["rank_slot"], row["micro_batch"]) == (row["pack_id"] % 3, row["pack_id"] // 3)
    assert sorted(packs) == list(range(len(packs)))
    walk = []
    for _, pack in sorted(packs.items()):
        ends = list(itertools.accumulate(row["length"] for row in pack))
        assert [row["offset"] for row in pack] == [0, *ends[:-1]]
        assert ends[-1] <= 128
        walk += [row["teacher_index"] for row in pack]
    assert walk == sorted(walk)


def test_the_plan_of_a_small_run_stays_as_it_was(spark: SparkSession, spark_root: str) -> None:
    result = build_plan(spark, **arguments(spark_root, "golden", mini_batch_trajectories=4))
    assert open_store(spark_root).get(result["rows_key"]) == (GOLDEN / "plan_small.jsonl").read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        {"spark.sql.shuffle.partitions": "1"},
        {"spark.sql.shuffle.partitions": "4"},
        {"spark.sql.shuffle.partitions": "7", "spark.sql.adaptive.enabled": "false"},
        {"spark.sql.files.maxPartitionBytes": "2000", "spark.sql.autoBroadcastJoinThreshold": "-1"},
    ],
    ids=lambda settings: ",".join(settings.values()),
)
def test_partitions_do_not_change_a_byte(
    settings: dict[str, str], spark: SparkSession, spark_root: str, run: tuple[str, dict]
) -> None:
    expected = build_plan(spark, **arguments(spark_root, run[0]))["rows_digest"]
    before = {name: spark.conf.get(name) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        assert build_plan(spark, **arguments(spark_root, run[0]))["rows_digest"] == expected
    finally:
        for name, value in before.items():
            spark.conf.set(name, value or "")


@pytest.mark.slow
def test_cores_and_files_do_not_change_a_byte(
    spark: SparkSession, spark_root: str, run: tuple[str, dict], tmp_path: Path
) -> None:
    expected = build_plan(spark, **arguments(spark_root, run[0]))["rows_digest"]
    for table in ("trajectories", "hidden_shards"):
        where = f"run_id = '{run[0]}'"
        frame = spark.table(f"opd.{table}").where(where).repartition(5)
        frame.write.format("delta").mode("overwrite").option("replaceWhere", where).saveAsTable(f"opd.{table}")
    assert build_plan(spark, **arguments(spark_root, run[0]))["rows_digest"] == expected
    settings = {**SETTINGS.model_dump(), "cores": 1, "shuffle_partitions": 3}
    with SparkChild(spark_root, settings, tmp_path / "spark.log") as child:
        assert child.call(build_plan, **arguments(spark_root, run[0]))["rows_digest"] == expected


def test_another_seed_gives_an_unrelated_order(spark: SparkSession, spark_root: str, run: tuple[str, dict]) -> None:
    def order(seed: int) -> list[str]:
        result = build_plan(spark, **arguments(spark_root, run[0], seed=seed, mini_batch_trajectories=1, slots=1))
        plan = read_plan(spark_root, result)
        return list(dict.fromkeys(row["trajectory_id"] for row in plan if row["split"] == "train"))

    first, second = order(0), order(-(1 << 63))
    assert first == shuffled(0, first)
    assert second == shuffled(-(1 << 63), second)
    ranks = {trajectory_id: rank for rank, trajectory_id in enumerate(second)}
    n = len(first)
    squares = sum((rank - ranks[trajectory_id]) ** 2 for rank, trajectory_id in enumerate(first))
    # Spearman's coefficient of two independent orders has variance 1 / (n - 1): four deviations.
    assert abs(1 - 6 * squares / (n * (n * n - 1))) < 4 / (n - 1) ** 0.5


def broken(content: dict, name: str) -> dict:
    trajectories, hidden, prompts = content["trajectories"], content["hidden_shards"], content["prompts"]
    if name == "no hidden rows":
        hidden.pop()
    elif name == "one row short":
        hidden[0]["rows"] -= 1
    elif name == "gap":
        hidden[0]["first_token_row"] += 1
    elif name == "orphan":
        hidden[0]["trajectory_id"] = "nobody"
    elif name == "surplus teacher":
        hidden.append({**hidden[0], "teacher_index": 1 - hidden[0]["teacher_index"]})
    elif name == "no prompt":
        trajectories[0]["prompt_id"] = "nothing"
    elif name == "no teacher":
        prompts[0]["teachers"] = []
    elif name == "unknown teacher":
        prompts[0]["teachers"] = [{"teacher_id": "history", "weight": 1.0}]
    elif name == "teacher twice":
        prompts[0]["teachers"] *= 2
    elif name == "unknown split":
        trajectories[0]["split"] = "test"
    elif name == "nothing sampled":
        for trajectory in trajectories:
            trajectory["sampled_tokens"] = 0
    elif name == "all given up":
        for trajectory in trajectories:
            trajectory["status"] = "given_up"
        hidden.clear()
    return content


def run_name(breach: str) -> str:
    return "breach-" + breach.replace(" ", "-")


BREACHES = {
    "no hidden rows": "found: none", "one row short": "rows 0..", "gap": "gap", "orphan": "nobody",
    "surplus teacher": "teacher_index 1", "no prompt": "nothing", "no teacher": "at least one teacher",
    "unknown teacher": "history", "teacher twice": "each teacher once", "unknown split": "test",
    "nothing sampled": "sampled token", "all given up": "to train on",
}  # fmt: skip


@pytest.mark.parametrize("name", BREACHES)
def test_rows_that_do_not_match_stop_the_stage(name: str, spark: SparkSession, spark_root: str) -> None:
    run_id = run_name(name)
    with pytest.raises(ContractError, match=BREACHES[name]):
        build_plan(spark, **arguments(spark_root, run_id))
    assert open_store(spark_root).head(f"test/{run_id}/plan.jsonl") is None


def given_up() -> dict[str, list[dict[str, Any]]]:
    content = make_tables("given-up", 3, samples=1, teachers=1)
    gone = content["trajectories"][0]
    gone["status"] = "given_up"
    content["hidden_shards"] = [h for h in content["hidden_shards"] if h["trajectory_id"] != gone["trajectory_id"]]
    return content


def test_given_up_trajectories_are_counted(spark: SparkSession, spark_root: str) -> None:
    result = build_plan(spark, **arguments(spark_root, "given-up"))
    assert (result["stats"]["given_up"], result["stats"]["trajectories"]) == (1, 2)


def test_a_trajectory_longer_than_a_pack_is_named(spark: SparkSession, spark_root: str, run: tuple[str, dict]) -> None:
    longest = max(t["prompt_tokens"] + t["response_tokens"] for t in run[1]["trajectories"])
    assert build_plan(spark, **arguments(spark_root, run[0], pack_tokens=longest))["num_rows"] > 0
    with pytest.raises(ContractError, match=f"{longest} tokens"):
        build_plan(spark, **arguments(spark_root, run[0], pack_tokens=longest - 1))


def test_a_seed_beyond_64_bits_is_refused(spark: SparkSession, spark_root: str, run: tuple[str, dict]) -> None:
    with pytest.raises(OpdError, match="64-bit"):
        build_plan(spark, **arguments(spark_root, run[0], seed=1 << 63))
