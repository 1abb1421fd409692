"""What pre-emption does to the lengths of responses: when interrupted ones go on, and when they are sampled anew.

The same prompts are sampled three times on a model with a long tail of lengths:

    undisturbed   real workers that nobody interrupts
    ours          real workers that are pre-empted at Poisson times, by SIGTERM or SIGKILL, until all is sampled
    discarded     the same engine, whose unfinished responses are lost at Poisson times and begin again from their
                  prompts with new randomness; the batch is closed once most prompts have an answer, the rest dropped

The check: ours is the undisturbed run, trajectory by trajectory. The bias of the third is a figure.
"""

from __future__ import annotations

import platform
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.testing import check, environment, figure
from ml.checkpoint import load_model
from ml.rollout.engine import RolloutEngine
from ml.rollout.pages import pages_for
from ml.rollout.requests import EngineConfig, Request
from ml.rollout.sampling import SamplingParams
from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from schemas import keys
from schemas.work.rollout import RolloutRequest
from tasks.bench.kolmogorov import ks_two_sample
from tasks.bench.random_model import STOP_ID, VOCAB_SIZE
from tasks.bench.survival_plot import survival_svg
from tasks.bench.trial import Trial, lengths
from tasks.workers.pool import Pool

_MAX_SEQUENCES = 64
#: Of ours, in seconds of sampling, and of the discarding engine, in steps: time between pre-emptions of a worker.
_MEAN_SECONDS, _MEAN_STEPS = 4.0, 300
#: The discarding batch is closed when so many of its prompts have an answer.
_CLOSED_AT = 0.9


def run(quick: bool, plot: str = "") -> dict[str, Any]:
    """plot: where to write the picture, an SVG. Raises CheckFailed when ours differs from the undisturbed run."""
    partitions, trajectories, limit = (2, 32, 700) if quick else (4, 96, 1500)
    with tempfile.TemporaryDirectory(prefix="opd-bench-") as folder:
        trial = Trial(
            Path(folder), partitions=partitions, trajectories=trajectories, response_tokens=limit,
            max_sequences=_MAX_SEQUENCES, seed=4, model_seed=4,
        )  # fmt: skip
        undisturbed = trial.run("undisturbed")
        preemptor = Preemptor(random.Random(1))
        ours = trial.run("ours", watcher=preemptor)
        discarded = [
            discard_and_regenerate(trial, partition, mean_steps=_MEAN_STEPS, closed_at=_CLOSED_AT)
            for partition in range(partitions)
        ]
    same = sum(
        len(o.rows) for p, o in ours.items() if (o.shard, o.content) == (undisturbed[p].shard, undisturbed[p].content)
    )
    whole = lengths(list(undisturbed.values()))
    check(same == len(whole), f"{same} of {len(whole)} trajectories are those of the undisturbed run")
    continued = lengths(list(ours.values()))
    regenerated = [tokens for batch in discarded for tokens in batch.lengths]
    our_d, our_p = ks_two_sample(whole, continued)
    d, p = ks_two_sample(whole, regenerated)
    long = sorted(whole)[len(whole) * 9 // 10]
    lost = sum(batch.lost_tokens for batch in discarded)
    interrupted = sum(row["num_preemptions"] > 0 for outcome in ours.values() for row in outcome.rows)
    if plot:
        samples = {
            "undisturbed": whole,
            "pre-empted, continued from the log": continued,
            "pre-empted, discarded and regenerated": regenerated,
        }
        Path(plot).write_text(survival_svg("Lengths of responses under pre-emption", samples), encoding="utf-8")
    return {
        "figures": {
            "ours_identical": figure(same, f"of {len(whole)} trajectories", "all", same == len(whole)),
            "ours_preemptions": figure(preemptor.count, "of workers"),
            "ours_interrupted": figure(interrupted / len(whole), "of trajectories"),
            "ours_ks_distance": figure(our_d, "", "0", our_d == 0),
            "ours_ks_p": figure(our_p, ""),
            "undisturbed_mean": figure(_mean(whole), "tokens"),
            "discarded_mean": figure(_mean(regenerated), "tokens"),
            "discarded_mean_bias": figure(_mean(regenerated) / _mean(whole) - 1, "of the mean"),
            "undisturbed_long_share": figure(_share(whole, long), f"of responses, {long} tokens or more"),
            "discarded_long_share": figure(_share(regenerated, long), f"of responses, {long} tokens or more"),
            "discarded_ks_distance": figure(d, ""),
            "discarded_ks_p": figure(p, ""),
            "discarded_prompts_dropped": figure(1 - len(regenerated) / len(whole), "of prompts"),
            "discarded_tokens_lost": figure(lost / (lost + sum(regenerated)), "of sampled tokens"),
        },
        "peers": {},
        "env": environment(
            f"{partitions} workers of {trajectories} prompts, at most {limit} tokens, {_MAX_SEQUENCES} at once; "
            f"pre-emption every {_MEAN_SECONDS:g} s (ours) or {_MEAN_STEPS} steps; closed at {_CLOSED_AT:.0%}"
        ) | {"python": platform.python_version()},
    }  # fmt: skip


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)


