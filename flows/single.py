"""One stage alone, without a Prefect server: the stages before it are read from their manifests."""

from __future__ import annotations

from schemas.config import RunConfig
from schemas.errors import ConfigError
from tasks.runs.finished import STAGES, StageResult
from tasks.runs.session import Progress, open_session, silent
from tasks.runs.stage import past_iteration
from tasks.runs.students import student_of
from tasks.stages import dispatch, rollout, teach, train


def run_single(config: RunConfig, stage: str, iteration: int, *, progress: Progress = silent) -> StageResult:
    """Execute or continue one stage. Raises StageError naming the first earlier stage that is not finished."""
    if not 0 <= iteration < config.iterations:
        raise ConfigError("--iteration", expected=f"0 to {config.iterations - 1}", found=str(iteration))
    with open_session(config, progress=progress, target=(iteration, stage)) as session:
        trained: StageResult | None = None
        for number in range(iteration + 1):
            if session.history.is_past(number):
                past = past_iteration(session, number)
                if number == iteration:
                    return past[stage]
                trained = past["train"]
                continue
            student = student_of(session, trained)
            done: dict[str, StageResult] = {}
            for name in STAGES:
                if name == "rollout":
                    done[name] = rollout.rollout(session, number, student)
                elif name == "teach":
                    done[name] = teach.teach(session, number, done["rollout"])
                elif name == "dispatch":
                    done[name] = dispatch.dispatch(session, number, done["rollout"], done["teach"])
                else:
                    done[name] = train.train(session, number, student, dict(done))
                if (number, name) == (iteration, stage):
                    return done[name]
            trained = done["train"]
    raise AssertionError(f"{stage} of iteration {iteration} was not reached")
