"""Spilled KV on its way to the store before a deadline, and back, several at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from infra.store import ObjectStore, read_parts
from infra.threads import at_once
from ml.rollout.spill import KvLayout, SpilledKv, decode_kv
from ml.rollout.wal_recovery import LoggedTrajectory
from schemas import keys
from schemas.errors import ContractError, FormatError

#: Spills that are read at once.
_AT_ONCE = 8


def put_in_time(store: ObjectStore, key: str, parts: list[memoryview], deadline: float) -> bool:
    """False when the object was not whole in the store by `deadline` (time.monotonic()); the upload is then given up.

    It ends with the process, and leaves no object or one that no record names.
    """
    failure: list[Exception] = []

    def put() -> None:
        try:
            store.put(key, parts)
        except Exception as error:
            failure.append(error)

    upload = threading.Thread(target=put, name=f"spill {key}", daemon=True)
    upload.start()
    upload.join(max(0.0, deadline - time.monotonic()))
    if failure:
        raise failure[0]
    return not upload.is_alive()


def read_spills(
    store: ObjectStore,
    spilled: Sequence[LoggedTrajectory],
    token_ids: Callable[[LoggedTrajectory], Sequence[int]],
    layout: KvLayout,
) -> list[SpilledKv | FormatError | ContractError]:
    """Of each trajectory, which has a spill record, its KV, or why it must not be used.

    token_ids: prompt and logged response of one, asked for as it is read.
    """

    def read(t: LoggedTrajectory) -> SpilledKv | FormatError | ContractError:
        try:
            return _read(store, t, token_ids(t), layout)
        except (FormatError, ContractError) as error:
            return error

    return at_once(read, spilled, _AT_ONCE)


def _read(store: ObjectStore, t: LoggedTrajectory, token_ids: Sequence[int], layout: KvLayout) -> SpilledKv:
    assert t.spill is not None
    key, info = t.spill.key, store.head(t.spill.key)
    if info is None or info.size_bytes != t.spill.size_bytes:
        raise FormatError(key, expected=f"spilled KV of {t.spill.size_bytes} bytes",
                          found="no such object" if info is None else f"{info.size_bytes} bytes")  # fmt: skip
    data = read_parts(store, key, t.spill.size_bytes)
    if keys.digest_bytes(data) != t.spill.digest.hex():
        raise FormatError(key, expected=f"SHA-256 {t.spill.digest.hex()}", found="other bytes")
    return decode_kv(data, key, layout, t.trajectory_id, token_ids)
