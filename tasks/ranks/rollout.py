"""One rollout worker: `python -m tasks.ranks.rollout WORK.json`; see tasks.stages.rollout for the fields of the work.

    take an epoch -> replay the newest log -> base segment -> sample, log, acknowledge -> shard, rows, manifest

It may die at any moment. Its heir takes the next epoch, continues every trajectory at the token after the last
logged one, and writes the same bytes. SIGTERM: the step in flight ends, its log and then the KV of what is not
finished go to the store, exit status 75. Nothing of an owner whose epoch is over is ever read.

    stdout: {"event": "resumed" | "kv_refused" | "ack" | "progress" | "finished" | "error", ...}, one a line
"""

from __future__ import annotations

import functools
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra import leases
from infra.store import ObjectStore
from infra.stores import open_store
from ml.device import observed, rank_device
from ml.model import Transformer
from ml.rollout.engine import EngineConfig, Finished, Request, RolloutEngine
from ml.rollout.pages import pages_for
from ml.rollout.sampling import SamplingParams
from ml.rollout.spill import KvLayout, SpilledKv
from ml.rollout.together import dismiss
from ml.rollout.wal import LogHeader, TokenLog
from ml.rollout.wal_format import Spill, prompt_digest
from ml.rollout.wal_recovery import LoggedTrajectory, Recovered, recover, segments_of
from schemas import keys
from schemas.errors import EXIT_PREEMPTED, ConfigError, ContractError, StoreError
from tasks.ranks.process import Preempted, Say, StopSignal, run_rank, say
from tasks.ranks.rollout_results import Response, publish
from tasks.ranks.shared_student import load_student
from tasks.ranks.spills import put_in_time, read_spills
from tasks.rewards.child import Rewarder
from tasks.rewards.verifiers import source_digest
from tasks.workers.lives import put_life
from tasks.workers.logs import local_log, stored_segments

_REPORT_SECONDS = 0.25
#: How the finish record of a trajectory that was given up begins; the rest says why.
_ERROR = "error: "
#: From the last seal to the end of the process: the lease is released, Python ends.
_EXIT_SECONDS = 1.0


@dataclass(frozen=True)
class Resumed:
    """An unfinished trajectory of an older epoch, and its spilled KV where that can be used."""

    logged: LoggedTrajectory
    kv: SpilledKv | None

    @property
    def rebuilds(self) -> bool:
        return self.kv is None and len(self.logged.ids) > 0


def newest_log(
    store: ObjectStore, scratch: Path, owned: str, header: LogHeader, acknowledged: dict[str, Any] | None
) -> Recovered | None:
    """The longer copy, on this node or in the store, of the newest log of an epoch before `header`'s.

    acknowledged: {"epoch", "tokens": {trajectory_id: response tokens}} that observers were told of; this node's copy
    of that epoch's log must hold them. Raises FormatError for a damaged copy, ContractError for another run's log.
    """
    for epoch in range(header.epoch - 1, 0, -1):
        local = _recovered(segments_of(local_log(scratch, owned, epoch)))
        stored = _recovered(stored_segments(store, owned, epoch))
        if local is not None or stored is not None:
            log = max((copy for copy in (local, stored) if copy), key=lambda copy: copy.last_sequence)
            if log.header != replace(header, epoch=epoch):
                raise ContractError(log.name, expected=str(replace(header, epoch=epoch)), found=str(log.header))
            if local is not None and acknowledged is not None and acknowledged["epoch"] == epoch:
                log.require(acknowledged["tokens"])
            return log
    return None


def _recovered(segments: Iterator[tuple[str, bytes]]) -> Recovered | None:
    """None for a log without a segment."""
    first = next(segments, None)
    return first and recover(chain([first], segments), Path(first[0]).parent.as_posix())


def _check_scoring(scoring: dict[str, str]) -> None:
    """Raises ContractError for a verifier that is not the one that the stage was started with."""
    for name, digest in scoring.items():
        if source_digest(name) != digest:
            raise ContractError(
                f"verifier {name!r}", expected=f"the source that the stage was started with, {digest[:16]}",
                found=source_digest(name)[:16], safe="every response is in the log and is scored again",
                next_command="the same command again",
            )  # fmt: skip


