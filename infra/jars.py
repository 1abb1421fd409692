"""The pinned jars of Delta, and of S3 for roots that lie there, and the Java that runs them.

`jars.lock` and `jars_s3.lock` name each jar by Maven coordinate and SHA-256. A missing jar is resolved by the Ivy
inside pyspark with settings of our own (one default resolver, no transitive dependency), so that neither Maven nor a
half-filled local repository matters. A jar with another digest is never used. What Delta lacks on S3, a log whose
entries are created conditionally, is ConditionalLogStore.scala, compiled by the Scala compiler inside pyspark.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import ConfigError, FormatError, StoreError

LOCK = Path(__file__).with_name("jars.lock")
S3_LOCK = Path(__file__).with_name("jars_s3.lock")
LOG_STORE = Path(__file__).with_name("ConditionalLogStore.scala")
MINIMUM_JAVA = 17
_RESOLVE_SECONDS = 600

_SETTINGS = """<ivysettings>
  <settings defaultResolver="central"/>
  <caches defaultCacheDir="{cache}"/>
  <resolvers><ibiblio name="central" m2compatible="true"/></resolvers>
</ivysettings>
"""
_MODULE = """<ivy-module version="2.0">
  <info organisation="opd" module="jars"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
{dependencies}
  </dependencies>
