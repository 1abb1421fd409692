"""What a worker was about to run, told to the next driver: strikes survive the death of driver and worker together.

    OWNED/e000002/life.json   {"suspects": strikes so far, "recovered": {trajectory_id: response tokens},
                               "group": unfinished trajectories in the order of the cache, "size": how many it holds}

The worker puts it before the first step of each group, since what follows may be its last. Who takes the partition over
reads the newest: when the owner of that epoch has not released it, it crashed, with those in the cache that come first
of the group among what the log does not finish.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from infra.store import ObjectStore
from ml.rollout.wal_recovery import Recovered, recover, segments_of
from schemas import keys, typed_json
from schemas.errors import FormatError
from schemas.work.rollout import Life
from tasks.workers.logs import local_log, stored_log
from tasks.workers.suspects import GivenUp, Suspects

_LIFE = re.compile(r"e(\d{6})/life\.json")
_HOW = "its worker ended unseen by this driver"


def put_life(store: ObjectStore, owned: str, epoch: int, life: Life) -> None:
    """By the owner of the epoch, before it samples."""
    store.put(_key(owned, epoch), typed_json.encode(life))


def last_life(
    store: ObjectStore, scratch: Path, owned: str, trajectory_ids: Sequence[str]
) -> tuple[Suspects, GivenUp | None] | None:
    """Strikes of an unfinished partition after its last life; who is to be given up; None when nobody ever sampled.

    scratch: of token logs on this node. Raises StoreError; damaged logs are the worker's to report.
    """
    epochs = [int(m[1]) for key in store.list(f"{owned}/e") if (m := _LIFE.fullmatch(key.removeprefix(f"{owned}/")))]
    if not epochs:
        return None
    epoch = max(epochs)
    try:
        life = typed_json.decode(Life, store.get(_key(owned, epoch)), _key(owned, epoch))
    except FormatError as error:
        raise FormatError(
            error.where, expected=error.expected, found=error.found, safe="the token log",
            next_command="remove that object: only counts of crashes are lost",
        ) from error  # fmt: skip
    suspects = Suspects(trajectory_ids, life.suspects)
    log = None if _released(store, owned, epoch) else _log(store, scratch, owned, epoch)
    if log is None:
        return suspects, None
    finished = {t.trajectory_id for t in log.trajectories if t.finish_reason is not None}
    running = [trajectory_id for trajectory_id in life.group if trajectory_id not in finished][: life.size]
    suspects.resumed(life.recovered)
    suspects.reported({t.trajectory_id: len(t.ids) for t in log.trajectories}, running)
    return suspects, suspects.crashed(_HOW) if running else None


def _released(store: ObjectStore, owned: str, epoch: int) -> bool:
    key = keys.heartbeat(owned, epoch)
    return store.head(key) is not None and bool(json.loads(store.get(key)).get("released"))


def _log(store: ObjectStore, scratch: Path, owned: str, epoch: int) -> Recovered | None:
    """The longer copy of the epoch's log; None when neither can be read."""
    copies = []
    for segments in (list(segments_of(local_log(scratch, owned, epoch))), stored_log(store, owned, epoch)):
        try:
            if segments:
                copies.append(recover(segments, owned))
        except FormatError:
            continue
    return max(copies, key=lambda copy: copy.last_sequence, default=None)


def _key(owned: str, epoch: int) -> str:
    return keys.owned_object(owned, epoch, "life.json")
