"""The writable layer: single flight, publish, eviction, pruning. Build side.

* **Single flight**: who finds a plan missing takes the plan's lock before it compiles, and looks again. The lock goes
  with its process, so a builder that dies is replaced.
* **Publish** writes a temporary file in the layer, syncs it, and links it to its name, unless a good file has that name
  already. A reader sees the whole file or none; a killed writer leaves a temporary file and nothing else.
* **Recency** is the plan file's mtime, set at publish and at each hit, best effort. It needs no index and no lock.
* **Eviction** is exact least-recently-used by bytes: as many of the oldest files as needed, no more. Publishing and
  evicting hold one lock, so that the layer exceeds its limit by one plan at most, and not for long.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsa_planner.cache import locks
from dsa_planner.cache.disk import ANYONES, read_bounded, sync_folders, write_synced
from dsa_planner.cache.index import Index
from dsa_planner.cache.layer import PLANS, Entry, Policy, RecordingLayer, is_id
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.errors import CacheError, PlanFileError, remedy_of

__all__ = ["Leftover", "Pruned", "Published", "WritableLayer"]

_TAG_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"
_CACHEDIR_TAG = _TAG_SIGNATURE + b"\n# Compiled GPU kernel plans of dsa-planner; safe to delete.\n"
log = logging.getLogger("dsa_planner.cache")
_PLACE_ATTEMPTS = 8
TEMPORARY_SECONDS = 3600  # no writer takes so long
LOCK_FILE_SECONDS = 24 * 3600  # what a builder's lock file lives at least
QUARANTINED = 16  # files
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_FOLDER_MODE = 0o775  # never for everybody to write, whatever the umask
_FILE_MODE = 0o664
_REASON = ".reason"
_OURS = {  # by folder, the names of the files that are removed there: a layer may be made in a folder that has others
    "tmp": re.compile(r"(?:[0-9a-f]{16}|CACHEDIR\.TAG|probe)\.\d+\.[0-9a-f]{16}"),
    PLANS: re.compile(r"probe\.\d+\.[0-9a-f]{16}"),
    "locks": re.compile(r"[0-9a-f]{32}\.[0-9a-f]{16}"),
    "quarantine": re.compile(
        rf"(?:[0-9a-f]{{64}}|{PLANS})\.[0-9a-f]{{64}}(?:\.dsaplan)?\.[0-9a-f]{{8}}(?:{re.escape(_REASON)})?"
    ),
}


@dataclass(frozen=True)
class Published:
    """What publishing did: the plan's entry, what had to go for it, and whether the plan had not been there before."""

    entry: Entry
    evicted: tuple[Entry, ...]
    new: bool = True


@dataclass(frozen=True)
class Leftover:
    """A file that no plan needs, its size in bytes, and what left it."""

    path: Path
    bytes: int
    origin: str


@dataclass(frozen=True)
class Pruned:
    """What pruning removed, or would remove."""

    evicted: tuple[Entry, ...]
    leftovers: tuple[Leftover, ...]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.evicted) + sum(leftover.bytes for leftover in self.leftovers)


