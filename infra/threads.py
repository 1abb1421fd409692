"""Calls at once, on threads that end with the process: whoever waits for them can be stopped, whatever they do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def at_once(call: Callable[[_T], _R], items: Iterable[_T], limit: int) -> list[_R]:
    """`call` of every item, up to `limit` at once, begun in order; results in order.

    Raises the first error of a call when those that had begun have ended; no other begins then. Threads of an executor
    would be joined when the interpreter ends: a call that hangs would hold the process.
    """
    waiting = list(enumerate(items))[::-1]
    results: dict[int, _R] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while True:
            try:
                index, item = waiting.pop()  # atomic, as each of these steps
            except IndexError:
                return
            try:
                results[index] = call(item)
            except BaseException as error:
                errors.append(error)
                waiting.clear()

    count = len(waiting)
    threads = [threading.Thread(target=work, name="at once", daemon=True) for _ in range(min(limit, count))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        waiting.clear()  # of a caller that is stopped as it waits
    if errors:
        raise errors[0]
    return [results[index] for index in range(count)]
