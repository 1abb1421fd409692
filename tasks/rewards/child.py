"""Rewards: a prompt's verifier applied to a response, computed in rollout before its row is committed.

Verifiers run in a confined child process (tasks.rewards.calls), which ends with all that it started when a call
takes too long and when the worker ends. A call that raises, ends its process, takes too long or gives no finite number
has failed: the worker stops, with every response in its log, unless the configuration allows that many failures a
partition; then the reward is null and the failure counted.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infra import confine
from schemas.config import Prompts
from schemas.errors import ConfigError, StageError, StoreError
from schemas.work.rollout import VerifierSettings
from tasks.inputs.text import Tokenizer
from tasks.rewards.verifiers import SHIPPED

#: Start of the process, and import of a verifier's module.
_LOAD_SECONDS = 120.0
_END_SECONDS = 10.0
_READ_BYTES = 1 << 16
#: What a verifier's process gets of this one's environment. Keys of stores and servers are not among it.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ")

#: Why verifiers run without namespaces on this machine, or "".
no_namespaces = functools.cache(confine.missing)


def verifier_settings(prompts: Prompts) -> VerifierSettings:
    return VerifierSettings(
        prompts.verifier_timeout_seconds, prompts.verifier_memory_bytes, prompts.verifier_env, prompts.verifier_network
    )


class CallFailedError(Exception):
    """A verifier call without a finite number; the text says why."""


class VerifierProcess:
    """The child that calls verifiers, started at its first use and again after a call that had to be killed."""

    def __init__(self, settings: VerifierSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: set[str] = set()
        self._rest = b""

    def __enter__(self) -> VerifierProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, name: str) -> None:
        """Raises ConfigError for a verifier that cannot be found or imported."""
        if name in self._loaded:
            return
        try:
            answer = self._ask({"load": name}, _LOAD_SECONDS)
            if "value" in answer:
                self._loaded.add(name)
                return
            found = answer.get("missing") or answer["failed"]
        except CallFailedError as error:
            found = str(error)
        raise ConfigError(
            f"verifier {name!r}", expected=f"one of {sorted(SHIPPED)}, or package.module:function that can be imported",
            found=found,
            next_command="the module's folder belongs on PYTHONPATH or is the working directory; its process has "
            f"{self._settings.memory_bytes} bytes (prompts.verifier_memory_bytes), "
            + ("the" if self._settings.network else "no")
            + " network and the variables that prompts.verifier_env names",
        )  # fmt: skip

    def call(self, name: str, text: str, prompt: dict[str, Any]) -> float:
        """Raises ConfigError as `load` does, and CallFailedError."""
        self.load(name)
        answer = self._ask({"call": name, "text": text, "prompt": prompt}, self._settings.timeout_seconds)
        if "value" not in answer:
            raise CallFailedError(answer["failed"])
        return answer["value"]

    def close(self) -> None:
        """End the child and all that it started; a later call starts another."""
        process, self._process = self._process, None
        self._loaded, self._rest = set(), b""
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()  # the keeper ends what it keeps, then itself
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            process.stdout.close()

    def _start(self) -> subprocess.Popen[bytes]:
        settings = {
            "memory_bytes": self._settings.memory_bytes, "network": self._settings.network,
            "namespaces": not no_namespaces(),
        }  # fmt: skip
        try:
            environment = {n: os.environ[n] for n in (*_ENVIRONMENT, *self._settings.env) if n in os.environ}
            environment |= {
                # The order of a verifier's sets must not differ between a first scoring and a second.
                "PYTHONHASHSEED": "0",
                # One response at a time, beside the worker: threads take address space and bring nothing.
                "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            return subprocess.Popen(
                [sys.executable, "-m", "tasks.rewards.calls", json.dumps(settings)], bufsize=0, env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise StoreError("verifier process", expected="a process that starts", found=str(error)) from error

    def _ask(self, request: dict[str, Any], limit_seconds: float) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            line = self._line(process.stdout, limit_seconds)
        except BrokenPipeError:
            line = b""
        except TimeoutError:
            self.close()
            raise CallFailedError(f"no answer in {limit_seconds:g} s") from None
        if not line:
            status = process.wait()
            self.close()
            raise CallFailedError(f"its process ended with {f'signal {-status}' if status < 0 else f'status {status}'}")
        return json.loads(line)

    def _line(self, pipe: Any, limit_seconds: float) -> bytes:
        """The child's next line, empty when it has ended. Raises TimeoutError."""
        deadline = time.monotonic() + limit_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                data = os.read(pipe.fileno(), _READ_BYTES)
                if not data:
                    return b""
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def check_verifiers(names: Iterable[str], settings: VerifierSettings) -> None:
    """Import every verifier that is not shipped, in a child. Raises ConfigError for the first that is not there."""
    with VerifierProcess(settings) as process:
        for name in sorted(set(names) - set(SHIPPED)):
            process.load(name)


class Rewarder:
    """Rewards of one rollout worker. allowed: failures of a partition that give a null reward."""

    def __init__(self, student_folder: Path, settings: VerifierSettings, allowed: int) -> None:
        self._tokenizer = Tokenizer.load(student_folder)
        self._process = VerifierProcess(settings)
        self._allowed = allowed
        self.failures = 0

    def __enter__(self) -> Rewarder:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def start_partition(self) -> None:
        """Count failures from 0 again."""
        self.failures = 0

    def __call__(self, prompt: dict[str, Any], response_ids: list[int]) -> float | None:
        """prompt: its row of opd.prompts. None without a verifier and for a failure that is allowed.

        Raises StageError for one more than that.
        """
        name = prompt.get("verifier")
        if name is None:
            return None
        try:
            return self._process.call(name, self._tokenizer.decode(response_ids), prompt)
        except CallFailedError as error:
            self.failures += 1
            if self.failures <= self._allowed:
                return None
            raise StageError(
                f"verifier {name!r}, prompt {prompt['prompt_id']}",
                expected=f"a finite number ({self._allowed} failures allowed a partition)", found=str(error),
                safe="the response is in the log; a rerun scores it again without sampling",
                next_command="cure the verifier, or --set prompts.max_verifier_failures=N; then the same command again",
            ) from error  # fmt: skip
