"""The files below a Delta table's folder: what is wrong with one that cannot be read, and making new ones durable.

    ROOT/tables/NAME/_delta_log/00000000000000000007.json    an entry of the log: JSON lines, commitInfo among them
                               00000000000000000007.crc      Delta's summary of that version, where it was written
                               *.checkpoint.parquet
                    COLUMN=VALUE/.../part-*.parquet          rows

Readers pass over an entry that is empty, or cut between two lines, and its rows would be missing without an error. So
each read looks at the newest entry and compares the number of files with Delta's summary of the version.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any

from infra.store import ObjectStore
from schemas.errors import FormatError

_ENTRY = re.compile(r"\d{20}\.json")
_CHECKPOINT = re.compile(r"\d{20}\.checkpoint.*\.parquet")
_MAGIC = b"PAR1"


def damaged(table: str, where: str, found: str) -> FormatError:
    """The error of a table that cannot be read as it stands; its rows stand in the objects of their stages too."""
    return FormatError(
        f"table opd.{table}, {where}", expected="a whole file of a Delta table", found=found,
        safe="the rows: the objects that they were committed from hold them", next_command="opd repair RUN",
    )  # fmt: skip


def check_log(store: ObjectStore, table: str, version: int, num_files: int) -> None:
    """Raises FormatError when the log of the table's newest version does not say what Delta wrote there.

    num_files: data files that a reader of this log counts.
    """
    _entry(store, table, version)
    key = f"{_log(table)}{version:020d}.crc"
    summary = None
    if store.head(key) is not None:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # Delta passes over a damaged summary too
            summary = int(json.loads(store.get(key))["numFiles"])
    if summary == num_files:
        return
    _check_entries(store, table)
    if summary is not None:
        raise damaged(
            table, f"{_log(table)}{version:020d}.json or one before it",
            f"{num_files} data files where Delta counted {summary}",
        )  # fmt: skip


def find_damage(store: ObjectStore, table: str, told: str) -> FormatError:
    """What is wrong with a table that a reader refuses with the words `told`, which are the answer when nothing is
    seen in the log, and in the Parquet files that they name. Raises StoreError when the store does not answer."""
    try:
        _check_entries(store, table)
    except FormatError as error:
        return error
    checkpoints = [key for key in store.list(_log(table)) if _CHECKPOINT.fullmatch(key.rpartition("/")[2])]
    named = [f"tables/{table}/{path}" for path in re.findall(rf"tables/{table}/([^\s:]+\.parquet)", told)]
    for key in [*checkpoints, *dict.fromkeys(named)]:
        if found := _parquet_damage(store, key):
            return damaged(table, key, found)
    return damaged(table, f"tables/{table}", told)


def _parquet_damage(store: ObjectStore, key: str) -> str:
    info = store.head(key)
    if info is None:
        return "no such file"
    if info.size_bytes < 12:
        return f"{info.size_bytes} bytes"
    ends = store.get_range(key, 0, 4), store.get_range(key, info.size_bytes - 4, 4)
    return "" if ends == (_MAGIC, _MAGIC) else f"{ends[0].hex()} ... {ends[1].hex()} where Parquet has its magic"


def _log(table: str) -> str:
    return f"tables/{table}/_delta_log/"


def _check_entries(store: ObjectStore, table: str) -> None:
    names = [key.rpartition("/")[2] for key in store.list(_log(table))]
    after = max((int(name[:20]) for name in names if _CHECKPOINT.fullmatch(name)), default=-1)
    versions = [int(name[:20]) for name in names if _ENTRY.fullmatch(name)]
    newer = [version for version in sorted(versions) if version > after]
    for index, version in enumerate(newer):
        if version != after + 1 + index:
            raise damaged(table, f"{_log(table)}{after + 1 + index:020d}.json", "no such file, but later ones")
        _entry(store, table, version)


def _entry(store: ObjectStore, table: str, version: int) -> list[dict[str, Any]]:
    """Actions of one entry of the log."""
    key = f"{_log(table)}{version:020d}.json"
    return _actions(table, key, store.get(key))


def _actions(table: str, key: str, data: bytes) -> list[dict[str, Any]]:
    try:
        actions = [json.loads(line) for line in data.split(b"\n") if line]
    except ValueError as error:
        raise damaged(table, key, f"{len(data)} bytes, of which a line is no JSON: {error}"[:300]) from error
    # Each commit of Spark says who made it; an empty file says nothing.
    if not any(isinstance(action, dict) and "commitInfo" in action for action in actions):
        raise damaged(table, key, f"{len(data)} bytes without a commitInfo")
    return actions


def sync(folder: Path, lock: Path) -> None:
    """Make durable what was committed to the local table in `folder` since the last call.

    Spark renames files and log entries into their places without syncing them. The lock file, which the caller holds,
    keeps the newest version that is durable, so that a commit whose process died before this is not forgotten.
    """
    log = folder / "_delta_log"
    text = lock.read_text().strip()
    durable = int(text) if text.isdecimal() else -1
    versions = {path.name: int(path.name[:20]) for path in log.iterdir() if path.name[:20].isdecimal()}
    newest = max(version for name, version in versions.items() if _ENTRY.fullmatch(name))
    files = {log / name for name, version in versions.items() if version > durable}
    for path in list(files):
        if _ENTRY.fullmatch(path.name):
            for action in _actions(folder.name, str(path), path.read_bytes()):
                if "add" in action:
                    files.add(folder / urllib.parse.unquote(action["add"]["path"]))
    if any(_CHECKPOINT.fullmatch(path.name) for path in files):
        files.add(log / "_last_checkpoint")
    # Hadoop keeps a checksum beside each file, and refuses one that it does not fit.
    files |= {path.with_name(f".{path.name}.crc") for path in files}
    folders = {parent for path in files for parent in path.parents if folder.parent in (parent, *parent.parents)}
    for path in [*sorted(files), *sorted(folders, reverse=True), folder.parent.parent]:
        _fsync(path)
    lock.write_text(f"{newest}\n")


def move(folder: Path, to: Path) -> None:
    """Rename a folder, durably."""
    to.parent.mkdir(parents=True, exist_ok=True)
    os.rename(folder, to)
    for parent in (to.parent, folder.parent):
        _fsync(parent)


def _fsync(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return  # no checksum file, or rows that a later commit replaced and a VACUUM removed
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
