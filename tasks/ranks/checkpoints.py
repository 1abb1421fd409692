"""States in the middle of a plan: what a training that was stopped or killed goes on from, on this node or another.

    SCRATCH/e000002/step-000016/              a whole folder on this node, of the owner of epoch 2
    OWNED/e000002/checkpoints/000016/NAME     its files in the store, of which state.json is put last

The folder is written while training waits, the objects in the background: one upload at a time, and of those that wait
the newest. Every owner writes under its own epoch, so that one that was superseded writes into nobody's way, and reads
what any owner of the same partition has written.
"""

from __future__ import annotations

import mmap
import re
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from infra import leases
from infra.store import ObjectStore, read_parts
from infra.threads import at_once
from ml.train.state import MARKER, State, load_state, read_marker, save_state
from ml.whole_folder import whole_folder
from schemas import keys
from schemas.errors import FormatError, OpdError
from schemas.typed_json import to_json
from schemas.work import messages
from schemas.work.manifest import StoredObject
from schemas.work.train import CheckpointFacts
from tasks.ranks.process import Say

#: Whole ones that are kept on this node, and by one owner in the store: the newest, and one beside it.
_KEPT = 2
_FILES_AT_ONCE = 4
_LAST_FILES_SECONDS = 10.0
_LOCAL = re.compile(r"e(\d{6})/step-(\d{6,})")
_STORED = re.compile(r"e(\d{6})/checkpoints/(\d{6,})/" + re.escape(MARKER))


@dataclass(frozen=True, order=True)
class _Place:
    """Where a checkpoint lies. The largest is the one to try first: of equal steps the one on this node."""

    steps: int
    local: bool
    epoch: int


class Checkpoints:
    """Those of one partition, for the owner of its lease, on one thread.

    scratch: this node's folder for the partition. notices: what was passed over because it was damaged.
    """

    def __init__(self, store: ObjectStore, lease: leases.Lease, scratch: Path, say: Say) -> None:
        self.notices: list[str] = []
        self.folder = scratch / f"e{lease.epoch:06d}"
        self._store, self._lease, self._scratch, self._say = store, lease, scratch, say
        self._uploads = _Uploads(store, lease, say)
        for pattern in ("e*/.step-*", "e*/out"):  # what killed owners were writing
            for folder in self._scratch.glob(pattern):
                shutil.rmtree(folder, ignore_errors=True)

    def newest(self) -> State | None:
        """The whole one with the most steps, on this node or in the store; None when there is none.

        Of a damaged one the next is taken, with a notice. Raises StoreError when the store does not answer.
        """
        local = self._local()
        stored = {
            _Place(int(m[2]), False, int(m[1]))
            for key in self._store.list(f"{self._lease.owned}/e")
            if (m := _STORED.fullmatch(key.removeprefix(f"{self._lease.owned}/")))
        }
        for place in sorted({*local, *stored}, reverse=True):
            try:
                state = load_state(local[place] if place.local else self._fetch(place))
            except FormatError as error:
                text = f"checkpoint of step {place.steps} passed over: {error.where}, {error.found}"
                self.notices.append(text)
                self._say(messages.Notice(text))
                continue
            if state is None:
                continue
            if any(other.steps == place.steps for other in stored):
                self._uploads.is_stored(place.steps)
            else:
                self._uploads.offer(place.steps, state.folder)
            return state
        return None

    def save(self, steps: int, tensors: Iterable[tuple[str, torch.Tensor]], facts: CheckpointFacts) -> None:
        """Durable on this node when it returns, on its way to the store. Raises StoreError when the disk refuses."""
        folder = self.folder / f"step-{steps:06d}"
        with self._lease.patience(leases.LONG_SECONDS):
            save_state(folder, tensors, to_json(facts))
        self._say(messages.CheckpointSaved(steps))
        self._uploads.offer(steps, folder)
        self._prune()

    def settle(self, steps: int, deadline: float) -> int:
        """Waits until the checkpoint of so many steps is in the store, or time.monotonic() reaches the deadline.

        Steps of the newest one in the store; 0 for none that this process knows of.
        """
        return self._uploads.settle(steps, deadline)

    def stop(self) -> None:
        """No further upload begins, and an upload in progress ends with its current files."""
        self._uploads.stop()

    def clear(self) -> None:
        """Once the partition has finished: nobody needs them. What is left in the store `opd upkeep` finds."""
        self._uploads.clear()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _local(self) -> dict[_Place, Path]:
        return {
            _Place(int(m[2]), True, int(m[1])): path
            for path in self._scratch.glob("e*/step-*")
            if (m := _LOCAL.fullmatch(path.relative_to(self._scratch).as_posix()))
        }

    def _prune(self) -> None:
        local, busy = self._local(), self._uploads.folders()
        for place in sorted(local)[:-_KEPT]:
            if local[place] not in busy:
                shutil.rmtree(local[place], ignore_errors=True)

    def _fetch(self, place: _Place) -> Path:
        """A copy on this node, under this owner's epoch; `load_state` compares it with its marker."""
        prefix = _prefix(self._lease.owned, place.epoch, place.steps)
        folder = self.folder / f"step-{place.steps:06d}"

        def read(name: str) -> memoryview:
            key = f"{prefix}/{name}"
            info = self._store.head(key)
            if info is None:
                raise FormatError(key, expected="a file of the checkpoint", found="no such object")
            return read_parts(self._store, key, info.size_bytes)

        marker = bytes(read(MARKER))
        _, files = read_marker(marker, f"{prefix}/{MARKER}")
        with whole_folder(folder, what="a copy of a checkpoint", safe="the checkpoint in the store") as partial:

            def fetch(name: str) -> None:
                (partial / name).write_bytes(read(name))
                self._say(messages.Working(f"a copy of {name}"))

            at_once(fetch, files, _FILES_AT_ONCE)
            (partial / MARKER).write_bytes(marker)
        return folder


