"""Settings from the environment. Standard library only; read when asked, never at import.

======================= ==================== =========================================================================
variable                default              meaning
======================= ==================== =========================================================================
DSA_PLAN_PATH           empty                read-only layers, searched in this order, separated as in PATH
DSA_PLAN_CACHE_DIR      ~/.cache/dsa-planner the writable layer, searched last; "none" for no writable layer
DSA_PLAN_CACHE_BYTES    1073741824 (1 GiB)   limit of the writable layer's plan files, in bytes
DSA_PLAN_PERMISSIONS    strict               "strict": what every user may write is not used, and another user's
                                             writable layer is only read; "any": neither is looked at
DSA_PLAN_REFUSED_BUILDS empty                build ids that are never used, or beginnings of them of at least 12
                                             digits, separated by commas
DSA_PLAN_TRUSTED_KEYS   empty                files of ed25519 public keys, separated as in PATH; if there are any,
                                             jobs use only layers that one of them has signed
DSA_PLAN_COMPILE        never                what jobs do about a plan that no layer has: "never" compile, it is an
                                             error; or compile what is "missing", where the compiler is installed
DSA_PLAN_LAUNCH         graph                how a plan's kernels are launched: as one CUDA "graph", or, easier to
                                             follow in a profiler and slower on the host, as "kernels"
DSA_PLAN_AUDIT          0                    "1": every launch is compared with those in flight on other streams, and
                                             refused where two that nothing orders share memory
DSA_PLAN_MODULE_BYTES   268435456 (256 MiB)  limit of the cubins that a process keeps loaded on a device, in bytes
======================= ==================== =========================================================================

The default follows XDG_CACHE_HOME where that is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsa_planner.cache.layer import Policy
from dsa_planner.errors import CacheError, UnsupportedError, shown

__all__ = ["DEFAULT_CACHE_BYTES", "DEFAULT_MODULE_BYTES", "LAUNCHES", "Settings", "default_cache_dir"]

DEFAULT_CACHE_BYTES = 1 << 30
DEFAULT_MODULE_BYTES = 256 << 20
COMPILES = ("never", "missing")
LAUNCHES = ("graph", "kernels")
AUDITS = ("0", "1")
PERMISSIONS = ("strict", "any")
_LEAST_DIGITS = 12  # of a refused build id: as many as tables show
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
    policy: Policy = field(default_factory=Policy)
    """What is refused of the layers."""
    compile: str = COMPILES[0]
    audit: bool = False
    module_bytes: int = DEFAULT_MODULE_BYTES

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the variables.

        Raises:
            UnsupportedError: a number of bytes is not a positive integer, a folder is relative to an unknown one, a
                refused build is no beginning of a build id, or a variable of few words has another one.
        """
        env = os.environ if environment is None else environment
        read_only = _paths("DSA_PLAN_PATH", env)
        chosen = env.get("DSA_PLAN_CACHE_DIR", "")
        if chosen.lower() == "none":
            cache_dir = None
        else:
            cache_dir = _folder("DSA_PLAN_CACHE_DIR", chosen) if chosen else default_cache_dir(env)
        launch = _word("DSA_PLAN_LAUNCH", env, LAUNCHES)
        anyone_may_write = _word("DSA_PLAN_PERMISSIONS", env, PERMISSIONS) == "any"
        policy = Policy(anyone_may_write, _refused_builds(env), _paths("DSA_PLAN_TRUSTED_KEYS", env))
        return cls(
            read_only,
            cache_dir,
            _bytes("DSA_PLAN_CACHE_BYTES", env, DEFAULT_CACHE_BYTES),
            launch,
            policy,
            compile=_word("DSA_PLAN_COMPILE", env, COMPILES),
            audit=_word("DSA_PLAN_AUDIT", env, AUDITS) == "1",
            module_bytes=_bytes("DSA_PLAN_MODULE_BYTES", env, DEFAULT_MODULE_BYTES),
        )

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


def _bytes(variable: str, env: Mapping[str, str], default: int) -> int:
    """The number of bytes that a variable has."""
    text = env.get(variable, "") or str(default)
    if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_LIMIT and int(text) > 0):
        raise UnsupportedError(
            f"{variable}={shown(text)}",
            f"it has to be a number of bytes, a positive integer of at most {_LONGEST_LIMIT} digits",
            "use for example 1073741824",
        )
    return int(text)


def _word(variable: str, env: Mapping[str, str], words: tuple[str, ...]) -> str:
    """Which of the words a variable has; the first by default."""
    found = env.get(variable, "") or words[0]
    if found not in words:
        raise UnsupportedError(
            f"{variable}={shown(found)}", f"it has to be {' or '.join(words)}", "unset it for the default"
        )
    return found


def _refused_builds(env: Mapping[str, str]) -> tuple[str, ...]:
    entries = tuple(entry.strip().lower() for entry in env.get("DSA_PLAN_REFUSED_BUILDS", "").split(","))
    for entry in filter(None, entries):
        if not _LEAST_DIGITS <= len(entry) <= 64 or set(entry) - set("0123456789abcdef"):
            raise UnsupportedError(
                f"DSA_PLAN_REFUSED_BUILDS={shown(entry)}",
                f"an entry is a build id, or its first {_LEAST_DIGITS} or more hexadecimal digits",
                "take it from dsa-plan list",
            )
    return tuple(filter(None, entries))


def _paths(variable: str, env: Mapping[str, str]) -> tuple[Path, ...]:
    return tuple(_folder(variable, entry) for entry in env.get(variable, "").split(os.pathsep) if entry)


def _folder(variable: str, text: str) -> Path:
    """The absolute path of a folder or file that a variable names; ~ is the home folder, as in a shell."""
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
