"""From a plan config to the plan id: what a plan is, computed without compiling it.

The identity is the config, the digest of the kernel sources, the compiler's options and the launch record. The shape of
a launch (batch, S_q, S_k), its scalars and the device's SM count are never part of it: one plan covers every shape.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsa_planner import envelope
from dsa_planner.cache.planfile import plan_id
from dsa_planner.kernels import catalogue

__all__ = ["compiler_options", "identity_of", "kernel_of", "plan_id_of"]


def kernel_of(config: Mapping[str, Any]) -> catalogue.Kernel:
    """The kernel that serves a complete config.

    Raises:
        UnsupportedError: the envelope names the config's row, and this version does not build it yet.
    """
    return catalogue.load(envelope.support_of(config).kernel)


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a plan.

    Args:
        config: its config; fields that are left out have their defaults.

    Raises:
        UnsupportedError: the config lies outside the envelope, or this version does not build its row yet.
    """
    complete = envelope.plan_config(config)
    kernel = kernel_of(complete)
    return {
        "config": complete,
        "sources": kernel.source_digest,
        "options": compiler_options(complete["arch"], kernel.options),
        "launch": kernel.launch_for(complete),
    }


def compiler_options(arch: str, options: Mapping[str, Any]) -> str:
    """The option string for ``cute.compile``: the arch always, then the kernel's own options in name order."""
    own = [f"--{name} {value}" for name, value in sorted(options.items())]
    return " ".join([f"--gpu-arch {arch}", *own, "--keep-cubin", "--keep-ptx"])


def plan_id_of(config: Mapping[str, Any]) -> str:
    """The plan id of a config, 64 hexadecimal digits; errors as ``identity_of``."""
    return plan_id(identity_of(config))
