"""The index never runs what it reads. Each planted row is one that diskcache itself would have followed."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import diskcache
import pytest
from diskcache.core import MODE_BINARY, MODE_PICKLE, MODE_RAW, MODE_TEXT

from dsa_planner.cache.index import Index, RawDisk, RefusedRowError

PLAN, BUILD = "a" * 64, "b" * 64
KEY = f"build/{PLAN}/{BUILD}"


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.write_text, (self.target, "exploded")


@pytest.fixture
def index(tmp_path: Path) -> Index:
    index = Index(tmp_path / "index")
    index.record((PLAN, BUILD, 2.5, 1234))
    return index


def plant(index: Index, **columns: object) -> None:
    with sqlite3.connect(index.folder / "cache.db") as database:
        sets = ", ".join(f"{name} = ?" for name in columns)
        database.execute(f"UPDATE Cache SET {sets} WHERE key = ?", (*columns.values(), KEY))


def test_what_is_recorded_comes_back(index: Index) -> None:
    assert index.build(PLAN, BUILD) == {"seconds": 2.5, "bytes": 1234}
    index.record_failure(PLAN, "c" * 64, "it broke")
    assert index.failure(PLAN) == "it broke"
    index.record((PLAN, "c" * 64, 1.0, 1))
    assert index.failure(PLAN) is None
    index.record(evicted=[(PLAN, BUILD)])
    assert index.build(PLAN, BUILD) is None


def test_reading_creates_nothing(tmp_path: Path) -> None:
    assert Index(tmp_path / "none").build(PLAN, BUILD) is None
    assert not (tmp_path / "none").exists()


def test_values_lie_in_the_database_as_plain_text(index: Index) -> None:
    with sqlite3.connect(index.folder / "cache.db") as database:
        rows = database.execute("SELECT key, raw, mode, filename, value FROM Cache").fetchall()
    totals = '{"built": 1, "imported": 0, "evicted": 0, "quarantined": 0}'
    assert rows == [
        (KEY, 1, MODE_RAW, None, '{"seconds": 2.5, "bytes": 1234}'),
        ("totals", 1, MODE_RAW, None, totals),
    ]
    assert [path.name for path in index.folder.iterdir() if path.suffix == ".val"] == []


def test_a_planted_pickle_is_not_loaded(index: Index, tmp_path: Path) -> None:
    plant(index, mode=MODE_PICKLE, value=pickle.dumps(Bomb(tmp_path / "exploded")))
    assert index.build(PLAN, BUILD) is None
    assert not (tmp_path / "exploded").exists()
    with diskcache.Cache(str(index.folder)) as unsafe:  # the same row, read by diskcache as published
        unsafe.get(KEY)
    assert (tmp_path / "exploded").exists(), "the planted row would not have exploded, so this test proves nothing"


def test_a_planted_pickle_in_a_file_is_not_loaded(index: Index, tmp_path: Path) -> None:
    (tmp_path / "bomb.val").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    plant(index, mode=MODE_PICKLE, value=None, filename="../bomb.val")
    assert index.build(PLAN, BUILD) is None
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("mode", [MODE_BINARY, MODE_TEXT, MODE_RAW])
@pytest.mark.parametrize("filename", ["../secret", "/etc/hostname"])
def test_a_planted_path_is_neither_read_nor_removed(index: Index, tmp_path: Path, mode: int, filename: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"seconds": 1}')
    plant(index, mode=mode, filename=filename, value=None)
    assert index.build(PLAN, BUILD) is None
    index.record((PLAN, BUILD, 1.0, 1))  # replacing the row would have removed the old row's file
    plant(index, mode=mode, filename=filename, value=None)
    index.record(evicted=[(PLAN, BUILD)])
    assert secret.exists()
    assert Path("/etc/hostname").exists()


def test_a_planted_pickled_key_is_not_loaded(index: Index, tmp_path: Path) -> None:
    plant(index, raw=0, key=pickle.dumps(Bomb(tmp_path / "exploded")))
    with index._open() as cache, pytest.raises(RefusedRowError):
        list(cache)
    assert not (tmp_path / "exploded").exists()


def test_only_text_goes_in() -> None:
    disk = RawDisk("/nowhere")
    for key in (1, b"x", ("a",), None):
        with pytest.raises(RefusedRowError):
            disk.put(key)
    for value in (1, b"x", {"a": 1}, None, "x" * 100_000):
        with pytest.raises(RefusedRowError):
            disk.store(value, False)
    with pytest.raises(RefusedRowError):
        disk.store("x", True)
    with pytest.raises(RefusedRowError):
        disk.filename()
    for row in ((MODE_RAW, "x.val", "text", False), (MODE_RAW, None, b"x", False), (MODE_RAW, None, "x", True)):
        with pytest.raises(RefusedRowError):
            disk.fetch(*row)


@pytest.mark.parametrize(
    "key",
    [
        "_directory",
        "directory",
        "_disk",
        "disk",
        "_con",
        "_local",
        "timeout",
        "_sql_retry",
        "sqlite_x",
        "disk_x",
        "_timeout",
    ],
)
def test_a_planted_setting_is_not_obeyed(index: Index, tmp_path: Path, key: str) -> None:
    """diskcache sets every attribute of itself that this table names, its folder among them."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with sqlite3.connect(index.folder / "cache.db") as database:
        database.execute("INSERT INTO Settings VALUES (?, ?)", (key, str(elsewhere)))
    index.record((PLAN, "c" * 64, 1.0, 1))
    assert index.build(PLAN, BUILD) is None
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"), [("sqlite_journal_mode", "delete"), ("eviction_policy", "least-recently-used")]
)
def test_a_changed_setting_is_refused(index: Index, key: str, value: str) -> None:
    with sqlite3.connect(index.folder / "cache.db") as database:
        database.execute("UPDATE Settings SET value = ? WHERE key = ?", (value, key))
    assert index.build(PLAN, BUILD) is None


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW Extra AS SELECT 1",
        "CREATE TABLE Extra (a)",
        "CREATE TRIGGER extra AFTER INSERT ON Extra BEGIN SELECT 1; END",
    ],
)
def test_a_foreign_table_is_refused(index: Index, statement: str) -> None:
    with sqlite3.connect(index.folder / "cache.db") as database:
        if "Extra BEGIN" in statement:
            database.execute("CREATE TABLE Extra (a)")
        database.execute(statement)
    assert index.build(PLAN, BUILD) is None


