"""The index of a writable layer: build times, counts and remembered failures, in diskcache. Build side only.

Nothing depends on it. Plans are found by name, checked by digest and evicted by mtime without it; losing it loses
statistics. So every fault in it is swallowed here, no wait in it is longer than a second or two, and loading a plan
never opens it. A database that is half made or damaged, as a full disk leaves it, is made anew by the next writer; one
that is busy, or has something foreign in it, is left alone.

diskcache as published unpickles what it finds in its database (CVE-2025-69872), opens and deletes files that a row
names, and sets any attribute of itself that the Settings table names; SQLite deletes the file that a planted rollback
journal names. So a database is examined before it is opened, and ``RawDisk`` keeps keys and values as plain text in
the row itself (tests/cache/test_index.py plants all of these).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import diskcache
from diskcache.core import DBNAME, DEFAULT_SETTINGS, METADATA, MODE_RAW

__all__ = ["Index", "RawDisk", "RefusedRowError"]

log = logging.getLogger("dsa_planner.cache")
WAIT_SECONDS = 1.0
_POLL_SECONDS = 0.01
_MAX_VALUE = 64 << 10  # characters
_MAX_MESSAGE = 4 << 10
_SETTINGS = {**DEFAULT_SETTINGS, "eviction_policy": "none", "cull_limit": 0}
_FILES = {DBNAME, f"{DBNAME}-wal", f"{DBNAME}-shm"}
_TABLES = {"Settings", "Cache"}
_NOT_DAMAGE = ("locked", "busy", "full", "readonly", "unable to open", "I/O error", "protocol", "memory", "interrupted")
"""In SQLite's messages: what is wrong with the moment or the place, and not with the database."""
COUNTS = ("built", "imported", "evicted", "quarantined")
_TOTALS = "totals"


class RefusedRowError(ValueError):
    """Something in the index that this project never writes: a pickle, a reference to a file, a foreign setting."""


class DamagedIndexError(ValueError):
    """A database that lacks something without which it cannot be used."""


class RawDisk(diskcache.Disk):  # type: ignore[misc]
    """Keys and values are str and stay in the database row; nothing is pickled, no file is opened or removed."""

    def put(self, key: Any) -> tuple[str, bool]:
        if type(key) is not str:
            raise RefusedRowError(f"index keys are str, not {type(key).__name__}")
        return key, True

    def get(self, key: Any, raw: Any) -> str:
        if not raw or type(key) is not str:
            raise RefusedRowError("an index row with a pickled or foreign key")
        return key

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, None, str]:
        if read or type(value) is not str or len(value) > _MAX_VALUE:
            raise RefusedRowError(f"index values are str of at most {_MAX_VALUE} characters")
        return 0, MODE_RAW, None, value

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> str:
        if mode != MODE_RAW or filename is not None or read or type(value) is not str:
            raise RefusedRowError("an index row with a pickled value or a reference to a file")
        return value

    def filename(self, key: Any = None, value: Any = None) -> tuple[str, str]:
        raise RefusedRowError("the index keeps no files")

    def remove(self, file_path: Any) -> None:
        """A row's file reference is never followed, so a planted one removes nothing."""
        log.warning("index row refers to the file %r; it is left alone", file_path)


