"""The compiler as installed: its packages, and the build id that names it.

The build id is a digest of the *contents* of the compiler's packages, taken from the SHA-256 lines that every installer
writes to a wheel's RECORD. So it is the same on every machine that installed the same wheels, in whatever folder, and
differs for another version, platform or CUDA flavour. (The compiler's binary wheels are built per Python minor version,
so the build id also tells those apart.)
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import lru_cache

from dsa_planner.errors import CompilerMissingError

__all__ = ["MINIMUM", "Toolchain", "installed", "version_key"]

PACKAGE = "nvidia-cutlass-dsl"
MINIMUM = (4, 8, 1)


@dataclass(frozen=True)
class Toolchain:
    """``packages`` maps each compiler package to its version; ``build_id`` is 64 hexadecimal digits."""

    build_id: str
    packages: dict[str, str]


def version_key(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for ordering: "4.8.1" -> (4, 8, 1)."""
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


@lru_cache(maxsize=1)
def installed() -> Toolchain:
    """The compiler of this environment.

    Raises:
        CompilerMissingError: nvidia-cutlass-dsl is not installed, or too old.
    """
    found = {
        name: distribution
        for distribution in importlib.metadata.distributions()
        if (name := _normal(distribution.metadata["Name"])).startswith(PACKAGE)
    }
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
    total = hashlib.sha256()
    for name in sorted(found):
        total.update(f"{name} {found[name].version}\n".encode())
        for line in _content_lines(found[name]):
            total.update(line.encode())
    return Toolchain(total.hexdigest(), {name: found[name].version for name in sorted(found)})


def _normal(name: str | None) -> str:
    return (name or "").lower().replace("_", "-").replace(".", "-")


def _content_lines(distribution: importlib.metadata.Distribution) -> list[str]:
    """The RECORD's "path hash" lines of installed library files.

    Left out is what installers make themselves: bytecode (no hash), the .dist-info folder, and scripts, which lie
    outside the library folder and name the interpreter's path.
    """
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    return sorted(
        f"{path} {content_hash}\n"
        for path, content_hash, *_ in rows
        if content_hash and not path.startswith(("../", "/")) and ".dist-info/" not in path
    )
