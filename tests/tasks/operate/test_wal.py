"""`opd wal show|check` over logs of a real writer, whole and damaged, in folders and in stores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flows.cli import main
from infra.store import ObjectStore
from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_records import Spill
from ml.rollout.wal_recovery import read_folder, recover
from tasks.operate.wal import read_logs

OWNED = "runs/r/00002/rollout/f00d/p00004"


def write_epochs(store: ObjectStore, scratch: Path) -> None:
    """Epoch 1 ends after a spill, epoch 2 goes on from its log; the segments of both are in the store too."""
    recovered = None
    for epoch in (1, 2):

        def upload(segment: int, data: bytes, epoch: int = epoch) -> None:
            assert store.put_if_absent(f"{OWNED}/e{epoch:06d}/wal/{segment:06d}.seg", data)

        folder = scratch / OWNED / f"e{epoch:06d}" / "wal"
        before = len(recovered.trajectories[0].ids) if recovered else 0
        with TokenLog(folder, LogHeader("r", 2, 4, epoch, "5tudent"), base=recovered, upload=upload) as log:
            a, b = (log.admit(n, prompt_digest=bytes(32), prompt_tokens=3) for n in ("a", "b"))
            for step in range(before, before + 5):
                log.append_step([a, b], [step, step], [step, 9], [-1.0, -2.0], [-1.0, -2.0])
            log.seal()
            if epoch == 1:
                log.append_spill(a, Spill(7, 4096, bytes(32), "spill/a"))
            else:
                log.append_observation(b, before + 5, [1, 2, 3])
                log.append_finish(a, before + 5, "stop")
        recovered = recover(read_folder(folder), "log")


@pytest.fixture
def scratch(tmp_path, store) -> Path:
    write_epochs(store, tmp_path / "scratch")
    return tmp_path / "scratch"


def test_logs_of_a_store_and_of_a_node_say_the_same(store, scratch):
    reports = [[log.to_json() for log in read_logs(path)] for path in (f"{store.root}/{OWNED}", str(scratch))]
    for logs, root in zip(reports, (store.root, str(scratch)), strict=True):
        assert [log.pop("log").removeprefix(root + "/") for log in logs] == [f"{OWNED}/e00000{e}/wal" for e in (1, 2)]
    assert reports[0] == reports[1]
    first, second = reports[0]
    assert (first["run_id"], first["iteration"], first["partition"], first["epoch"]) == ("r", 2, 4, 1)
    assert first["student_digest"] == "5tudent"
    assert first["records"] == {"admit": 2, "spill": 1, "step": 5}
    assert [s["state"] for s in first["segments"]] == ["sealed"] * 3
    assert [(s["first_sequence"], s["last_sequence"]) for s in first["segments"]] == [(None, None), (1, 7), (8, 8)]
    a, b = first["trajectories"]
    assert (a["trajectory_id"], a["sampled"], a["spilled_positions"], a["spill_key"]) == ("a", 5, 7, "spill/a")
    assert (b["sampled"], b["spilled_positions"], b["finish_reason"]) == (5, 0, None)
    assert (second["tokens"], second["state"], second["faults"]) == (23, "sealed", [])
    a, b = second["trajectories"]
    assert (a["sampled"], a["observed"], a["finish_reason"]) == (10, 0, "stop")
    assert (b["sampled"], b["observed"], b["finish_reason"]) == (10, 3, None)


def test_check_says_whole_open_and_torn(tmp_path, capsys):
    with TokenLog(tmp_path / "log", LogHeader("r", 0, 0, 1, "s")) as log:
        number = log.admit("t", prompt_digest=bytes(32), prompt_tokens=1)
        log.wait_local(log.append_step([number], [0], [7], [-1.0], [-1.0]))
        assert [report.state for report in read_logs(str(tmp_path))] == ["open"]
        tail = (tmp_path / "log" / "000001.seg").read_bytes()
    assert main(["wal", "check", str(tmp_path)]) == 0
    assert "2 segments, 2 records, 1 tokens" in capsys.readouterr().out
    end = len(tail.rstrip(b"\0"))
    (tmp_path / "log" / "000001.seg").write_bytes(tail[:end] + b"\x01half a frame" + tail[:64])
    assert main(["wal", "check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"torn    {tmp_path}/log:")
    assert "000001.seg: " in out
    assert "bytes of an unfinished group at its end are dropped" in out
    assert out.endswith("1 logs, 2 segments, 1 tokens: 0 damaged\n")


def test_every_damaged_segment_is_named_with_its_offset(scratch, capsys):
    for epoch, segment, offset in ((1, 1, 600), (2, 0, 100), (2, 1, 530)):
        path = scratch / OWNED / f"e{epoch:06d}/wal/{segment:06d}.seg"
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
    for action in ("check", "show"):
        assert main(["wal", action, str(scratch)]) == 3
        out = capsys.readouterr().out
        for place in ("e000001/wal/000001.seg, offset 5", "e000002/wal/000000.seg, offset 0", "e000002/wal/000001.seg"):
            assert place in out
        assert out.endswith("2 damaged\n")
    assert main(["wal", "check", "--json", str(scratch)]) == 3
    logs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [log["state"] for log in logs] == ["damaged"] * 2
    assert [len(log["faults"]) for log in logs] == [1, 2]


def test_broken_chain_is_damage(scratch, capsys):
    log = scratch / OWNED / "e000001/wal"
    (log / "000001.seg").unlink()
    assert main(["wal", "check", str(log)]) == 3
    assert "segment 1 of" in capsys.readouterr().out


def test_one_segment_alone(scratch, store, capsys):
    name = f"{OWNED}/e000002/wal/000001.seg"
    for root in (str(scratch), store.root):
        (report,) = read_logs(f"{root}/{name}")
        assert (report.state, report.where) == ("sealed", f"{root}/{name}")
        # The base holds the admissions and the first tokens.
        assert [(t["trajectory_id"], t["sampled"]) for t in report.trajectories] == [(None, 5), (None, 5)]
    assert main(["wal", "show", str(scratch / name)]) == 0
    out = capsys.readouterr().out
    assert "run r, iteration 2, partition 4, epoch 2, student 5tudent" in out
    shutil.copy(scratch / name, scratch / "renamed.seg")
    assert main(["wal", "check", str(scratch / "renamed.seg")]) == 0


@pytest.mark.parametrize("name", ["nothing", "no.seg", "file"])
def test_path_without_a_log_is_refused(tmp_path, name, capsys):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    assert main(["wal", "check", str(tmp_path / name)]) == 2
    assert main(["wal", "check", str(tmp_path / "folder")]) == 2
    assert "expected: a token log" in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()
