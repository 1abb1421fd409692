from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from infra.threads import at_once


def test_results_come_in_order_whatever_ends_first():
    def call(item: int) -> int:
        time.sleep(0.01 * (5 - item))
        return item * item

    assert at_once(call, range(5), 5) == [0, 1, 4, 9, 16]
    assert at_once(call, (), 3) == []
    assert at_once(call, [4], 3) == [16]


@pytest.mark.parametrize("limit", [1, 3])
def test_as_many_run_at_once_as_may(limit):
    together, most, now = threading.Barrier(limit, timeout=30), 0, 0
    lock = threading.Lock()

    def call(_: int) -> None:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        together.wait()
        with lock:
            now -= 1

    at_once(call, range(4 * limit), limit)
    assert most == limit


def test_the_first_error_is_raised_and_nothing_begins_after_it():
    begun = []

    def call(item: int) -> None:
        begun.append(item)
        if item == 2:
            raise ValueError("two")

    with pytest.raises(ValueError, match="two"):
        at_once(call, range(100), 1)
    assert begun == [0, 1, 2]


def test_a_caller_that_is_stopped_does_not_wait_and_the_process_ends():
    """A signal handler that raises, as a worker's does, while a call hangs."""
    code = """
import signal, sys, threading
from infra.threads import at_once
class Stopped(BaseException): pass
def handle(*_): raise Stopped
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.3)
begun = []
def call(item):
    begun.append(item)
    threading.Event().wait()
try:
    at_once(call, range(9), 2)
except Stopped:
    print("stopped", len(begun))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "stopped 2\n"), done.stderr
