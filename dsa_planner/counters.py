"""``stats``: what this process has done so far, in numbers. Run side."""

from __future__ import annotations

import sys
from typing import Any

from dsa_planner.cache.search import layer_counts

__all__ = ["stats"]


def stats() -> dict[str, Any]:
    """Counters of this process, as plain data for a log or a metrics exporter. Nothing is loaded or started for it.

    Returns:
        layers: by folder, see ``layer_counts``.
        plans: a list, one entry for each plan that was loaded: ``plan_id``, ``build_id``, ``device``, ``backend``,
            ``topk``, ``launches``, ``captured`` (how many of these), ``loaded`` (now), ``stays`` (its cubin is never
            unloaded).
        devices: by ordinal, for each device in use: ``modules``, ``modules_that_stay``, ``module_bytes`` (loaded now),
            ``modules_unloaded``; ``streams`` that own memory, ``counters`` (of them with a counter), ``slab_bytes``,
            ``scratch_streams``, ``scratch_bytes``, ``launches_on_lent_memory``.
        audit: ``audited`` launches, and ``found``, how many were refused.
        synchronisations: how often the runtime has waited for the GPU: once for each stream of a plan whose cubin was
            unloaded. A launch does not, unless it has to load its own cubin again.
    """
    answer: dict[str, Any] = {
        "layers": layer_counts(),
        "plans": [],
        "devices": {},
        "audit": {"audited": 0, "found": 0},
        "synchronisations": 0,
    }
    if "dsa_planner.plan" not in sys.modules:  # nothing was launched
        return answer
    from dsa_planner import audit, device_memory, driver, modules, operators

    for plan in operators.plans():
        answer["plans"].append(
            {
                "plan_id": plan.plan_id,
                "build_id": plan.build_id,
                "device": plan.device,
                "backend": plan.config["backend"],
                "topk": plan.config["topk"],
                **plan.stats(),
            }
        )
    for target in driver.open_devices():
        answer["devices"][target.ordinal] = {
            **modules.module_stats(target.ordinal),
            **device_memory.memory_of(target).stats(),
        }
    answer["audit"] = audit.audit_stats()
    answer["synchronisations"] = modules.waits()
    return answer
