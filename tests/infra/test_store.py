"""One suite for every kind of store, then what only a folder can show: torn writes, full disks, leftovers."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra import store as infra_store
from infra import store_s3
from infra.store import ObjectStore, read_parts
from infra.store_local import LocalStore
from infra.stores import open_store
from schemas.errors import ConfigError, StoreError


def test_an_object_reads_back_whole_and_in_ranges(store: ObjectStore):
    data = os.urandom(300_001)
    store.put("a/b/object.bin", data)
    assert store.get("a/b/object.bin") == data
    info = store.head("a/b/object.bin")
    assert info is not None
    assert info.size_bytes == len(data)
    for start, length in [(0, 0), (0, 1), (7, 4096), (299_000, 1001), (300_000, 1), (300_001, 0)]:
        assert store.get_range("a/b/object.bin", start, length) == data[start : start + length]


def test_an_empty_object_is_an_object(store: ObjectStore):
    store.put("empty", b"")
    assert store.get("empty") == b""
    info = store.head("empty")
    assert info is not None
    assert info.size_bytes == 0
    assert not store.put_if_absent("empty", b"x")


@pytest.mark.parametrize("start", [0, 5, 10, 11])
def test_a_range_past_the_end_is_an_error_not_a_short_answer(store: ObjectStore, start: int):
    store.put("ten", b"0123456789")
    with pytest.raises(StoreError) as caught:
        store.get_range("ten", start, 11)
    assert "10 bytes" in caught.value.found


def test_put_replaces_and_put_if_absent_does_not(store: ObjectStore):
    store.put("k", b"one")
    store.put("k", memoryview(b"two"))
    assert store.get("k") == b"two"
    assert not store.put_if_absent("k", b"three")
    assert store.get("k") == b"two"
    assert store.put_if_absent("new/k", bytearray(b"four"))
    assert store.get("new/k") == b"four"


def test_parts_become_one_object(store: ObjectStore):
    store.put("k", [memoryview(b"one,"), b"", bytearray(b"two,"), memoryview(bytes(3)).cast("B")])
    assert store.get("k") == b"one,two,\0\0\0"
    store.put("k", [])
    assert store.get("k") == b""


MIB = 1 << 20


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 MiB, the least that S3 takes, so that an object of 13 MiB has three."""
    monkeypatch.setattr(store_s3, "_SINGLE_BYTES", 6 * MIB)
    monkeypatch.setattr(store_s3, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(infra_store, "PART_BYTES", 2 * MIB + 7)


@pytest.mark.parametrize("size", [6 * MIB + 1, 10 * MIB, 13 * MIB + 5, 20 * MIB - 1])
@pytest.mark.usefixtures("small_parts")
def test_a_large_object_is_the_bytes_of_its_pieces(store: ObjectStore, size: int):
    data = os.urandom(size)
    cuts = [0, 1, 4096, 4096, 5 * MIB - 1, 5 * MIB + 1, size]
    store.put("large", b"before")
    store.put("large", [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)])
    assert store.get("large") == data
    assert read_parts(store, "large", size) == data
    assert read_parts(store, "large", 3 * MIB) == data[: 3 * MIB]
    info = store.head("large")
    assert info is not None
    assert (info.size_bytes, info.digest) in ((size, None), (size, hashlib.sha256(data).hexdigest()))
    assert store.get_range("large", 5 * MIB - 3, 7) == data[5 * MIB - 3 : 5 * MIB + 4]
    assert store.unfinished_writes(0.0) == []
    store.put("large", data)
    assert store.get("large") == data


@pytest.mark.usefixtures("small_parts")
def test_what_is_read_in_parts_may_be_written(store: ObjectStore):
    store.put("k", b"abc")
    data = read_parts(store, "k", 3)
    data[0] = 120
    assert bytes(data) == b"xbc"
    assert bytes(read_parts(store, "k", 0)) == b""
    with pytest.raises(StoreError, match="3 bytes"):
        read_parts(store, "k", 4)


