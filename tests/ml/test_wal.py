"""The token log's format and its writer, against a decoder written from FORMATS.md alone."""

from __future__ import annotations

import hashlib
import itertools
import struct
import tracemalloc
import zlib
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml.rollout import wal_records
from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_recovery import Recovered, base_segment, read_folder, recover, segments_of

HEADER = LogHeader("nightly-7", 3, 11, 2, "c0ffee" * 10)
GOLDEN = Path(__file__).parents[1] / "golden"


# --- a second decoder, from FORMATS.md, "The token log": plain struct, no line of the code under test


def decode_by_prose(segments: list[bytes]) -> dict:
    """{"header", "trajectories": {id: {...}}} of a whole undamaged log."""
    out: dict = {"header": None, "trajectories": {}}
    by_number: list[dict] = []
    previous, next_sequence = b"\0" * 32, 1
    for index, data in enumerate(segments):
        assert data[:8] == b"OPDTLOG\n"
        version, iteration, partition, epoch, segment, zero = struct.unpack("<6I", data[8:32])
        (first,) = struct.unpack("<Q", data[32:40])
        salt = data[40:48]
        assert (version, segment, zero, first) == (1, index, 0, next_sequence)
        assert data[48:80] == previous
        (run_length,) = struct.unpack("<H", data[80:82])
        (student_length,) = struct.unpack("<H", data[208:210])
        run, student = data[82 : 82 + run_length], data[210 : 210 + student_length]
        assert data[82 + run_length : 208].strip(b"\0") == b"" == data[210 + student_length : 508].strip(b"\0")
        assert struct.unpack("<I", data[508:512]) == (zlib.crc32(data[:508]),)
        out["header"] = (run.decode(), iteration, partition, epoch, student.decode())
        at, records, group = 512, 0, first
        while at < len(data):
            length, crc, kind, place, sequence = struct.unpack("<IIBIQ", data[at : at + 21])
            assert crc == zlib.crc32(salt + data[at : at + 4] + data[at + 8 : at + 21 + length])
            payload = data[at + 21 : at + 21 + length]
            if kind == 7:
                count, whole = struct.unpack("<Q32s", payload)
                assert (count, sequence) == (records, next_sequence - 1)
                assert whole == hashlib.sha256(data[:at]).digest()
                assert at + 21 + length == len(data)
            else:
                assert sequence == next_sequence
                group = sequence if place == 0 else group
                assert sequence - place == group
                next_sequence += 1
                records += 1
                _apply_by_prose(kind, payload, by_number)
            at += 21 + length
        previous = hashlib.sha256(data).digest()
    out["trajectories"] = {t.pop("id"): t for t in by_number}
    return out