def _share(values: list[int], least: int) -> float:
    return sum(value >= least for value in values) / len(values)


class Preemptor:
    """Watcher that ends each worker at a Poisson moment of its sampling, whichever signal comes up."""

    def __init__(self, rng: random.Random) -> None:
        self.count = 0
        self._rng = rng
        self._ends: dict[tuple[int, int], float] = {}

    def look(self, pool: Pool) -> None:
        for worker in pool.workers:
            if worker.process is None or worker.process.status is not None or not worker.left:
                continue
            partition = worker.left[0]
            told = pool.acknowledged.get(partition)
            if told is None or partition not in pool.suspects or not pool.suspects[partition].running:
                continue  # not sampling yet
            life = partition, told.epoch
            if life not in self._ends:
                self._ends[life] = time.monotonic() + self._rng.expovariate(1 / _MEAN_SECONDS)
            elif time.monotonic() >= self._ends[life]:
                self._ends[life] = float("inf")
                worker.process.send(self._rng.choice([signal.SIGTERM, signal.SIGKILL]))
                self.count += 1


@dataclass(frozen=True)
class Batch:
    """lengths: of the responses that came in before the batch was closed. lost_tokens: sampled and thrown away."""

    lengths: list[int]
    lost_tokens: int


def discard_and_regenerate(trial: Trial, partition: int, *, mean_steps: float, closed_at: float) -> Batch:
    """One worker's prompts under the policy that keeps no log. Its first attempts are those of the undisturbed run."""
    model = load_model(trial.model, precision="bf16", compute="bf16", device="cpu")
    torch.set_num_threads(1)
    rng = random.Random(f"discard:{partition}")
    waiting = sorted(trial.requests(0, partition), key=lambda r: r.trajectory_id)
    wanted = round(closed_at * len(waiting))
    done: list[int] = []
    lost = attempt = 0
    while len(done) < wanted:
        finished, sampled = _life(trial, model, waiting, attempt, rng.expovariate(1 / mean_steps), wanted - len(done))
        done += finished.values()
        lost += sampled - sum(finished.values())
        waiting = [r for r in waiting if r.trajectory_id not in finished]
        attempt += 1
    return Batch(done, lost)


def _life(
    trial: Trial, model: Any, requests: list[RolloutRequest], attempt: int, steps: float, wanted: int
) -> tuple[dict[str, int], int]:
    """Response tokens of what finishes within so many steps, and all tokens that were sampled."""
    page_tokens = 64
    pages = pages_for(len(requests[0].prompt_ids) + trial.response_tokens, page_tokens)
    config = EngineConfig.on(
        torch.device("cpu"), max_sequences=trial.max_sequences, page_tokens=page_tokens,
        num_pages=trial.max_sequences * pages,
    )  # fmt: skip
    finished: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory(prefix="opd-bench-") as folder,
        TokenLog(Path(folder) / "log", LogHeader("bench", 0, 0, 1, "random")) as log,
    ):
        engine = RolloutEngine(model, config, SamplingParams(), (STOP_ID,), VOCAB_SIZE, log)
        for request in requests:
            again = f"{request.trajectory_id}:{attempt}" if attempt else ""
            key = keys.sampling_key(trial.seed, again) if again else request.sampling_key
            engine.add(Request(request.trajectory_id, request.prompt_ids, key, request.max_response_tokens))
        while engine.has_work() and steps > 0 and len(finished) < wanted:
            finished |= {f.trajectory_id: len(f.response_ids) for f in engine.step()}
            steps -= 1
        return finished, sum(engine.live().values())