def test_identical_bytes_do_not_make_a_second_winner(store: ObjectStore):
    assert store.put_if_absent("same", b"same")
    assert not store.put_if_absent("same", b"same")


def test_a_missing_key_is_an_error_to_get_none_to_head_and_nothing_to_delete(store: ObjectStore):
    for read in (lambda: store.get("no/such"), lambda: store.get_range("no/such", 0, 1)):
        with pytest.raises(StoreError) as caught:
            read()
        assert "no/such" in caught.value.where
    assert store.head("no/such") is None
    store.delete("no/such")
    assert store.list("") == []


def test_delete_makes_the_key_free_again(store: ObjectStore):
    store.put("d/x", b"1")
    store.delete("d/x")
    assert store.head("d/x") is None
    assert store.list("d/") == []
    assert store.put_if_absent("d/x", b"2")


def test_list_is_whole_beyond_a_page_of_a_thousand(store: ObjectStore):
    names = [f"many/{i:04d}" for i in range(1003)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, b""), reversed(names)))
    assert store.list("many/") == names


def test_list_takes_any_prefix_and_sorts(store: ObjectStore):
    names = ["p/1", "p/10", "p/2/deep/er", "p/2", "q", "pq/x", "é/☃"]
    names.remove("p/2")  # a key cannot also be a folder in a local store
    for name in reversed(names):
        store.put(name, b"")
    assert store.list("") == sorted(names)
    assert store.list("p") == ["p/1", "p/10", "p/2/deep/er", "pq/x"]
    assert store.list("p/") == ["p/1", "p/10", "p/2/deep/er"]
    assert store.list("p/1") == ["p/1", "p/10"]
    assert store.list("p/2/") == ["p/2/deep/er"]
    assert store.list("é/") == ["é/☃"]
    assert store.list("nothing/") == []


@pytest.mark.parametrize(
    "key", ["", "/", "/abs", "a//b", "a/", "..", "a/../b", "./a", "a\nb", "a\0b", "a\\b", ".tmp/x", "\ud800", "x" * 300]
)
def test_keys_that_would_leave_the_root_are_refused(store: ObjectStore, key: str):
    for call in (
        store.get,
        store.head,
        store.delete,
        lambda k: store.put(k, b""),
        lambda k: store.put_if_absent(k, b""),
    ):
        with pytest.raises(ConfigError):
            call(key)


def test_eight_threads_race_and_one_wins(store: ObjectStore):
    # The S3 server under test makes losers of one moment wait for seconds.
    for round_index in range(6 if store.root.startswith("s3:") else 60):
        key = f"race/{round_index}"
        barrier = threading.Barrier(8)
        won: list[int] = []

        def contend(index: int, key: str = key, barrier: threading.Barrier = barrier, won: list[int] = won) -> None:
            barrier.wait()
            if store.put_if_absent(key, b"%d" % index * 1000):
                won.append(index)

        threads = [threading.Thread(target=contend, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get(key) == b"%d" % won[0] * 1000


_CONTENDER = """
import sys, time
from infra.stores import open_store
store, me, rounds = open_store(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store.put(f"ready/{me}", b"")
while len(store.list("ready/")) < 4:
    time.sleep(0.005)
print(*(r for r in range(rounds) if store.put_if_absent(f"race/{r}", me.encode())))
"""


def test_four_processes_race_two_hundred_rounds_and_each_has_one_winner(store: ObjectStore):
    rounds = 200
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", _CONTENDER, store.root, str(i), str(rounds)], stdout=subprocess.PIPE, text=True
        )
        for i in range(4)
    ]
    winner_of: dict[int, int] = {}
    for index, process in enumerate(contenders):
        answer, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        for won in map(int, answer.split()):
            assert won not in winner_of, "two winners"
            winner_of[won] = index
    assert sorted(winner_of) == list(range(rounds))
    for number in range(0, rounds, 17):
        assert store.get(f"race/{number}") == b"%d" % winner_of[number]


@pytest.mark.parametrize("root", ["", "gs://bucket/x", "s3://", "s3:///prefix"])
def test_a_root_of_no_known_kind_is_a_config_error(root: str):
    with pytest.raises(ConfigError):
        open_store(root)


