"""Bundles: layers that do not change any more, as a folder or a tar file. Build side.

A bundle is a layer with a list of its files, ``layer.json``, and if it was signed, ``layer.sig`` (see ``listing``). It
is a pure function of its plans: the same plans give the same bytes, names, modes and times, as a folder and as a tar
file. An export is there whole or not at all. An import checks everything before it publishes anything, and each file
again, against the same list, when it publishes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
import tarfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_planner.cache.disk import read_bounded, sync_folders, write_synced
from dsa_planner.cache.layer import PLANS, is_id
from dsa_planner.cache.listing import LISTING, SIGNATURE, Listing, key_id, sign, signer
from dsa_planner.cache.planfile import MAX_BYTES, SUFFIX, PlanFile
from dsa_planner.cache.writable import TEMPORARY_SECONDS, WritableLayer
from dsa_planner.errors import CacheError, DsaPlannerError, PlanFileError, UnsupportedError, remedy_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["Bundle", "Exported", "Imported", "Report", "export_bundle", "import_bundle", "open_bundle", "verify_bundle"]

TAR = ".tar"
_FOLDER_MODE = 0o755
_FILE_MODE = 0o644
_TIME = 0  # of every file: a bundle does not tell when it was made
_MOST_MEMBERS = 1 << 20
_AGAIN = "export the bundle again"


@dataclass(frozen=True)
class Exported:
    """An export: the plan files in it, their bytes together, and the id of the key that signed it, if one did."""

    plans: int
    bytes: int
    key: str | None


def export_bundle(
    plans: Sequence[PlanFile],
    target: Path,
    key: Ed25519PrivateKey | None = None,
    chosen: Mapping[str, str] | None = None,
) -> Exported:
    """Write a bundle.

    Args:
        plans: its plans, any number of builds of each.
        target: a folder that is not there yet or empty, or a file whose name ends in ".tar", which is replaced.
        key: what signs it.
        chosen: plan id -> build id, where there are several builds: the one that jobs use.

    Raises:
        UnsupportedError: there is something else at ``target``.
        CacheError: it cannot be written; what was there before is still there.
    """
    contents = {f"{plan.plan_id}/{plan.build_id}": plan.encode() for plan in plans}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    several = {plan_id: build for plan_id, build in (chosen or {}).items() if f"{plan_id}/{build}" in contents}
    listing = Listing(digests, several).encode()
    files = {LISTING: listing}
    if key is not None:
        files[SIGNATURE] = sign(listing, key)
    files |= {f"{PLANS}/{name}{SUFFIX}": contents[name] for name in sorted(contents)}
    write = _write_tar if target.name.endswith(TAR) else _write_folder
    try:
        write(files, target)
    except OSError as error:
        remedy = remedy_of(error, "name a place that can be written")
        raise CacheError(f"cannot export to {target}", str(error.strerror or error), remedy) from None
    size = sum(map(len, contents.values()))
    return Exported(len(contents), size, None if key is None else key_id(key.public_key()))


def _write_folder(files: Mapping[str, bytes], target: Path) -> None:
    target = Path(os.path.abspath(target))
    if os.path.lexists(target) and not (target.is_dir() and not os.listdir(target)):
        raise UnsupportedError(f"export to {target}", "it is there and not an empty folder", "name a new folder")
    with _beside(target) as temporary:
        temporary.mkdir(mode=0o700)
        for name, data in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, lambda file, data=data: file.write(data))  # type: ignore[misc]
        for folder, _, _ in os.walk(temporary, topdown=False):
            os.chmod(folder, _FOLDER_MODE)
            os.utime(folder, (_TIME, _TIME))
            sync_folders(folder)
        os.rename(temporary, target)  # an empty folder gives way
        sync_folders(target.parent)


def _write_tar(files: Mapping[str, bytes], target: Path) -> None:
    target = Path(os.path.realpath(target))
    if target.exists() and not target.is_file():
        raise UnsupportedError(f"export to {target}", "it is there and not a regular file", "name a new file")
    folders = {str(parent) for name in files for parent in Path(name).parents if str(parent) != "."}

    def write(file: BufferedWriter) -> None:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for name in sorted({*folders, *files}):
                member = tarfile.TarInfo(name)
                member.mtime, member.mode = _TIME, _FILE_MODE
                if name in folders:
                    member.type, member.mode = tarfile.DIRTYPE, _FOLDER_MODE
                else:
                    member.size = len(files[name])
                archive.addfile(member, io.BytesIO(files.get(name, b"")))

    with _beside(target) as temporary:
        _write(temporary, write)
        os.replace(temporary, target)
        sync_folders(target.parent)


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A path beside ``target`` for what is to be renamed; whatever is still there in the end is removed.

    What killed exports to this target left goes too, after an hour.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    ours = re.compile(rf"\.{re.escape(target.name)}\.\d+\.[0-9a-f]{{8}}\.tmp")
    for path in target.parent.iterdir():
        with contextlib.suppress(OSError):
            if ours.fullmatch(path.name) and time.time() - path.lstat().st_ctime > TEMPORARY_SECONDS:
                _remove(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(path: Path, write: Callable[[BufferedWriter], object]) -> None:
    write_synced(path, write, _FILE_MODE, _TIME)
    os.chmod(path, _FILE_MODE)  # whatever the umask


# --- reading ----------------------------------------------------------------------------------------------------------


class Bundle:
    """A bundle that is open for reading.

    Args:
        place: the folder or file, for messages.
        listing: the content of ``layer.json``.
        signature: that of ``layer.sig``, or None.
        names: every file of it, relative, with "/".
    """

    def __init__(self, place: Path, listing: bytes, signature: bytes | None, names: Collection[str]) -> None:
        self.place = place
        self.listing_bytes = listing
        self.listing = Listing.decode_strictly(listing, f"bundle {place}, {LISTING}")
        self.signature = signature
        self.names = names

    def content(self, name: str) -> bytes:
        """The bytes of one of its files.

        Raises:
            OSError, PlanFileError: it cannot be read, or is too large.
        """
        return read_bounded(self.place / name)

    def plan(self, name: str) -> PlanFile:
        """A plan that the list names, "<plan id>/<build id>", checked against the list and both ids.

        Raises:
            PlanFileError: it is damaged, missing, or another file.
        """
        plan_id, _, build_id = name.partition("/")
        path = f"{PLANS}/{name}{SUFFIX}"
        place = f"{path} of bundle {self.place}"
        try:
            data = self.content(path)
        except (FileNotFoundError, NotADirectoryError, KeyError):
            raise PlanFileError(place, f"{LISTING} lists it, and it is not there", _AGAIN) from None
        except OSError as error:
            raise PlanFileError(place, f"it cannot be read ({error.strerror})", _AGAIN) from None
        if hashlib.sha256(data).hexdigest() != self.listing.plans[name]:
            raise PlanFileError(place, f"it is not the file that {LISTING} lists", _AGAIN)
        plan = PlanFile.decode(data, place, plan_id)
        if plan.build_id != build_id:
            raise PlanFileError(place, f"it holds build {plan.build_id}", _AGAIN)
        return plan


class _TarBundle(Bundle):
    def __init__(self, place: Path, archive: tarfile.TarFile, members: Mapping[str, tarfile.TarInfo]) -> None:
        self.archive = archive
        self.members = members
        signature = self.content(SIGNATURE) if SIGNATURE in members else None
        super().__init__(place, self.content(LISTING), signature, members)

    def content(self, name: str) -> bytes:
        file = self.archive.extractfile(self.members[name])
        assert file is not None  # it is a regular file
        try:
            return file.read()
        except tarfile.TarError as error:
            raise PlanFileError(
                f"{name} of bundle {self.place}", f"the tar file ends in it ({error})", _AGAIN
            ) from None


@contextlib.contextmanager
def open_bundle(place: Path) -> Iterator[Bundle]:
    """Open a bundle, a folder or a tar file.

    Raises:
        UnsupportedError: there is nothing, or something else.
        PlanFileError: it has no list, a malformed one, or, in a tar file, anything that a bundle has not.
    """
    asked = f"bundle {place}"
    with contextlib.ExitStack() as stack:
        try:
            if stat.S_ISDIR(place.stat().st_mode):
                bundle = _open_folder(place)
            else:
                archive = tarfile.open(place, "r:")  # noqa: SIM115 - closed below
                stack.callback(_close, archive)
                bundle = _open_tar(archive, place)
        except tarfile.TarError as error:
            raise PlanFileError(asked, f"it is no folder and no tar file ({error})", "name a bundle") from None
        except FileNotFoundError:
            raise UnsupportedError(asked, "there is no such file or folder", "name a bundle") from None
        except OSError as error:
            raise UnsupportedError(asked, f"it cannot be read ({error.strerror or error})", "mend that") from None
        yield bundle


def _close(archive: tarfile.TarFile) -> None:
    with contextlib.suppress(OSError):  # everything has been read by then
        archive.close()


def _open_tar(archive: tarfile.TarFile, place: Path) -> Bundle:
    members = _members(archive, place)
    if LISTING not in members:
        raise _no_list(place)
    return _TarBundle(place, archive, members)


def _open_folder(place: Path) -> Bundle:
    names = []
    for folder, folders, files in os.walk(place):
        # A link to a folder is not entered by os.walk; it counts as a file, which no list names.
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        names += [os.path.relpath(os.path.join(folder, name), place) for name in (*files, *links)]
    if LISTING not in names:
        raise _no_list(place)
    signature = read_bounded(place / SIGNATURE) if SIGNATURE in names else None
    return Bundle(place, read_bounded(place / LISTING), signature, sorted(names))


def _no_list(place: Path) -> PlanFileError:
    return PlanFileError(f"bundle {place}", f"it has no {LISTING}", "make bundles with dsa-plan export")


def _members(archive: tarfile.TarFile, place: Path) -> dict[str, tarfile.TarInfo]:
    """The regular files of an archive, by name. Nothing is ever extracted to a name that an archive gives."""
    found: dict[str, tarfile.TarInfo] = {}
    for count, member in enumerate(archive):
        name = member.name.removeprefix("./")
        rule = None
        if count > _MOST_MEMBERS:
            rule = f"it has more than {_MOST_MEMBERS} members"
        elif member.isdir():
            if name not in (".", "", PLANS) and not (name.startswith(PLANS + "/") and is_id(name[len(PLANS) + 1 :])):
                rule = f"it has the folder {member.name!r}, which no bundle has"
        elif not member.isreg():
            rule = f"its member {member.name!r} is not a regular file"
        elif name not in (LISTING, SIGNATURE) and not _is_plan_path(name):
            rule = f"it has the file {member.name!r}, which no bundle has"
        elif name in found:
            rule = f"it has the file {member.name!r} twice"
        elif member.size > MAX_BYTES:
            rule = f"its file {member.name!r} has {member.size} bytes, more than {MAX_BYTES}"
        else:
            found[name] = member
        if rule is not None:
            raise PlanFileError(f"bundle {place}", rule, _AGAIN)
    return found


def _is_plan_path(name: str) -> bool:
    parts = name.split("/")
    return (
        len(parts) == 3
        and parts[0] == PLANS
        and is_id(parts[1])
        and parts[2].endswith(SUFFIX)
        and is_id(parts[2][: -len(SUFFIX)])
    )


# --- checking and importing -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a bundle is, and all that is wrong with it."""

    plans: Mapping[str, int]
    """The bytes of each intact plan file, by "<plan id>/<build id>"."""
    signature: bool
    """Whether there is a signature."""
    signed_by: str | None
    """The id of the trusted key whose signature it is; None also where nobody asked."""
    problems: tuple[DsaPlannerError, ...]

    @property
    def bytes(self) -> int:
        return sum(self.plans.values())


