"""The index never runs what it reads. Each planted row is one that diskcache itself would have followed."""

from __future__ import annotations

import pickle
import sqlite3
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
    index.record_build(PLAN, BUILD, 2.5, 1234)
    return index


def plant(index: Index, **columns: object) -> None:
    with sqlite3.connect(index.folder / "cache.db") as database:
        sets = ", ".join(f"{name} = ?" for name in columns)
        database.execute(f"UPDATE Cache SET {sets} WHERE key = ?", (*columns.values(), KEY))


def test_what_is_recorded_comes_back(index: Index) -> None:
    assert index.build(PLAN, BUILD) == {"seconds": 2.5, "bytes": 1234}
    index.record_failure(PLAN, "c" * 64, "it broke")
    assert index.failure(PLAN, "c" * 64) == "it broke"
    index.record_build(PLAN, "c" * 64, 1.0, 1)
    assert index.failure(PLAN, "c" * 64) is None
    index.forget(PLAN, BUILD)
    assert index.build(PLAN, BUILD) is None


def test_reading_creates_nothing(tmp_path: Path) -> None:
    assert Index(tmp_path / "none").build(PLAN, BUILD) is None
    assert not (tmp_path / "none").exists()


def test_values_lie_in_the_database_as_plain_text(index: Index) -> None:
    with sqlite3.connect(index.folder / "cache.db") as database:
        rows = database.execute("SELECT key, raw, mode, filename, value FROM Cache").fetchall()
    assert rows == [(KEY, 1, MODE_RAW, None, '{"seconds": 2.5, "bytes": 1234}')]
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
    index.record_build(PLAN, BUILD, 1.0, 1)  # replacing the row would have removed the old row's file
    plant(index, mode=mode, filename=filename, value=None)
    index.forget(PLAN, BUILD)
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


@pytest.mark.parametrize("content", [b"", b"not a database at all", b"SQLite format 3\0" + b"\xff" * 4000])
def test_damage_loses_statistics_and_raises_nothing(index: Index, content: bytes) -> None:
    for path in index.folder.iterdir():
        path.write_bytes(content)
    assert index.build(PLAN, BUILD) is None
    index.record_build(PLAN, BUILD, 1.0, 1)
    index.record_failure(PLAN, BUILD, "x")


def test_a_folder_that_cannot_be_used_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc/nothing"), tmp_path / "$HOME" / "index"):
        Index(folder).record_build(PLAN, BUILD, 1.0, 1)
        assert Index(folder).build(PLAN, BUILD) is None
