"""Folders that appear complete and durable under their name, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from schemas.errors import StoreError


@contextmanager
def whole_folder(folder: Path, *, what: str, safe: str) -> Iterator[Path]:
    """An empty folder to fill with files; when the block ends it stands as `folder`, replacing one of that name.

    When the block raises nothing is left of it. what, safe: words of the StoreError that a disk's refusal becomes.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise StoreError(str(folder), expected="a folder that can be written", found=str(error), safe=safe) from error
    try:
        yield partial
        _publish(partial, folder)
    except (OSError, SafetensorError) as error:
        raise StoreError(str(folder), expected=f"{what} written", found=str(error), safe=safe) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, folder: Path) -> None:
    partial.chmod(0o755)
    for path in (*partial.iterdir(), partial):
        _sync(path)
    if folder.exists():
        replaced = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        folder.rename(replaced / folder.name)
        partial.rename(folder)
        shutil.rmtree(replaced)
    else:
        partial.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
