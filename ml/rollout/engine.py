"""The rollout engine: continuous batching over a paged KV cache, each sampled token logged before anyone sees it.

    add -> waiting -> admitted (pages, spilled KV restored) -> step launched -> collected, logged -> durable -> Finished

A trajectory that makes room for others waits with its KV in host memory.
On a GPU one step is in flight: while it runs, the one before is collected and logged. A stop token is seen one step
late; what that step sampled for the finished trajectory is dropped unlogged.
A step may compute guesses of a trajectory's next tokens beside it (ml.rollout.guesses). Each of their rows is sampled
by its own position's noise, and the tokens are kept up to the first one that the next guess is not: they are those of
as many steps without guesses.

Invariant: tokens, both log-probabilities and KV of a trajectory depend on the weights, its prompt, its key and the
sampling parameters alone: not on other requests, on when it was admitted, on how its prefill was cut, on what was
guessed, nor on how often it was paused, spilled, or rebuilt from the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ml.model import Transformer
from ml.rollout.guesses import MOST_SEQUENCES, Guesser
from ml.rollout.requests import EngineConfig, Finished, Request, check_config
from ml.rollout.runner import Runner
from ml.rollout.sampling import SamplingParams
from ml.rollout.scheduler import Plan, Scheduler
from ml.rollout.scheduler import Sequence as Scheduled
from ml.rollout.spill import (
    KvLayout,
    PrefillCost,
    Spillable,
    SpilledKv,
    SpillQueue,
    SpillRecord,
    encode_kv,
    write_spills,
)
from ml.rollout.steps import Ticket
from ml.rollout.together import LeadRunner
from ml.rollout.wal_records import prompt_digest
from schemas.errors import ContractError
from schemas.interruptions import UNINTERRUPTED, Interruptions


class Log(Protocol):
    """What the engine needs of a token log (ml.rollout.wal.TokenLog)."""

    @property
    def acknowledged(self) -> int: ...
    def admit(self, trajectory_id: str, *, prompt_digest: bytes, prompt_tokens: int) -> int: ...
    def append_step(self, numbers: Any, first_token_indices: Any, ids: Any, raw: Any, sampled: Any) -> int: ...
    def append_finish(self, number: int, response_tokens: int, reason: str) -> int: ...
    def commit(self) -> None: ...
    def wait_local(self, sequence: int) -> None: ...


@dataclass(eq=False)
class _Trajectory(Scheduled):
    sampling_key: int = 0
    number: int = 0
    durable: int = 0
    raw: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    kv: SpilledKv | None = None
    stored_positions: int = 0
    interruptions: Interruptions = UNINTERRUPTED
    finish_reason: str = ""


class RolloutEngine:
    """One engine a process, for one log after another. stop_ids end a response; only ids below vocab_size can be
    sampled.

    Of ranks that share the model, rank 0 has the engine; the others `follow` (ml.rollout.together).
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        sampling: SamplingParams,
        stop_ids: Sequence[int],
        vocab_size: int,
        log: Log,
    ) -> None:
        check_config(model, config, sampling, vocab_size)
        self.model, self.config, self.sampling = model, config, sampling
        self.stop_ids, self.vocab_size = frozenset(stop_ids), vocab_size
        self.kv_layout = KvLayout.of(model, config.student_digest)
        runner = LeadRunner if model.group.ranks > 1 else Runner
        self._runner = runner(
            model, max_sequences=config.max_sequences, num_pages=config.num_pages, page_tokens=config.page_tokens,
            split_tokens=config.split_tokens, vocab_size=vocab_size, sampling=sampling, graphs=config.graphs,
        )  # fmt: skip
        self._guesser: Guesser | None = None
        if config.guess_tokens:
            self._guesser = Guesser(config.guess_tokens, ahead=config.steps_in_flight > 0)
        self._open(log)

    def begin(self, log: Log) -> None:
        """Forget every trajectory and go on with another log; wherever the last one was left, this is a new engine.

        Weights, the memory of the cache and graphs stay on the device; what was computed there is wiped.
        """
        self._runner.clear()
        self._open(log)

    def _open(self, log: Log) -> None:
        config = self.config
        self.log = log
        self._scheduler = Scheduler(max_sequences=config.max_sequences, page_tokens=config.page_tokens,
                                    num_pages=config.num_pages, prefill_tokens=config.prefill_chunk_tokens)  # fmt: skip
        if self._guesser is not None:
            self._guesser.clear()
        self._in_flight: deque[tuple[int, Ticket]] = deque()
        self._unfinished: dict[str, _Trajectory] = {}
        self._known: dict[str, _Trajectory] = {}
        self._undelivered: deque[tuple[int, _Trajectory]] = deque()
        self._unacknowledged: deque[tuple[int, list[_Trajectory]]] = deque()

    def add(self, request: Request) -> None:
        """Queue a request, new or resumed. Raises ContractError when it could never run or is known already."""
        earlier = [list(ids) for ids in request.earlier_responses] if self._guesser is not None else []
        self._check_request(request, earlier)
        prompt = list(request.prompt_ids)
        digest = prompt_digest(prompt)
        trajectory = _Trajectory(
            request.trajectory_id, prompt + list(request.logged_ids), len(prompt),
            len(prompt) + request.max_response_tokens,
            prompt_key=digest, sampling_key=request.sampling_key,
            raw=list(request.logged_raw), sampled=list(request.logged_sampled),
            number=self.log.admit(request.trajectory_id, prompt_digest=digest, prompt_tokens=len(prompt)),
            durable=len(request.logged_ids),
        )  # fmt: skip
        self._known[request.trajectory_id] = trajectory
        if request.logged_ids and self._is_done(trajectory):
            self._finish(trajectory)
            self.log.commit()
            return
        if request.kv is not None and request.kv.positions:
            trajectory.kv, trajectory.num_kept = request.kv, request.kv.positions
            trajectory.stored_positions = request.kv.positions
        elif request.logged_ids:
            trajectory.interruptions = Interruptions(prefill_rebuilds=1)
        self._unfinished[request.trajectory_id] = trajectory
        self._scheduler.add(trajectory)
        if self._guesser is not None:
            self._guesser.add(trajectory.trajectory_id, digest, trajectory.tokens, len(prompt), earlier)

    def has_work(self) -> bool:
        """Whether a request has not been handed out as Finished."""
        return bool(self._unfinished or self._undelivered)

    def step(self) -> list[Finished]:
        """Admit, launch a step of prefill chunks beside decode rows, collect and log the oldest step in flight.

        A step with guesses is collected before anything is planned behind it.
        Returns what became final and durable. The log's commit of a step overlaps the next one. Raises ContractError,
        naming trajectory and position, when the model's logits have no finite maximum, and whatever the log raises.
        """
        if self._in_flight and self._in_flight[-1][1].guessed:
            self._collect_all()
        admitted = self._admit()
        guesser = self._guesser
        if guesser is not None and guesser.holds_back(_names(self._scheduler.decoding(MOST_SEQUENCES))):
            self._collect_all()
        plan = self._scheduler.plan()
        for paused in plan.paused:
            trajectory = self._known[paused.sequence.trajectory_id]
            if trajectory.num_kept:
                trajectory.kv = SpilledKv(*self._runner.read_kv(paused.pages, trajectory.num_kept))
        if plan:
            if guesser is not None:
                self._guess(guesser, plan)
                disturbed = bool(admitted or plan.chunks or plan.paused)
                num_rows = len(plan.decode) + sum(len(ids) for ids in plan.guessed.values())
                guesser.launching(num_rows, len(self._in_flight), disturbed=disturbed)
            ticket = self._runner.launch(plan)
            self._in_flight.append((self._scheduler.launched(plan), ticket))
        while len(self._in_flight) > (self.config.steps_in_flight if plan else 0):
            self._collect()
        if not self._unfinished and self._undelivered:
            self.log.wait_local(self._undelivered[-1][0])
        return self._deliver()

    def live(self) -> dict[str, int]:
        """Response tokens of each trajectory, finished ones included, that are durable and may be shown."""
        self._note_acknowledged()
        return {i: t.durable for i, t in self._known.items()}

    def kept_kv(self, trajectory_id: str, *, to_return: bool = True) -> SpilledKv:
        """KV of an unfinished trajectory's kept positions, on the host; steps in flight are waited for and dropped.

        to_return: in memory from which it is soon on the device again; else in what is had in less time.
        """
        self._drop_in_flight()
        t = self._unfinished[trajectory_id]
        return t.kv or SpilledKv(*self._runner.read_kv(t.pages, t.num_kept, to_return=to_return))

    def running(self) -> dict[str, int]:
        """Positions in the cache of each trajectory there, the oldest first: that one goes on with every step."""
        return {sequence.trajectory_id: sequence.num_kept for sequence in self._scheduler.running}

    def spill(self, write: Callable[[str, list[memoryview]], bool], deadline: float) -> list[SpillRecord]:
        """Write KV of unfinished trajectories until `deadline` (time.monotonic()), in the order of SpillQueue.

        write(name, parts) stores one object of these bytes, on several threads at once; False: it could not. The engine
        must not step during or after this.
        """
        self._drop_in_flight()
        kept = {t.trajectory_id: t.kv.positions if t.kv else t.num_kept for t in self._unfinished.values()}
        position_bytes = self.kv_layout.position_bytes
        candidates = [
            Spillable(i, kept[i], t.stored_positions, kept[i] * position_bytes) for i, t in self._unfinished.items()
        ]
        queue = SpillQueue(candidates, PrefillCost.of(self.model.config), deadline)

        def encode(trajectory_id: str, kv: SpilledKv) -> list[memoryview]:
            return encode_kv(kv, self.kv_layout, trajectory_id, self._unfinished[trajectory_id].tokens)

        return write_spills(queue, lambda i: self.kept_kv(i, to_return=False), encode, write)

    # --- the parts of a step

    def _admit(self) -> bool:
        """Whether any was."""
        admitted = self._scheduler.admit()
        if not admitted:
            return False
        trajectories = [self._known[a.sequence.trajectory_id] for a in admitted]
        for trajectory in trajectories:
            if trajectory.kv is not None:
                self._runner.write_kv(trajectory.pages, trajectory.kv.k_MLGC, trajectory.kv.v_MLGC)
                trajectory.kv = None
                trajectory.interruptions += Interruptions(kv_restores=1)
        # Afterwards, since others may take their prompt from what was just restored.
        self._runner.admit(admitted, [t.sampling_key for t in trajectories])
        return True

    def _guess(self, guesser: Guesser, plan: Plan) -> None:
        """Add rows for guesses to a step of decode rows alone, all of whose ids are known."""
        if plan.chunks or self._in_flight:
            return
        for sequence, ids in zip(plan.decode, guesser.guesses(_names(plan.decode)), strict=True):
            if ids:
                self._scheduler.guess(plan, sequence, ids)

    def _agreeing(self, ticket: Ticket, ids: list[int]) -> list[bool]:
        """Which rows of a step with guesses gave the tokens that steps without them would have given: of a trajectory
        the rows up to one whose token is not the guess of the next row, or ends the response."""
        keep: list[bool] = []
        for sequence in dict.fromkeys(ticket.sequences):
            guessed, sampled = ticket.guessed.get(sequence, []), ids[len(keep) :]
            count = 1
            while count <= len(guessed) and guessed[count - 1] == sampled[count - 1] not in self.stop_ids:
                count += 1
            keep += [True] * count + [False] * (len(guessed) + 1 - count)
            if guessed:
                self._scheduler.verified(sequence, count)
        return keep

    def _collect_all(self) -> None:
        while self._in_flight:
            self._collect()

    def _collect(self) -> None:
        """Log the tokens of the oldest step in flight, those of trajectories that have finished since left out."""
        number, ticket = self._in_flight.popleft()
        collected = self._runner.collect(ticket)
        self._scheduler.step_ended(number)
        trajectories = [self._known[s.trajectory_id] for s in ticket.sequences]
        columns = collected.ids_R, collected.raw_R, collected.sampled_R
        going = [not t.finish_reason for t in trajectories]
        if ticket.guessed:
            going = self._agreeing(ticket, collected.ids_R.tolist())
        if not all(going):
            trajectories = [t for t, goes in zip(trajectories, going, strict=True) if goes]
            columns = tuple(column[going] for column in columns)
        if not trajectories:
            return
        firsts = [len(t.raw) for t in trajectories]
        if ticket.guessed:
            for row in range(1, len(firsts)):
                if trajectories[row] is trajectories[row - 1]:
                    firsts[row] = firsts[row - 1] + 1
        finite = np.isfinite(columns[1]) & np.isfinite(columns[2])
        if not finite.all():
            row = int(finite.argmin())
            broken = trajectories[row]
            position = broken.num_prompt + firsts[row]
            raise ContractError(
                f"trajectory {broken.trajectory_id}, position {position}",
                expected="finite logits", found="NaN or infinity", safe="every token logged so far",
                next_command="check the student's weights: opd verify",
            )  # fmt: skip
        self._unacknowledged.append(
            (self.log.append_step([t.number for t in trajectories], firsts, *columns), trajectories)
        )
        for t, token, raw, sampled in zip(trajectories, *(column.tolist() for column in columns), strict=True):
            t.tokens.append(token)
            t.raw.append(raw)
            t.sampled.append(sampled)
            if token in self.stop_ids or len(t.tokens) >= t.max_tokens:
                self._scheduler.finish(t)
                del self._unfinished[t.trajectory_id]
                if self._guesser is not None:
                    self._guesser.remove(t.trajectory_id)
                self._finish(t)
        self.log.commit()

    def _drop_in_flight(self) -> None:
        """Wait for the launched steps; their KV stays, their tokens are not logged and come back the same."""
        while self._in_flight:
            number, ticket = self._in_flight.popleft()
            self._runner.collect(ticket)
            self._scheduler.step_ended(number)
            for sequence in ticket.guessed:
                self._scheduler.verified(sequence, 0)
        for t in self._unfinished.values():
            t.num_kept = min(t.num_kept, len(t.tokens))

    def _is_done(self, trajectory: _Trajectory) -> bool:
        return trajectory.tokens[-1] in self.stop_ids or len(trajectory.tokens) >= trajectory.max_tokens

    def _finish(self, trajectory: _Trajectory) -> None:
        trajectory.finish_reason = "stop" if trajectory.tokens[-1] in self.stop_ids else "length"
        sequence = self.log.append_finish(trajectory.number, len(trajectory.raw), trajectory.finish_reason)
        self._undelivered.append((sequence, trajectory))

    def _note_acknowledged(self) -> int:
        acknowledged = self.log.acknowledged
        while self._unacknowledged and self._unacknowledged[0][0] <= acknowledged:
            for trajectory in self._unacknowledged.popleft()[1]:
                trajectory.durable += 1
        return acknowledged

    def _deliver(self) -> list[Finished]:
        acknowledged = self._note_acknowledged()
        out = []
        while self._undelivered and self._undelivered[0][0] <= acknowledged:
            t = self._undelivered.popleft()[1]
            out.append(Finished(t.trajectory_id, tuple(t.tokens[t.num_prompt :]), tuple(t.raw), tuple(t.sampled),
                                t.finish_reason, t.interruptions))  # fmt: skip
        return out

    # --- what could never run is refused when it is added

    def _check_request(self, request: Request, earlier: list[list[int]]) -> None:
        num_prompt, num_logged = len(request.prompt_ids), len(request.logged_ids)
        # The last token of a response is never fed back, so it needs no position and no KV.
        needed = num_prompt + request.max_response_tokens - 1
        ids = (*request.prompt_ids, *request.logged_ids)
        strange = [i for part in (ids, *earlier) for i in part if not 0 <= i < self.vocab_size]
        positions, slots = self.model.config.max_positions, self.config.num_pages * self.config.page_tokens
        kv_positions = request.kv.positions if request.kv else 0
        rules = (
            (request.trajectory_id not in self._known, "each trajectory once", "a second request for it"),
            (num_prompt > 0, "a prompt of at least one token", "an empty prompt"),
            (request.max_response_tokens > 0, "max_response_tokens of at least 1", str(request.max_response_tokens)),
            (0 <= request.sampling_key < 1 << 64, "a 64-bit sampling key", str(request.sampling_key)),
            (not strange, f"token ids below {self.vocab_size}", str(strange[:1])),
            (needed <= positions, f"at most {positions} positions (the model's)", f"{num_prompt} prompt tokens and "
             f"{request.max_response_tokens} response tokens"),
            (self._scheduler.fits(needed), f"at most {slots} positions of KV", f"{needed}"),
            (num_logged <= request.max_response_tokens, f"at most {request.max_response_tokens} logged tokens",
             str(num_logged)),
            (len(request.logged_raw) == len(request.logged_sampled) == num_logged,
             "two log-probabilities a logged token", f"{len(request.logged_raw)} and {len(request.logged_sampled)}"),
            (self.stop_ids.isdisjoint(request.logged_ids[:-1]), "nothing logged after a stop token", "more tokens"),
            (kv_positions < max(1, len(ids)), f"KV of at most {len(ids) - 1} positions", str(kv_positions)),
        )  # fmt: skip
        for holds, expected, found in rules:
            if not holds:
                raise ContractError(f"trajectory {request.trajectory_id}", expected=expected, found=found,
                                    safe="every other request")  # fmt: skip


def _names(sequences: Sequence[Scheduled]) -> list[str]:
    return [s.trajectory_id for s in sequences]
