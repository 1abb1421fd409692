"""One iteration, the first page to read: rollout -> teach -> dispatch -> train.

    rollout    the student samples trajectories, every token in a log
    teach      each trajectory's teachers read it; last hidden states are kept
    dispatch   Spark shuffles all trajectories and packs them into the plan
    train      DeepSpeed walks the plan; the next student comes out

Stages are idempotent by their own manifests; Prefect adds retries, states and artifacts, and carries nothing. A stage
that is stopped ends in state "Preempted".
"""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows import artifacts, preemption
from schemas.errors import StoreError
from tasks.runs.finished import StageResult
from tasks.runs.session import current_session
from tasks.runs.stage import past_iteration
from tasks.runs.students import Student, student_of
from tasks.stages import dispatch, rollout, teach, train


def _worth_a_retry(_task: Any, _run: Any, state: Any) -> bool:
    """A store may answer the next time; a wrong setting or a broken contract never will."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, StoreError)


def _stage(name: str):
    as_task = task(
        name=name, task_run_name=name + " {iteration}", retries=2, retry_delay_seconds=10,
        retry_condition_fn=_worth_a_retry, cache_policy=NO_CACHE, persist_result=False,
    )  # fmt: skip
    return preemption.stoppable(as_task)


@_stage("rollout")
def rollout_task(iteration: int, student: Student) -> StageResult:
    return artifacts.published(rollout.rollout(current_session(), iteration, student))


@_stage("teach")
def teach_task(iteration: int, rolled: StageResult) -> StageResult:
    return artifacts.published(teach.teach(current_session(), iteration, rolled))


@_stage("dispatch")
def dispatch_task(iteration: int, rolled: StageResult, taught: StageResult) -> StageResult:
    return artifacts.published(dispatch.dispatch(current_session(), iteration, rolled, taught))


@_stage("train")
def train_task(iteration: int, student: Student, inputs: dict[str, StageResult]) -> StageResult:
    return artifacts.published(train.train(current_session(), iteration, student, inputs))


@flow(
    name="iteration", flow_run_name="{run_id} {iteration}", persist_result=False, on_crashed=[preemption.name_crash]
)  # fmt: skip
@preemption.noting_stops()
def iteration_flow(run_id: str, iteration: int) -> dict[str, StageResult]:
    """Iteration k of the open session, sampling with the student of iteration k-1. Returns the stages' results.

    An iteration below `--from-iteration` stays what it was made as: its manifests are read.
    """
    session = current_session()
    if session.history.is_past(iteration):
        past = past_iteration(session, iteration)
        session.trained = past["train"]
        return past
    student = student_of(session, session.trained)
    rolled = rollout_task(iteration, student)
    taught = teach_task(iteration, rolled)
    dispatched = dispatch_task(iteration, rolled, taught)
    inputs = {"rollout": rolled, "teach": taught, "dispatch": dispatched}
    session.trained = train_task(iteration, student, inputs)
    return {**inputs, "train": session.trained}
