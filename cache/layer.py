"""One layer: a folder of plan files. This is the reading half; it needs no lock and no index.

A layer holds ``plans-v1/<plan id>/<build id>.dsaplan``. The folder name carries the version of the layout: a change of
format gets a new folder and never migrates an old one. Several builds of one plan, made by different compilers, may lie
side by side. A bundle has a list of its files beside them, which may be signed (``listing``).

Trouble with a file or a layer never raises here: it is counted, logged with the file's name, and the search goes on, so
that a bad layer costs a miss and not a job. Standard library only, but for the check of a signature.
"""

from __future__ import annotations

import logging
import os
import stat
import string
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dsa_planner.cache.disk import ANYONES, read_bounded
from dsa_planner.cache.listing import LISTING, SIGNATURE, Listing, signer
from dsa_planner.cache.planfile import SUFFIX, PlanFile
from dsa_planner.errors import DsaPlannerError, PlanFileError

__all__ = ["Entry", "Layer", "Policy", "RecordingLayer", "version_key"]

PLANS = "plans-v1"
log = logging.getLogger("dsa_planner.cache")
_HEX = frozenset(string.digits + "abcdef")
_LONGEST_NUMBER = 9


@dataclass(frozen=True)
class Policy:
    """What a reader refuses, beyond what is damaged."""

    anyone_may_write: bool = False
    """Whether files and folders are used that every user of the machine may write."""
    refused_builds: tuple[str, ...] = ()
    """Beginnings of the build ids that are never used."""
    trusted_keys: tuple[Path, ...] = ()
    """Files of public keys. If there are any, only layers that one of them signed are used."""

    def refuses(self, build_id: str) -> bool:
        """Whether a build is never used."""
        return bool(self.refused_builds) and build_id.startswith(self.refused_builds)


@dataclass(frozen=True)
class Entry:
    """A plan file found in a layer: its two ids, its size in bytes, and when it was last used (ns since 1970)."""

    plan_id: str
    build_id: str
    path: Path
    bytes: int
    used_ns: int


@dataclass
class Counts:
    """What became of the requests to a layer: plans given, plans not found, files and folders skipped for a fault."""

    hits: int = 0
    misses: int = 0
    skipped: int = 0


def is_id(text: str) -> bool:
    """Whether ``text`` can be a plan or build id. Checked before any id becomes part of a path."""
    return len(text) == 64 and set(text) <= _HEX


def _build_ids(names: Iterable[str]) -> list[str]:
    """The build ids among the names of a plan's folder."""
    return [name[: -len(SUFFIX)] for name in names if name.endswith(SUFFIX) and is_id(name[: -len(SUFFIX)])]


@dataclass
class _Admission:
    """Whether a layer may be used at all, and the list that a trusted key signed, if any has to."""

    refusal: str | None = None
    signed: Listing | None = field(default=None, repr=False)