class _Uploads:
    """One upload at a time on a thread of its own; a checkpoint that waits gives way to a newer one."""

    def __init__(self, store: ObjectStore, lease: leases.Lease, say: Say) -> None:
        self._store, self._lease, self._say = store, lease, say
        self._changed = threading.Condition()
        self._waiting: tuple[int, Path] | None = None
        self._flying: tuple[int, Path] | None = None
        self._needed = 0
        self._stored = 0
        self._stopped = False
        self._written: dict[int, list[str]] = {}  # names of objects by steps, whole or not
        self._whole: set[int] = set()
        self._thread: threading.Thread | None = None

    def is_stored(self, steps: int) -> None:
        self._stored = steps

    def folders(self) -> set[Path]:
        """Those that are being read, or will be."""
        with self._changed:
            return {path for _, path in filter(None, (self._waiting, self._flying))}

    def offer(self, steps: int, folder: Path) -> None:
        with self._changed:
            self._waiting = (steps, folder)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint upload", daemon=True)
            self._thread.start()

    def settle(self, steps: int, deadline: float) -> int:
        with self._changed:
            self._needed = steps  # an upload of an older one makes room
            self._changed.wait_for(
                lambda: self._stored >= steps or not (self._waiting or self._flying),
                max(0.0, deadline - time.monotonic()),
            )
            return self._stored

    def stop(self) -> None:
        with self._changed:
            self._stopped, self._waiting = True, None
            self._changed.notify_all()

    def clear(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join(_LAST_FILES_SECONDS)
        try:
            for steps in sorted(self._written):
                self._delete(steps)
        except OpdError as error:
            self._say(messages.Notice(f"checkpoints of a finished plan stay in the store until opd upkeep: {error}"))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if self._waiting is None:
                    return
                self._flying, self._waiting = self._waiting, None
            try:
                whole = self._upload(*self._flying)
            except Exception as error:  # training goes on: this node's copy stands, and the next one is tried
                whole = False
                self._say(messages.Notice(f"checkpoint of step {self._flying[0]} is not in the store: {error}"))
            with self._changed:
                if whole:
                    self._stored = max(self._stored, self._flying[0])
                self._flying = None
                self._changed.notify_all()

    def _upload(self, steps: int, folder: Path) -> bool:
        prefix = _prefix(self._lease.owned, self._lease.epoch, steps)
        names = sorted(path.name for path in folder.iterdir())
        self._written[steps] = names
        self._lease.check()

        def put(name: str) -> bool:
            if self._given_up(steps):
                return False
            put_file(self._store, f"{prefix}/{name}", folder / name)
            return True

        if not all(at_once(put, [name for name in names if name != MARKER], _FILES_AT_ONCE)):
            return False
        put_file(self._store, f"{prefix}/{MARKER}", folder / MARKER)
        self._whole.add(steps)
        self._say(messages.CheckpointStored(steps))
        self._lease.check()
        kept = sorted(self._whole)[-_KEPT:]
        for outdated in [n for n in self._written if n not in kept]:
            self._delete(outdated)
        return True

    def _given_up(self, steps: int) -> bool:
        with self._changed:
            return self._stopped or steps < self._needed

    def _delete(self, steps: int) -> None:
        # The marker first: what is left of a checkpoint is none.
        prefix = _prefix(self._lease.owned, self._lease.epoch, steps)
        for name in sorted(self._written[steps], key=lambda name: name != MARKER):
            self._store.delete(f"{prefix}/{name}")
        del self._written[steps]
        self._whole.discard(steps)


def put_file(store: ObjectStore, key: str, path: Path) -> StoredObject:
    """Upload without a copy in memory."""
    if path.stat().st_size == 0:
        store.put(key, b"")
        return StoredObject(key, keys.digest_bytes(b""), 0)
    with open(path, "rb") as file:
        # Never closed by hand: an error of the store holds views of the bytes in its frames, and closing under them
        # would raise in its place. The mapping ends with the last of them.
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    store.put(key, data)
    return StoredObject(key, keys.digest_bytes(data), len(data))


def _prefix(owned: str, epoch: int, steps: int) -> str:
    return keys.owned_object(owned, epoch, f"checkpoints/{steps:06d}")
