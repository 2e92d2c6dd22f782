"""What is known of a kernel without compiling it: launch record, compile options, digest of its sources.

Standard library only, so that a training image, which has no compiler, computes the same plan ids as the machine that
built the plans.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parent
MODULE_PREFIX = "dsa_planner.kernels."


@dataclass(frozen=True)
class Kernel:
    """One entry of the catalogue.

    ``launch`` is the launch record and ``options`` the compile options, both plain JSON data; a part of the record that
    not every plan has says in ``only`` which config values it is for. ``module`` has the ``program(config)`` that is
    compiled: fixed, since kernel symbols must not depend on the caller. ``sources`` maps the name
    of every file of this package that the compilation reads to its bytes; ``source_digest`` is the SHA-256 over them.
    """

    name: str
    sources: Mapping[str, bytes]
    source_digest: str
    options: Mapping[str, Any]
    launch: Mapping[str, Any]

    @property
    def module(self) -> str:
        return MODULE_PREFIX + self.name

    def launch_for(self, config: Mapping[str, Any]) -> Any:
        """The launch record of one plan."""
        return _only_for(config, self.launch)


def _only_for(config: Mapping[str, Any], part: Any) -> Any:
    """A part of a record without those of other configs."""
    if isinstance(part, dict):
        return {key: _only_for(config, value) for key, value in part.items() if key != "only"}
    if isinstance(part, list):
        wanted = (entry for entry in part if not isinstance(entry, dict) or _holds(entry.get("only", {}), config))
        return [_only_for(config, entry) for entry in wanted]
    return part


def _holds(only: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    return all(config[name] == value for name, value in only.items())


def digest_sources(files: Mapping[str, bytes]) -> str:
    """SHA-256 over names and contents, in name order; a file's length goes in, so that no two sets run together."""
    total = hashlib.sha256()
    for name in sorted(files):
        content = files[name]
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


@cache
def load(name: str, folder: Path = _FOLDER) -> Kernel:
    """Read a kernel's entry. Cached, with the sources, so that what is compiled is what the digest is of."""
    entry = json.loads((folder / f"{name}.json").read_bytes())
    sources = {source: (folder / source).read_bytes() for source in sorted(entry["sources"])}
    return Kernel(name, sources, digest_sources(sources), entry["options"], entry["launch"])
