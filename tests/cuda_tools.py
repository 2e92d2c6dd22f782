"""The CUDA binary utilities that the tests use."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def tool(name: str) -> str:
    """A CUDA binary utility, from the packages of the extra "test"."""
    return str(Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / name)
