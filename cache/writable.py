"""The writable layer: publish, recency, eviction. Build side, except that the run side reads it as a
``RecordingLayer``.

* **Publish** writes a temporary file in the layer, syncs it, and renames it to its name. A reader sees the whole file
  or none; a killed writer leaves a temporary file and nothing else. The bytes of a name never depend on who wrote
  them, so two writers of one plan cannot disagree.
* **Recency** is the plan file's mtime, set at publish and at each hit, best effort. It needs no index and no lock.
* **Eviction** is exact least-recently-used by bytes: as many of the oldest files as needed, no more, under a lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsa_planner.cache.layer import PLANS, Entry, Layer
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.errors import CacheError

__all__ = ["Published", "RecordingLayer", "WritableLayer"]

_CACHEDIR_TAG = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n# Compiled GPU kernel plans of dsa-planner; safe to delete.\n"
)
_RENAME_ATTEMPTS = 8


class RecordingLayer(Layer):
    """A layer that is somebody's writable one: hits are recorded in it, as far as it can be written."""

    writable = True

    def _used(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            os.utime(path)


@dataclass(frozen=True)
class Published:
    """What publishing did: the plan's entry, or None if it was kept out, and what had to go for it."""

    entry: Entry | None
    evicted: tuple[Entry, ...]
    note: str = ""


class WritableLayer(RecordingLayer):
    """The layer that plans are built into.

    Args:
        root: its folder, created at the first publish.
        limit_bytes: bound of the plan files' sizes together.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        super().__init__(root)
        self.limit_bytes = limit_bytes

    def publish(self, plan: PlanFile) -> Published:
        """Write a plan, then evict down to the limit. The plan just published is never evicted by its own publish.

        Raises:
            CacheError: the layer cannot be written (no permission, no room, not a folder). Nothing is left behind.
        """
        data = plan.encode()
        if len(data) > self.limit_bytes:
            what = f"plan {plan.plan_id[:12]} has {len(data)} bytes"
            return Published(None, (), f"{what}, more than the layer's limit of {self.limit_bytes}; it is not kept")
        target = self.path_of(plan.plan_id, plan.build_id)
        with self._errors("write", target):
            self._create()
            temporary = self.root / "tmp" / f"{plan.plan_id[:16]}.{os.getpid()}.{secrets.token_hex(8)}"
            try:
                _write_synced(temporary, data)
                _rename_into(temporary, target)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            found = target.stat()
        entry = Entry(plan.plan_id, plan.build_id, target, found.st_size, found.st_mtime_ns)
        return Published(entry, tuple(self.evict(self.limit_bytes, keep=target)))

    def evict(self, limit_bytes: int, keep: Path | None = None, dry_run: bool = False) -> list[Entry]:
        """Remove least-recently-used plans until the layer holds at most ``limit_bytes``; return what was (or would be)
        removed, in order. ``keep`` is never removed.

        Raises:
            CacheError: a file cannot be removed.
        """
        removed: list[Entry] = []
        with self._errors("evict from", self.root), contextlib.nullcontext() if dry_run else self._lock():
            entries = sorted(self.entries(), key=lambda entry: (entry.used_ns, str(entry.path)))
            excess = sum(entry.bytes for entry in entries) - limit_bytes
            for entry in entries:
                if excess <= 0:
                    break
                if entry.path == keep:
                    continue
                if not dry_run:
                    entry.path.unlink(missing_ok=True)
                    with contextlib.suppress(OSError):
                        entry.path.parent.rmdir()
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
            probe = self.root / "tmp" / f"probe.{os.getpid()}.{secrets.token_hex(8)}"
            probe.touch()
            probe.unlink()

    def _create(self) -> None:
        (self.root / "tmp").mkdir(parents=True, exist_ok=True)
        (self.root / PLANS).mkdir(exist_ok=True)
        tag = self.root / "CACHEDIR.TAG"
        if not tag.exists():
            tag.write_bytes(_CACHEDIR_TAG)

    def _set_aside(self, path: Path) -> None:
        """Move a damaged file out of the way, so that the plan can be built again."""
        with contextlib.suppress(OSError):
            quarantine = self.root / "quarantine"
            quarantine.mkdir(exist_ok=True)
            os.replace(path, quarantine / f"{path.parent.name}.{path.name}.{secrets.token_hex(4)}")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        from filelock import FileLock  # not on the path of a hit

        with FileLock(self.root / "lock"):
            yield

    @contextlib.contextmanager
    def _errors(self, action: str, path: Path) -> Iterator[None]:
        """Turn an OSError into a CacheError that names the place, the cause and the way out."""
        try:
            yield
        except OSError as error:
            remedy = {
                errno.ENOSPC: "free some space or set DSA_PLAN_CACHE_DIR to another folder",
                errno.EDQUOT: "free some of the quota or set DSA_PLAN_CACHE_DIR to another folder",
            }.get(error.errno or 0, "set DSA_PLAN_CACHE_DIR to a folder that can be written")
            raise CacheError(f"cannot {action} {path}", f"{error.strerror or error}", remedy) from error


def _write_synced(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        # Without this, a crash soon after the rename can leave an empty file under the final name.
        os.fsync(file.fileno())


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
