"""Folders of named fp32 tensors with a completeness marker: mid-plan checkpoints and the optimizer's moments.

    FOLDER/tensors-00000.safetensors ...    whole tensors by name, so that any number of ranks can continue
    FOLDER/state.json                       {"facts": {...}, "files": {NAME: {"bytes": n, "sha256": "..."}}}

state.json is the marker, and names what it vouches for: a folder gets its name when all of it is durable, and one
without a marker is no checkpoint. DeepSpeed's own checkpoints are written in place, bound to a number of ranks, and
their `latest` file vouches for nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ml.whole_folder import whole_folder
from schemas.errors import FormatError
from schemas.keys import canonical_json

MARKER = "state.json"
_SHARD_BYTES = 512 << 20


@dataclass(frozen=True)
class State:
    """A complete, verified folder. facts: what the writer noted, JSON values."""

    folder: Path
    facts: dict[str, Any]
    files: dict[str, Path]  # tensor name -> file

    def read(self, name: str) -> torch.Tensor:
        """One tensor. Raises FormatError when the state has none of that name."""
        if name not in self.files:
            raise FormatError(str(self.folder), expected=f"tensor {name}", found="no such tensor")
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)


def save_state(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], facts: dict[str, Any]) -> None:
    """Write a folder that appears complete or not at all. Raises StoreError when the disk refuses."""
    with whole_folder(folder, what="a checkpoint", safe="earlier checkpoints") as partial:
        files = _write_tensors(partial, tensors)
        (partial / MARKER).write_bytes(canonical_json({"facts": facts, "files": files}))


def load_state(folder: Path) -> State | None:
    """The state of a complete folder, its files verified; None without a marker.

    Raises FormatError when a file differs from what the marker vouches for.
    """
    try:
        data = (folder / MARKER).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    facts, vouched = read_marker(data, str(folder / MARKER))
    files: dict[str, Path] = {}
    for name, (num_bytes, digest) in vouched.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else -1
        if size != num_bytes or _sha256(path) != digest:
            raise FormatError(
                str(path),
                expected=f"{num_bytes} bytes with SHA-256 {digest}",
                found=f"{size} bytes" if size != num_bytes else "other bytes",
                safe="the student that this iteration started from",
                next_command=f"remove {folder} and start the train stage again",
            )
        with safe_open(path, framework="pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    return State(folder, facts, files)


def read_marker(data: bytes, where: str) -> tuple[dict[str, Any], dict[str, tuple[int, str]]]:
    """Facts, and (bytes, SHA-256) of each file, by name. Raises FormatError for anything but a marker."""
    try:
        marker = json.loads(data)
    except ValueError as error:
        raise FormatError(where, expected="JSON", found=str(error)) from error
    try:
        facts, vouched = marker["facts"], {n: (e["bytes"], e["sha256"]) for n, e in marker["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        expected = "facts, and bytes and sha256 of each of its files"
        raise FormatError(where, expected=expected, found=repr(error)) from error
    for name in vouched:
        if "/" in name or name in ("", ".", ".."):  # a marker may come from a store that others write to
            raise FormatError(where, expected="names of files in its folder", found=repr(name))
    return facts, vouched


def _write_tensors(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        path = folder / f"tensors-{len(files):05d}.safetensors"
        save_file(shard, path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > _SHARD_BYTES:
            flush()
        shard[name] = tensor.contiguous()
    flush()
    return files


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
