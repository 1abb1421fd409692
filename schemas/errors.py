"""The one family of errors: a user reads where, expected, found, what is safe, and what to run next.

Every error that opd raises for a cause outside its own code is an `OpdError` of one of five kinds.
Each kind has its own exit status, so that a scheduler can tell a typing mistake from a full disk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_CREDENTIALS = re.compile(r"//[^/\s]*@")


def without_credentials(text: str) -> str:
    """The text without the user names and passwords of its URLs; every message goes through it."""
    return _CREDENTIALS.sub("//", text)


class OpdError(Exception):
    """Base of the family.

    where: the file and offset, table and key, or setting at fault. expected, found: the two sides of the breach.
    safe: what remains intact. next_command: what the user can run now. The last two have a default for each kind.
    """

    kind = "error"
    exit_status = 1
    usually_safe = "everything that was committed"
    usually_next = "the same command again, once that is cured"

    def __init__(self, where: str, *, expected: str, found: str, safe: str = "", next_command: str = "") -> None:
        self.where, self.expected, self.found = map(without_credentials, (where, expected, found))
        self.safe = without_credentials(safe or self.usually_safe)
        self.next_command = without_credentials(next_command or self.usually_next)
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [
            (self.kind, self.where),
            ("expected", self.expected),
            ("found", self.found),
            ("safe", self.safe),
            ("next", self.next_command),
        ]
        return "\n".join(f"{name}: {text}" for name, text in parts if text)

    def to_json(self) -> dict[str, str]:
        """Kind and parts as JSON values, for the process that waits for this one; `error_from_json` reads them."""
        return {
            "kind": self.kind, "where": self.where, "expected": self.expected, "found": self.found,
            "safe": self.safe, "next_command": self.next_command,
        }  # fmt: skip

    def __reduce__(self):
        # Keyword-only fields do not survive Exception's default pickling.
        return error_from_json, (self.to_json(),)


class ConfigError(OpdError):
    """A setting, a path or a command line is wrong; nothing was started."""

    kind, exit_status = "config error", 2
    usually_safe = "everything: nothing was started"
    usually_next = "the same command again, once that is corrected"


class FormatError(OpdError):
    """Bytes are not what their format says: a damaged log, shard, manifest or model file."""

    kind, exit_status = "format error", 3


class StoreError(OpdError):
    """The object store, a disk or a server did not do what was asked."""

    kind, exit_status = "store error", 4


class ContractError(OpdError):
    """Two parts disagree: a fingerprint, a digest, a vocabulary, an owner."""

    kind, exit_status = "contract error", 5


class StageError(OpdError):
    """A stage could not finish; what it finished so far is kept."""

    kind, exit_status = "stage error", 6
    usually_safe = "everything that the run has finished or logged"
    usually_next = "the same command again: it continues"


_KINDS = {kind.kind: kind for kind in (ConfigError, FormatError, StoreError, ContractError, StageError)}


def error_from_json(fields: Mapping[str, str]) -> OpdError:
    """The error that another process described by `OpdError.to_json`; other fields are passed over."""
    return _KINDS.get(fields["kind"], OpdError)(
        fields["where"], expected=fields["expected"], found=fields["found"], safe=fields["safe"],
        next_command=fields["next_command"],
    )  # fmt: skip


#: Exit status of a rank that was asked to stop, kept its work and can be resumed (EX_TEMPFAIL of sysexits.h).
EXIT_PREEMPTED = 75
