"""Lines on stderr for the person who waits at the terminal."""

from __future__ import annotations

import contextlib
import sys


def tell(text: str) -> None:
    """One line on stderr; nothing where nobody listens any more, since a closed terminal must not stop what goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
