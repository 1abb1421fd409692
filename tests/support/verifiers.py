"""Verifiers of the tests, good ones and bad ones; a module of its own, so that their process starts fast."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

not_callable = 3


def count_letters(text: str, prompt: dict) -> float:
    return sum(c.isalpha() for c in text) + len(prompt["prompt_id"]) / 16


def prints(text: str, prompt: dict) -> float:
    print("noise on stdout", flush=True)
    os.system("echo noise of a child")
    return float(text == prompt["answer"])


def draws_lots(_text: str, _prompt: dict) -> float:
    return random.random()


def hash_order(_text: str, _prompt: dict) -> float:
    return float("".join({"1", "2", "3", "4", "5", "6", "7"}))


def fails(_text: str, _prompt: dict) -> float:
    raise KeyError("no such answer")


def fails_on_one(text: str, prompt: dict) -> float:
    """Of the prompts of tests/faults/test_bad_input.py."""
    return {"2": 0.5, "4": float(len(text))}[prompt["answer"]]


def answers_in_words(_text: str, _prompt: dict):
    return "good"


def not_finite(_text: str, _prompt: dict) -> float:
    return float("nan")


def exits(_text: str, _prompt: dict) -> float:
    os._exit(7)


def calls_sys_exit(_text: str, _prompt: dict) -> float:
    sys.exit(3)


def sleeps(_text: str, _prompt: dict) -> float:
    time.sleep(600)
    return 1.0


def never_leaves_c(_text: str, _prompt: dict) -> float:
    return float(9 ** (9**9))


def as_told(text: str, prompt: dict) -> float:
    """Behaves like the verifier that the environment names."""
    return globals()[os.environ["OPD_TEST_VERIFIER"]](text, prompt)


def environment(_text: str, prompt: dict) -> float:
    """1 when anything of the prompt's answer is in this process's environment or in that of one around it."""
    found = json.dumps(dict(os.environ))
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) not in (os.getpid(),):
            with contextlib.suppress(OSError):
                found += (folder / "environ").read_bytes().decode("utf-8", "replace")
    return float(prompt["answer"] in found)


def starts(text: str, _prompt: dict) -> float:
    """Starts `sleep SECONDS` (the text) three ways, the last one in a session and under a parent of its own."""
    command = ["sleep", text.rstrip("!")]
    subprocess.Popen(command)
    subprocess.Popen(command, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp(command[0], command)
        os._exit(0)
    os.wait()
    time.sleep(0.3 if not text.endswith("!") else 600)
    return 1.0


def hoards(_text: str, _prompt: dict) -> float:
    return float(len(bytearray(8 << 30)))


def dials(text: str, _prompt: dict) -> float:
    with socket.create_connection(("127.0.0.1", int(text)), timeout=5) as connection:
        return float(connection.recv(1) == b"x")


def reads_requests(_text: str, _prompt: dict) -> float:
    return float(len(subprocess.run(["cat"], capture_output=True, timeout=5, check=True).stdout))


def writes_a_large_file(_text: str, _prompt: dict) -> float:
    with open(Path.home() / "large", "wb") as file:
        file.truncate(2 << 30)
    return 1.0


def gains_rights(_text: str, _prompt: dict) -> float:
    """How many of the things that only root of a namespace may do were done."""
    libc, done = ctypes.CDLL(None), 0
    done += libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0
    done += libc.sethostname(b"x", 1) == 0
    done += libc.unshare(0x00020000) == 0
    done += subprocess.run(["mount", "-t", "tmpfs", "none", "/tmp"], capture_output=True, check=False).returncode == 0
    return float(done)
