"""Layers: folders of plan files, and the search through them. This is the reading half; it needs no lock and no index.

A layer holds ``plans-v1/<plan id>/<build id>.dsaplan``. The folder name carries the version of the layout: a change of
format gets a new folder and never migrates an old one. Several builds of one plan, made by different compilers, may lie
side by side.

Trouble with a file or a layer never raises here: it is counted, logged with the file's name, and the search goes on, so
that a bad layer costs a miss and not a job. Standard library only.
"""

from __future__ import annotations

import logging
import os
import stat
import string
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dsa_planner.cache.planfile import MAX_BYTES, SUFFIX, PlanFile
from dsa_planner.errors import PlanFileError

__all__ = ["Entry", "Layer", "SearchPath", "version_key"]

PLANS = "plans-v1"
log = logging.getLogger("dsa_planner.cache")
_HEX = frozenset(string.digits + "abcdef")
_LONGEST_NUMBER = 9


@dataclass(frozen=True)
class Entry:
    """A plan file found in a layer: its two ids, its size in bytes, and when it was last used (ns since 1970)."""

    plan_id: str
    build_id: str
    path: Path
    bytes: int
    used_ns: int


def is_id(text: str) -> bool:
    """Whether ``text`` can be a plan or build id. Checked before any id becomes part of a path."""
    return len(text) == 64 and set(text) <= _HEX


class Layer:
    """One read-only folder of plans."""

    writable = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self.damaged: dict[Path, str] = {}
        """Files and folders that could not be used in this process, and why."""
        self._examined = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.root)!r})"

    def path_of(self, plan_id: str, build_id: str) -> Path:
        """Where a build of a plan lies, or would lie."""
        if not is_id(plan_id) or not is_id(build_id):
            raise ValueError(f"plan and build ids are 64 hexadecimal digits, not {plan_id!r} and {build_id!r}")
        return self.root / PLANS / plan_id / (build_id + SUFFIX)

    def builds(self, plan_id: str) -> list[str]:
        """The build ids that the layer holds of a plan, in no particular order."""
        if not is_id(plan_id):
            raise ValueError(f"a plan id is 64 hexadecimal digits, not {plan_id!r}")
        names = self._names(self.root / PLANS / plan_id)
        return [name[: -len(SUFFIX)] for name in names if name.endswith(SUFFIX) and is_id(name[: -len(SUFFIX)])]

    def read(self, plan_id: str, build_id: str, record_use: bool = True) -> PlanFile | None:
        """A build of a plan, checked against both of its names, or None."""
        path = self.path_of(plan_id, build_id)
        try:
            data = read_bounded(path)
            plan = PlanFile.decode(data, str(path), plan_id)
            if plan.build_id != build_id:
                raise PlanFileError(f"plan file {path}", f"it holds build {plan.build_id}", "remove or rename it")
        except (FileNotFoundError, NotADirectoryError):
            if path.is_symlink():
                self._note(path, "it is a link that leads nowhere")
            self._missed(path.parent)
            return None
        except OSError as error:
            self._note(path, f"it cannot be read ({error.strerror})")
            return None
        except PlanFileError as error:
            self._note(path, error.rule)
            self._set_aside(path)
            return None
        if record_use:
            self._used(path)
        return plan

    def find(self, plan_id: str) -> PlanFile | None:
        """The layer's best build of a plan: that of the newest compiler. None if there is no good one."""
        plans = [plan for build_id in self.builds(plan_id) if (plan := self.read(plan_id, build_id, False)) is not None]
        best = max(plans, key=_newest, default=None)
        if best is not None:
            self._used(self.path_of(plan_id, best.build_id))
        return best

    def entries(self) -> Iterator[Entry]:
        """All plan files of the layer, unread, ordered by id."""
        base = self.root / PLANS
        for plan_id in sorted(self._names(base)):
            if not is_id(plan_id):
                continue
            for build_id in sorted(self.builds(plan_id)):
                path = self.path_of(plan_id, build_id)
                with suppress(OSError):  # evicted since it was listed
                    found = path.lstat() if path.is_symlink() and not path.exists() else path.stat()
                    yield Entry(plan_id, build_id, path, found.st_size, found.st_mtime_ns)

    def _names(self, folder: Path) -> list[str]:
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            self._missed(folder)
        except OSError as error:
            self._note(folder, f"it cannot be listed ({error.strerror})")
        return []

    def _missed(self, folder: Path) -> None:
        """After a miss: note what lies in the place of a plan's folder, or else that there is no layer here at all."""
        if folder.parent.name != PLANS or not os.path.lexists(folder) or os.path.isdir(folder):
            self._examine()
            return
        self._note(folder, "it is not a folder" if os.path.exists(folder) else "it is a link that leads nowhere")
        self._set_aside(folder)

    def _examine(self) -> None:
        """After a miss, once: note it if there is no layer here at all. A writable layer need not exist yet."""
        if self._examined:
            return
        self._examined = True
        for folder in (self.root, self.root / PLANS):
            try:
                if not stat.S_ISDIR(folder.stat().st_mode):
                    self._note(folder, "it is not a folder")
                    return
            except FileNotFoundError:
                if not self.writable:
                    self._note(folder, "there is no such folder")
                return
            except OSError as error:
                self._note(folder, f"it cannot be read ({error.strerror})")
                return

    def _note(self, path: Path, reason: str) -> None:
        if path not in self.damaged:
            log.warning("%s: %s; skipped", path, reason)
        self.damaged[path] = reason

    def _used(self, path: Path) -> None:
        """Called after a hit; a read-only layer keeps no record of use."""

    def _set_aside(self, path: Path) -> None:
        """Called for a damaged file, or one in the place of a plan's folder; a read-only layer leaves it there."""


