"""The machine's C code as a shared library, compiled once per version by the C compiler of the ziglang package.

The library lies in the cache folder under the digest of its sources and of the compiler's version, so a new version of
either is another file and nothing is ever rebuilt in place.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path

__all__ = ["BuildError", "library", "source_digest"]

_SOURCES = Path(__file__).parent / "vm"
_OPTIONS = (
    "-O2", "-std=gnu11", "-shared", "-fPIC", "-nostdlib", "-ffp-contract=off", "-fno-strict-aliasing",
    "-fno-sanitize=undefined",
)  # fmt: skip
# Fused multiply-add is an instruction on every 64-bit Arm, and on x86-64 since 2013.
_CPU = {"x86_64": ("-march=x86_64_v3",), "AMD64": ("-march=x86_64_v3",)}
_COMPILE_SECONDS = 300


class BuildError(RuntimeError):
    """The machine cannot be compiled here; the message says what is missing."""


def source_digest() -> str:
    """SHA-256 over the C sources, in name order."""
    total = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        if path.suffix in (".c", ".h"):
            content = path.read_bytes()
            total.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


@cache
def library(folder: Path) -> ctypes.CDLL:
    """Load the machine, compiling it into ``folder`` where it is not there yet.

    Raises:
        BuildError: ziglang is not installed, or it failed.
    """
    try:
        version = metadata.version("ziglang")
    except metadata.PackageNotFoundError:
        raise BuildError("package ziglang: the virtual machine is compiled with it and it is not installed") from None
    key = hashlib.sha256(f"{source_digest()} {version} {_OPTIONS} {platform.machine()}".encode()).hexdigest()[:16]
    path = folder / f"ptx-vm-{key}.so"
    if not path.exists():
        _compile(path)
    return ctypes.CDLL(str(path))


def _compile(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ptx-vm-", dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        command = [
            sys.executable, "-m", "ziglang", "cc", *_OPTIONS, *_CPU.get(platform.machine(), ()), "-o", str(made),
            str(_SOURCES / "vm.c"),
        ]  # fmt: skip
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": scratch, "ZIG_LOCAL_CACHE_DIR": scratch}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"the compiler of ziglang took longer than {_COMPILE_SECONDS} s") from None
        if done.returncode:
            raise BuildError(f"the compiler of ziglang failed: {done.stderr.strip()[-2000:]}")
        os.replace(made, path)