def verify_bundle(bundle: Bundle, trusted: Sequence[Path] = ()) -> Report:
    """Check every file of a bundle, and its signature if keys are given.

    Args:
        bundle: the bundle.
        trusted: files of public keys, one of which must have signed it; none asks for no signature.

    Raises:
        UnsupportedError: a file of ``trusted`` is no public key.
        PackageMissingError: the cryptography package is not installed, and keys are given.
    """
    problems: list[DsaPlannerError] = []
    signed_by = None
    if trusted:
        try:
            if bundle.signature is None:
                raise PlanFileError("", "it is not signed", "export it again with --sign")
            signed_by = signer(bundle.listing_bytes, bundle.signature, trusted)
        except PlanFileError as error:
            problems.append(PlanFileError(f"bundle {bundle.place}", error.rule, error.remedy))
    plans = {}
    for name in bundle.listing.plans:
        try:
            plans[name] = len(bundle.plan(name).encode())
        except PlanFileError as error:
            problems.append(error)
    listed = {f"{PLANS}/{name}{SUFFIX}" for name in bundle.listing.plans} | {LISTING, SIGNATURE}
    problems += [
        PlanFileError(f"{name} of bundle {bundle.place}", f"{LISTING} does not list it", "remove it")
        for name in sorted(set(bundle.names) - listed)
    ]
    return Report(plans, bundle.signature is not None, signed_by, tuple(problems))


