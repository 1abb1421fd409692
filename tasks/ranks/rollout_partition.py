"""One partition of a rollout worker: the newest log replayed, what is left sampled, every token logged.

Invariant: what is logged is what an undisturbed worker would have sampled, whoever was interrupted how often.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sized
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from infra import leases
from ml.rollout.engine import RolloutEngine
from ml.rollout.spill import KvLayout, SpilledKv
from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_records import Spill, prompt_digest
from ml.rollout.wal_recovery import LoggedTrajectory, Recovered
from schemas import keys
from schemas.errors import ContractError, StoreError
from schemas.work import messages
from schemas.work.rollout import Life, RolloutPartition
from tasks.ranks.process import Preempted
from tasks.ranks.rollout_log import (
    Resumed,
    engine_request,
    finish_reason,
    logged_response,
    logged_responses,
    newest_log,
    sampled_response,
    unfinished,
)
from tasks.ranks.rollout_results import Response
from tasks.ranks.spills import put_in_time, read_spills
from tasks.workers.lives import put_life
from tasks.workers.logs import local_log

if TYPE_CHECKING:
    from tasks.ranks.rollout import Worker

_REPORT_SECONDS = 0.25
#: From the last seal to the end of the process: the lease is released, Python ends.
_EXIT_SECONDS = 1.0


class Partition:
    """One partition under one lease; `sample` brings every request to its end, in order of trajectory_id."""

    def __init__(self, worker: Worker, lease: leases.Lease, entry: RolloutPartition) -> None:
        self.worker, self.lease, self.entry, self.index = worker, lease, entry, entry.partition
        self.work, self.store = worker.work, worker.store
        self.requests = sorted(entry.requests, key=lambda r: r.trajectory_id)
        self._by_id = {r.trajectory_id: r for r in self.requests}
        self._reported = time.monotonic()

    # --- sampling

    def sample(self) -> dict[str, Response]:
        """Responses by trajectory_id; their log is sealed and in the store. Raises Preempted after spilling."""
        with self.lease.patience(leases.LONG_SECONDS), self.worker.stop.at_once():
            base = self._newest_log()
            responses = logged_responses(base)
            given_up = {i: text for i, text in self.entry.given_up.items() if i not in responses}
            resumed = self._resume(base, set(given_up))
            if len(responses) + len(given_up) < len(self.requests):
                _ = self.worker.model  # read here, where it is safe to be stopped
        recovered = {t.trajectory_id: len(t.ids) for t in base.trajectories} if base else {}
        with self.lease.patience(leases.LONG_SECONDS):
            opened = self._open_log(base)
        with opened as log:
            responses |= self._give_up(log, base, given_up)
            self.worker.say(
                messages.Resumed(
                    partition=self.index,
                    epoch=self.lease.epoch,
                    recovered=recovered,
                    given_up={i: r.error for i, r in responses.items() if r.error},
                    kv_restored=sum(r.kv is not None for r in resumed.values()),
                    prefill_rebuilt=sum(r.rebuilds for r in resumed.values()),
                )
            )
            if len(responses) < len(self.requests):
                self._run_engine(log, recovered, responses, resumed)
        return responses

    def _give_up(self, log: TokenLog, base: Recovered | None, given_up: dict[str, str]) -> dict[str, Response]:
        """Ends trajectories where they stand, with the reason in the log; their responses so far."""
        logged = base.by_id() if base else {}
        ended = {}
        for request in self.requests:
            trajectory_id, prompt_ids = request.trajectory_id, request.prompt_ids
            if trajectory_id in given_up:
                number = log.admit(
                    trajectory_id, prompt_digest=prompt_digest(prompt_ids), prompt_tokens=len(prompt_ids)
                )
                response = logged_response(logged.get(trajectory_id), given_up[trajectory_id])
                log.append_finish(number, len(response.ids), finish_reason(response))
                ended[trajectory_id] = response
        return ended

    def _header(self) -> LogHeader:
        work = self.work
        return LogHeader(work.run_id, work.iteration, self.index, self.lease.epoch, work.student.digest)

    def _newest_log(self) -> Recovered | None:
        base = newest_log(self.store, self.worker.scratch, self.lease.owned, self._header(), self.entry.acknowledged)
        for t in base.trajectories if base else ():
            request = self._by_id.get(t.trajectory_id)
            digest = prompt_digest(request.prompt_ids).hex() if request else "no request"
            if digest != t.admit.prompt_digest.hex():
                raise ContractError(
                    f"{base.name if base else ''}, trajectory {t.trajectory_id}",
                    expected=f"the request of prompt digest {t.admit.prompt_digest.hex()}", found=digest,
                )  # fmt: skip
        return base

    def _resume(self, base: Recovered | None, given_up: set[str]) -> dict[str, Resumed]:
        """What goes on from the log; the base's own counts are brought up to date."""
        left = [t for t in unfinished(base) if t.trajectory_id not in given_up]
        kv = self._spilled_kv([t for t in left if t.spill is not None])
        resumed = {t.trajectory_id: Resumed(t, kv.get(t.trajectory_id), before=t.admit.interruptions) for t in left}
        for r in resumed.values():
            r.logged.admit = replace(r.logged.admit, interruptions=r.at_start)
        return resumed

    def _spilled_kv(self, spilled: list[LoggedTrajectory]) -> dict[str, SpilledKv]:
        """KV that can be used, by trajectory_id."""
        if not spilled:
            return {}
        layout = KvLayout.of(self.worker.model, self.work.student.digest)

        def token_ids(t: LoggedTrajectory) -> list[int]:
            return [*self._by_id[t.trajectory_id].prompt_ids, *t.ids.tolist()]

        found = {}
        for t, kv in zip(spilled, read_spills(self.store, spilled, token_ids, layout), strict=True):
            if not isinstance(kv, SpilledKv):
                # Not an error of the run: the log has the tokens, so the KV is computed again, and counted as rebuilt.
                self.worker.say(messages.KvRefused(self.index, t.trajectory_id, str(kv)))
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
            seal_seconds=self.work.seal_seconds, upload=upload,
        )  # fmt: skip

    def _run_engine(
        self, log: TokenLog, recovered: dict[str, int], responses: dict[str, Response], resumed: dict[str, Resumed]
    ) -> None:
        """Every response there is; one group of trajectories after another, since a suspect may have to be alone."""
        with self.lease.patience(leases.LONG_SECONDS):
            engine = self.worker.engine(log)
        for group in self.entry.groups or [tuple(self._by_id)]:
            left = {i: None for i in group if i not in responses}
            for trajectory_id in left:
                engine.add(engine_request(self._by_id[trajectory_id], resumed.get(trajectory_id)))
            if left:
                life = Life(self.entry.suspects, recovered, tuple(left), self.work.engine.max_sequences)
                put_life(self.store, self.lease.owned, self.lease.epoch, life)
            self._report(recovered | engine.live(), engine.running(), left, responses, now=True)
            gained = False
            while engine.has_work():
                self.lease.progress()
                for finished in engine.step():
                    known = resumed.get(finished.trajectory_id)
                    responses[finished.trajectory_id] = sampled_response(finished, known)
                    del left[finished.trajectory_id]
                if not gained or time.monotonic() - self._reported > _REPORT_SECONDS:
                    tokens = recovered | engine.live()
                    # The first token is told at once: what has gone on is not what the worker may die of next.
                    first = not gained and any(tokens[i] > recovered.get(i, 0) for i in group)
                    gained = gained or first
                    self._report(tokens, engine.running(), left, responses, now=first)
                if self.worker.stop.arrived is not None and engine.has_work():
                    with self.lease.patience(leases.LONG_SECONDS):
                        self._spill(log, engine, self.worker.stop.arrived)
                    self._report(recovered | engine.live(), engine.running(), left, responses, now=True)
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
        deadline = stopped + self.work.grace_seconds - 2 * sealing - _EXIT_SECONDS

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
            self.worker.say(messages.KvRefused(self.index, name.removesuffix(".kv"), str(error)))

    def _report(
        self,
        tokens: dict[str, int],
        running: dict[str, int],
        left: Iterable[str],
        responses: Sized,
        *,
        now: bool = False,
    ) -> None:
        """tokens: durable, of each trajectory that has any. running: positions of those in the cache, the oldest first.

        left: those of the group, in the order in which the cache takes them.
        """
        clock = time.monotonic()
        if now or clock - self._reported > _REPORT_SECONDS:
            self._reported = clock
            # The next step may take in some that wait, and die of them before another report.
            next_running = islice(dict.fromkeys([*running, *left]), self.work.engine.max_sequences)
            positions = next(iter(running.values()), 0)
            self.worker.say(messages.Sampled(self.index, self.lease.epoch, tokens, tuple(next_running), positions))
            self.worker.say(messages.Progress(len(responses), len(self.requests), "trajectories", self.index))
