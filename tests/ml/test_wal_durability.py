"""What a writer of the token log reports as durable, and when."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from ml.rollout import wal_format as fmt
from ml.rollout.wal import TokenLog
from ml.rollout.wal_recovery import read_folder, recover
from schemas.errors import ContractError, StoreError
from tests.ml.test_wal import HEADER

# --- durability, as the writer reports it


def test_nothing_is_acknowledged_before_commit_and_both_levels_follow(tmp_path):
    release, started = threading.Event(), threading.Event()

    def upload(number: int, data: bytes) -> None:
        if number:
            started.set()
            assert release.wait(30)

    log = TokenLog(tmp_path / "log", HEADER, seal_seconds=0.01, upload=upload)
    number = log.admit("t", prompt_digest=bytes(32), prompt_tokens=1)
    step = log.append_step([number], [0], [1], [-1.0], [-1.0])
    assert (log.acknowledged, log.store_durable) == (0, 0)
    log.commit()
    log.wait_local(step)
    assert log.acknowledged == step
    assert started.wait(30)
    assert log.store_durable == 0
    later = log.append_step([number], [1], [2], [-1.0], [-1.0])
    log.commit()
    log.wait_local(later)
    release.set()
    log.seal()
    assert log.store_durable == later
    log.close()


def test_segment_is_sealed_by_age_without_another_append(tmp_path):
    uploaded = threading.Event()
    with TokenLog(tmp_path / "log", HEADER, seal_seconds=0.05, upload=lambda n, _: n and uploaded.set()) as log:
        log.admit("t", prompt_digest=bytes(32), prompt_tokens=1)
        log.commit()
        assert uploaded.wait(30)


def test_writer_that_never_pauses_does_not_keep_segments_from_being_sealed(tmp_path):
    uploads: dict[int, bytes] = {}
    with TokenLog(tmp_path / "log", HEADER, seal_seconds=0.01, upload=uploads.__setitem__) as log:
        number = log.admit("t", prompt_digest=bytes(32), prompt_tokens=1)
        step, deadline = 0, time.monotonic() + 60
        while len(uploads) < 5:
            assert time.monotonic() < deadline
            log.wait_local(log.append_step([number], [step], [step], [-1.0], [-1.0]))
            step += 1
    found = recover([(str(n), data) for n, data in sorted(uploads.items())], "store")
    assert found.trajectories[0].ids.tolist() == list(range(step))


def test_failed_upload_stops_the_log_and_keeps_what_is_local(tmp_path):
    def upload(number: int, data: bytes) -> None:
        if number:
            raise StoreError("s3://bucket", expected="the object written", found="503")

    log = TokenLog(tmp_path / "log", HEADER, upload=upload)
    number = log.admit("t", prompt_digest=bytes(32), prompt_tokens=1)
    log.append_step([number], [0], [4], [-1.0], [-1.0])
    with pytest.raises(StoreError, match="503"):
        log.seal()
    with pytest.raises(StoreError, match="503"):
        log.append_step([number], [1], [4], [-1.0], [-1.0])
    with pytest.raises(StoreError, match="503"):
        log.close()
    assert recover(read_folder(tmp_path / "log"), "log").trajectories[0].ids.tolist() == [4]


def test_folder_that_holds_a_log_is_refused(tmp_path):
    TokenLog(tmp_path / "log", HEADER).close()
    before = read_folder(tmp_path / "log")
    with pytest.raises(ContractError, match="no log of this epoch"):
        TokenLog(tmp_path / "log", HEADER)
    assert read_folder(tmp_path / "log") == before


def test_oversized_record_is_refused_and_the_log_goes_on(tmp_path):
    with TokenLog(tmp_path / "log", HEADER) as log:
        number = log.admit("t", prompt_digest=bytes(32), prompt_tokens=1)
        with pytest.raises(ContractError, match="record of at most"):
            log.append_intent(number, 0, bytes(fmt.MAX_PAYLOAD_BYTES))
        log.append_step([number], [0], [4], [-1.0], [-1.0])
    assert recover(read_folder(tmp_path / "log"), "log").num_tokens == 1


def test_step_with_unequal_columns_is_refused(tmp_path):
    with TokenLog(tmp_path / "log", HEADER) as log:
        number = log.admit("t", prompt_digest=bytes(32), prompt_tokens=1)
        for columns in ([[number], [0], [4, 5], [-1.0], [-1.0]], [[number], [0, 1], [4], [-1.0], [-1.0]],
                        [[number], [0], [4], [-1.0], [-1.0] * 2], [[number], [0], [4] * 2, [-1.0] * 2, [-1.0] * 2],
                        [[number], [0], [[4]], [[-1.0]], [[-1.0]]]):  # fmt: skip
            with pytest.raises(ValueError, match="columns of one length"):
                log.append_step(*columns)
        log.append_step([number], [0], [4], [-1.0], [-1.0])
    assert recover(read_folder(tmp_path / "log"), "log").num_tokens == 1


def test_columns_are_copied_before_the_call_returns(tmp_path):
    """The caller's buffers belong to the next step at once."""
    with TokenLog(tmp_path / "log", HEADER) as log:
        numbers = [log.admit(f"t{i}", prompt_digest=bytes(32), prompt_tokens=1) for i in range(3)]
        ids, logprobs = np.arange(3, dtype=np.int32), -np.arange(3, dtype=np.float32)
        for step in range(2):
            log.append_step(np.array(numbers), np.full(3, step), ids, logprobs, logprobs)
            ids += 10
            logprobs -= 1
    got = recover(read_folder(tmp_path / "log"), "log").trajectories
    assert [t.ids.tolist() for t in got] == [[0, 10], [1, 11], [2, 12]]
    assert [t.logprobs_raw.tolist() for t in got] == [[0, -1], [-1, -2], [-2, -3]]
