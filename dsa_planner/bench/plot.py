"""The answer as a picture: microseconds of a call, and nanoseconds of a pair beside the floor, by topk.

Needs matplotlib, the extra ``plot``.
"""

from __future__ import annotations

from pathlib import Path

from dsa_planner.bench.report import Measured, Report, Result
from dsa_planner.errors import UnsupportedError

__all__ = ["draw"]

_WIDTH, _HEIGHT = 12.0, 5.0  # inches
_MOST_LINES_WITH_LEGEND = 24


def draw(report: Report, path: Path) -> None:
    """Write a PNG: a line for each contender with each S_q, S_k and distribution of ids.

    Raises:
        UnsupportedError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    times, pairs = figure.subplots(1, 2)
    found = _series(report)
    for label, points in found.items():
        topks = [result.shape.topk for result, _ in points]
        style = "--" if points[0][1] is points[0][0].peer else "-"
        times.plot(topks, [entry.best_us for _, entry in points], style, marker="o", label=label)
        pairs.plot(topks, [result.ns_a_pair(entry) for result, entry in points], style, marker="o", label=label)
    for keys, floors in _floors(report).items():
        pairs.plot(
            sorted(floors), [floors[topk] for topk in sorted(floors)], ":", color="black", label=f"floor, {keys}"
        )
    for axes, title in ((times, "GPU time of a call, us"), (pairs, "GPU time of a pair, ns")):
        axes.set_title(title)
        axes.set_xlabel("topk")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    if len(found) <= _MOST_LINES_WITH_LEGEND:
        pairs.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1))
    figure.suptitle(
        f"indexer_backward on {report.facts.name}, {report.request.heads} heads, torch {report.facts.torch}"
    )
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise UnsupportedError(
            f"--plot {path}", f"it cannot be written ({error.strerror})", "name another file"
        ) from None


def _series(report: Report) -> dict[str, list[tuple[Result, Measured]]]:
    """By label, the measured points of a line, by topk."""
    found: dict[str, list[tuple[Result, Measured]]] = {}
    for result in sorted(report.results, key=lambda result: result.shape.topk):
        shape = result.shape
        for entry in (*result.plans, *([result.peer] if result.peer else [])):
            if entry.best_us is not None:
                label = f"{entry.name}, S_q={shape.s_q} S_k={shape.s_k}, {shape.ids}"
                found.setdefault(label, []).append((result, entry))
    return found


def _floors(report: Report) -> dict[str, dict[int, float]]:
    """By the number of keys, and by topk."""
    found: dict[str, dict[int, float]] = {}
    for result in report.results:
        if result.floor_ns is not None:
            found.setdefault(f"S_k={result.shape.s_k}", {})[result.shape.topk] = result.floor_ns.median
    return found