def plant_journal(folder: Path, victim: Path) -> None:
    """A rollback journal as of a transaction over several databases, which names ``victim`` as the file they share.

    SQLite plays it back at the next opening, and then removes the file that it names (sqlite.org: fileformat2, section
    3, and lockingv3, section 5).
    """
    with sqlite3.connect(folder / "cache.db") as database:
        database.execute("PRAGMA journal_mode = delete")
        ((pages,),) = database.execute("PRAGMA page_count")
        ((page_size,),) = database.execute("PRAGMA page_size")
    database.close()
    magic, sector, name = bytes.fromhex("d9d505f920a163d7"), 512, str(victim).encode()
    header = magic + struct.pack(">IIIII", 0, 0x1234, pages, sector, page_size)
    tail = struct.pack(">I", 0x40000000 // page_size + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    (folder / "cache.db-journal").write_bytes(header.ljust(sector, b"\0") + tail)


def test_a_planted_journal_removes_no_file(index: Index, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    plant_journal(index.folder, victim)
    index.record((PLAN, BUILD, 1.0, 1))
    assert index.build(PLAN, BUILD) is None
    assert victim.exists()
    with sqlite3.connect(index.folder / "cache.db") as database:  # SQLite itself, with the same journal
        database.execute("SELECT * FROM Cache").fetchall()
    assert not victim.exists(), "the planted journal would not have removed it, so this test proves nothing"


@pytest.mark.parametrize("name", ["cache.db", "cache.db-wal", "cache.db-shm"])
def test_a_link_to_another_database_is_not_followed(index: Index, tmp_path: Path, name: str) -> None:
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE users (name)")
    before = other.read_bytes()
    (index.folder / name).unlink(missing_ok=True)
    (index.folder / name).symlink_to(other)
    index.record((PLAN, BUILD, 1.0, 1))
    assert index.build(PLAN, BUILD) is None
    assert other.read_bytes() == before
    folder = Index(tmp_path / "linked")
    folder.folder.symlink_to(tmp_path)
    folder.record((PLAN, BUILD, 1.0, 1))
    assert not (tmp_path / "cache.db").exists()


@pytest.mark.parametrize("mode", ["EXCLUSIVE", "NORMAL"])
def test_a_database_that_somebody_holds_costs_seconds_not_minutes(index: Index, mode: str) -> None:
    holder = sqlite3.connect(index.folder / "cache.db", isolation_level=None)
    holder.execute(f"PRAGMA locking_mode = {mode}")
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("UPDATE Settings SET value = value")
    started = time.monotonic()
    index.record((PLAN, BUILD, 1.0, 1))
    assert index.build(PLAN, BUILD) is None
    assert time.monotonic() - started < 10
    holder.execute("ROLLBACK")
    holder.close()
    assert index.build(PLAN, BUILD) == {"seconds": 2.5, "bytes": 1234}


@pytest.mark.parametrize("value", ["[" * 60_000, "7", "{", '"text"', '{"seconds": 1e999'])
def test_a_planted_value_is_no_statistic(index: Index, value: str) -> None:
    plant(index, value=value)
    assert index.build(PLAN, BUILD) is None


def test_threads_lose_nothing(tmp_path: Path) -> None:
    index = Index(tmp_path / "index")
    names = [f"{n:064x}" for n in range(12)]
    threads = [threading.Thread(target=index.record, args=((name, BUILD, 1.0, 1),)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(index.build(name, BUILD) for name in names)


@pytest.mark.parametrize("content", [b"", b"not a database at all", b"SQLite format 3\0" + b"\xff" * 4000])
def test_damage_loses_statistics_and_raises_nothing(index: Index, content: bytes) -> None:
    for path in index.folder.iterdir():
        path.write_bytes(content)
    assert index.build(PLAN, BUILD) is None
    index.record((PLAN, BUILD, 1.0, 1))
    index.record_failure(PLAN, BUILD, "x")


def half_made(path: Path) -> None:
    """What a full disk leaves of a new database: a header and no table."""
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA journal_mode = wal")
    database.close()
    assert path.stat().st_size == 4096


def without(statement: str) -> Callable[[Path], None]:
    """A database that lacks something."""

    def change(path: Path) -> None:
        with sqlite3.connect(path) as database:
            database.execute(statement)
        database.close()

    return change


def overwrite(path: Path) -> None:
    """The header stays, and the pages are gone."""
    path.write_bytes(path.read_bytes()[:4096].ljust(path.stat().st_size, b"\xff"))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "half made": half_made,
    "empty": Path.touch,
    "no database": lambda path: path.write_bytes(b"not a database at all"),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "overwritten": overwrite,
    "unreadable names": lambda path: path.write_bytes(path.read_bytes().replace(b"Settings", b"\xff" * 8)),
    "no table of values": without("DROP TABLE Cache"),
    "no table of settings": without("DROP TABLE Settings"),
    "a table of other columns": without("ALTER TABLE Cache RENAME COLUMN value TO other"),
    "a setting less": without("DELETE FROM Settings WHERE key = 'sqlite_journal_mode'"),
    "a count less": without("DELETE FROM Settings WHERE key = 'count'"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_what_is_damaged_is_made_anew_by_the_next_writer_and_by_no_reader(
    index: Index, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    path = index.folder / "cache.db"
    if how in ("half made", "empty"):
        path.unlink()
    DAMAGE[how](path)
    before = (path.stat().st_ino, path.stat().st_size)
    reader = Index(index.folder)
    assert reader.build(PLAN, "c" * 64) is None
    assert reader.failure(PLAN) is None
    assert (path.stat().st_ino, path.stat().st_size) == before
    assert caplog.text == ""
    index.record((PLAN, "c" * 64, 1.0, 1))
    assert index.build(PLAN, "c" * 64) == {"seconds": 1.0, "bytes": 1}
    (warning,) = caplog.messages
    assert warning.startswith(f"index {index.folder}: ")
    assert warning.endswith("; it is made anew, and the statistics in it are lost")
    assert {file.name for file in index.folder.iterdir()} <= {"cache.db", "cache.db-wal", "cache.db-shm"}


def test_a_database_that_a_full_disk_cut_short_is_no_longer_one_when_there_is_room(tmp_path: Path) -> None:
    """A limit of the file's size is as good as a full disk: at every one of them SQLite stops somewhere else."""
    script = (
        "import resource, sys; from pathlib import Path; from dsa_planner.cache.index import Index\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))\n"
        "Index(Path(sys.argv[1])).record(('a' * 64, 'b' * 64, 1.0, 1))"
    )
    left = set()
    for limit in range(0, 40_000, 4000):
        folder = tmp_path / str(limit)
        subprocess.run([sys.executable, "-c", script, str(folder), str(limit)], check=True)
        left.add(sum(file.stat().st_size for file in folder.iterdir()))
        Index(folder).record((PLAN, BUILD, 2.5, 1234))
        assert Index(folder).build(PLAN, BUILD) == {"seconds": 2.5, "bytes": 1234}
    assert len(left) > 2, "the limits left the same each time, so this test proves little"


@pytest.mark.parametrize("name", ["cache.db-journal", "notes"])
def test_what_is_refused_is_named_once_and_left_alone(
    index: Index, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (index.folder / "cache.db").unlink()
    half_made(index.folder / "cache.db")
    (index.folder / name).write_text("foreign")
    before = {path.name: path.read_bytes() for path in index.folder.iterdir()}
    for _ in range(2):
        index.record((PLAN, "c" * 64, 1.0, 1))
    assert caplog.messages == [
        f"index {index.folder}: {name!r} is not a file of the index, so it is not used; "
        "remove that folder, and it is made anew"
    ]
    assert {path.name: path.read_bytes() for path in index.folder.iterdir()} == before


def test_writers_in_several_processes_do_not_take_each_others_index_for_damaged(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from dsa_planner.cache import index\n"
        "index.WAIT_SECONDS = 30.0; time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "index.Index(Path(sys.argv[1])).record((sys.argv[3], 'b' * 64, 1.0, 1))"
    )
    names = [f"{n:064x}" for n in range(6)]
    start = str(time.time() + 2)
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "index"), start, name], stderr=subprocess.PIPE)
        for name in names
    ]
    assert [writer.communicate()[1] for writer in writers] == [b""] * len(names)
    assert all(Index(tmp_path / "index").build(name, BUILD) for name in names)


def test_a_writer_waits_a_moment_for_another_and_no_longer(index: Index) -> None:
    descriptor = os.open(index.folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    started = time.monotonic()
    index.record((PLAN, "c" * 64, 1.0, 1))
    assert time.monotonic() - started < 5
    assert index.build(PLAN, "c" * 64) is None
    assert index.build(PLAN, BUILD) == {"seconds": 2.5, "bytes": 1234}
    os.close(descriptor)
    index.record((PLAN, "c" * 64, 1.0, 1))
    assert index.build(PLAN, "c" * 64) == {"seconds": 1.0, "bytes": 1}


def test_a_file_system_without_locks_still_keeps_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    index = Index(tmp_path / "index")
    index.record((PLAN, BUILD, 1.0, 1))
    assert index.build(PLAN, BUILD) == {"seconds": 1.0, "bytes": 1}


def test_damage_that_cannot_be_removed_is_named(
    index: Index, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (index.folder / "cache.db").write_bytes(b"not a database at all")
    monkeypatch.setattr(Path, "unlink", unlink)
    index.record((PLAN, BUILD, 1.0, 1))
    (warning,) = caplog.messages
    assert warning.startswith(f"index {index.folder}: file is not a database, and it cannot be made anew (Permission ")


def test_a_folder_that_cannot_be_used_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc/nothing"), tmp_path / "$HOME" / "index"):
        Index(folder).record((PLAN, BUILD, 1.0, 1))
        assert Index(folder).build(PLAN, BUILD) is None
