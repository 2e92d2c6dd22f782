"""Plans that are not what they should be."""

from __future__ import annotations

from dsa_planner import verify
from dsa_planner.cache.planfile import PlanFile


def changed(plan: PlanFile, old: str, new: str, count: int = -1) -> PlanFile:
    """The plan with other PTX."""
    text = plan.sections["ptx"].decode()
    assert old in text
    return verify.with_ptx(plan, text.replace(old, new, count).encode())