def test_what_is_being_written_is_never_listed(tmp_path: Path):
    store = LocalStore(tmp_path)
    store.put("a", b"1")
    (tmp_path / ".tmp" / "leftover").write_bytes(b"half")
    assert store.list("") == ["a"]


def test_a_key_below_an_object_or_on_a_folder_is_explained(tmp_path: Path):
    store = LocalStore(tmp_path)
    store.put("a", b"1")
    store.put("folder/x", b"1")
    for call in (
        lambda: store.put("a/b", b""),
        lambda: store.put_if_absent("folder", b""),
        lambda: store.get("folder"),
    ):
        with pytest.raises(StoreError):
            call()
    assert store.list("") == ["a", "folder/x"]
    assert store.get("a") == b"1"


def _in_child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


def test_a_disk_that_fills_in_the_middle_leaves_nothing_behind(tmp_path: Path):
    """A file size limit makes the kernel write a part and then refuse, as a full disk does."""
    LocalStore(tmp_path).put("old", b"old")
    code = """
import resource, signal, sys
from pathlib import Path
from infra.store_local import LocalStore
from schemas.errors import StoreError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
store = LocalStore(Path(sys.argv[1]))
for call in (store.put, store.put_if_absent):
    for key in ("old", "new"):
        try:
            call(key, bytes(200_000))
        except StoreError as error:
            print("refused", key, "free space" in error.next_command)
"""
    done = _in_child(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    # put_if_absent of "old" is answered False without writing anything.
    assert done.stdout.split("\n")[:-1] == ["refused old True", "refused new True", "refused new True"]
    store = LocalStore(tmp_path)
    assert store.list("") == ["old"]
    assert store.get("old") == b"old"
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_a_failed_fsync_is_an_error_and_leaves_the_old_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = LocalStore(tmp_path)
    store.put("k", b"old")

    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("infra.store_local.os.fsync", broken)
    with pytest.raises(StoreError):
        store.put("k", b"new")
    with pytest.raises(StoreError):
        store.put_if_absent("n", b"new")
    monkeypatch.undo()
    assert store.get("k") == b"old"
    assert store.list("") == ["k"]


def test_sigkill_at_any_moment_shows_whole_objects_only(tmp_path: Path):
    code = """
import sys
from pathlib import Path
from infra.store_local import LocalStore
store = LocalStore(Path(sys.argv[1]))
print(flush=True)
for n in range(10**9):
    store.put("replaced", bytes([n % 251]) * 500_000)
    store.put_if_absent(f"made/{n}", bytes([n % 251]) * 500_000)
    print(n, flush=True)
"""
    for attempt in range(6):
        writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / str(attempt))], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        threading.Event().wait(0.02 + 0.031 * attempt)
        writer.send_signal(signal.SIGKILL)
        acknowledged = writer.stdout.read().split()
        writer.wait()
        store = LocalStore(tmp_path / str(attempt))
        made = store.list("made/")
        assert len(made) >= len(acknowledged)
        for key in [*made, *store.list("replaced")]:
            data = store.get(key)
            assert len(data) == 500_000
            assert len(set(data)) == 1


def test_a_read_only_folder_is_explained(tmp_path: Path):
    if os.geteuid() == 0:  # root writes anywhere: give up that right in a child
        code = """
import os, sys
from pathlib import Path
from infra.store_local import LocalStore
from schemas.errors import StoreError
os.setgid(65534); os.setuid(65534)
try:
    LocalStore(Path(sys.argv[1])).put("k", b"")
except StoreError as error:
    print(error)
"""
        tmp_path.chmod(0o555)
        for parent in tmp_path.parents:
            if parent == Path("/tmp"):
                break
            parent.chmod(0o755)
        done = _in_child(code, str(tmp_path))
        text = done.stdout
    else:
        tmp_path.chmod(0o555)
        with pytest.raises(StoreError) as caught:
            LocalStore(tmp_path).put("k", b"")
        text = str(caught.value)
    assert "may read and write" in text
