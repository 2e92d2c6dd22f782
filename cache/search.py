"""The search path: the layers of a process, in order, and what they gave. Both sides; standard library only."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from dsa_planner.cache.layer import Counts, Layer, Policy
from dsa_planner.cache.planfile import PlanFile

__all__ = ["SearchPath", "layer_counts"]

_COUNTS: dict[str, Counts] = {}
_LOCK = threading.Lock()


class SearchPath:
    """Read-only layers, then at most one writable one.

    The writable layer is not touched before every read-only one has missed.

    Args:
        read_only: folders; one that is named twice, or is the writable one too, counts once.
        writable: the writable layer.
        policy: what the read-only layers refuse.
    """

    def __init__(
        self,
        read_only: Sequence[Path],
        writable: Layer | None = None,
        policy: Policy = Policy(),  # noqa: B008 - immutable
    ) -> None:
        last = [] if writable is None else [writable]
        folders: dict[str, Path] = {}
        for root in read_only:
            # The writable layer's name is compared as it is: to resolve it would look at it, before any miss.
            if writable is None or os.path.abspath(root) != os.path.abspath(writable.root):
                folders.setdefault(os.path.realpath(root), root)
        self.layers = (*(Layer(root, policy) for root in folders.values()), *last)

    def find(self, plan_id: str, build_id: str | None = None) -> tuple[PlanFile, Layer] | None:
        """A plan, and the layer that held it: of one build, or the first layer's best build."""
        for layer in self.layers:
            skipped = layer.counts.skipped
            plan = layer.find(plan_id) if build_id is None else layer.read(plan_id, build_id)
            _count(layer, plan is not None, layer.counts.skipped - skipped)
            if plan is not None:
                return plan, layer
        return None

    def describe(self) -> str:
        """The searched folders, in words, for messages."""
        return ", ".join(str(layer.root) for layer in self.layers) or "no layer"

    def unusable(self) -> list[str]:
        """What was damaged or refused in the search so far, in words, for messages."""
        return [
            f"{path}: {reason}" for layer in self.layers for path, reason in {**layer.damaged, **layer.refused}.items()
        ]


def _count(layer: Layer, hit: bool, skipped: int) -> None:
    with _LOCK:
        total = _COUNTS.setdefault(str(layer.root), Counts())
        for counts in (layer.counts, total):
            counts.hits += hit
            counts.misses += not hit
        total.skipped += skipped


def layer_counts() -> dict[str, dict[str, int]]:
    """What this process has asked of each layer so far, by its folder, in the order in which they were first asked.

    Returns:
        For each layer ``hits``, ``misses``, and ``skipped``: how often a file or the layer itself was passed over,
        because it was damaged, could not be read or was refused.
    """
    with _LOCK:
        return {root: dict(vars(counts)) for root, counts in _COUNTS.items()}
