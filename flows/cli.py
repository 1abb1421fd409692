"""The command `opd`: reads its arguments, runs a command, and turns errors and signals into exit statuses."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from flows.commands import COMMANDS
from flows.parser import parser
from schemas.errors import EXIT_PREEMPTED, OpdError, StoreError


class _Stopped(BaseException):
    """SIGTERM: unwinds like Ctrl-C, so that children are stopped and leases released."""


def _on_sigterm(_number: int, _frame: Any) -> None:
    raise _Stopped


def _stop_when_hung_up() -> None:
    """A closed terminal is a stop like SIGTERM, unless `nohup` or the like has had SIGHUP ignored."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return
    terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]

    def on_sighup(_number: int, _frame: Any) -> None:
        # Writing to a terminal that is gone fails, and would take the place of the stop.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in terminals:
            os.dup2(nowhere, fd)
        os.close(nowhere)
        os.kill(os.getpid(), signal.SIGTERM)  # to whoever handles it now: this module, or Prefect inside a flow

    signal.signal(signal.SIGHUP, on_sighup)


def main(argv: list[str] | None = None) -> int:
    """Entry point. Errors of the family print their text and give their own exit status."""
    try:
        arguments = parser().parse_args(argv)
        signal.signal(signal.SIGTERM, _on_sigterm)
        _stop_when_hung_up()
        if "data" in arguments:  # somebody sits and waits: not for as long as a run may (store_patience_seconds)
            os.environ.setdefault("OPD_STORE_PATIENCE_SECONDS", "20")
        return COMMANDS[arguments.command](arguments)
    except OpdError as error:
        print(f"\n{error}", file=sys.stderr)
        return error.exit_status
    except (KeyboardInterrupt, _Stopped):
        print("\nstopped; the same command continues from here", file=sys.stderr)
        return EXIT_PREEMPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # The stores explain theirs; what is left are work files and logs on a disk that is full or not ours.
        refused = StoreError(
            error.filename or "the file system", expected="to read and write there", found=str(error),
            safe="everything that was committed", next_command="the same command again, once that is cured",
        )  # fmt: skip
        print(f"\n{refused}", file=sys.stderr)
        return refused.exit_status


if __name__ == "__main__":
    sys.exit(main())