def _apply_by_prose(kind: int, payload: bytes, by_number: list[dict]) -> None:
    u32 = struct.unpack(f"<{len(payload) // 4}I", payload[: len(payload) // 4 * 4])
    if kind == 1:
        number, prompt_tokens, digest, preempted, restored, rebuilt, size = struct.unpack("<II32sIIIH", payload[:54])
        assert number == len(by_number)
        assert len(payload) == 54 + size
        by_number.append({"id": payload[54:].decode(), "prompt": (prompt_tokens, digest), "tokens": [], "spill": None,
                          "counts": (preempted, restored, rebuilt), "intents": [], "finish": None})  # fmt: skip
    elif kind == 2:
        n, t = u32[:2]
        numbers, firsts, counts = u32[2 : 2 + n], u32[2 + n : 2 + 2 * n], u32[2 + 2 * n : 2 + 3 * n]
        at = 8 + 12 * n
        ids, raw, sampled = (struct.unpack(f"<{t}{c}", payload[at + 4 * t * i : at + 4 * t * (i + 1)])
                             for i, c in enumerate("iff"))  # fmt: skip
        assert len(payload) == at + 12 * t
        done = 0
        for number, first, count in zip(numbers, firsts, counts, strict=True):
            tokens = by_number[number]["tokens"]
            assert len(tokens) == first
            rows = range(done, done + count)
            tokens.extend((ids[i], raw[i], sampled[i], 1) for i in rows)
            done += count
    elif kind == 3:
        number, first, t = u32[:3]
        assert len(by_number[number]["tokens"]) == first
        ids = struct.unpack(f"<{t}i", payload[12:])
        by_number[number]["tokens"].extend((i, 0.0, 0.0, 0) for i in ids)
    elif kind == 4:
        number, before, size = u32[:3]
        assert len(payload) == 12 + size
        by_number[number]["intents"].append((before, payload[12:]))
    elif kind == 5:
        number, positions, size, digest, length = struct.unpack("<IIQ32sH", payload[:50])
        assert len(payload) == 50 + length
        by_number[number]["spill"] = (positions, size, digest, payload[50:].decode())
    elif kind == 6:
        number, tokens, length = struct.unpack("<IIH", payload[:10])
        assert len(by_number[number]["tokens"]) == tokens
        by_number[number]["finish"] = payload[10 : 10 + length].decode()
    else:
        raise AssertionError(f"record type {kind}")


def as_plain(recovered: Recovered) -> dict:
    trajectories = {}
    for t in recovered.trajectories:
        rows = (t.ids.tolist(), t.logprobs_raw.tolist(), t.logprobs_sampled.tolist(), t.sampled_mask.tolist())
        admit = t.admit
        trajectories[t.trajectory_id] = {
            "prompt": (admit.prompt_tokens, admit.prompt_digest),
            "tokens": list(zip(*rows, strict=True)),
            "spill": t.spill and (t.spill.positions, t.spill.size_bytes, t.spill.digest, t.spill.key),
            "counts": astuple(admit.interruptions),
            "intents": [(i.first_token_index, i.action) for i in t.intents],
            "finish": t.finish_reason,
        }
    h = recovered.header
    return {"header": (h.run_id, h.iteration, h.partition, h.epoch, h.student_digest), "trajectories": trajectories}


# --- scripts: what an engine might append


def apply_script(log: TokenLog, script: list[tuple]) -> dict:
    """Appends a script of operations; returns {trajectory id: plain trajectory} as it must be recovered."""
    want: dict[str, dict] = {}
    numbers: dict[str, int] = {}
    for operation, *rest in script:
        if operation == "admit":
            (name,) = rest
            digest = hashlib.sha256(name.encode()).digest()
            numbers[name] = log.admit(name, prompt_digest=digest, prompt_tokens=len(name))
            want[name] = {"prompt": (len(name), digest), "tokens": [], "spill": None, "counts": (0, 0, 0),
                          "intents": [], "finish": None}  # fmt: skip
        elif operation == "step":
            rows: list[tuple] = []
            for name, tokens in rest[0].items():
                have = want[name]["tokens"]
                rows.extend((numbers[name], len(have) + i, *token) for i, token in enumerate(tokens))
                have.extend((*t, 1) for t in tokens)
            log.append_step(*([row[i] for row in rows] for i in range(5)))
        elif operation == "observe":
            name, ids = rest
            log.append_observation(numbers[name], len(want[name]["tokens"]), ids)
            want[name]["tokens"].extend((i, 0.0, 0.0, 0) for i in ids)
        elif operation == "intend":
            name, action = rest
            log.append_intent(numbers[name], len(want[name]["tokens"]), action)
            want[name]["intents"].append((len(want[name]["tokens"]), action))
        elif operation == "spill":
            name, positions, key = rest
            digest = hashlib.sha256(key.encode()).digest()
            log.append_spill(numbers[name], wal_records.Spill(positions, positions * 7, digest, key))
            want[name]["spill"] = (positions, positions * 7, digest, key)
        elif operation == "finish":
            name, reason = rest
            log.append_finish(numbers[name], len(want[name]["tokens"]), reason)
            want[name]["finish"] = reason
        elif operation == "commit":
            log.commit()
        elif operation == "seal":
            log.seal()
    return want


SCRIPT = [
    ("admit", "a"), ("admit", "bé"), ("step", {"a": [(5, -0.5, -0.25)], "bé": [(0, -1.5, -1.0)]}), ("commit",),
    ("step", {"bé": [(49151, -2.0, -2.0), (7, -(2.0**-20), 0.0)]}), ("intend", "a", b'{"tool":"add"}'), ("seal",),
    ("observe", "a", [9, 9, 2**31 - 1]), ("step", {"a": [(3, float("-inf"), -3.25)]}), ("finish", "a", "stop"),
    ("spill", "bé", 5, "runs/x/spill/b"), ("seal",), ("admit", "c"), ("step", {}),
    ("step", {"c": [(1, -1.0, -1.0)]}), ("finish", "c", "length"),
]  # fmt: skip


def test_both_decoders_read_back_what_was_appended(tmp_path):
    with TokenLog(tmp_path / "log", HEADER, seal_seconds=60) as log:
        want = apply_script(log, SCRIPT)
    segments = read_folder(tmp_path / "log")
    assert len(segments) == 4
    recovered = recover(segments, "log")
    assert as_plain(recovered)["trajectories"] == want
    assert decode_by_prose([data for _, data in segments]) == as_plain(recovered)
    assert recovered.torn_bytes == 0
    assert recovered.num_segments == 4


def test_golden_bytes(tmp_path, monkeypatch):
    """The bytes of version 1 never change: a log written today is read by whoever resumes it next year."""
    monkeypatch.setattr("os.urandom", lambda n: bytes(range(n)))
    with TokenLog(tmp_path / "log", HEADER, seal_seconds=60) as log:
        want = apply_script(log, SCRIPT)
    segments = read_folder(tmp_path / "log")
    heir = LogHeader(HEADER.run_id, HEADER.iteration, HEADER.partition, 3, HEADER.student_digest)
    base, _ = base_segment(recover(segments, "log"), heir, bytes(range(8)))
    golden = (GOLDEN / "wal_v1.bin").read_bytes()
    assert b"".join(data for _, data in segments) + base == golden
    cuts = [i for i in range(len(golden)) if golden.startswith(b"OPDTLOG\n", i)] + [len(golden)]
    parts = [golden[a:b] for a, b in itertools.pairwise(cuts)]
    assert decode_by_prose(parts[:-1])["trajectories"] == want == decode_by_prose(parts[-1:])["trajectories"]


def test_log_without_records_is_read(tmp_path):
    with TokenLog(tmp_path / "log", HEADER):
        pass
    recovered = recover(read_folder(tmp_path / "log"), "log")
    assert (recovered.trajectories, recovered.last_sequence, recovered.header) == ([], 0, HEADER)


@st.composite
def scripts(draw):
    names = draw(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=4, unique=True))
    logprob = st.floats(max_value=0, width=32, allow_nan=False)
    token = st.tuples(st.integers(0, 2**31 - 1), logprob, logprob)
    script: list[tuple] = [("admit", n) for n in names]
    running = list(names)
    for _ in range(draw(st.integers(0, 12))):
        if not running:
            break
        name = draw(st.sampled_from(running))
        operation = draw(st.sampled_from(["step", "step", "step", "observe", "intend", "spill", "finish", "seal"]))
        if operation == "step":
            some = draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
            script.append(("step", {n: draw(st.lists(token, min_size=1, max_size=3)) for n in some}))
        elif operation == "observe":
            script.append(("observe", name, draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))))
        elif operation == "intend":
            script.append(("intend", name, draw(st.binary(max_size=20))))
        elif operation == "spill":
            script.append(("spill", name, draw(st.integers(0, 99)), draw(st.text(max_size=20))))
        elif operation == "finish":
            script.append(("finish", name, draw(st.sampled_from(["stop", "length"]))))
            running.remove(name)
        script.append((draw(st.sampled_from(["commit", "seal", "more"])),))
    return script


