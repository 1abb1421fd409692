"""A campaign under faults of its driver: `python -m tests.driver_faults FOLDER --moments 100 [--root s3]`.

One tiny run of two iterations is driven to its end again and again. At a random moment of each life its driver is

    killed      SIGKILL; the next life begins at once
    hung up     SIGHUP, as a closed terminal sends it; it must end by itself, with exit status 75
    frozen      SIGSTOP; an heir takes the run and is disturbed in its turn; the zombie wakes later (SIGCONT) and must
                end by itself, in an error; one that wakes in time keeps the run, and its heir is refused
    cut off     its S3 server stands still for a while; it must go on, or end in an error of the store

Held: each run that comes to its end has the content of an undisturbed one (outputs of all stages, students by content,
`opd verify` without a breach); no process that a life has started and no listening port is left; the longest time
without a line of output is told. The last line is one JSON object; the exit status is 1 when something did not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from infra.stores import open_store
from schemas.errors import EXIT_PREEMPTED, ContractError, StoreError
from tests.support import prefect_server, s3_server
from tests.support.tiny import tiny_model

REPOSITORY = Path(__file__).parents[1]
_PR_SET_CHILD_SUBREAPER = 36
_SECONDS_TO_END = 120.0
#: An heir that starts beside a frozen owner knows by then whether that one is silent for good.
_SECONDS_TO_KNOW = 60.0
#: Of all lives, this one of so many has no Prefect server to talk to and starts Prefect's own.
_ALONE = 5

CONFIG = """
run_id = "faults"
seed = 5
iterations = 2
data = "{data}"
scratch = "{scratch}"
[student]
path = "{models}/student"
[[teachers]]
id = "a"
path = "{models}/second"
[prompts]
per_iteration = 4
heldout = 1
[[prompts.datasets]]
name = "chain_sum"
size = 12
teachers = ["a"]
[rollout]
samples_per_prompt = 2
max_response_tokens = 48
prompts_per_partition = 3
page_tokens = 16
max_sequences = 4
threads = 1
seal_seconds = 0.5
grace_seconds = 10
dead_after_seconds = 10
[teach]
trajectories_per_partition = 5
threads = 1
dead_after_seconds = 10
[dispatch]
mini_batch_trajectories = 2
pack_tokens = 256
slots = 1
[train]
learning_rate = 1e-2
threads = 1
save_every_steps = 1
dead_after_seconds = 15
[spark]
cores = 1
driver_memory = "1g"
jars = "{repository}/jars"
"""


class Life:
    """One process of the driver: `opd run`, its output in a file that is watched for silence."""

    def __init__(self, folder: Path, number: int, environment: dict[str, str]) -> None:
        self.log = folder / f"life-{number:03d}.log"
        self.started = time.monotonic()
        self.silence, self._size, self._spoke = 0.0, 0, self.started
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", "run", str(folder / "run.toml")],
                cwd=REPOSITORY, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def look(self) -> int | None:
        """Exit status, None while it lives."""
        size, now = self.log.stat().st_size, time.monotonic()
        if size != self._size:
            self._size, self._spoke = size, now
        self.silence = max(self.silence, now - self._spoke)
        return self.process.poll()

    def wait(self, seconds: float) -> int | None:
        """Exit status, None if it still lives after so many seconds."""
        deadline = time.monotonic() + seconds
        while self.look() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.process.poll()

    def forget_silence(self) -> None:
        """A stopped process cannot speak."""
        self._spoke = time.monotonic()

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class Campaign:
    def __init__(self, folder: Path, root: str, seed: int, moments: int, weed: int | None, away: float) -> None:
        self.folder, self.root, self.moments, self.weed, self.away = folder, root, moments, weed, away
        self.random = random.Random(seed)
        self.breaches: list[str] = []
        self.counts: Counter[str] = Counter()
        self.lives = self.runs = self.done = 0
        self.silence = 0.0
        self.silent_log = ""
        self.reference: dict[str, str] = {}
        self.seconds = 20.0
        tiny_model(folder / "student", seed=0)
        tiny_model(folder / "second", seed=1, tied=False, width=64)

    def run(self) -> None:
        self.new_root()
        began = time.monotonic()
        life = self.start()
        if life.wait(1800) != 0:
            raise AssertionError(f"the undisturbed run failed:\n{life.text()[-4000:]}")
        self.seconds = time.monotonic() - began
        self.reference = self.content()
        print(f"undisturbed: {self.seconds:.0f} s, {len(self.reference)} outputs", flush=True)
        while self.done < self.moments:
            self.new_root()
            life = self.start()
            while True:
                status = life.wait(self.moment()) if self.done < self.moments else life.wait(_SECONDS_TO_END * 5)
                if status is None and self.done < self.moments:
                    self.done += 1
                    life = self.disturb(life, self.done)
                elif status is None:
                    self.breach(life, "did not end")
                    life.process.kill()
                elif status == 0:
                    self.note(life)
                    break
                else:
                    self.note(life)
                    life = self.start()
            self.finish(life)

    def moment(self) -> float:
        """Seconds to the next fault: a life gets a part of the way, and the lives of a run get through all of it."""
        return self.random.uniform(0.5, self.seconds / 2)

    def disturb(self, life: Life, number: int) -> Life:
        """The life after the fault: the same one where it may go on, one that has ended where it should be replaced."""
        faults = ["killed", "hung up", "frozen"] + (["cut off"] if self.weed else [])
        fault = faults[number % len(faults)]
        self.counts[fault] += 1
        after = time.monotonic() - life.started
        following = getattr(self, fault.replace(" ", "_"))(life)
        status = following.process.poll()
        now = "goes on" if status is None else f"exit status {status}"
        print(f"{number}: {fault} after {after:.1f} s: {now}", flush=True)
        return following

    def killed(self, life: Life) -> Life:
        life.process.kill()
        life.wait(_SECONDS_TO_END)
        return life

    def hung_up(self, life: Life) -> Life:
        life.process.send_signal(signal.SIGHUP)
        status = life.wait(_SECONDS_TO_END)
        if status is None:
            self.breach(life, "SIGHUP did not end it")
            life.process.kill()
            life.wait(_SECONDS_TO_END)
        elif status not in (EXIT_PREEMPTED, 0, -signal.SIGHUP):
            self.breach(life, f"SIGHUP ended it with {status}")
        elif status == -signal.SIGHUP and time.monotonic() - life.started > 10:
            self.breach(life, "SIGHUP killed it without a word")
        return life

    def frozen(self, life: Life) -> Life:
        """Its heir takes the run and goes on; or is refused, as the frozen one woke in time, which then goes on."""
        life.process.send_signal(signal.SIGSTOP)
        heir = self.start()
        status = heir.wait(self.random.uniform(20.0, 40.0))
        life.process.send_signal(signal.SIGCONT)
        life.forget_silence()
        if status is None:  # it knows by now, or will learn, whether the run is its own
            status = heir.wait(_SECONDS_TO_KNOW)
        if status == ContractError.exit_status:
            self.note(heir)
            self.counts["frozen, woke in time"] += 1
            return life
        zombie = life.wait(_SECONDS_TO_END)
        self.note(life)
        if zombie is None:
            self.breach(life, "a zombie that woke did not end")
            life.process.kill()
            life.wait(_SECONDS_TO_END)
        elif zombie == 0 and "already finished" not in life.text():
            self.breach(life, "a zombie finished the run that its heir had")
        return heir

    def cut_off(self, life: Life) -> Life:
        """It waits for its store, and goes on once that is back."""
        assert self.weed is not None
        os.kill(self.weed, signal.SIGSTOP)
        try:
            status = life.wait(self.away)
        finally:
            os.kill(self.weed, signal.SIGCONT)
        if status is not None and status not in (0, StoreError.exit_status):
            self.breach(life, f"a store that was away ended it with {status}")
        self.counts["cut off, and went on"] += status is None
        return life

    # --- lives and what they leave

    def new_root(self) -> None:
        self.runs += 1
        self.data = f"{self.root}/{self.runs}"
        (self.folder / "run.toml").write_text(
            CONFIG.format(data=self.data, scratch=self.folder / "scratch", models=self.folder, repository=REPOSITORY)
        )

    def start(self) -> Life:
        self.lives += 1
        environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
        if self.lives % _ALONE == 0:
            environment.pop("PREFECT_API_URL")
            environment["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"] = "true"
        return Life(self.folder, self.lives, environment)

    def note(self, life: Life) -> None:
        if life.silence > self.silence:
            self.silence, self.silent_log = life.silence, life.log.name

    def breach(self, life: Life, text: str) -> None:
        self.breaches.append(f"{life.log.name}: {text}")
        print(f"BREACH {self.breaches[-1]}\n{life.text()[-3000:]}", flush=True)

    def finish(self, life: Life) -> None:
        content = self.content()
        different = sorted(k for k in {*content, *self.reference} if content.get(k) != self.reference.get(k))
        if different:
            self.breach(life, f"other content than undisturbed: {different}")
        verified = subprocess.run(
            [sys.executable, "-m", "flows.cli", "verify", "faults", "--data", self.data],
            cwd=REPOSITORY, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if verified.returncode != 0:
            self.breach(life, f"opd verify: {verified.stdout[-2000:]}")
        left = self.left_over()
        if left:
            self.breach(life, f"processes left: {left}")
        print(f"run {self.runs} is whole", flush=True)
        shutil.rmtree(self.folder / "scratch", ignore_errors=True)

    def content(self) -> dict[str, str]:
        """Output digest of each stage, student versions included."""
        store, found = open_store(self.data), {}
        for key in store.list("runs/faults/"):
            parts = key.split("/")
            if len(parts) == 6 and parts[5] == "manifest.json":
                manifest = json.loads(store.get(key))
                found[f"{manifest['stage']} {manifest['iteration']}"] = manifest["output_digest"]
        return found

    def left_over(self) -> list[str]:
        """Descendants that outlived their driver: this process adopts them."""
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            left = [text for pid, text in children() if pid not in self.known]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)

    known: frozenset[int] = frozenset()


def children() -> Iterator[tuple[int, str]]:
    """(pid, command line) of this process's living children."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and fields[0] != "Z":
                line = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield int(path.parent.name), line[:200]


