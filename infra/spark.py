"""Spark with Delta: the session, and the one child process of a flow that holds it.

    flow process --stdin: one JSON request a line--> child (python -m infra.spark serve) --> JVM
                 <--own pipe: one JSON answer a line, and before it what the call waits for--

The flow's process never imports pyspark, and a JVM that crashes takes only the child with it. What the child and
the JVM print goes to a log file, never into an answer. The child ends when its stdin ends, so it cannot outlive the
flow, however the flow ends.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from infra import jars, tables
from infra.stores import place
from schemas.config import Spark
from schemas.errors import ConfigError, OpdError, StageError, error_from_json
from schemas.root import DataRoot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P = ParamSpec("P")
T = TypeVar("T")

_LOG_LINES = 15
_TICK_SECONDS = 1.0
_WORD_SECONDS = 10.0
_SCRATCH = "opd-spark-"
#: A flow runs a few dozen short jobs: the optimising compiler and parallel collectors cost twice what they win.
_JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_PROJECT = Path(__file__).resolve().parents[1]


def session(root: str, settings: Spark) -> SparkSession:
    """The process's Spark session over the tables of `root`, each existing one registered in database `opd`.

    Nothing is created under root, and nothing outside a temporary folder. Raises ConfigError without Java 17 or the
    pinned jars.
    """
    jars.java()
    where = place(root)
    jar_paths = where.spark_jars(Path(settings.jars), lambda text: print(text, file=sys.stderr))
    # A Spark that the user has installed elsewhere would meet jars of another version.
    os.environ["SPARK_HOME"] = str(jars.pyspark_home())
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    scratch = tempfile.mkdtemp(prefix=_SCRATCH)
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    options = {
        "spark.app.name": "opd",
        "spark.master": f"local[{settings.cores}]",
        "spark.driver.memory": settings.driver_memory,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"{_JVM_OPTIONS} -Djava.io.tmpdir={scratch}",
        "spark.local.dir": scratch,
        "spark.sql.warehouse.dir": f"file://{scratch}/warehouse",
        "spark.jars": ",".join(str(path) for path in jar_paths),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.ansi.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(settings.shuffle_partitions),
        "spark.databricks.delta.properties.defaults.enableDeletionVectors": "false",
        # Delta rebuilds a snapshot in 50 tasks unless told otherwise: seconds each, for logs of a few thousand files.
        "spark.databricks.delta.snapshotPartitions": "1",
        **where.spark_options(),
    }
    builder = SparkSession.builder
    for name, value in options.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("WARN")
    tables.register_tables(spark, root)
    return spark


def version(spark: SparkSession) -> str:
    """Spark's version: the smallest question that a session answers."""
    return spark.version


def check_log(spark: SparkSession, *, root: str, key: str) -> str:
    """Breach, or "", of the promise that an entry of a Delta log under s3:// is created once.

    Tried by the session's own log store on the object `key`, which is left to the caller to delete.
    """
    java: Any = spark._jvm
    jvm_session: Any = spark._jsparkSession
    configuration = jvm_session.sparkContext().hadoopConfiguration()
    path = java.org.apache.hadoop.fs.Path(DataRoot.parse(root).for_spark(key))
    log_store = java.opd.ConditionalLogStore(configuration)

    def write(text: str) -> bool:
        lines = java.java.util.ArrayList()
        lines.add(text)
        try:
            log_store.write(path, lines.iterator(), False, configuration)
        except Exception as error:
            if "FileAlreadyExistsException" not in str(error):
                raise
            return False
        return True

    if not write("first"):
        return "a new entry counts as taken"
    if not write("first"):
        return "an entry whose answer was lost counts as another's"
    return "an entry was overwritten by another" if write("second") else ""