class WritableLayer(RecordingLayer):
    """The layer that plans are built into.

    Args:
        root: its folder, created at the first publish, for its owner alone.
        limit_bytes: bound of the plan files' sizes together.
        policy: what is refused. No signature is asked of a layer that one builds oneself.
    """

    def __init__(self, root: Path, limit_bytes: int, policy: Policy = Policy()) -> None:  # noqa: B008 - immutable
        super().__init__(root, Policy(policy.anyone_may_write, policy.refused_builds))
        self.limit_bytes = limit_bytes
        self.index = Index(root / "index")

    # --- single flight ------------------------------------------------------------------------------------------------

    def only_builder(
        self, plan_id: str, build_id: str, seconds: float, give_up: Callable[[], bool] = lambda: False
    ) -> contextlib.AbstractContextManager[bool]:
        """For the block, be the one process and thread of the host that builds a plan.

        Whoever gets in looks for the plan again first: the one before may have built it.

        Args:
            plan_id, build_id: the plan.
            seconds: how long to wait for another builder.
            give_up: ends the wait when it answers True.

        Returns:
            What the block enters: it tells whether nobody else is in such a block for this plan. That is False after
            the wait, and where the file system has no locks; the plan can be built all the same, since publishing it
            twice does no harm.
        """
        path = self.root / "locks" / f"{plan_id[:32]}.{build_id[:16]}"
        return locks.only_builder(path, self.path_of(plan_id, build_id), seconds, give_up)

    # --- publish and evict --------------------------------------------------------------------------------------------

    def publish(self, plan: PlanFile, keep: Collection[Path] = (), seconds: float | None = None) -> Published:
        """Write a plan, and evict others down to the limit. If a good file of that name is there, it stays.

        Args:
            plan: the plan.
            keep: plan files that must not be evicted for it, such as those of the same request.
            seconds: what it took to compile it, for the index; None if it was not compiled here.

        Raises:
            CacheError: the layer cannot be written (no permission, no room, not a folder), or its limit has no room for
            the plan beside those to keep. Nothing is left behind and nothing is evicted. Trouble with the eviction is
            a warning: the plan is there.
        """
        data = plan.encode()
        target = self.path_of(plan.plan_id, plan.build_id)
        evicted: list[Entry] = []
        with self._errors("write", target):
            self._create()
            self._require_room(plan, len(data), [path for path in keep if path != target])
            with self._temporary(plan.plan_id[:16]) as temporary:
                used_ns = _write(temporary, data)
                with self._lock_if_possible() as locked:
                    new = self._place(temporary, target)
                    if locked:
                        evicted = self._evict(self.limit_bytes, {*keep, target}, dry_run=False)
        sync_folders(target.parent, target.parent.parent)
        entry = Entry(plan.plan_id, plan.build_id, target, len(data), used_ns)
        gone = [(each.plan_id, each.build_id) for each in evicted]
        self.index.record(published=(plan.plan_id, plan.build_id, seconds, len(data)) if new else None, evicted=gone)
        return Published(entry, tuple(evicted), new)

    def _place(self, temporary: Path, target: Path) -> bool:
        """Give a finished file its name, in a folder that an evictor may remove meanwhile. False if a good file has it.

        A link fails where a name is taken, so no file that somebody has already read is replaced by another.
        """
        for _ in range(_PLACE_ATTEMPTS):
            target.parent.mkdir(mode=_FOLDER_MODE, exist_ok=True)
            try:
                os.link(temporary, target)
                return True
            except FileNotFoundError:
                if not temporary.exists():
                    raise
                continue
            except FileExistsError:
                pass
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if not os.path.lexists(target):  # a file system without links
                    os.replace(temporary, target)
                    return True
            if self.read(target.parent.name, target.name.partition(".")[0]) is not None:
                return False
            if os.path.lexists(target):  # damaged, and it could not be set aside
                os.replace(temporary, target)
                return True
        raise OSError(errno.EBUSY, f"others removed its folder {_PLACE_ATTEMPTS} times")

    def _examine(self) -> None:
        """``prepare`` says what is wrong with a layer that is to be written."""

    def evict(self, limit_bytes: int, keep: Collection[Path] = (), dry_run: bool = False) -> list[Entry]:
        """Remove least-recently-used plans until the layer holds at most ``limit_bytes``; return what was (or would be)
        removed, in order. The files to ``keep`` stay. One that cannot be removed is named in a warning and stays.

        Raises:
            CacheError: the layer cannot be locked.
        """
        if self._excess(self.entries(), limit_bytes) <= 0:
            return []
        lock = self.root / "lock"
        with self._errors("lock", lock), contextlib.nullcontext() if dry_run else locks.only_writer(lock):
            removed = self._evict(limit_bytes, keep, dry_run)
        if not dry_run:
            self.index.record(evicted=[(entry.plan_id, entry.build_id) for entry in removed])
        return removed

    def _evict(self, limit_bytes: int, keep: Collection[Path], dry_run: bool) -> list[Entry]:
        entries = sorted(self.entries(), key=lambda entry: (entry.used_ns, str(entry.path)))
        excess = self._excess(entries, limit_bytes)
        removed: list[Entry] = []
        for entry in entries:
            if excess <= 0:
                break
            if entry.path in keep or not (dry_run or _remove(entry.path)):
                continue
            excess -= entry.bytes
            removed.append(entry)
        return removed

    @staticmethod
    def _excess(entries: Iterable[Entry], limit_bytes: int) -> int:
        return sum(entry.bytes for entry in entries) - limit_bytes

    def prune(self, limit_bytes: int, quarantined: int = QUARANTINED, dry_run: bool = False) -> Pruned:
        """Evict down to a limit, and remove what no plan needs.

        Args:
            limit_bytes: what the plan files may have together.
            quarantined: how many of the latest damaged files stay.
            dry_run: only say what would go.

        Raises:
            CacheError: the layer cannot be locked, or is not to be written by this user.
        """
        if not dry_run and os.path.exists(self.root):
            with self._errors("prune", self.root):
                self._require_ours()
        evicted = self.evict(limit_bytes, dry_run=dry_run)
        leftovers = self.leftovers(quarantined)
        if not dry_run:
            leftovers = [leftover for leftover in leftovers if _unlink(leftover.path)]
            with contextlib.suppress(OSError):
                for name in filter(is_id, os.listdir(self.root / PLANS)):
                    with contextlib.suppress(OSError):  # what a killed writer left empty
                        (self.root / PLANS / name).rmdir()
        return Pruned(tuple(evicted), tuple(leftovers))

    def leftovers(self, quarantined: int = QUARANTINED) -> list[Leftover]:
        """What killed writers and builders left, and all but the latest of the damaged files that were set aside."""
        now = time.time()
        found = [
            Leftover(path, size, "a killed writer")
            for used, path, size in (*self._by_age("tmp"), *self._by_age(PLANS))
            if now - used > TEMPORARY_SECONDS
        ]
        found += [
            Leftover(path, size, "a killed builder")
            for used, path, size in self._by_age("locks")
            if now - used > LOCK_FILE_SECONDS
        ]
        set_aside = [each for each in self._by_age("quarantine") if each[1].suffix != _REASON]
        for _, path, size in set_aside[: max(0, len(set_aside) - quarantined)]:
            found.append(Leftover(path, size, "a damaged file"))
        staying = {path.name for _, path, _ in set_aside} - {leftover.path.name for leftover in found}
        for _, path, size in self._by_age("quarantine"):
            if path.suffix == _REASON and path.name.removesuffix(_REASON) not in staying:
                found.append(Leftover(path, size, "the reason of a damaged file"))
        return found

    def quarantine(self) -> dict[Path, str]:
        """The damaged files that were set aside, latest last, and why each was."""
        found = {}
        for _, path, _ in self._by_age("quarantine"):
            if path.suffix != _REASON:
                try:
                    found[path] = read_bounded(path.with_name(path.name + _REASON)).decode("utf-8", "replace").strip()
                except (OSError, PlanFileError):
                    found[path] = "unknown"
        return found

    def _by_age(self, folder: str) -> list[tuple[float, Path, int]]:
        """What this class left in one of its folders, oldest first: when it was last changed, where, and its bytes."""
        found = []
        with contextlib.suppress(OSError):
            for name in filter(_OURS[folder].fullmatch, os.listdir(self.root / folder)):
                with contextlib.suppress(OSError):
                    state = (self.root / folder / name).lstat()
                    if not stat.S_ISDIR(state.st_mode):
                        found.append((state.st_mtime, self.root / folder / name, state.st_size))
        return sorted(found)

    def prepare(self) -> None:
        """Create the layer's folders, to know before a long compilation that it can be written, and tidy up.

        Raises:
            CacheError: it cannot.
        """
        with self._errors("write", self.root):
            self._create()
            for folder in (self.root / "tmp", self.root / PLANS):
                probe = folder / f"probe.{os.getpid()}.{secrets.token_hex(8)}"
                probe.touch()
                probe.unlink()
        for leftover in self.leftovers():
            _unlink(leftover.path)

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
        if not self.root.exists():
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=True)
        self._require_ours()
        for folder in ("tmp", "locks", PLANS):
            (self.root / folder).mkdir(mode=_FOLDER_MODE, exist_ok=True)
        self._mark()

    def _require_ours(self) -> None:
        """Refuse to write into a layer that belongs to another user, or that everybody may write."""
        if self.policy.anyone_may_write:
            return
        remedy = "set DSA_PLAN_CACHE_DIR to {}, or DSA_PLAN_PERMISSIONS=any if it is to be shared"
        owner, user = self.root.stat().st_uid, os.geteuid()
        if user not in (0, owner):
            raise CacheError(
                f"cannot write {self.root}",
                f"it belongs to user {owner}, not to {user}",
                remedy.format("a folder of yours"),
            )
        for folder in (self.root, self.root / PLANS):
            with contextlib.suppress(FileNotFoundError):
                if folder.stat().st_mode & stat.S_IWOTH:
                    raise CacheError(f"cannot write {folder}", ANYONES, remedy.format("a new folder inside it"))

    def _mark(self) -> None:
        """Have a CACHEDIR.TAG that backup programs know, best effort: no plan depends on it.

        A tag that begins as it must is left alone, whatever follows; what a full disk cut short is replaced.
        """
        tag = self.root / "CACHEDIR.TAG"
        with contextlib.suppress(OSError, PlanFileError):
            if read_bounded(tag).startswith(_TAG_SIGNATURE):
                return
        with contextlib.suppress(OSError), self._temporary(tag.name) as temporary:
            _write(temporary, _CACHEDIR_TAG)
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

    def _set_aside(self, path: Path, reason: str) -> None:
        """Move a damaged file out of the way, with the reason beside it, so that the plan can be built again."""
        quarantine = self.root / "quarantine"
        target = quarantine / f"{path.parent.name}.{path.name}.{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            self._require_ours_or_leave()
            quarantine.mkdir(mode=_FOLDER_MODE, exist_ok=True)
            os.replace(path, target)
            with contextlib.suppress(OSError):
                _write(target.with_name(target.name + _REASON), f"{reason}\n".encode())
            self.index.record(quarantined=1)

    def _require_ours_or_leave(self) -> None:
        try:
            self._require_ours()
        except CacheError as error:
            raise PermissionError(error.rule) from None

    @contextlib.contextmanager
    def _lock_if_possible(self) -> Iterator[bool]:
        """The lock of writers; without it, after a warning, nothing is evicted."""
        with contextlib.ExitStack() as stack:
            try:
                with self._errors("lock", self.root / "lock"):
                    stack.enter_context(locks.only_writer(self.root / "lock"))
            except CacheError as error:
                log.warning("%s", error)
                yield False
                return
            yield True

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


def _unlink(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: it cannot be removed (%s); skipped", path, error.strerror)
        return False
    return True


def _write(path: Path, data: bytes) -> int:
    """Write a new file; its modification time, which is finer than the kernel's own clock for files."""
    now = time.time_ns()
    write_synced(path, lambda file: file.write(data), _FILE_MODE, now)
    return now