@settings(max_examples=60, deadline=None)
@given(scripts(), st.sampled_from([1, 600, 1 << 20]))
def test_round_trip_of_any_script_and_of_its_base(tmp_path_factory, script, segment_bytes):
    folder = tmp_path_factory.mktemp("log")
    with TokenLog(folder / "first", HEADER, seal_seconds=60, segment_bytes=segment_bytes) as log:
        want = apply_script(log, script)
    segments = read_folder(folder / "first")
    recovered = recover(segments, "log")
    assert as_plain(recovered)["trajectories"] == want
    assert decode_by_prose([data for _, data in segments]) == as_plain(recovered)
    heir = LogHeader(HEADER.run_id, HEADER.iteration, HEADER.partition, 3, HEADER.student_digest)
    base, last_sequence = base_segment(recovered, heir, b"saltsalt")
    again = recover([("000000.seg", base)], "heir")
    assert again.last_sequence == last_sequence
    assert as_plain(again)["trajectories"] == want
    assert decode_by_prose([base]) == as_plain(again)
    assert base_segment(again, heir, b"saltsalt")[0] == base


@pytest.mark.parametrize(("sorted_tokens", "replayed_records"), [(1, 1), (5, 2), (1 << 30, 1 << 30)])
def test_replay_in_parts_of_any_size(tmp_path, monkeypatch, sorted_tokens, replayed_records):
    monkeypatch.setattr("ml.rollout.wal_recovery._SORTED_TOKENS", sorted_tokens)
    monkeypatch.setattr("ml.rollout.wal_recovery._REPLAYED_RECORDS", replayed_records)
    with TokenLog(tmp_path / "log", HEADER, seal_seconds=60) as log:
        want = apply_script(log, SCRIPT)
    assert as_plain(recover(segments_of(tmp_path / "log"), "log"))["trajectories"] == want