class SparkChild:
    """Client of one Spark process, started by `start` or the first call. Calls of several threads run one by one.

    root: data root; settings: fields of schemas.config.Spark; log_path: where child and JVM print.

    with SparkChild("data", settings, Path("data/logs/spark.log")) as spark:
        result = spark.call(build_plan, root="data", ...)
    """

    def __init__(self, root: str, settings: Mapping[str, Any], log_path: Path) -> None:
        self._root, self._settings, self._log_path = root, settings, log_path
        #: Called about once a second while a call lasts; an exception of it ends the child and the call.
        self.tick: Callable[[], object] = lambda: None
        #: Is told what a call waits for.
        self.tell: Callable[[str], object] = logging.getLogger(__name__).warning
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: int | None = None
        self._received = bytearray()
        self._late = False
        self._scratch: _Scratch | None = None

    def __enter__(self) -> SparkChild:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the child; None before the first start or call and after close."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the child and return at once: it opens its session beside what the caller does before the first call,
        which also reports why it could not."""
        with self._lock:
            if self._process is None:
                self._start()

    def call(self, function: Callable[Concatenate[SparkSession, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Result of a module's `function`, called in the child as function(spark, *args, **kwargs).

        Arguments and result are JSON values, and the function must be safe to run again: when the child dies under
        it, or has no answer in `call_seconds` and is killed, a new child runs it once more. An OpdError raised there is
        raised here as itself; any other exception, and a second death, is a StageError with the end of the log.
        """
        name = f"{function.__module__}:{function.__qualname__}"
        request = json.dumps({"function": name, "args": args, "kwargs": kwargs}, allow_nan=False).encode() + b"\n"
        with self._lock:
            answer = self._exchange(name, request) or self._exchange(name, request)
        if answer is None:
            limit = f"{self._settings['call_seconds']:g} s (spark.call_seconds)"
            died = f"none in {limit}, twice: " if self._late else "it died twice: "
            raise StageError(
                f"Spark process, {name}", expected="an answer", found=died + self._log_end(),
                safe="committed tables: a commit is whole or not there", next_command=f"less {self._log_path}",
            )  # fmt: skip
        if "result" in answer:
            return answer["result"]
        if "error" in answer:
            raise error_from_json(answer["error"])
        raise StageError(
            f"Spark process, {name}", expected="a result", found=f"{answer['exception']} | {self._log_end()}",
            safe="committed tables: a commit is whole or not there", next_command=f"less {self._log_path}",
        )  # fmt: skip

    def close(self) -> None:
        """Ends the child and its JVM; a later call starts a new one."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._scratch = _Scratch()
        answers, child_end = os.pipe()
        path = os.pathsep.join(filter(None, [str(_PROJECT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "infra.spark", "serve", str(child_end), self._root]
        try:
            with open(self._log_path, "ab") as log:
                self._process = subprocess.Popen(
                    [*command, json.dumps(dict(self._settings))],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(child_end, scratch.lock),
                    env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(scratch.folder)},
                    # A group of its own: Ctrl-C is the flow's to handle, and the JVM can be ended with its parent.
                    start_new_session=True,
                )  # fmt: skip
        except BaseException:
            os.close(answers)
            scratch.remove()
            raise
        finally:
            os.close(child_end)
        self._answers = answers
        self._received.clear()

    def _exchange(self, function: str, request: bytes) -> dict[str, Any] | None:
        """The answer, or None when the child died or was killed since it had none in time."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        answer = None
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            while (answer := self._next_message(function)) is not None and "waits" in answer:
                self.tell(answer["waits"])
        except BrokenPipeError:
            pass
        except BaseException:
            # Interrupted: the answer still to come would be taken for that of the next call.
            self._stop()
            raise
        if answer is None:
            self._stop()
        return answer

    def _next_message(self, function: str) -> dict[str, Any] | None:
        """What the child writes next; None at its end, or when it writes nothing in `call_seconds`."""
        assert self._answers is not None
        arrived = select.poll()
        arrived.register(self._answers, select.POLLIN)
        limit = self._settings["call_seconds"]
        began = told = time.monotonic()
        self._late = False
        while b"\n" not in self._received:
            now = time.monotonic()
            if now - began >= limit:
                self._late = True
                self.tell(f"Spark: no answer to {function} in {limit:g} s: killed; its log: {self._log_path}")
                return None
            if now - told >= _WORD_SECONDS:
                told = now
                self.tell(f"Spark: {function} has run for {now - began:.0f} s; its log: {self._log_path}")
            if not arrived.poll(_TICK_SECONDS * 1000):
                self.tick()
            elif data := os.read(self._answers, 1 << 16):
                self._received += data
            else:
                return None
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _stop(self) -> None:
        process, self._process = self._process, None
        answers, self._answers = self._answers, None
        if process is None:
            return
        # A kill loses nothing: a Delta commit is whole or not there. The group is killed before its leader is
        # reaped, so that its number cannot have passed to another process.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if answers is not None:
            os.close(answers)
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    def _log_end(self) -> str:
        try:
            lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(lines[-_LOG_LINES:])


