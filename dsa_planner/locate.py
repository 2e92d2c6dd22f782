"""Find a plan's file in the layers. Run side: standard library only, and never a compiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsa_planner import envelope
from dsa_planner.cache.layer import Policy, RecordingLayer
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.search import SearchPath
from dsa_planner.errors import PlanNotFoundError
from dsa_planner.identity import plan_id_of
from dsa_planner.settings import Settings

__all__ = ["find_plan", "search_path"]


def search_path(settings: Settings, trust_writable: bool = False) -> SearchPath:
    """The layers of the settings, for reading.

    Args:
        settings: where they are, and what is refused.
        trust_writable: use the writable layer though no trusted key has signed it: for commands of its owner, who
            builds plans there. For jobs it is one layer like any other.
    """
    policy = settings.policy
    own = Policy(policy.anyone_may_write, policy.refused_builds) if trust_writable else policy
    writable = None if settings.cache_dir is None else RecordingLayer(settings.cache_dir, own)
    return SearchPath(settings.read_only, writable, policy)


def find_plan(config: Mapping[str, Any], settings: Settings | None = None) -> PlanFile:
    """The plan of a config, from the first layer that has it.

    Raises:
        UnsupportedError: the config lies outside the envelope, or this version does not build its row yet.
        PlanNotFoundError: no layer holds it; the message has the command that builds it.
    """
    config = envelope.plan_config(config)
    plan_id = plan_id_of(config)
    layers = search_path(Settings.from_environment() if settings is None else settings)
    found = layers.find(plan_id)
    if found is not None:
        return found[0]
    unusable = layers.unusable()
    command = f"dsa-plan precompile --backend {config['backend']} --arch {config['arch']} --topk {config['topk']}"
    if config["d_weights"] != "bf16":
        command += f" --d-weights {config['d_weights']}"
    asked = f"plan {plan_id[:12]} ({', '.join(f'{name}={value}' for name, value in config.items())})"
    if not layers.layers:
        raise PlanNotFoundError(
            asked,
            "there is no layer to look in",
            f"set DSA_PLAN_PATH or DSA_PLAN_CACHE_DIR, and run '{command}' where the compiler is installed",
        )
    raise PlanNotFoundError(
        asked,
        f"it is not in {layers.describe()}" + (f" (unusable: {'; '.join(unusable)})" if unusable else ""),
        f"run '{command}' where the compiler is installed, and add its layer to DSA_PLAN_PATH",
    )