</ivy-module>
"""
_DEPENDENCY = (
    '    <dependency org="{group}" name="{artifact}" rev="{version}" transitive="false" conf="default->master"/>'
)


@dataclass(frozen=True)
class Jar:
    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"


def read_lock(path: Path = LOCK) -> tuple[Jar, ...]:
    """The pinned jars, in the order of the lock. Raises FormatError naming the line."""
    jars = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"([\w.-]+):([\w.-]+):([\w.-]+) ([0-9a-f]{64})", line)
        if match is None:
            raise FormatError(f"{path}, line {number}", expected="group:artifact:version sha256", found=repr(line))
        jars.append(Jar(*match.groups()))
    return tuple(jars)


def java() -> str:
    """The java command (JAVA_HOME first, then PATH). Raises ConfigError when there is none of version 17 or later."""
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home) / "bin" / "java") if home else "java"
    found = shutil.which(command)
    text = ""
    if found:
        text = subprocess.run([found, "-version"], capture_output=True, text=True, check=False).stderr
        version = re.search(r'version "(\d+)', text)
        if version and int(version.group(1)) >= MINIMUM_JAVA:
            return found
    raise ConfigError(
        f"Java ({'JAVA_HOME=' + home if home else 'PATH'})",
        expected=f"Java {MINIMUM_JAVA} or later: Spark runs on it",
        found=text.splitlines()[0] if text else f"no {command} command",
        safe="nothing was started",
        next_command=f"apt-get install openjdk-{MINIMUM_JAVA}-jre-headless (Debian, Ubuntu), "
        f"brew install openjdk@{MINIMUM_JAVA} (macOS), or set JAVA_HOME to an installed one",
    )


def fetch(folder: str | Path, progress: Callable[[str], None] = print, *, s3: bool = False) -> list[Path]:
    """Paths of the pinned jars inside `folder`; what is missing is resolved once, what is there is only checked.

    s3: also those of jars_s3.lock and the compiled log store, which only tables under s3:// need.

    Raises ConfigError without Java, StoreError when a jar cannot be resolved, FormatError when a jar's digest is not
    the pinned one (the file is left for inspection and not used).
    """
    folder = Path(folder).resolve()
    pinned = read_lock() + (read_lock(S3_LOCK) if s3 else ())
    missing = [jar for jar in pinned if not (folder / jar.file_name).exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        progress(f"jars: resolving {len(missing)} of {len(pinned)} ({26 if s3 else 13} MB in all) into {folder}")
        _resolve(missing, folder)
    for jar in pinned:
        _check(folder / jar.file_name, jar)
    progress(f"jars: {len(pinned)} present in {folder}, digests match the lock")
    return [folder / jar.file_name for jar in pinned] + ([_log_store(folder)] if s3 else [])


def _log_store(folder: Path) -> Path:
    """The compiled log store, named by its source: made once, in four seconds, and again when the source changes."""
    jar = folder / f"opd-log-store-{hashlib.sha256(LOG_STORE.read_bytes()).hexdigest()[:16]}.jar"
    if jar.exists():
        return jar
    libraries = os.pathsep.join([str(pyspark_home() / "jars" / "*"), *map(str, folder.glob("delta-storage-*.jar"))])
    with tempfile.TemporaryDirectory(prefix="opd-scala-", dir=folder) as scratch:
        made = Path(scratch) / jar.name
        command = [java(), "-cp", libraries, "scala.tools.nsc.Main", "-usejavacp", "-d", str(made), str(LOG_STORE)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise StoreError(
                f"compiling {LOG_STORE.name}", expected=f"{jar.name} in {folder}",
                found=_last_lines(run.stdout + run.stderr, 6), next_command="java -version; df -h",
            )  # fmt: skip
        os.replace(made, jar)
    return jar


def _check(path: Path, jar: Jar) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != jar.sha256:
        raise FormatError(
            str(path), expected=f"SHA-256 {jar.sha256}", found=found, safe="the jar was not used",
            next_command=f"rm '{path}' && {Path(sys.executable).name} -m infra.spark fetch-jars '{path.parent}'",
        )  # fmt: skip


def _resolve(jars: Sequence[Jar], folder: Path) -> None:
    libraries = pyspark_home() / "jars"
    class_path = os.pathsep.join(
        str(path) for pattern in ("ivy-*.jar", "commons-cli-*.jar") for path in sorted(libraries.glob(pattern))
    )
    with tempfile.TemporaryDirectory(prefix="opd-ivy-", dir=folder) as scratch_name:
        scratch = Path(scratch_name)
        (scratch / "settings.xml").write_text(_SETTINGS.format(cache=scratch / "cache"), encoding="utf-8")
        lines = [_DEPENDENCY.format(group=j.group, artifact=j.artifact, version=j.version) for j in jars]
        (scratch / "ivy.xml").write_text(_MODULE.format(dependencies="\n".join(lines)), encoding="utf-8")
        command = [
            java(), "-cp", class_path, "org.apache.ivy.Main", "-settings", str(scratch / "settings.xml"),
            "-ivy", str(scratch / "ivy.xml"), "-retrieve", str(scratch / "[artifact]-[revision].[ext]"),
        ]  # fmt: skip
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_RESOLVE_SECONDS, check=False)
            output, failed = run.stdout + run.stderr, run.returncode != 0
        except subprocess.TimeoutExpired:
            output, failed = f"no answer within {_RESOLVE_SECONDS} s", True
        for jar in jars:
            if failed or not (scratch / jar.file_name).exists():
                raise StoreError(
                    f"resolving {jar.group}:{jar.artifact}:{jar.version}",
                    expected="a jar from the central Maven repository", found=_last_lines(output, 6),
                    safe=f"jars already in {folder}",
                    next_command="check the network (Java takes -Dhttps.proxyHost from JAVA_TOOL_OPTIONS), or copy "
                    f"the jars that {LOCK.name} and {S3_LOCK.name} name into {folder}",
                )  # fmt: skip
            _check(scratch / jar.file_name, jar)
        # Two set-ups may race for one folder: a rename shows a jar whole or not at all.
        for jar in jars:
            os.replace(scratch / jar.file_name, folder / jar.file_name)


def _last_lines(text: str, count: int) -> str:
    return " | ".join(line.strip() for line in text.splitlines() if line.strip(" \t-:|"))[-200 * count :]


def pyspark_home() -> Path:
    """Folder of the installed pyspark, found without importing it."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigError("pyspark", expected="the pinned pyspark in this environment", found="none")
    return Path(spec.origin).parent
