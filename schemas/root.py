"""The root of a run's data: read once, and spelt for each client so that all of them mean the same place.

The object store, Spark (S3A) and delta-rs each read a path or URL by rules of their own: one decodes %20, one takes a
backslash for a slash, one cuts at a question mark. What they would take for different places is refused here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from schemas.errors import ConfigError

_EXPECTED = "a folder or s3://BUCKET/PREFIX"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_BUCKET = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
#: The end of a path in a URL, and what delta-rs takes for parts of a host or panics at.
_NOT_IN_A_PREFIX = set('#?[]{}<>|^"')
_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}")


@dataclass(frozen=True)
class DataRoot:
    """A local folder (path), or a prefix of a bucket (bucket, prefix without slashes at its ends, perhaps empty).

    str() is the normal form: what users are shown, and what `parse` reads again in another process of the same working
    directory.
    """

    scheme: Literal["local", "s3"]
    path: str = ""
    bucket: str = ""
    prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> DataRoot:
        """Raises ConfigError for a root of no known kind, and for one that the clients would read differently."""
        _refuse_characters(text)
        scheme = _SCHEME.match(text)
        if scheme is None:
            return cls("local", path=_folder(text))
        bucket, _, rest = text[scheme.end() + 1 :].partition("/")
        if scheme[1].lower() != "s3" or not text[scheme.end() :].startswith("/"):
            raise _refused(text, _EXPECTED, repr(text))
        if not _BUCKET.fullmatch(bucket):
            raise _refused(text, "a bucket's name of small letters, digits, '.' and '-'", repr(bucket))
        parts = [part for part in rest.split("/") if part]
        for part in parts:
            if part in (".", "..") or set(part) & _NOT_IN_A_PREFIX:
                raise _refused(
                    text, f"a prefix without {' '.join(sorted(_NOT_IN_A_PREFIX))} and parts '.' or '..'", repr(part)
                )
        return cls("s3", bucket=bucket, prefix="/".join(parts))

    def __str__(self) -> str:
        if self.scheme == "local":
            return f"./{self.path}" if self.path.startswith("~") else self.path
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def on_s3(self) -> bool:
        return self.scheme == "s3"

    @property
    def absolute(self) -> str:
        """For users who are elsewhere."""
        return str(self) if self.on_s3 else os.path.abspath(self.path)

    def for_delta(self, name: str) -> str:
        """Where `name`, a path below the root, lies for delta-rs."""
        return f"{self}/{name}" if self.on_s3 else str(Path(self.path).resolve() / name)

    def for_spark(self, name: str) -> str:
        """Where `name`, a path below the root, lies for Spark and Hadoop."""
        return f"s3a{self.for_delta(name).removeprefix('s3')}" if self.on_s3 else self.for_delta(name)


def _refuse_characters(text: str) -> None:
    strange = next((c for c in text if ord(c) < 32 or c in "\\`\x7f" or 0xD800 <= ord(c) < 0xE000), None)
    if encoded := _ENCODED.search(text):
        strange = encoded[0]
    if strange is not None:
        raise _refused(text, "no backslash, backtick, control character or percent code, which some of the clients "
                       "(the object store, Spark, delta-rs) decode and others do not", repr(strange))  # fmt: skip


def _folder(text: str) -> str:
    if not text:
        raise _refused(text, _EXPECTED, "nothing")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise _refused(text, "the home folder of a user of this machine (a folder of that name is ./~NAME)", repr(text))
    return str(Path(expanded))


def _refused(text: str, expected: str, found: str) -> ConfigError:
    return ConfigError(f"data root {text!r}", expected=expected, found=found)
