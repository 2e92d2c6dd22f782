"""The index of a writable layer: build times and remembered failures, in diskcache. Build side only.

Nothing depends on it. Plans are found by name, checked by digest and evicted by mtime without it; losing it loses
statistics. So every fault in it is swallowed here, and reading a plan never opens it.

diskcache as published unpickles what it finds in its database (CVE-2025-69872) and opens and deletes files that a row
names. ``RawDisk`` does neither: values and keys are plain text in the row itself, and a row that says otherwise is
refused (tests/cache/test_index.py plants such rows).
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import diskcache
from diskcache.core import MODE_RAW

__all__ = ["Index", "RawDisk", "RefusedRowError"]

log = logging.getLogger("dsa_planner.cache")
_FAULTS = (OSError, sqlite3.Error, diskcache.Timeout, ValueError, TypeError)
_MAX_VALUE = 64 << 10
T = TypeVar("T")


class RefusedRowError(ValueError):
    """A row of the index database that this project never writes: a pickle, or a reference to a file."""


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
    """Statistics about the builds of one writable layer.

    Args:
        folder: the index's own folder inside the layer; created at the first write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def record_build(self, plan_id: str, build_id: str, seconds: float, size: int) -> None:
        """Note a finished build, and forget failures of the plan."""
        value = {"seconds": round(seconds, 3), "bytes": size}
        self._write(
            lambda cache: (
                cache.set(f"build/{plan_id}/{build_id}", json.dumps(value)),
                cache.delete(f"failure/{plan_id}/{build_id}"),
            )
        )

    def record_failure(self, plan_id: str, build_id: str, message: str) -> None:
        """Note why a build failed."""
        self._write(lambda cache: cache.set(f"failure/{plan_id}/{build_id}", json.dumps({"message": message[:4096]})))

    def forget(self, plan_id: str, build_id: str) -> None:
        """Drop what is known of a build, for example after its eviction."""
        self._write(
            lambda cache: (cache.delete(f"build/{plan_id}/{build_id}"), cache.delete(f"failure/{plan_id}/{build_id}"))
        )

    def build(self, plan_id: str, build_id: str) -> dict[str, Any] | None:
        """What ``record_build`` noted: seconds and bytes."""
        return self._read(f"build/{plan_id}/{build_id}")

    def failure(self, plan_id: str, build_id: str) -> str | None:
        """The message that ``record_failure`` noted."""
        found = self._read(f"failure/{plan_id}/{build_id}")
        return str(found["message"]) if found and "message" in found else None

    def _open(self) -> diskcache.Cache:
        # diskcache expands ~ and $ in the path that it is given, which could lead it out of the layer.
        if os.path.expandvars(os.path.expanduser(str(self.folder))) != str(self.folder):
            raise ValueError(f"{self.folder} contains ~ or $, which the index cannot use")
        return diskcache.Cache(
            str(self.folder), timeout=5, disk=RawDisk, eviction_policy="none", cull_limit=0, statistics=0, tag_index=0
        )

    def _write(self, action: Callable[[diskcache.Cache], object]) -> None:
        try:
            with self._open() as cache:
                action(cache)
        except _FAULTS as error:
            log.info("index %s: %s; statistics of this build are lost", self.folder, error)

    def _read(self, key: str) -> dict[str, Any] | None:
        if not (self.folder / "cache.db").exists():
            return None
        try:
            with self._open() as cache:
                text = cache.get(key)
            value = json.loads(text) if text is not None else None
            return value if isinstance(value, dict) else None
        except _FAULTS as error:
            log.info("index %s: %s; its statistics are unknown", self.folder, error)
            return None
