"""State folders: whole or not there, and any damage named."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from ml.train import state as state_module
from ml.train.state import load_state, read_marker, save_state
from schemas.errors import FormatError, StoreError

FACTS = {"steps": 3, "metrics": [{"name": "loss", "value": 0.1}]}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (5, 3), "exp_avg.a.weight": (5, 3), "empty": (0,), "one": (1,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_what_is_saved_is_read_back_bit_for_bit_over_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "_SHARD_BYTES", 64)
    save_state(tmp_path / "s", tensors().items(), FACTS)
    assert len(list((tmp_path / "s").glob("*.safetensors"))) == 2
    state = load_state(tmp_path / "s")
    assert state is not None
    assert state.facts == FACTS
    assert set(state.files) == set(tensors())
    for name, tensor in tensors().items():
        assert torch.equal(state.read(name), tensor)
    with pytest.raises(FormatError, match="no such tensor"):
        state.read("b.weight")


def test_equal_tensors_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        save_state(tmp_path / name, tensors().items(), FACTS)
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]


def test_a_folder_without_its_marker_does_not_count(tmp_path):
    assert load_state(tmp_path / "none") is None
    save_state(tmp_path / "s", tensors().items(), {"steps": 1})
    (tmp_path / "s" / "state.json").unlink()
    assert load_state(tmp_path / "s") is None


@pytest.mark.parametrize("name", ["../s", "/etc/passwd", "a/b", "", ".."])
def test_a_marker_names_files_of_its_own_folder_only(name):
    marker = json.dumps({"facts": {}, "files": {name: {"bytes": 1, "sha256": "0"}}}).encode()
    with pytest.raises(FormatError, match="in its folder"):
        read_marker(marker, "state.json")


def test_saving_again_replaces(tmp_path):
    save_state(tmp_path / "s", tensors(0).items(), {"steps": 1})
    save_state(tmp_path / "s", tensors(1).items(), {"steps": 2})
    state = load_state(tmp_path / "s")
    assert state is not None
    assert torch.equal(state.read("a.weight"), tensors(1)["a.weight"])
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "marker"])
def test_damage_is_named(tmp_path, damage):
    save_state(tmp_path / "s", tensors().items(), FACTS)
    path: Path = tmp_path / "s" / ("state.json" if damage == "marker" else "tensors-00000.safetensors")
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        path.write_bytes(data[:-1])
    with pytest.raises(FormatError, match=path.name):
        load_state(tmp_path / "s")


@pytest.mark.parametrize("failing", range(1, 6))
def test_a_disk_that_fails_at_any_sync_leaves_the_earlier_state(tmp_path, monkeypatch, failing):
    save_state(tmp_path / "step-000001", tensors(1).items(), {"steps": 1})
    calls = 0
    real = os.fsync

    def fsync(descriptor):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    # Syncs: the file of tensors, the marker, the folder, the folder's parent.
    if failing <= 4:
        with pytest.raises(StoreError, match="No space"):
            save_state(tmp_path / "step-000002", tensors(2).items(), {"steps": 2})
    else:
        save_state(tmp_path / "step-000002", tensors(2).items(), {"steps": 2})
    monkeypatch.undo()
    # Renamed but its parent not synced: complete now, and after a power cut either there or not.
    whole = [n for n in (1, 2) if load_state(tmp_path / f"step-{n:06d}") is not None]
    assert whole == ([1] if failing <= 3 else [1, 2])
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    "marker",
    [b"{}", b"[]", b"3", b'{"facts": {}}', b'{"facts": {}, "files": {"a": {}}}', b'{"facts": {}, "files": []}'],
)
def test_a_marker_of_another_shape_is_refused(tmp_path, marker):
    (tmp_path / "state.json").write_bytes(marker)
    with pytest.raises(FormatError, match=r"state\.json"):
        load_state(tmp_path)