@dataclass(frozen=True)
class Imported:
    """One plan of an import: ``status`` is "imported", "hit" if it was there already, or "refused" by the settings."""

    plan_id: str
    build_id: str
    config: Mapping[str, Any]
    status: str
    bytes: int


def import_bundle(bundle: Bundle, layer: WritableLayer, trusted: Sequence[Path] = ()) -> list[Imported]:
    """Publish the plans of a bundle into a writable layer.

    Args:
        bundle: the bundle.
        layer: where they go. None of them is evicted for another one.
        trusted: as for ``verify_bundle``.

    Raises:
        PlanFileError: something is wrong with the bundle; nothing was imported.
        CacheError: the layer cannot be written, or has no room for all of them; those published before stay.
        UnsupportedError, PackageMissingError: as for ``verify_bundle``.
    """
    report = verify_bundle(bundle, trusted)
    if report.problems:
        first = report.problems[0]
        more = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
        raise PlanFileError(first.asked, first.rule + more, first.remedy)
    welcome = {name: size for name, size in report.plans.items() if not layer.policy.refuses(name.partition("/")[2])}
    if (total := sum(welcome.values())) > layer.limit_bytes:
        raise CacheError(
            f"{len(welcome)} plans of {total} bytes together",
            f"they do not fit into the layer's limit of {layer.limit_bytes} bytes",
            f"set DSA_PLAN_CACHE_BYTES to {total} or more",
        )
    layer.prepare()
    keep = frozenset(layer.path_of(*name.split("/")) for name in welcome)
    found = []
    for name, size in report.plans.items():
        plan = bundle.plan(name)
        status = "refused"
        if name in welcome:
            status = "imported" if layer.publish(plan, keep).new else "hit"
        found.append(Imported(plan.plan_id, plan.build_id, plan.config, status, size))
    return found
