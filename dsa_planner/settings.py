"""Settings from the environment. Standard library only; read when asked, never at import.

===================== =============================== ================================================================
variable              default                         meaning
===================== =============================== ================================================================
DSA_PLAN_PATH         empty                           read-only layers, searched in this order, separated as in PATH
DSA_PLAN_CACHE_DIR    ~/.cache/dsa-planner            the writable layer, searched last; "none" for no writable layer
DSA_PLAN_CACHE_BYTES  1073741824 (1 GiB)              limit of the writable layer's plan files, in bytes
DSA_PLAN_LAUNCH       graph                           how a plan's kernels are launched: as one CUDA "graph", or, easier
                                                      to follow in a profiler and slower on the host, as "kernels"
===================== =============================== ================================================================

The default follows XDG_CACHE_HOME where that is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsa_planner.errors import CacheError, UnsupportedError, shown

__all__ = ["DEFAULT_CACHE_BYTES", "LAUNCHES", "Settings", "default_cache_dir"]

DEFAULT_CACHE_BYTES = 1 << 30
LAUNCHES = ("graph", "kernels")
_FOLDER = "dsa-planner"
_LONGEST_LIMIT = 18  # digits


@dataclass(frozen=True)
class Settings:
    """Where plans are looked for and kept, and how they are launched."""

    read_only: tuple[Path, ...]
    cache_dir: Path | None
    """The writable layer, or None for none."""
    cache_bytes: int
    launch: str = LAUNCHES[0]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the variables.

        Raises:
            UnsupportedError: DSA_PLAN_CACHE_BYTES is not a positive integer, a folder is relative to an unknown one, or
                DSA_PLAN_LAUNCH is no way to launch.
        """
        env = os.environ if environment is None else environment
        entries = env.get("DSA_PLAN_PATH", "").split(os.pathsep)
        read_only = tuple(_folder("DSA_PLAN_PATH", entry) for entry in entries if entry)
        chosen = env.get("DSA_PLAN_CACHE_DIR", "")
        if chosen.lower() == "none":
            cache_dir = None
        else:
            cache_dir = _folder("DSA_PLAN_CACHE_DIR", chosen) if chosen else default_cache_dir(env)
        limit = env.get("DSA_PLAN_CACHE_BYTES", "") or str(DEFAULT_CACHE_BYTES)
        if not (limit.isascii() and limit.isdigit() and len(limit) <= _LONGEST_LIMIT and int(limit) > 0):
            raise UnsupportedError(
                f"DSA_PLAN_CACHE_BYTES={shown(limit)}",
                f"it has to be a number of bytes, a positive integer of at most {_LONGEST_LIMIT} digits",
                "use for example 1073741824",
            )
        launch = env.get("DSA_PLAN_LAUNCH", "") or LAUNCHES[0]
        if launch not in LAUNCHES:
            raise UnsupportedError(
                f"DSA_PLAN_LAUNCH={shown(launch)}", f"it has to be {' or '.join(LAUNCHES)}", "unset it for the default"
            )
        return cls(read_only, cache_dir, int(limit), launch)

    def require_cache_dir(self) -> Path:
        """The writable layer, for those who must write.

        Raises:
            CacheError: there is none.
        """
        if self.cache_dir is None:
            raise CacheError(
                "no writable layer",
                "DSA_PLAN_CACHE_DIR is 'none', or no home folder could be found",
                "set DSA_PLAN_CACHE_DIR to a folder",
            )
        return self.cache_dir


def _folder(variable: str, text: str) -> Path:
    """The absolute path of a folder that a variable names; ~ is the home folder, as in a shell."""
    path = os.path.expanduser(text)
    try:
        if not path.startswith("~"):
            return Path(os.path.abspath(path))
        reason = "no home folder is known for it"
    except OSError:
        reason = "it is relative, and the working folder is gone"
    raise UnsupportedError(f"{variable}={shown(text)}", reason, "give an absolute path")


def default_cache_dir(environment: Mapping[str, str]) -> Path | None:
    """The user's cache folder for this package; None where no home folder is known (HOME unset, unknown user)."""
    base = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / _FOLDER
    home = environment.get("HOME", "") or os.path.expanduser("~")
    if not os.path.isabs(home):
        return None
    return Path(home) / ".cache" / _FOLDER