class SearchPath:
    """The layers of a process, in order: read-only ones, then at most one writable one.

    The writable layer is not touched before every read-only one has missed.

    Args:
        read_only: folders; one that is named twice, or is the writable one too, counts once.
        writable: the writable layer.
    """

    def __init__(self, read_only: Sequence[Path], writable: Layer | None = None) -> None:
        last = [] if writable is None else [writable]
        folders: dict[str, Path] = {}
        for root in read_only:
            folders.setdefault(os.path.realpath(root), root)
        for layer in last:
            folders.pop(os.path.realpath(layer.root), None)
        self.layers = (*(Layer(root) for root in folders.values()), *last)

    def find(self, plan_id: str, build_id: str | None = None) -> tuple[PlanFile, Layer] | None:
        """A plan, and the layer that held it: of one build, or the first layer's best build."""
        for layer in self.layers:
            plan = layer.find(plan_id) if build_id is None else layer.read(plan_id, build_id)
            if plan is not None:
                return plan, layer
        return None

    def describe(self) -> str:
        """The searched folders, in words, for messages."""
        return ", ".join(str(layer.root) for layer in self.layers) or "no layer"


def read_bounded(path: Path) -> bytes:
    """The content of a regular file of at most MAX_BYTES.

    O_NONBLOCK keeps a FIFO of that name from blocking the open for ever.

    Raises:
        OSError: it cannot be read.
        PlanFileError: it is something else than a regular file, or too large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PlanFileError(f"plan file {path}", "it is not a regular file", "remove it")
        if found.st_size > MAX_BYTES:
            raise PlanFileError(
                f"plan file {path}", f"it has {found.st_size} bytes, more than {MAX_BYTES}", "remove it"
            )
        return file.read(MAX_BYTES + 1)


def version_key(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for ordering: "4.8.1" -> (4, 8, 1)."""
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits or len(digits) > _LONGEST_NUMBER:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _newest(plan: PlanFile) -> tuple[tuple[int, ...], str]:
    """Order builds of one plan: by compiler version, then, to be the same everywhere, by build id."""
    return version_key(plan.manifest["build"]["packages"].get("nvidia-cutlass-dsl", "")), plan.build_id