class _Scratch:
    """A temporary folder for a child and its JVM. A flow that is killed leaves it to the next start of any.

    lock: descriptor that holds folder/lock; the child inherits it, so that a folder whose lock is free has no owner.
    """

    def __init__(self) -> None:
        for old in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
            _reap(old)
        self.folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        new = self.folder / "lock.new"
        self.lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        new.rename(self.folder / "lock")  # seen by others only once it is held

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


def _reap(folder: Path) -> None:
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return  # another user's, or one that has no lock yet
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _serve(answer_fd: int, root: str, settings: Spark) -> None:
    """The child: answers requests until stdin ends, then exits at once, a call in progress included."""
    requests: list[bytes] = []
    arrived = threading.Semaphore(0)

    def read() -> None:
        # PR_SET_PDEATHSIG would fire when the *thread* that started the child ends, and flows start it from
        # short-lived ones; the end of stdin comes with the end of the process and only then.
        for line in sys.stdin.buffer:
            requests.append(line)
            arrived.release()
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    spark: SparkSession | None = None
    with contextlib.suppress(Exception):  # the first request meets it again, and answers with it
        spark = session(root, settings)
    with os.fdopen(answer_fd, "wb") as answers:
        one_at_a_time = threading.Lock()

        def write(line: str) -> None:
            with one_at_a_time:
                answers.write(line.encode() + b"\n")
                answers.flush()

        # The child's own output goes to a log, and the person who waits looks at the flow.
        tables.on_wait = lambda text: write(json.dumps({"waits": text}))
        while True:
            arrived.acquire()
            request = json.loads(requests.pop(0))
            try:
                if spark is None:
                    spark = session(root, settings)
                module, _, name = request["function"].partition(":")
                function = getattr(importlib.import_module(module), name)
                answer = {"result": function(spark, *request["args"], **request["kwargs"])}
                line = json.dumps(answer, allow_nan=False)
            except Exception as error:
                traceback.print_exc()
                sys.stderr.flush()
                if spark is not None and _jvm_is_gone(spark):
                    os._exit(1)
                line = json.dumps(_describe(error))
            write(line)


def _jvm_is_gone(spark: SparkSession) -> bool:
    gateway = spark.sparkContext._gateway
    process = getattr(gateway, "proc", None)
    return process is not None and process.poll() is not None


def _describe(error: Exception) -> dict[str, Any]:
    if isinstance(error, OpdError):
        return {"error": error.to_json()}
    return {"exception": f"{type(error).__name__}: {str(error).strip()[:2000]}"}


def _main(arguments: list[str]) -> int:
    match arguments:
        case ["serve", answer_fd, root, settings]:
            _serve(int(answer_fd), root, Spark.model_validate_json(settings))
            return 0
        case ["fetch-jars", folder, *only_s3] if only_s3 in ([], ["s3"]):
            try:
                jars.fetch(folder, s3=bool(only_s3))
            except OpdError as error:
                print(error, file=sys.stderr)
                return error.exit_status
            return 0
    print(
        ConfigError("python -m infra.spark", expected="fetch-jars FOLDER [s3]", found=" ".join(arguments)),
        file=sys.stderr,
    )
    return ConfigError.exit_status


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
