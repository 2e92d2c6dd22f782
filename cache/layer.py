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
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dsa_planner.cache.planfile import MAX_BYTES, SUFFIX, PlanFile
from dsa_planner.errors import PlanFileError

__all__ = ["Entry", "Layer", "SearchPath", "read_only_layers"]

PLANS = "plans-v1"
log = logging.getLogger("dsa_planner.cache")
_HEX = frozenset(string.digits + "abcdef")


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
        """Files that could not be used in this process, and why."""

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
        try:
            names = os.listdir(self.root / PLANS / plan_id)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._note(self.root / PLANS / plan_id, f"cannot be listed ({error.strerror})")
            return []
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
            return None
        except OSError as error:
            self._note(path, f"cannot be read ({error.strerror})")
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
        plans = [plan for build_id in self.builds(plan_id) if (plan := self.read(plan_id, build_id)) is not None]
        return max(plans, key=_newest, default=None)

    def entries(self) -> Iterator[Entry]:
        """All plan files of the layer, unread, ordered by id."""
        base = self.root / PLANS
        for plan_id in sorted(_names(base)):
            if not is_id(plan_id):
                continue
            for build_id in sorted(self.builds(plan_id)):
                path = self.path_of(plan_id, build_id)
                with suppress(OSError):  # evicted since it was listed
                    found = path.stat()
                    yield Entry(plan_id, build_id, path, found.st_size, found.st_mtime_ns)

    def _note(self, path: Path, reason: str) -> None:
        if path not in self.damaged:
            log.warning("%s: %s; it is skipped", path, reason)
        self.damaged[path] = reason

    def _used(self, path: Path) -> None:
        """Called after a hit; a read-only layer keeps no record of use."""

    def _set_aside(self, path: Path) -> None:
        """Called for a damaged file; a read-only layer leaves it where it is."""


class SearchPath:
    """The layers of a process, in order: read-only ones, then at most one writable one.

    The writable layer is not touched before every read-only one has missed.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self.hits: Counter[str] = Counter()
        """Hits by layer root."""
        self.misses = 0

    def find(self, plan_id: str, build_id: str | None = None) -> tuple[PlanFile, Layer] | None:
        """A plan, and the layer that held it: of one build, or the first layer's best build."""
        for layer in self.layers:
            plan = layer.find(plan_id) if build_id is None else layer.read(plan_id, build_id)
            if plan is not None:
                self.hits[str(layer.root)] += 1
                return plan, layer
        self.misses += 1
        return None

    def describe(self) -> str:
        """The searched folders, in words, for messages."""
        return ", ".join(str(layer.root) for layer in self.layers) or "no layer"


def read_only_layers(roots: Sequence[Path]) -> list[Layer]:
    """Layers for these folders; one that is not there is named in a warning, and then misses every plan."""
    for root in roots:
        if not root.is_dir():
            log.warning("layer %s: there is no such folder; it is skipped", root)
    return [Layer(root) for root in roots]


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


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _newest(plan: PlanFile) -> tuple[list[int], str]:
    """Order builds of one plan: by compiler version, then, to be the same everywhere, by build id."""
    packages = plan.manifest["build"].get("packages", {})
    version = str(packages.get("nvidia-cutlass-dsl", ""))
    return [int(part) for part in version.split(".") if part.isdigit()], plan.build_id
