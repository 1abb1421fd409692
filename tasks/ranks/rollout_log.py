"""What a rollout worker goes on from: the log of the owner before it, and the KV that it spilled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from infra.store import ObjectStore
from ml.rollout.requests import Finished, Request
from ml.rollout.spill import SpilledKv
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_recovery import LoggedTrajectory, Recovered, recover, segments_of
from schemas.errors import ContractError
from schemas.interruptions import Interruptions
from schemas.work.rollout import Acknowledged, RolloutRequest
from tasks.ranks.rollout_results import Response
from tasks.workers.logs import local_log, stored_segments

#: How the finish record of a trajectory that was given up begins; the rest says why.
_ERROR = "error: "


@dataclass(frozen=True)
class Resumed:
    """An unfinished trajectory of an older epoch, and its spilled KV where that can be used.

    before: interruptions of its lives before this one.
    """

    logged: LoggedTrajectory
    kv: SpilledKv | None
    before: Interruptions

    @property
    def rebuilds(self) -> bool:
        return self.kv is None and len(self.logged.ids) > 0

    @property
    def preemption(self) -> Interruptions:
        """This life's going on from logged tokens, whatever becomes of its KV."""
        return Interruptions(preemptions=int(self.kv is not None or self.rebuilds))

    @property
    def at_start(self) -> Interruptions:
        """All so far, as the base segment of this life has them."""
        restored = Interruptions(kv_restores=int(self.kv is not None), prefill_rebuilds=int(self.rebuilds))
        return self.before + self.preemption + restored


def newest_log(
    store: ObjectStore, scratch: Path, owned: str, header: LogHeader, acknowledged: Acknowledged | None
) -> Recovered | None:
    """The longer copy, on this node or in the store, of the newest log of an epoch before `header`'s.

    acknowledged: what observers were told of; this node's copy of that epoch's log must hold it. Raises FormatError
    for a damaged copy, ContractError for another run's log.
    """
    for epoch in range(header.epoch - 1, 0, -1):
        local = _recovered(segments_of(local_log(scratch, owned, epoch)))
        stored = _recovered(stored_segments(store, owned, epoch))
        if local is not None or stored is not None:
            log = max((copy for copy in (local, stored) if copy), key=lambda copy: copy.last_sequence)
            if log.header != replace(header, epoch=epoch):
                raise ContractError(log.name, expected=str(replace(header, epoch=epoch)), found=str(log.header))
            if local is not None and acknowledged is not None and acknowledged.epoch == epoch:
                log.require(acknowledged.tokens)
            return log
    return None


def _recovered(segments: Iterator[tuple[str, bytes]]) -> Recovered | None:
    """None for a log without a segment."""
    first = next(segments, None)
    return first and recover(chain([first], segments), Path(first[0]).parent.as_posix())


def unfinished(base: Recovered | None) -> list[LoggedTrajectory]:
    return [t for t in (base.trajectories if base else ()) if t.finish_reason is None]


def logged_responses(base: Recovered | None) -> dict[str, Response]:
    """Of trajectories that the log finishes, by trajectory_id."""
    responses = {}
    for t in base.trajectories if base else ():
        if t.finish_reason is not None:
            error = t.finish_reason.removeprefix(_ERROR) if t.finish_reason.startswith(_ERROR) else ""
            responses[t.trajectory_id] = logged_response(t, error)
    return responses


def finish_reason(response: Response) -> str:
    """What the finish record of a trajectory that is given up says."""
    return f"{_ERROR}{response.error}"


def logged_response(t: LoggedTrajectory | None, error: str) -> Response:
    """error: why it is given up, else empty. t is None when nothing of it was ever logged."""
    if t is None:
        ids, logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        return Response(ids, logprobs, logprobs, np.empty(0, np.uint8), "error", error=error)
    return Response(
        t.ids, t.logprobs_raw, t.logprobs_sampled, t.sampled_mask, "error" if error else t.finish_reason or "",
        t.admit.interruptions, error,
    )  # fmt: skip


def sampled_response(f: Finished, resumed: Resumed | None) -> Response:
    interruptions = f.interruptions
    if resumed is not None:
        interruptions += resumed.before + resumed.preemption
    return Response(
        np.array(f.response_ids, np.int32), np.array(f.logprobs_raw, np.float32),
        np.array(f.logprobs_sampled, np.float32), np.ones(len(f.response_ids), np.uint8), f.finish_reason,
        interruptions,
    )  # fmt: skip


def engine_request(request: RolloutRequest, resumed: Resumed | None) -> Request:
    logged = resumed.logged if resumed else None
    return Request(
        trajectory_id=request.trajectory_id,
        prompt_ids=request.prompt_ids,
        sampling_key=request.sampling_key,
        max_response_tokens=request.max_response_tokens,
        logged_ids=tuple(logged.ids.tolist()) if logged else (),
        logged_raw=tuple(logged.logprobs_raw.tolist()) if logged else (),
        logged_sampled=tuple(logged.logprobs_sampled.tolist()) if logged else (),
        kv=resumed.kv if resumed else None,
    )
