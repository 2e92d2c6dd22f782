"""From a plan config to the plan id: what a plan is, computed without compiling it.

The identity is the config, the digest of the kernel sources, the compile options and the launch record. The shape of a
launch (batch, S_q, S_k), its scalars and the device's SM count are never part of it: one plan covers every shape.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsa_planner import envelope
from dsa_planner.cache.planfile import plan_id
from dsa_planner.kernels import catalogue

__all__ = ["identity_of", "plan_id_of"]


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of the plan for a complete config (see ``envelope.plan_config``).

    Raises:
        UnsupportedError: the envelope names the config's row, and this version does not build it yet.
    """
    kernel = catalogue.load(envelope.require_built(envelope.support_of(config), config))
    return {
        "config": dict(config),
        "sources": kernel.source_digest,
        "options": dict(kernel.options),
        "launch": dict(kernel.launch),
    }


def plan_id_of(config: Mapping[str, Any]) -> str:
    """The plan id of a complete config, 64 hexadecimal digits."""
    return plan_id(identity_of(config))
