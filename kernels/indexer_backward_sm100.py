"""``indexer_backward`` for Blackwell: what is compiled for a plan."""

from collections.abc import Callable, Mapping
from typing import Any

from dsa_planner.kernels.gradients_sm100 import Gradients
from dsa_planner.kernels.indexer_backward import compilation


def program(config: Mapping[str, Any]) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What to hand to ``cute.compile`` for one plan config: the function and its stand-in arguments."""
    return compilation(config, Gradients)
