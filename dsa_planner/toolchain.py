"""The compiler as installed: its packages, and the build id that names it.

The build id is a digest of the *contents* of the compiler's packages, taken from the SHA-256 lines that every installer
writes to a wheel's RECORD, and of the program that runs the compiler. So it is the same on every machine that installed
the same wheels, in whatever folder, and differs for another version, platform or CUDA flavour. (The compiler's binary
wheels are built per Python minor version, so the build id also tells those apart.) ``verify`` holds the installed files
to their lines before anything is compiled.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dsa_planner.cache.layer import version_key
from dsa_planner.errors import CompileError, CompilerMissingError, remedy_of

__all__ = ["MINIMUM", "WORKER", "Toolchain", "installed", "verify"]

PACKAGE = "nvidia-cutlass-dsl"
MINIMUM = (4, 8, 1)
WORKER = Path(__file__).with_name("compile_worker.py")
_REINSTALL = f"install it from a wheel: pip install --force-reinstall '{PACKAGE}'"


@dataclass(frozen=True)
class Toolchain:
    """The compiler.

    ``packages`` maps each of its packages to its version; ``build_id`` is 64 hexadecimal digits; ``files`` maps the
    path of each of its library files to the SHA-256 in its RECORD (URL-safe base64).
    """

    build_id: str
    packages: dict[str, str]
    files: dict[str, str]


@lru_cache(maxsize=1)
def installed() -> Toolchain:
    """The compiler of this environment: the packages that an import would find.

    Raises:
        CompilerMissingError: nvidia-cutlass-dsl is not installed, too old, or without a list of its files.
    """
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():  # in the order of sys.path: an import takes the first
        name = _normal(distribution.metadata["Name"])
        if name.startswith(PACKAGE):
            found.setdefault(name, distribution)
    if PACKAGE not in found or importlib.util.find_spec("elftools") is None:
        raise CompilerMissingError(
            f"package {PACKAGE if PACKAGE not in found else 'pyelftools'}",
            "compiling a plan needs it and it is not installed",
            "pip install 'dsa-planner[compile]'",
        )
    version = found[PACKAGE].version
    minimum = ".".join(map(str, MINIMUM))
    if version_key(version) < MINIMUM:
        raise CompilerMissingError(
            f"package {PACKAGE} {version}",
            f"version {minimum} or newer is needed",
            f"pip install '{PACKAGE}>={minimum}'",
        )
    total = hashlib.sha256(WORKER.read_bytes())
    files: dict[str, str] = {}
    for name in sorted(found):
        total.update(f"{name} {found[name].version}\n".encode())
        for path, content_hash in _contents(found[name]):
            total.update(f"{path} {content_hash}\n".encode())
            files[os.path.realpath(str(found[name].locate_file(path)))] = content_hash.removeprefix("sha256=")
    if not files:
        raise CompilerMissingError(
            f"package {PACKAGE} {version}", "its RECORD lists no files, so that builds cannot be told apart", _REINSTALL
        )
    return Toolchain(total.hexdigest(), {name: found[name].version for name in sorted(found)}, files)


@lru_cache(maxsize=1)
def verify() -> None:
    """Hold the compiler's files to their RECORD, once a process: an edited compiler would build under a false name.

    Raises:
        CompileError: a file is missing or another one.
    """
    for path, expected in installed().files.items():
        try:
            with open(path, "rb") as file:
                digest = hashlib.sha256(file.read()).digest()
        except OSError as error:
            raise CompileError(
                f"compiler file {path}", f"it cannot be read ({error.strerror})", remedy_of(error, _REINSTALL)
            ) from None
        if base64.urlsafe_b64encode(digest).decode().rstrip("=") != expected:
            raise CompileError(f"compiler file {path}", "it is not the one that was installed", _REINSTALL)


def _normal(name: str | None) -> str:
    return (name or "").lower().replace("_", "-").replace(".", "-")


def _contents(distribution: importlib.metadata.Distribution) -> Iterator[tuple[str, str]]:
    """Path and hash of the library files that the RECORD lists, in order of path.

    Left out is what installers make themselves: bytecode (no hash), the .dist-info folder, and scripts, which lie
    outside the library folder and name the interpreter's path.
    """
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    for path, content_hash, *_ in sorted(row for row in rows if len(row) > 1):
        if content_hash and not path.startswith(("../", "/")) and ".dist-info/" not in path:
            yield path, content_hash