class Index:
    """Statistics about the builds of one writable layer. One of these serves all threads of a process.

    Args:
        folder: the index's own folder inside the layer; created at the first write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._warned = False

    def record(
        self,
        published: tuple[str, str, float | None, int] | None = None,
        evicted: Sequence[tuple[str, str]] = (),
        quarantined: int = 0,
    ) -> None:
        """Note what happened to plans, and count it.

        Args:
            published: plan id, build id, seconds that it took to compile (None: it was imported), and bytes.
            evicted: plan and build ids; what was known of them is dropped.
            quarantined: damaged files that were set aside.
        """
        counts = {"built": 0, "imported": 0, "evicted": len(evicted), "quarantined": quarantined}
        if published is not None:
            counts["imported" if published[2] is None else "built"] += 1
        if not any(counts.values()):
            return

        def note(cache: diskcache.Cache) -> None:
            with cache.transact():
                if published is not None:
                    plan_id, build_id, seconds, size = published
                    value = {"seconds": seconds if seconds is None else round(seconds, 3), "bytes": size}
                    cache.set(f"build/{plan_id}/{build_id}", json.dumps(value))
                    cache.delete(f"failure/{plan_id}")
                for pair in evicted:
                    cache.delete("build/{}/{}".format(*pair))
                totals = _totals(cache.get(_TOTALS))
                cache.set(_TOTALS, json.dumps({name: totals[name] + count for name, count in counts.items()}))

        self._write(note)

    def record_failure(self, plan_id: str, build_id: str, message: str) -> None:
        """Note why the latest build of a plan failed."""
        value = {"build_id": build_id, "message": message[:_MAX_MESSAGE]}
        self._write(lambda cache: cache.set(f"failure/{plan_id}", json.dumps(value)))

    def totals(self) -> dict[str, int]:
        """How many plans were built, imported and evicted, and files quarantined, since the index was made."""
        return _totals(self._read_text(_TOTALS))

    def build(self, plan_id: str, build_id: str) -> dict[str, Any] | None:
        """What ``record`` noted of a build: seconds, None if it was imported, and bytes."""
        return self._read(f"build/{plan_id}/{build_id}")

    def failure(self, plan_id: str) -> str | None:
        """Why the latest build of a plan failed; None if it did not."""
        found = self._read(f"failure/{plan_id}")
        return str(found["message"]) if found and "message" in found else None

    def _open(self) -> diskcache.Cache:
        self._examine_folder()
        if (self.folder / DBNAME).exists():
            self._examine_database()
        cache = diskcache.Cache.__new__(diskcache.Cache)
        try:
            diskcache.Cache.__init__(cache, str(self.folder), timeout=WAIT_SECONDS, disk=RawDisk, **_SETTINGS)
        except BaseException:  # a full disk: what was opened by then would stay open until garbage is collected
            with contextlib.suppress(AttributeError):
                cache.close()
            raise
        return cache

    def _examine_place(self) -> None:
        """Refuse what is no folder of the layer."""
        # diskcache expands ~ and $ in the path that it is given, which could lead it out of the layer.
        if os.path.expandvars(os.path.expanduser(str(self.folder))) != str(self.folder):
            raise ValueError(f"{self.folder} contains ~ or $, which the index cannot use")
        if self.folder.is_symlink():
            raise RefusedRowError("it is a link")
        if self.folder.exists() and not self.folder.is_dir():
            raise RefusedRowError("it is not a folder")

    def _examine_folder(self) -> None:
        """Refuse a folder with something in it that this project does not put there."""
        self._examine_place()
        for name in os.listdir(self.folder):
            if name not in _FILES or not stat.S_ISREG((self.folder / name).lstat().st_mode):
                raise RefusedRowError(f"{name!r} is not a file of the index")

    def _examine_database(self) -> None:
        """Refuse a database with something in it that this project does not put there, that is busy, or half made.

        diskcache itself would wait a minute, several times over, for a database that somebody else is writing.
        """
        uri = f"file:{quote(str(self.folder / DBNAME))}?mode=rw"
        database = sqlite3.connect(uri, uri=True, timeout=WAIT_SECONDS, isolation_level=None)
        try:
            missing = set(_TABLES)
            for kind, name, table in database.execute("SELECT type, name, tbl_name FROM sqlite_master"):
                missing.discard(name)
                if (
                    kind not in ("table", "index", "trigger")
                    or table not in _TABLES
                    or (kind == "table" and name != table)
                ):
                    raise RefusedRowError(f"the database has the {kind} {name!r}")
            if missing:
                raise DamagedIndexError(f"it has no table {min(missing)}")
            missing = {*METADATA, *_SETTINGS}
            for key, value in database.execute("SELECT key, value FROM Settings"):
                missing.discard(key)
                if key not in METADATA and (key not in _SETTINGS or value != _SETTINGS[key]):
                    raise RefusedRowError(f"the database has the setting {key!r} = {value!r}")
            if missing:
                raise DamagedIndexError(f"it has no setting {min(missing)}")
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
        finally:
            database.close()

    def _write(self, action: Callable[[diskcache.Cache], object]) -> None:
        try:
            with self._lock, self._only_writer():
                damage = self._attempt(action)
                if damage is not None:  # the failed attempt's connection is closed by now
                    self._discard(damage)
                    with self._open() as cache:
                        action(cache)
        except RefusedRowError as error:
            level = logging.INFO if self._warned else logging.WARNING
            self._warned = True
            log.log(
                level, "index %s: %s, so it is not used; remove that folder, and it is made anew", self.folder, error
            )
        except Exception as error:
            log.info("index %s: %s; statistics of this build are lost", self.folder, error)

    def _attempt(self, action: Callable[[diskcache.Cache], object]) -> str | None:
        """Do something with the index; None, or what is wrong with the database if that kept it from being done."""
        try:
            with self._open() as cache:
                action(cache)
        except (sqlite3.Error, DamagedIndexError, UnicodeError) as error:  # the last, of a name in SQLite's message
            if isinstance(error, sqlite3.Error) and any(words in str(error) for words in _NOT_DAMAGE):
                raise
            return str(error)
        return None

    def _discard(self, damage: str) -> None:
        """Remove the database. Its files are regular ones, and of the names that the index uses."""
        self._examine_folder()
        try:
            for name in sorted(_FILES):
                (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise RefusedRowError(f"{damage}, and it cannot be made anew ({error.strerror})") from error
        log.warning("index %s: %s; it is made anew, and the statistics in it are lost", self.folder, damage)

    @contextlib.contextmanager
    def _only_writer(self) -> Iterator[None]:
        """Keep other writers out, so that none takes a database for half made that another is making.

        Raises:
            BlockingIOError: another one has the index for longer than a moment.
            RefusedRowError: it is no folder of the layer.
        """
        self._examine_place()
        self.folder.mkdir(mode=0o775, parents=True, exist_ok=True)  # never for everybody to write
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + WAIT_SECONDS
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_POLL_SECONDS)
                except OSError:  # a file system without locks of folders
                    break
            yield
        finally:
            os.close(descriptor)

    def _read(self, key: str) -> dict[str, Any] | None:
        return _object(self._read_text(key))

    def _read_text(self, key: str) -> str | None:
        try:
            if not (self.folder / DBNAME).exists():
                return None
            with self._lock, self._open() as cache:
                text: str | None = cache.get(key)
            return text
        except Exception as error:
            log.info("index %s: %s; its statistics are unknown", self.folder, error)
            return None


def _object(text: str | None) -> dict[str, Any] | None:
    """The JSON object in a row; None for no row, or anything else."""
    try:
        value = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _totals(text: str | None) -> dict[str, int]:
    found = _object(text) or {}
    return {name: value if type(value := found.get(name)) is int else 0 for name in COUNTS}
