"""dsa_planner: GPU kernel plans, compiled ahead of time and launched without a compiler.

Two worlds share this package. The **build side** (``PlanConfig``, ``Planner``, the ``dsa-plan`` command) compiles plans
and keeps them. The **run side** (``indexer_backward``, ``indexer_loss``, ``load_plan``, ``require``, ``stats``, the
errors) launches them in training jobs, with the standard library, cuda.bindings and torch; it never imports a compiler,
pydantic, typer, rich or diskcache. Names are imported when first used, so that neither side pays for the other
(tests/test_two_worlds.py).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dsa_planner.errors import (
    AuditError,
    CacheError,
    CaptureError,
    CompileError,
    CompilerMissingError,
    DeviceMismatchError,
    DriverError,
    DsaPlannerError,
    PlanFileError,
    PlanNotFoundError,
    RequirementError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from dsa_planner.cache.search import layer_counts
    from dsa_planner.config import PlanConfig
    from dsa_planner.counters import stats
    from dsa_planner.operators import indexer_backward, load_plan
    from dsa_planner.plan import Plan
    from dsa_planner.planner import Planner
    from dsa_planner.requirements import require
    from dsa_planner.torch_ops import indexer_loss

__version__ = "0.1.0"
__all__ = [
    "AuditError",
    "CacheError",
    "CaptureError",
    "CompileError",
    "CompilerMissingError",
    "DeviceMismatchError",
    "DriverError",
    "DsaPlannerError",
    "Plan",
    "PlanConfig",
    "PlanFileError",
    "PlanNotFoundError",
    "Planner",
    "RequirementError",
    "UnsupportedError",
    "indexer_backward",
    "indexer_loss",
    "layer_counts",
    "load_plan",
    "require",
    "stats",
]

_LAZY = {
    "Plan": "dsa_planner.plan",
    "PlanConfig": "dsa_planner.config",
    "Planner": "dsa_planner.planner",
    "indexer_backward": "dsa_planner.operators",
    "indexer_loss": "dsa_planner.torch_ops",
    "layer_counts": "dsa_planner.cache.search",
    "load_plan": "dsa_planner.operators",
    "require": "dsa_planner.requirements",
    "stats": "dsa_planner.counters",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
