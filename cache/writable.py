"""The writable layer: publish, recency, eviction. Build side, except that the run side reads it as a
``RecordingLayer``.

* **Publish** writes a temporary file in the layer, syncs it, and renames it to its name. A reader sees the whole file
  or none; a killed writer leaves a temporary file and nothing else. The bytes of a name never depend on who wrote
  them, so two writers of one plan cannot disagree.
* **Recency** is the plan file's mtime, set at publish and at each hit, best effort. It needs no index and no lock.
* **Eviction** is exact least-recently-used by bytes: as many of the oldest files as needed, no more, under a lock that
  only evictors take.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsa_planner.cache.layer import PLANS, Entry, Layer, read_bounded
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.errors import CacheError, PlanFileError, remedy_of

__all__ = ["Published", "RecordingLayer", "WritableLayer"]

_TAG_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"
_CACHEDIR_TAG = _TAG_SIGNATURE + b"\n# Compiled GPU kernel plans of dsa-planner; safe to delete.\n"
log = logging.getLogger("dsa_planner.cache")
_RENAME_ATTEMPTS = 8
LOCK_SECONDS = 10
TEMPORARY_SECONDS = 3600  # no writer takes so long
QUARANTINED = 16  # files


class RecordingLayer(Layer):
    """A layer that is somebody's writable one: hits are recorded in it, as far as it can be written."""

    writable = True

    def _used(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            os.utime(path)


@dataclass(frozen=True)
class Published:
    """What publishing did: the plan's entry, and what had to go for it."""

    entry: Entry
    evicted: tuple[Entry, ...]


class WritableLayer(RecordingLayer):
    """The layer that plans are built into.

    Args:
        root: its folder, created at the first publish.
        limit_bytes: bound of the plan files' sizes together.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        super().__init__(root)
        self.limit_bytes = limit_bytes

    def publish(self, plan: PlanFile, keep: Collection[Path] = ()) -> Published:
        """Write a plan, and evict others down to the limit.

        Args:
            plan: the plan.
            keep: plan files that must not be evicted for it, such as those of the same request.

        Raises:
            CacheError: the layer cannot be written (no permission, no room, not a folder), or its limit has no room for
            the plan beside those to keep. Nothing is left behind and nothing is evicted. Trouble with the eviction is
            a warning: the plan is there.
        """
        data = plan.encode()
        target = self.path_of(plan.plan_id, plan.build_id)
        with self._errors("write", target):
            self._create()
            self._require_room(plan, len(data), [path for path in keep if path != target])
            with self._temporary(plan.plan_id[:16]) as temporary:
                used_ns = _write_synced(temporary, data)
                _rename_into(temporary, target)
        entry = Entry(plan.plan_id, plan.build_id, target, len(data), used_ns)
        try:
            return Published(entry, tuple(self.evict(self.limit_bytes, {*keep, target})))
        except CacheError as error:  # the plan is there all the same
            log.warning("%s", error)
            return Published(entry, ())

    def _examine(self) -> None:
        """``prepare`` says what is wrong with a layer that is to be written."""

    def evict(self, limit_bytes: int, keep: Collection[Path] = (), dry_run: bool = False) -> list[Entry]:
        """Remove least-recently-used plans until the layer holds at most ``limit_bytes``; return what was (or would be)
        removed, in order. The files to ``keep`` stay. One that cannot be removed is named in a warning and stays.

        Raises:
            CacheError: the layer cannot be locked.
        """
        if sum(entry.bytes for entry in self.entries()) <= limit_bytes:
            return []
        removed: list[Entry] = []
        with self._errors("lock", self.root / "lock"), contextlib.nullcontext() if dry_run else self._lock():
            entries = sorted(self.entries(), key=lambda entry: (entry.used_ns, str(entry.path)))
            excess = sum(entry.bytes for entry in entries) - limit_bytes
            for entry in entries:
                if excess <= 0:
                    break
                if entry.path in keep or not (dry_run or _remove(entry.path)):
                    continue
                excess -= entry.bytes
                removed.append(entry)
        return removed

    def prepare(self) -> None:
        """Create the layer's folders, to know before a long compilation that it can be written.

        Raises:
            CacheError: it cannot.
        """
        with self._errors("write", self.root):
            self._create()
            for folder in (self.root / "tmp", self.root / PLANS):
                probe = folder / f"probe.{os.getpid()}.{secrets.token_hex(8)}"
                probe.touch()
                probe.unlink()
            self._tidy()

    def _tidy(self) -> None:
        """Remove what killed writers left, and all but the latest of the damaged files that were set aside."""

        def by_age(folder: str) -> list[tuple[float, Path]]:
            found = []
            with contextlib.suppress(OSError):
                for name in os.listdir(self.root / folder):
                    with contextlib.suppress(OSError):
                        found.append(((self.root / folder / name).lstat().st_mtime, self.root / folder / name))
            return sorted(found)

        now = time.time()
        left = [path for used, path in by_age("tmp") if now - used > TEMPORARY_SECONDS]
        set_aside = [path for _, path in by_age("quarantine")]
        for path in (*left, *set_aside[: max(0, len(set_aside) - QUARANTINED)]):
            with contextlib.suppress(OSError):
                path.unlink()

    def _require_room(self, plan: PlanFile, size: int, others: Collection[Path]) -> None:
        kept = 0
        for path in others:
            with contextlib.suppress(FileNotFoundError):
                kept += path.stat().st_size
        if size + kept > self.limit_bytes:
            beside = f", beside {kept} bytes of plans that go with it" if kept else ""
            raise CacheError(
                f"plan {plan.plan_id[:12]} of {size} bytes",
                f"it does not fit into the layer's limit of {self.limit_bytes} bytes{beside}",
                f"set DSA_PLAN_CACHE_BYTES to {size + kept} or more",
            )

    def _create(self) -> None:
        (self.root / "tmp").mkdir(parents=True, exist_ok=True)
        (self.root / PLANS).mkdir(exist_ok=True)
        self._mark()

    def _mark(self) -> None:
        """Have a CACHEDIR.TAG that backup programs know, best effort: no plan depends on it.

        A tag that begins as it must is left alone, whatever follows; what a full disk cut short is replaced.
        """
        tag = self.root / "CACHEDIR.TAG"
        with contextlib.suppress(OSError, PlanFileError):
            if read_bounded(tag).startswith(_TAG_SIGNATURE):
                return
        with contextlib.suppress(OSError), self._temporary(tag.name) as temporary:
            _write_synced(temporary, _CACHEDIR_TAG)
            os.replace(temporary, tag)

    @contextlib.contextmanager
    def _temporary(self, name: str) -> Iterator[Path]:
        """A path in the layer for a file that is to be renamed; whatever is still there in the end is removed."""
        path = self.root / "tmp" / f"{name}.{os.getpid()}.{secrets.token_hex(8)}"
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    def _set_aside(self, path: Path) -> None:
        """Move a damaged file out of the way, so that the plan can be built again."""
        with contextlib.suppress(OSError):
            quarantine = self.root / "quarantine"
            quarantine.mkdir(exist_ok=True)
            os.replace(path, quarantine / f"{path.parent.name}.{path.name}.{secrets.token_hex(4)}")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        import filelock  # not on the path of a hit

        path = self.root / "lock"
        lock = filelock.FileLock(path, timeout=LOCK_SECONDS, mode=0o666)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise CacheError(
                f"the lock {path}",
                f"another process has held it for {LOCK_SECONDS} seconds",
                "end that process, or set DSA_PLAN_CACHE_DIR to another folder",
            ) from None
        except NotImplementedError:
            # A file system without locks. Two evictors at once may then take more than they need to.
            yield
            return
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _errors(self, action: str, path: Path) -> Iterator[None]:
        """Turn an OSError into a CacheError that names the place, the cause and the way out."""
        try:
            yield
        except FileExistsError as error:  # something else lies where a folder is to be made
            raise CacheError(
                f"cannot {action} {path}",
                f"{error.filename} is not a folder",
                "remove it, or set DSA_PLAN_CACHE_DIR to another folder",
            ) from error
        except OSError as error:
            remedy = {
                errno.ENOSPC: "free some space or set DSA_PLAN_CACHE_DIR to another folder",
                errno.EDQUOT: "free some of the quota or set DSA_PLAN_CACHE_DIR to another folder",
            }.get(error.errno or 0, remedy_of(error, "set DSA_PLAN_CACHE_DIR to a folder that can be written"))
            raise CacheError(f"cannot {action} {path}", f"{error.strerror or error}", remedy) from error


def _remove(path: Path) -> bool:
    """Remove a plan file, and its folder where that was the last."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: it cannot be evicted (%s); skipped", path, error.strerror)
        return False
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    return True


def _write_synced(path: Path, data: bytes) -> int:
    """Write a file and sync it; its modification time, in ns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        # Without this, a crash soon after the rename can leave an empty file under the final name.
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_mtime_ns


def _rename_into(temporary: Path, target: Path) -> None:
    """Rename into the plan's folder, which an evictor may remove between our making it and our using it."""
    for attempt in range(_RENAME_ATTEMPTS):
        try:
            target.parent.mkdir(exist_ok=True)
            os.replace(temporary, target)
            break
        except FileNotFoundError:
            if attempt == _RENAME_ATTEMPTS - 1:
                raise
    for folder in (target.parent, target.parent.parent):
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