class Worker:
    """Runs the partitions of one work file, one after another."""

    def __init__(self, work: dict[str, Any], work_path: Path, say: Say, stop: StopSignal) -> None:
        self.work, self.work_path, self.say, self.stop = work, work_path, say, stop
        self.store, self.scratch = open_store(work["root"]), Path(work["scratch"])
        self._engine: RolloutEngine | None = None

    @functools.cached_property
    def model(self) -> Transformer:
        return load_student(self.work, self.work_path)

    def engine(self, log: TokenLog) -> RolloutEngine:
        """One for all partitions, since a GPU takes seconds to capture its graphs; it begins anew with each log."""
        if self._engine is None:
            self._engine = RolloutEngine(
                self.model, self._engine_config(), SamplingParams(**self.work["sampling"]), self.work["stop_ids"],
                self.work["vocab_size"], log,
            )  # fmt: skip
        else:
            self._engine.begin(log)
        return self._engine

    def _engine_config(self) -> EngineConfig:
        """With pages for the largest partition, as far as the configuration grants them."""
        sizes, digest = self.work["engine"], self.work["student"]["digest"]
        page_bytes = KvLayout.of(self.model, digest).cache_bytes * sizes["page_tokens"]
        partitions = [
            sorted(
                pages_for(len(r["prompt_ids"]) + r["max_response_tokens"], sizes["page_tokens"])
                for r in entry["requests"]
            )
            for entry in self.work["partitions"]
        ]
        longest = max(pages[-1] for pages in partitions)
        wanted = max(sum(pages[-sizes["max_sequences"] :]) for pages in partitions)
        num_pages = min(sizes["kv_bytes"] // page_bytes, wanted)
        if num_pages < longest:
            raise ConfigError(
                "rollout.kv_bytes", expected=f"{longest * page_bytes} for the longest sequence",
                found=str(sizes["kv_bytes"]),
            )  # fmt: skip
        return EngineConfig.on(
            self.model.head_weight.device, max_sequences=sizes["max_sequences"], page_tokens=sizes["page_tokens"],
            num_pages=num_pages, student_digest=digest,
        )  # fmt: skip

    def run(self) -> None:
        """Raises Preempted, or OpdError for the partition that cannot go on; those before it are finished."""
        torch.set_num_threads(self.work["threads"])
        with Rewarder(self.work) as rewarder:
            for entry in self.work["partitions"]:
                self._own(entry, rewarder)
        if "model" in vars(self):
            self._engine = None
            dismiss(self.model.group)

    def _own(self, entry: dict[str, Any], rewarder: Rewarder) -> None:
        owned = keys.partition_prefix(self.work["stage_prefix"], entry["partition"])
        owner = {"stage": "rollout", "partition": entry["partition"]}
        with self.stop.at_once():
            lease = leases.acquire(
                self.store, owned, owner=owner, dead_after_seconds=self.work["dead_after_seconds"],
                run_epoch=self.work.get("run_epoch"), on_wait=lambda text: self.say("waiting", text=text),
            )  # fmt: skip
        if isinstance(lease, leases.Lease):
            with lease:
                lease.finish(self._partition(lease, entry, rewarder))
        # The store has every segment; on this node nobody will look for them again.
        shutil.rmtree(self.scratch / owned, ignore_errors=True)
        self.say("finished", partition=entry["partition"], epoch=lease.epoch)

    def _partition(self, lease: leases.Lease, entry: dict[str, Any], rewarder: Rewarder) -> dict[str, Any]:
        started = time.monotonic()
        partition = Partition(self, lease, entry)
        responses = partition.sample()
        common = {"run_id": self.work["run_id"], "iteration": self.work["iteration"], "partition": partition.index,
                  "student_version": self.work["student"]["digest"]}  # fmt: skip

        def reward(request: dict[str, Any], response_ids: list[int]) -> float | None:
            lease.progress()
            return rewarder(request, response_ids)

        rewarder.start_partition()
        _check_scoring(self.work["scoring"])
        with self.stop.at_once():  # every response is in the store: a later worker scores them again
            manifest = publish(
                self.store,
                functools.partial(keys.owned_object, lease.owned, lease.epoch),
                partition.requests,
                [responses[r["trajectory_id"]] for r in partition.requests],
                reward,
                common,
            )
        stats = {"verifier_failures": rewarder.failures, "seconds": time.monotonic() - started}
        stats |= observed(rank_device())
        return manifest | {"stats": manifest["stats"] | stats, "scoring": self.work["scoring"]}


class Partition:
    """One partition under one lease; `sample` brings every request to its end, in order of trajectory_id."""

    def __init__(self, worker: Worker, lease: leases.Lease, entry: dict[str, Any]) -> None:
        self.worker, self.lease, self.index = worker, lease, entry["partition"]
        self.work, self.store = worker.work, worker.store
        self.requests = sorted(entry["requests"], key=lambda r: r["trajectory_id"])
        self.acknowledged = entry.get("acknowledged")
        self.groups: list[list[str]] = entry.get("groups", [[r["trajectory_id"] for r in self.requests]])
        self.given_up: dict[str, str] = entry.get("given_up", {})
        self.suspects: dict[str, Any] | None = entry.get("suspects")
        self._reported = time.monotonic()

    # --- sampling

    def sample(self) -> dict[str, Response]:
        """Responses by trajectory_id; their log is sealed and in the store. Raises Preempted after spilling."""
        with self.lease.patience(leases.LONG_SECONDS), self.worker.stop.at_once():
            base = self._newest_log()
            responses = _logged_responses(base)
            given_up = {i: text for i, text in self.given_up.items() if i not in responses}
            resumed = self._resume(base, set(given_up))
            if len(responses) + len(given_up) < len(self.requests):
                _ = self.worker.model  # read here, where it is safe to be stopped
        recovered = {t.trajectory_id: len(t.ids) for t in base.trajectories} if base else {}
        with self.lease.patience(leases.LONG_SECONDS):
            opened = self._open_log(base)
        with opened as log:
            responses |= self._give_up(log, base, given_up)
            self.worker.say(
                "resumed", partition=self.index, epoch=self.lease.epoch,
                recovered=recovered, given_up={i: r.error for i, r in responses.items() if r.error},
                kv_restored=sum(r.kv is not None for r in resumed.values()),
                prefill_rebuilt=sum(r.rebuilds for r in resumed.values()),
            )  # fmt: skip
            if len(responses) < len(self.requests):
                self._run_engine(log, recovered, responses, resumed)
        return responses

    def _give_up(self, log: TokenLog, base: Recovered | None, given_up: dict[str, str]) -> dict[str, Response]:
        """Ends trajectories where they stand, with the reason in the log; their responses so far."""
        logged = base.by_id() if base else {}
        ended = {}
        for request in self.requests:
            trajectory_id, prompt_ids = request["trajectory_id"], request["prompt_ids"]
            if trajectory_id in given_up:
                number = log.admit(
                    trajectory_id, prompt_digest=prompt_digest(prompt_ids), prompt_tokens=len(prompt_ids)
                )
                response = _logged_response(logged.get(trajectory_id), given_up[trajectory_id])
                log.append_finish(number, len(response.ids), f"{_ERROR}{response.error}")
                ended[trajectory_id] = response
        return ended

    def _header(self) -> LogHeader:
        work = self.work
        return LogHeader(work["run_id"], work["iteration"], self.index, self.lease.epoch, work["student"]["digest"])

    def _newest_log(self) -> Recovered | None:
        base = newest_log(self.store, self.worker.scratch, self.lease.owned, self._header(), self.acknowledged)
        requests = {r["trajectory_id"]: r for r in self.requests}
        for t in base.trajectories if base else ():
            request = requests.get(t.trajectory_id)
            digest = prompt_digest(request["prompt_ids"]).hex() if request else "no request"
            if digest != t.admit.prompt_digest.hex():
                raise ContractError(
                    f"{base.name if base else ''}, trajectory {t.trajectory_id}",
                    expected=f"the request of prompt digest {t.admit.prompt_digest.hex()}", found=digest,
                )  # fmt: skip
        return base

    def _resume(self, base: Recovered | None, given_up: set[str]) -> dict[str, Resumed]:
        """What goes on from the log; the base's own counts are brought up to date."""
        unfinished = [
            t for t in (base.trajectories if base else ())
            if t.finish_reason is None and t.trajectory_id not in given_up
        ]  # fmt: skip
        kv = self._spilled_kv([t for t in unfinished if t.spill is not None])
        resumed = {t.trajectory_id: Resumed(t, kv.get(t.trajectory_id)) for t in unfinished}
        for r in resumed.values():
            admit, restored = r.logged.admit, r.kv is not None
            r.logged.admit = replace(
                admit,
                num_preemptions=admit.num_preemptions + (restored or r.rebuilds),
                num_kv_restores=admit.num_kv_restores + restored,
                num_prefill_rebuilds=admit.num_prefill_rebuilds + r.rebuilds,
            )
        return resumed

    def _spilled_kv(self, spilled: list[LoggedTrajectory]) -> dict[str, SpilledKv]:
        """KV that can be used, by trajectory_id."""
        if not spilled:
            return {}
        layout = KvLayout.of(self.worker.model, self.work["student"]["digest"])
        prompts = {r["trajectory_id"]: r["prompt_ids"] for r in self.requests}

        def token_ids(t: LoggedTrajectory) -> list[int]:
            return [*prompts[t.trajectory_id], *t.ids.tolist()]

        found = {}
        for t, kv in zip(spilled, read_spills(self.store, spilled, token_ids, layout), strict=True):
            if not isinstance(kv, SpilledKv):
                # Not an error of the run: the log has the tokens, so the KV is computed again, and counted as rebuilt.
                self.worker.say("kv_refused", partition=self.index, trajectory_id=t.trajectory_id, text=str(kv))
            elif kv.positions:
                found[t.trajectory_id] = kv
        return found

    def _open_log(self, base: Recovered | None) -> TokenLog:
        def upload(segment: int, data: bytes) -> None:
            key = keys.wal_segment(self.lease.owned, self.lease.epoch, segment)
            if not self.store.put_if_absent(key, data):
                raise ContractError(
                    key, expected="no object, since this worker alone owns the epoch", found="an object"
                )

        return TokenLog(
            local_log(self.worker.scratch, self.lease.owned, self.lease.epoch), self._header(), base=base,
            seal_seconds=self.work["seal_seconds"], upload=upload,
        )  # fmt: skip

    def _run_engine(
        self, log: TokenLog, recovered: dict[str, int], responses: dict[str, Response], resumed: dict[str, Resumed]
    ) -> None:
        """Every response there is; one group of trajectories after another, since a suspect may have to be alone."""
        with self.lease.patience(leases.LONG_SECONDS):
            engine = self.worker.engine(log)
        requests = {r["trajectory_id"]: r for r in self.requests}
        for group in self.groups:
            unfinished = {i: None for i in group if i not in responses}
            for trajectory_id in unfinished:
                engine.add(_engine_request(requests[trajectory_id], resumed.get(trajectory_id)))
            if unfinished:
                put_life(
                    self.store, self.lease.owned, self.lease.epoch, suspects=self.suspects,
                    recovered=recovered, group=list(unfinished), size=self.work["engine"]["max_sequences"],
                )  # fmt: skip
            self._report(recovered | engine.live(), engine.running(), unfinished, responses, now=True)
            gained = False
            while engine.has_work():
                self.lease.progress()
                for finished in engine.step():
                    known = resumed.get(finished.trajectory_id)
                    responses[finished.trajectory_id] = _sampled_response(finished, known)
                    del unfinished[finished.trajectory_id]
                if not gained or time.monotonic() - self._reported > _REPORT_SECONDS:
                    tokens = recovered | engine.live()
                    # The first token is told at once: what has gone on is not what the worker may die of next.
                    first = not gained and any(tokens[i] > recovered.get(i, 0) for i in group)
                    gained = gained or first
                    self._report(tokens, engine.running(), unfinished, responses, now=first)
                if self.worker.stop.arrived is not None and engine.has_work():
                    with self.lease.patience(leases.LONG_SECONDS):
                        self._spill(log, engine, self.worker.stop.arrived)
                    self._report(recovered | engine.live(), engine.running(), unfinished, responses, now=True)
                    raise Preempted
        with self.lease.patience(leases.LONG_SECONDS):
            log.seal()
        self._report(recovered | engine.live(), {}, (), responses, now=True)

    def _spill(self, log: TokenLog, engine: RolloutEngine, stopped: float) -> None:
        """Tail first, then KV while the grace lasts, then the records that make the KV findable.

        stopped: time.monotonic() of the SIGTERM.
        """
        started = time.monotonic()
        log.seal()
        # The records are sealed and uploaded as the tail was, and the process must end, before the grace is over.
        sealing = time.monotonic() - started
        deadline = stopped + self.work["grace_seconds"] - 2 * sealing - _EXIT_SECONDS

        def key(name: str) -> str:
            return keys.owned_object(self.lease.owned, self.lease.epoch, f"spill/{name}")

        refused: dict[str, StoreError] = {}

        def write(name: str, parts: list[memoryview]) -> bool:
            try:
                return put_in_time(self.store, key(name), parts, deadline)
            except StoreError as error:  # the log has the tokens, and the store may have no room
                refused[name] = error
                return False

        for record in engine.spill(write, deadline):
            spill = Spill(record.positions, record.size_bytes, bytes.fromhex(record.digest), key(record.name))
            log.append_spill(log.number(record.trajectory_id), spill)
        log.seal()
        for name, error in refused.items():
            self.worker.say("kv_refused", partition=self.index, trajectory_id=name.removesuffix(".kv"), text=str(error))

    def _report(
        self,
        tokens: dict[str, int],
        running: dict[str, int],
        unfinished: Iterable[str],
        responses: Sized,
        *,
        now: bool = False,
    ) -> None:
        """tokens: durable, of each trajectory that has any. running: positions of those in the cache, the oldest first.

        unfinished: those of the group, in the order in which the cache takes them.
        """
        clock = time.monotonic()
        if now or clock - self._reported > _REPORT_SECONDS:
            self._reported = clock
            # The next step may take in some that wait, and die of them before another report.
            next_running = islice(dict.fromkeys([*running, *unfinished]), self.work["engine"]["max_sequences"])
            self.worker.say(
                "ack", partition=self.index, epoch=self.lease.epoch, tokens=tokens, running=list(next_running),
                positions=next(iter(running.values()), 0),
            )  # fmt: skip
            self.worker.say("progress", partition=self.index, done=len(responses), total=len(self.requests),
                            unit="trajectories")  # fmt: skip


def _logged_responses(log: Recovered | None) -> dict[str, Response]:
    responses = {}
    for t in log.trajectories if log else ():
        if t.finish_reason is not None:
            error = t.finish_reason.removeprefix(_ERROR) if t.finish_reason.startswith(_ERROR) else ""
            responses[t.trajectory_id] = _logged_response(t, error)
    return responses


def _logged_response(t: LoggedTrajectory | None, error: str) -> Response:
    """error: why it is given up, else empty. t is None when nothing of it was ever logged."""
    if t is None:
        ids, logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        return Response(ids, logprobs, logprobs, np.empty(0, np.uint8), "error", error=error)
    return Response(
        t.ids, t.logprobs_raw, t.logprobs_sampled, t.sampled_mask, "error" if error else t.finish_reason or "",
        t.admit.num_preemptions, t.admit.num_kv_restores, t.admit.num_prefill_rebuilds, error,
    )  # fmt: skip


def _sampled_response(f: Finished, resumed: Resumed | None) -> Response:
    counts = (0, f.num_kv_restores, f.num_prefill_rebuilds)
    if resumed is not None:
        # The base segment counted this life's own restoring or rebuilding already; pauses come on top.
        admit, restored = resumed.logged.admit, resumed.kv is not None
        counts = (admit.num_preemptions, admit.num_kv_restores + f.num_kv_restores - restored,
                  admit.num_prefill_rebuilds + f.num_prefill_rebuilds - resumed.rebuilds)  # fmt: skip
    return Response(
        np.array(f.response_ids, np.int32), np.array(f.logprobs_raw, np.float32),
        np.array(f.logprobs_sampled, np.float32), np.ones(len(f.response_ids), np.uint8), f.finish_reason, *counts,
    )  # fmt: skip


def _engine_request(request: dict[str, Any], resumed: Resumed | None) -> Request:
    logged = resumed.logged if resumed else None
    return Request(
        trajectory_id=request["trajectory_id"],
        prompt_ids=tuple(request["prompt_ids"]),
        sampling_key=request["sampling_key"],
        max_response_tokens=request["max_response_tokens"],
        logged_ids=tuple(logged.ids.tolist()) if logged else (),
        logged_raw=tuple(logged.logprobs_raw.tolist()) if logged else (),
        logged_sampled=tuple(logged.logprobs_sampled.tolist()) if logged else (),
        kv=resumed.kv if resumed else None,
    )


def main(arguments: list[str]) -> int:
    stop = StopSignal()
    try:
        return run_rank(arguments, dict[str, Any], lambda work: Worker(work, Path(arguments[0]), say, stop).run())
    except Preempted:
        return EXIT_PREEMPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
