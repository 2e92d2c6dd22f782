"""The audit: are there two launches that may run at the same time and write the same memory? Run side.

Whoever shares a workspace, an output or attn_score between streams without ordering them gets results that are wrong
now and then. With ``audit=True`` on a launch, or DSA_PLAN_AUDIT=1 for all, every launch is compared with those that are
still in flight on other streams of the device before anything of it runs.

Two launches that share memory may well be in flight together if one stream waits for the other. To tell, the audit
records an event on the stream of the new launch, and waits for whichever ends first. If that event ends while the
earlier launch still runs, nothing orders the two: the error names both callers. If the earlier launch ends first, no
harm can come of it any more. So an audit may wait, finds only what this run would have suffered from, and never accuses
launches that are ordered. Launches under capture are not audited: they run when the graph is replayed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dsa_planner import streams
from dsa_planner.driver import call, cu, relaxed_capture
from dsa_planner.errors import AuditError

__all__ = ["Span", "audit_stats", "audited"]

_SUCCESS = cu.CUresult.CUDA_SUCCESS
_PACKAGES = ("dsa_planner", "torch")
_PAUSE = 50e-6  # seconds between two looks

Span = tuple[str, int, int, bool]
"""Memory of a launch: name, first byte, byte after the last, whether it is written."""


@dataclass(eq=False)
class _InFlight:
    owner: int
    spans: Sequence[Span]
    caller: str
    end: Any = None
    """The event after it; None while it is being launched."""
    watchers: int = 0
    """Threads that look at the event now."""


_in_flight: dict[int, list[_InFlight]] = {}
_lock = threading.Lock()
_counts = {"audited": 0, "found": 0}


@contextmanager
def audited(device: int, stream: int, spans: Sequence[Span]) -> Iterator[None]:
    """Around a launch that is not captured: compare it with those in flight, and add it to them.

    Args:
        device: ordinal.
        stream: handle.
        spans: of its memory.

    Raises:
        AuditError: an earlier launch on another stream may still run, and one of the two writes what the other uses.
        DriverError: the driver refused.
    """
    owner = 0 if stream <= streams.LEGACY_STREAM else int(call("identifying a stream", cu.cuStreamGetId(stream)))
    caller = f"{_calling_line()} (thread {threading.current_thread().name}, stream {stream:#x})"
    mine = _InFlight(owner, tuple(spans), caller)
    with relaxed_capture():
        while (rival := _enter(device, mine)) is not None:  # the lock is not held while this waits
            other, names = rival
            try:
                unordered = other.end is not None and _unordered(stream, other.end)
            finally:
                with _lock:
                    other.watchers -= 1
            if unordered:
                with _lock:
                    _counts["found"] += 1
                raise AuditError(
                    f"{names[0]} of the launch at {caller}",
                    f"it is also {names[1]} of the launch at {other.caller}, which is still in flight, and no event "
                    "orders the two streams",
                    "give each stream buffers of its own, or have one wait for the other (Stream.wait_stream)",
                )
            if other.end is None:
                time.sleep(_PAUSE)
        try:
            yield
            mine.end = _new_event(stream)
        except BaseException:
            with _lock:
                _in_flight[device].remove(mine)
            raise


def _enter(device: int, mine: _InFlight) -> tuple[_InFlight, tuple[str, str]] | None:
    """Add a launch to those in flight; or say which of them, on another stream, shares memory with it, and how."""
    with _lock:
        flying = _in_flight.setdefault(device, [])
        for other in [o for o in flying if o.end is not None and not o.watchers and _ended(o.end)]:
            flying.remove(other)
            cu.cuEventDestroy(other.end)
        for other in flying:
            names = _shared(mine.spans, other.spans) if other.owner != mine.owner else None
            if names is not None and not (other.end is not None and _ended(other.end)):
                other.watchers += 1
                return other, names
        flying.append(mine)
        _counts["audited"] += 1
    return None


def audit_stats() -> dict[str, int]:
    """How many launches were audited, and how many of them were found wrong."""
    return dict(_counts)


def _shared(spans: Sequence[Span], others: Sequence[Span]) -> tuple[str, str] | None:
    """The names of two overlapping spans of which at least one is written, or None."""
    for name, start, end, written in spans:
        for other, other_start, other_end, other_written in others:
            if (written or other_written) and start < other_end and other_start < end:
                return name, other
    return None


def _unordered(stream: int, other: Any) -> bool:
    """Whether what is on the stream now ends while another launch has not ended."""
    mine = _new_event(stream)
    try:
        while not _ended(other):
            # In this order: the other one may end between two looks.
            if cu.cuEventQuery(mine)[0] == _SUCCESS and not _ended(other):
                return True
            time.sleep(_PAUSE)
        return False
    finally:
        cu.cuEventDestroy(mine)


def _new_event(stream: int) -> Any:
    event = call("auditing a launch", cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    call("auditing a launch", cu.cuEventRecord(event, stream))
    return event


def _ended(event: Any) -> bool:
    """Whether an event has ended. A failure counts as an end: the launch that comes will meet it too."""
    return bool(cu.cuEventQuery(event)[0] != cu.CUresult.CUDA_ERROR_NOT_READY)


def _calling_line() -> str:
    """File, line and function of the nearest caller outside this package and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in (*_PACKAGES, "contextlib"):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
