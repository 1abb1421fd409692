"""Dispatch for an objective without a teacher: rows of the tables in, a plan out, and training on that plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from infra import tables
from infra.row_objects import read_jsonl
from infra.stores import open_store
from schemas import rows
from schemas.errors import ContractError
from schemas.rows import PLAN, TABLES
from tasks.operate.invariants import check_plan
from tasks.stages import dispatch_in_spark
from tests.ml.test_objectives import check, oracle
from tests.ml.test_train_parity import VOCAB, run_ranks, scenario, write_student
from tests.support.policy_gradient import PolicyGradient, PolicyGradientSettings
from tests.support.training_world import World, make_world

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

REWARDS = {"t000": 1.0, "t001": 0.0, "t002": 0.5, "t003": 0.5, "t004": 0.0, "t005": 3.0}


def table_rows(world: World, run_id: str) -> dict[str, list[dict[str, Any]]]:
    """Three prompts of two trajectories each; the last prompt is held out. No prompt has a teacher."""
    prompts, trajectories = [], []
    for number, row in enumerate(world.trajectory_rows):
        prompt_id = f"{run_id}-{number // 2}"
        if number % 2 == 0:
            prompts.append({"prompt_id": prompt_id, "source": run_id, "domain": "d", "teachers": [], "messages": "[]",
                            "answer": None, "verifier": None, "context": "{}"})  # fmt: skip
        blank = {c.name: {"string": "x", "double": 0.0}.get(c.type, 0) for c in rows.TRAJECTORIES.columns}
        trajectories.append(
            blank | row
            | {"run_id": run_id, "prompt_id": prompt_id, "sample_index": number % 2, "status": "finished",
               "split": "heldout" if number >= 4 else "train", "reward": REWARDS[row["trajectory_id"]]}
        )  # fmt: skip
    return {"prompts": prompts, "trajectories": trajectories}


def write_tables(spark: SparkSession, root: str, content: dict[str, list[dict[str, Any]]]) -> None:
    for table, new_rows in content.items():
        frame = spark.createDataFrame(pa.Table.from_pylist(new_rows, schema=tables.arrow_schema(TABLES[table])))
        frame.write.format("delta").mode("append").save(tables.table_uri(root, table))


def plan_of(spark: SparkSession, root: str, run_id: str) -> list[dict[str, Any]]:
    result = dispatch_in_spark.build_plan(
        spark, root=root, run_id=run_id, iteration=0, seed=7, objective={"type": "policy_gradient"}, teachers=[],
        mini_batch_trajectories=4, pack_tokens=32, slots=2, out_key=f"test/{run_id}/plan.jsonl",
        versions={t: tables.table_version(root, t) or 0 for t in ("prompts", "trajectories", "hidden_shards")},
    )  # fmt: skip
    plan = read_jsonl(open_store(root), PLAN, result["rows_key"])
    assert result["content_digest"] == rows.content_digest(PLAN, plan)
    assert plan == [dict.fromkeys(PLAN.added_columns) | json.loads(line)
                    for line in open_store(root).get(result["rows_key"]).splitlines()]  # fmt: skip
    return plan


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_in_spark, "read_objective", PolicyGradientSettings.model_validate)


def test_an_objective_without_a_teacher_is_dispatched_and_trained(
    spark: SparkSession, spark_root: str, tmp_path
) -> None:
    world = make_world([(3, 4), (1, 1), (5, 9), (2, 7), (4, 2), (6, 5)], {}, vocab=VOCAB, seed=3)
    content = table_rows(world, "alone")
    write_tables(spark, spark_root, content)
    plan = plan_of(spark, spark_root, "alone")
    assert {r["trajectory_id"]: r["advantage"] for r in plan} == {
        "t000": 0.5, "t001": -0.5, "t002": 0.0, "t003": 0.0, "t004": -1.5, "t005": 1.5,
    }  # fmt: skip
    assert {(r["objective"], r["teacher_index"], r["weight"]) for r in plan} == {("policy_gradient", None, 1.0)}
    by_id = {row["trajectory_id"]: row for row in content["trajectories"]}
    assert [c.breaches for c in check_plan(plan, by_id, [])] == [(), (), ()]
    assert check_plan(plan[1:], by_id, [])[0].breaches == (f"(0, {plan[0]['trajectory_id']!r}, None): in no pack",)

    student = write_student(tmp_path / "student", tied=True)
    only = {"policy_gradient": PolicyGradient()}
    results = run_ranks(tmp_path, student, world, [scenario("dispatched", plan, objectives=only, teachers={})], 2)
    check(results["dispatched"], oracle(student, world, [r for r in plan if r["split"] == "train"], 1.0))


def test_a_trajectory_without_a_reward_has_no_advantage(spark: SparkSession, spark_root: str) -> None:
    content = table_rows(make_world([(3, 4), (1, 1)], {}, vocab=VOCAB), "unrewarded")
    content["trajectories"][1]["reward"] = None
    write_tables(spark, spark_root, content)
    with pytest.raises(ContractError, match=r"trajectory t001, reward\nexpected: a number"):
        plan_of(spark, spark_root, "unrewarded")
