"""Register slots by liveness: the thousands of virtual registers of a PTX kernel become a few hundred slots.

A slot is 128 bytes, 32 lanes of 32 bits; a 64-bit register takes two. A register keeps its slot over the whole span of
instructions in which it is live, from the first to the last. An instruction's results never share a slot with its own
operands, so that it may write lane by lane.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["REGISTER_WIDTHS", "Use", "allocate", "live_spans"]

REGISTER_WIDTHS = {
    "pred": 0, "b8": 1, "u8": 1, "s8": 1, "b16": 1, "u16": 1, "s16": 1, "f16": 1, "b32": 1, "u32": 1, "s32": 1,
    "f32": 1, "b64": 2, "u64": 2, "s64": 2, "f64": 2,
}  # fmt: skip
"""Slots of 32 lanes by 32 bits that a register of a type takes."""


@dataclass(frozen=True)
class Use:
    """What one instruction reads and writes, and where it can go next. A guarded write does not end a life."""

    reads: frozenset[str]
    writes: frozenset[str]
    guarded: bool
    successors: tuple[int, ...]


def live_spans(uses: Sequence[Use]) -> dict[str, tuple[int, int]]:
    """First and last instruction at which each register is live."""
    predecessors: list[list[int]] = [[] for _ in uses]
    for index, use in enumerate(uses):
        for successor in use.successors:
            if successor < len(uses):
                predecessors[successor].append(index)
    live_in: list[frozenset[str]] = [frozenset()] * len(uses)
    pending = list(range(len(uses)))
    queued = set(pending)
    while pending:
        index = pending.pop()
        queued.discard(index)
        use = uses[index]
        live_out: set[str] = set()
        for successor in use.successors:
            if successor < len(uses):
                live_out |= live_in[successor]
        found = frozenset(use.reads | (live_out if use.guarded else live_out - use.writes))
        if found != live_in[index]:
            live_in[index] = found
            for predecessor in predecessors[index]:
                if predecessor not in queued:
                    queued.add(predecessor)
                    pending.append(predecessor)
    spans: dict[str, tuple[int, int]] = {}

    def extend(names: Iterable[str], index: int) -> None:
        for name in names:
            first, last = spans.get(name, (index, index))
            spans[name] = (min(first, index), max(last, index))

    for index, use in enumerate(uses):
        extend(live_in[index], index)
        extend(use.reads | use.writes, index)
    return spans


def allocate(
    spans: dict[str, tuple[int, int]], width: Callable[[str], int], pinned: Iterable[str] = ()
) -> tuple[dict[str, int], int]:
    """Give every register its first slot; also returns how many slots there are.

    Args:
        spans: from ``live_spans``.
        width: slots of a register, 1 or 2.
        pinned: registers that share their slot with nobody.
    """
    slots: dict[str, int] = {}
    used = 0
    free: dict[int, list[int]] = {1: [], 2: []}
    alone = set(pinned)
    active: list[tuple[int, int, int]] = []  # last instruction, slot, width
    for name, (first, last) in sorted(spans.items(), key=lambda item: (item[1], item[0])):
        while active and active[0][0] < first:
            _, slot, size = heapq.heappop(active)
            heapq.heappush(free[size], slot)
        size = width(name)
        if free[size] and name not in alone:
            slot = heapq.heappop(free[size])
        else:
            used += used % size  # 64-bit lanes start at an even slot
            slot = used
            used += size
        slots[name] = slot
        if name not in alone:
            heapq.heappush(active, (last, slot, size))
    return slots, used