def test_recovery_holds_two_segments_at_a_time(tmp_path, monkeypatch):
    """Of a log of many, in little more memory than what it says: 13 bytes a token, and not much more on the way."""
    monkeypatch.setattr("ml.rollout.wal_recovery._SORTED_TOKENS", 1 << 14)
    steps, sequences = 4000, 64
    with TokenLog(tmp_path / "log", HEADER, seal_seconds=60, segment_bytes=200_000) as log:
        numbers = [log.admit(str(i), prompt_digest=bytes(32), prompt_tokens=1) for i in range(sequences)]
        ids, logprobs = np.arange(sequences), np.zeros(sequences, np.float32)
        for step in range(steps):
            sequence = log.append_step(numbers, np.full(sequences, step), ids, logprobs, logprobs)
            if step % 50 == 49:
                log.wait_local(sequence)
    alive: list[int] = []

    class Segment(bytes):
        def __del__(self) -> None:
            alive.remove(0)

    def segments():
        for name, data in segments_of(tmp_path / "log"):
            alive.append(0)
            assert len(alive) <= 3  # two held, and this one
            yield name, Segment(data)

    recovered = recover(segments(), "log")
    assert recovered.num_segments > 10
    assert recovered.num_tokens == steps * sequences
    assert not alive
    tracemalloc.start()
    recovered = recover(segments_of(tmp_path / "log"), "log")
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 14 * recovered.num_tokens
    assert peak < 26 * recovered.num_tokens


def test_heir_continues_its_predecessor(tmp_path):
    """Epochs in a row, each from the last one's log: numbers stay, tokens go on, nothing is told twice."""
    recovered, tokens = None, []
    for epoch in range(1, 5):
        header = LogHeader("r", 0, 0, epoch, "s")
        uploads: dict[int, bytes] = {}
        with TokenLog(tmp_path / str(epoch), header, base=recovered, upload=uploads.__setitem__) as log:
            number = log.admit("t", prompt_digest=bytes(32), prompt_tokens=1)
            assert number == 0
            log.append_step([number] * 2, [len(tokens), len(tokens) + 1], [epoch] * 2, [-1.0, -2.0], [-3.0, -4.0])
            tokens += [epoch, epoch]
        recovered = recover(read_folder(tmp_path / str(epoch)), "log")
        from_store = recover([(str(n), data) for n, data in sorted(uploads.items())], "store")
        assert as_plain(from_store) == as_plain(recovered)
        assert recovered.trajectories[0].ids.tolist() == tokens
        assert recovered.header.epoch == epoch


def test_base_of_a_long_trajectory_is_cut_into_records(tmp_path):
    count = 200_001
    ids = np.arange(count, dtype=np.int32)
    raw = -np.arange(count, dtype=np.float32)
    with TokenLog(tmp_path / "log", HEADER) as log:
        number = log.admit("long", prompt_digest=bytes(32), prompt_tokens=1)
        log.append_step(np.full(count - 1, number), ids[:-1], ids[:-1], raw[:-1], raw[:-1] / 2)
        log.append_observation(number, count - 1, ids[-1:])
    base, last = base_segment(recover(read_folder(tmp_path / "log"), "log"), HEADER, bytes(8))
    assert last == 1 + 4 + 1
    again = recover([("base", base)], "base").trajectories[0]
    assert np.array_equal(again.ids, ids)
    assert np.array_equal(again.logprobs_sampled[:-1], raw[:-1] / 2)
    assert again.sampled_mask.sum() == count - 1
