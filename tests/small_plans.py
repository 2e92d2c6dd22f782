"""Small well-formed plan files, for tests of the cache that need no compiler."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

from dsa_planner.cache.planfile import PlanFile


def small_plan(number: int = 0, size: int = 100, build: str = "b", version: str = "4.8.1") -> PlanFile:
    """A plan that differs from every other ``number``, with a cubin section of ``size`` bytes."""
    identity = {
        "config": {"arch": "sm_90a", "topk": number},
        "sources": "0" * 64,
        "options": "",
        "launch": {"kernels": [{"name": "only"}], "buffers": []},
    }
    build_record = {"id": build * 64, "packages": {"nvidia-cutlass-dsl": version}}
    return PlanFile.build(
        identity, build_record, [kernel_entry("only")], {"cubin": elf_header() + bytes([number % 256]) * size}
    )


def elf_header(sm: int = 90, suffix: str = "a") -> bytes:
    """The beginning of a cubin for an arch."""
    old = sm <= 90
    flags = (sm | (0x800 if suffix == "a" else 0)) if old else (sm << 8 | (0x8 if suffix == "a" else 0))
    ident = b"\x7fELF" + bytes([2, 1, 1, 0x41, 7 if old else 8]) + bytes(7)
    return ident + struct.pack("<HHIQQQI", 2, 190, 1, 0, 0, 0, flags) + bytes(12)


def kernel_entry(name: str) -> dict[str, Any]:
    """A kernel as a manifest describes it."""
    numbers = ("registers", "stack_bytes", "spill_store_bytes", "spill_load_bytes", "static_shared_bytes")
    return {
        "name": name,
        "symbol": f"dsa_{name}_0",
        **dict.fromkeys((*numbers, "dynamic_shared_bytes"), 0),
        "parameters": [[0, 8]],
    }


def files(root: Path) -> list[str]:
    """All files below a folder, relative to it, but for the index and locks."""
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if path.parts[0] not in ("index", "lock", "locks", "CACHEDIR.TAG"))


def set_age(path: Path, seconds_ago: int) -> None:
    """Make a file look as if it had last been used so long ago."""
    then = path.stat().st_mtime_ns - seconds_ago * 10**9
    os.utime(path, ns=(then, then))
