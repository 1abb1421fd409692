"""The pinned jars and Java, with stand-ins for the java command; nothing here touches the network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from infra import jars
from schemas.errors import ConfigError, FormatError, StoreError
from tests.support.spark_session import JARS


def fake_java(folder: Path, script: str) -> None:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "java").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / "java").chmod(0o755)


VERSION_17 = """[ "$1" = -version ] && { echo 'openjdk version "17.0.1" 2021-10-19' >&2; exit 0; }"""


def test_the_lock_names_the_jars_of_the_installed_delta() -> None:
    from importlib.metadata import version

    pinned = jars.read_lock()
    assert {jar.version for jar in pinned} == {version("delta-spark")}
    assert pinned[0].artifact == f"delta-spark_{'.'.join(version('pyspark').split('.')[:2])}_2.13"
    assert len(pinned) == 5


def test_the_s3_jars_fit_the_hadoop_inside_pyspark() -> None:
    hadoop = next((jars.pyspark_home() / "jars").glob("hadoop-client-api-*.jar")).stem.rpartition("-")[2]
    pinned = {jar.artifact: jar.version for jar in jars.read_lock(jars.S3_LOCK)}
    assert pinned["hadoop-aws"] == hadoop
    assert "bundle" not in pinned
    assert len({jar.version for jar in jars.read_lock(jars.S3_LOCK) if jar.group == "software.amazon.awssdk"}) == 1


@pytest.mark.parametrize("line", ["io.delta:x:1", "io.delta:x:1 0123", "io.delta:x " + "0" * 64, " "])
def test_a_line_of_the_lock_that_is_none_is_named(line: str, tmp_path: Path) -> None:
    lock = tmp_path / "jars.lock"
    lock.write_text(f"# comment\n\nio.delta:x:1 {'0' * 64}\n{line}\n")
    with pytest.raises(FormatError, match="line 4"):
        jars.read_lock(lock)


def test_jars_that_are_there_need_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(JARS, tmp_path / "jars")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    paths = jars.fetch(tmp_path / "jars", progress=lambda _: None)
    assert [path.name for path in paths] == [jar.file_name for jar in jars.read_lock()]


def test_a_jar_with_another_digest_is_refused_and_kept(tmp_path: Path) -> None:
    shutil.copytree(JARS, tmp_path / "jars")
    damaged = tmp_path / "jars" / jars.read_lock()[2].file_name
    damaged.write_bytes(damaged.read_bytes()[:-1])
    size = damaged.stat().st_size
    with pytest.raises(FormatError, match=damaged.name):
        jars.fetch(tmp_path / "jars", progress=lambda _: None)
    assert damaged.stat().st_size == size


@pytest.mark.parametrize(
    ("script", "found"),
    [(None, "no .* command"), ("echo 'openjdk version \"11.0.2\"' >&2", "11.0.2"), ("exit 3", "no .* command")],
)
def test_java_that_is_missing_or_old(
    script: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    if script is not None:
        fake_java(tmp_path / "java", script)
    with pytest.raises(ConfigError, match=f"(?s)Java 17 or later.*{found}.*openjdk-17"):
        jars.java()


def test_java_17_is_taken_from_java_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "java", VERSION_17)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    assert jars.java() == str(tmp_path / "java" / "bin" / "java")


@pytest.mark.parametrize("script", ["echo UNRESOLVED DEPENDENCY; exit 1", "exit 0"])
def test_a_jar_that_cannot_be_resolved_leaves_nothing_behind(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(tmp_path / "java", f"{VERSION_17}\n{script}")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    with pytest.raises(StoreError, match=r"io.delta:delta-spark_4.2_2.13:4.4.0"):
        jars.fetch(tmp_path / "jars", progress=lambda _: None)
    assert list((tmp_path / "jars").iterdir()) == []