def listening() -> set[str]:
    """Local addresses of listening TCP sockets of this machine's processes that this user may see."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add(fields[1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--root", choices=("local", "s3"), default="local")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--away-seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    # Under nohup drivers would inherit that SIGHUP is ignored, as a user of nohup wants it: no fault at all.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="df-")))
        (short / "prefect").mkdir()
        stack.enter_context(prefect_server.running(short / "prefect"))
        weed, root = None, str(folder / "data")
        if arguments.root == "s3":
            before = {pid for pid, _ in children()}
            (short / "s3").mkdir()
            server = stack.enter_context(s3_server.running(short / "s3"))
            os.environ.update(server.environment)
            (weed,) = {pid for pid, _ in children()} - before
            root = f"s3://{s3_server.BUCKET}/faults"
        campaign = Campaign(folder, root, arguments.seed, arguments.moments, weed, arguments.away_seconds)
        campaign.known = frozenset(pid for pid, _ in children())
        ports = listening()
        began = time.monotonic()
        campaign.run()
        new_ports = sorted(listening() - ports)
        print(json.dumps({
            "bench": "driver_faults", "root": arguments.root, "moments": arguments.moments, **campaign.counts,
            "lives": campaign.lives, "runs": campaign.runs - 1, "longest silence, s": round(campaign.silence, 1),
            "of": campaign.silent_log, "new listening ports": len(new_ports), "breaches": campaign.breaches,
            "seconds": round(time.monotonic() - began),
        }))  # fmt: skip
    return 1 if campaign.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
