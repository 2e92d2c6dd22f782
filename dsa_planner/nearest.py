"""Why a plan is missing: the plans that come nearest to it, and what differs. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsa_planner.cache.layer import Layer
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.search import SearchPath
from dsa_planner.identity import identity_of

__all__ = ["Difference", "Near", "nearest"]

_MEANINGS = {
    "sources": "the kernel's sources are those of another version of dsa-planner",
    "options": "the compiler's options are those of another version of dsa-planner",
    "launch": "the launch record is that of another version of dsa-planner",
}


@dataclass(frozen=True)
class Difference:
    """A field in which a plan differs from the one that was asked for."""

    field: str
    asked: Any
    found: Any

    def __str__(self) -> str:
        return _MEANINGS.get(self.field) or f"{self.field} is {self.found}, not {self.asked}"


@dataclass(frozen=True)
class Near:
    """A plan that a layer holds, and how it differs from the one that was asked for."""

    plan: PlanFile
    layer: Layer
    differences: tuple[Difference, ...]


def nearest(config: Mapping[str, Any], search: SearchPath, most: int = 3) -> list[Near]:
    """The plans of the layers that come nearest to a config, the nearest first. Reads every plan file.

    Args:
        config: a complete config.
        search: where to look.
        most: plans at most.
    """
    asked = identity_of(config)
    found: dict[str, Near] = {}
    for layer in search.layers:
        for entry in layer.entries():
            if entry.plan_id in found or (plan := layer.read(entry.plan_id, entry.build_id, False)) is None:
                continue
            found[entry.plan_id] = Near(plan, layer, _differences(asked, plan.manifest["identity"]))
    return sorted(found.values(), key=_distance)[:most]


def _differences(asked: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[Difference, ...]:
    mine, theirs = asked["config"], found["config"]
    fields = [
        Difference(name, mine.get(name), theirs.get(name))
        for name in {**mine, **theirs}
        if mine.get(name) != theirs.get(name)
    ]
    # Another config has other kernels and another launch record: that is no news.
    names = () if fields else _MEANINGS
    rest = [Difference(name, asked[name], found[name]) for name in names if asked[name] != found[name]]
    return (*fields, *rest)


def _distance(near: Near) -> tuple[int, int, str]:
    numbers = [d for d in near.differences if type(d.asked) is int and type(d.found) is int]
    return len(near.differences), sum(abs(d.asked - d.found) for d in numbers), near.plan.plan_id