class Layer:
    """One read-only folder of plans.

    Args:
        root: the folder.
        policy: what is refused.
    """

    writable = False

    def __init__(self, root: Path, policy: Policy = Policy()) -> None:
        self.root = root
        self._base = os.path.join(root, PLANS)
        self.policy = policy
        self.damaged: dict[Path, str] = {}
        """Files and folders that could not be used, and why."""
        self.refused: dict[Path, str] = {}
        """Intact files that the policy refuses, and why."""
        self.counts = Counts()
        self._examined = False
        self._admission: _Admission | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.root)!r})"

    def path_of(self, plan_id: str, build_id: str) -> Path:
        """Where a build of a plan lies, or would lie."""
        return Path(self._file(plan_id, build_id))

    def _file(self, plan_id: str, build_id: str) -> str:
        """``path_of`` as text: to put a path object together takes a reader longer than to open the file."""
        if not is_id(plan_id) or not is_id(build_id):
            raise ValueError(f"plan and build ids are 64 hexadecimal digits, not {plan_id!r} and {build_id!r}")
        return f"{self._base}/{plan_id}/{build_id}{SUFFIX}"

    def builds(self, plan_id: str) -> list[str]:
        """The build ids that the layer holds of a plan, in no particular order."""
        if not is_id(plan_id):
            raise ValueError(f"a plan id is 64 hexadecimal digits, not {plan_id!r}")
        if self.admission().refusal is not None:
            return []
        return _build_ids(self._names(self.root / PLANS / plan_id))

    def read(self, plan_id: str, build_id: str, record_use: bool = True) -> PlanFile | None:
        """A build of a plan, checked against both of its names, or None."""
        place = self._file(plan_id, build_id)
        admission = self.admission()
        if admission.refusal is not None:
            return None
        if self.policy.refuses(build_id):
            if os.path.lexists(place):
                self.refused[Path(place)] = "DSA_PLAN_REFUSED_BUILDS refuses its build"
            return None
        try:
            self._require_private(f"{self._base}/{plan_id}")
            data = read_bounded(place, self.policy.anyone_may_write)
            expected = None
            if admission.signed is not None:
                expected = admission.signed.plans.get(f"{plan_id}/{build_id}", "")
            plan = PlanFile.decode(data, place, plan_id, expected)
            if plan.build_id != build_id:
                raise PlanFileError(f"plan file {place}", f"it holds build {plan.build_id}", "remove or rename it")
        except (OSError, PlanFileError) as error:
            self._failed(Path(place), error)
            return None
        if record_use:
            self._used(place)
        return plan

    def _failed(self, path: Path, error: OSError | PlanFileError) -> None:
        """A plan file that is not there, or not good: note what there is to note."""
        if isinstance(error, PlanFileError):
            self._note(path, error.rule)
            self._set_aside(path, error.rule)
        elif isinstance(error, (FileNotFoundError, NotADirectoryError)):
            if os.path.islink(path):
                self._note(path, "it is a link that leads nowhere")
            self._missed(path.parent)
        else:
            self._note(path, f"it cannot be read ({error.strerror})")

    def find(self, plan_id: str) -> PlanFile | None:
        """The layer's build of a plan: that which its list chooses, else the best, of the newest compiler."""
        builds = self.builds(plan_id)
        if len(builds) > 1 and (chosen := self._chosen(plan_id)) in builds:
            plan = self.read(plan_id, chosen)
            if plan is not None:
                return plan
            builds.remove(chosen)
        plans = [plan for build_id in builds if (plan := self.read(plan_id, build_id, False)) is not None]
        best = max(plans, key=_newest, default=None)
        if best is not None:
            self._used(self._file(plan_id, best.build_id))
        return best

    def entries(self) -> Iterator[Entry]:
        """All plan files of the layer, unread, ordered by id."""
        if self.admission().refusal is not None:
            return
        for plan_id in filter(is_id, sorted(self._names(self._base))):
            folder = f"{self._base}/{plan_id}"
            for build_id in sorted(_build_ids(self._names(folder))):
                path = f"{folder}/{build_id}{SUFFIX}"
                with suppress(OSError):  # evicted since it was listed
                    found = os.lstat(path) if os.path.islink(path) and not os.path.exists(path) else os.stat(path)
                    yield Entry(plan_id, build_id, Path(path), found.st_size, found.st_mtime_ns)

    def admission(self) -> _Admission:
        """Whether the policy admits the layer; examined once. What is not there is admitted, and misses."""
        if self._admission is None:
            admission = _Admission()
            try:
                for folder in (str(self.root), self._base):
                    self._require_private(folder)
            except PlanFileError as error:
                admission.refusal = error.rule
                self._note(Path(folder), error.rule)
            except OSError:
                return admission  # whoever misses says so; and the next request looks again
            if admission.refusal is None and self.policy.trusted_keys:
                self._require_signature(admission)
            self._admission = admission
        return self._admission

    def _require_signature(self, admission: _Admission) -> None:
        """Read the layer's list, or refuse the layer, if no trusted key has signed the list."""
        name = SIGNATURE
        try:
            signature = read_bounded(self.root / SIGNATURE, self.policy.anyone_may_write)
            name = LISTING
            listing = read_bounded(self.root / LISTING, self.policy.anyone_may_write)
            signer(listing, signature, self.policy.trusted_keys)
            admission.signed = Listing.decode(listing, str(self.root / LISTING))
        except FileNotFoundError:
            admission.refusal = f"it is not signed, it has no {name}, and DSA_PLAN_TRUSTED_KEYS is set"
        except OSError as error:
            admission.refusal = f"its {name} cannot be read ({error.strerror})"
        except DsaPlannerError as error:
            admission.refusal = error.rule if isinstance(error, PlanFileError) else str(error)
        if admission.refusal is not None:
            self._note(self.root, admission.refusal)

    def _chosen(self, plan_id: str) -> str:
        """The build of a plan that the layer's list chooses; "" for none."""
        listing = self.admission().signed
        if listing is None:
            with suppress(OSError, PlanFileError):
                data = read_bounded(self.root / LISTING, self.policy.anyone_may_write)
                listing = Listing.decode(data, str(self.root / LISTING))
        return "" if listing is None else str(listing.chosen.get(plan_id, ""))

    def _require_private(self, folder: str) -> None:
        if not self.policy.anyone_may_write and os.stat(folder).st_mode & stat.S_IWOTH:
            raise PlanFileError(f"folder {folder}", ANYONES, "take that permission away")

    def _names(self, folder: Path | str) -> list[str]:
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            self._missed(Path(folder))
        except OSError as error:
            self._note(Path(folder), f"it cannot be listed ({error.strerror})")
        return []

    def _missed(self, folder: Path) -> None:
        """After a miss: note what lies in the place of a plan's folder, or else that there is no layer here at all."""
        if folder.parent.name != PLANS or not os.path.lexists(folder) or os.path.isdir(folder):
            self._examine()
            return
        reason = "it is not a folder" if os.path.exists(folder) else "it is a link that leads nowhere"
        self._note(folder, reason)
        self._set_aside(folder, reason)

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
        self.counts.skipped += 1

    def _used(self, path: str) -> None:
        """Called after a hit; a read-only layer keeps no record of use."""

    def _set_aside(self, path: Path, reason: str) -> None:
        """Called for a damaged file, or one in the place of a plan's folder; a read-only layer leaves it there."""


class RecordingLayer(Layer):
    """A layer that is somebody's writable one: hits are recorded in it, as far as it can be written."""

    writable = True

    def _used(self, path: str) -> None:
        now = time.time_ns()
        try:
            os.utime(path, ns=(now, now))  # finer than the kernel's own clock for files
        except OSError:
            with suppress(OSError):
                os.utime(path)  # somebody else's file, which we may write


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
