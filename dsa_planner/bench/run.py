"""The rounds of a measurement.

In a round every contender has a turn with the same inputs, and the order is reversed from round to round, so that what
changes on the GPU meanwhile (its clock, its temperature, other processes) meets all alike. The number of a round is a
median over its calls; statistics are over rounds.

Host times come first: a profiler, once used, may slow launches for the rest of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsa_planner.bench.contenders import Contender, Peer, PlanContender, find_peer
from dsa_planner.bench.gpu import Clocks, Gpu, Recorded
from dsa_planner.bench.inputs import Inputs, bytes_of, make
from dsa_planner.bench.report import HostTimes, Measured, Report, Result, Stat, median
from dsa_planner.bench.request import Request, Shape
from dsa_planner.errors import DriverError, UnsupportedError

__all__ = ["Advance", "measure", "run"]

Advance = Callable[[int, int, str], None]
"""Told of progress: steps done, steps in all, what comes next."""
_WARM_CALLS = 2
_HOST_CALLS = 200
_HOST_ROWS = 8
_SPARE_BYTES = 1 << 30
_LONGEST_NAME = 60  # of a kernel that is not ours


def measure(request: Request, advance: Advance = lambda done, total, what: None) -> Report:
    """Measure on the GPU that the request names.

    Raises:
        DsaPlannerError: there is no such GPU, a plan is missing, or a shape does not fit.
    """
    gpu = Gpu(request.device)
    with gpu.current():
        return run(request, gpu, find_peer() if request.peer else None, advance)


def run(
    request: Request, clocks: Clocks, peer: Peer | str | None, advance: Advance = lambda done, total, what: None
) -> Report:
    """Measure with these clocks.

    Args:
        peer: None to leave it out, or in words why it cannot take part.

    Raises:
        PlanNotFoundError: no layer has one of the plans. Nothing was measured.
        UnsupportedError: a shape does not fit into the memory of the GPU.
    """
    plans = {(b, topk): PlanContender(request, b, topk) for topk in request.topks for b in request.backends}
    for shape in request.shapes:
        _require_room(request, shape, clocks, [plans[b, shape.topk] for b in request.backends])
    notes = _Notes()
    if isinstance(peer, str):
        notes.add(peer)
        peer = None
    steps = _Steps(advance, request.repeats * (len(request.topks) + 1 + len(request.shapes)))
    host = [entry for topk in request.topks for entry in _host(request, topk, plans, peer, clocks, notes, steps)]
    copies, products = [], []
    for _ in range(request.repeats):
        steps.next("limits of the GPU")
        copies.append(clocks.copy_tb_s())
        products.append(clocks.matmul_tflops())
    mhz: list[int] = []
    results = []
    for shape in request.shapes:
        contenders = [*(plans[b, shape.topk] for b in request.backends), *([peer] if peer else [])]
        try:
            results.append(_result(request, shape, contenders, clocks, notes, steps, mhz))
        except torch.cuda.OutOfMemoryError:
            raise _no_room(shape, "the GPU ran out of memory") from None
    return Report(
        request=request,
        facts=clocks.facts(),
        clocks_mhz=tuple(mhz),
        copy_tb_s=Stat(tuple(copies)),
        matmul_tflops=Stat(tuple(products)),
        host=tuple(host),
        results=tuple(results),
        notes=tuple(notes.lines),
    )


@dataclass
class _Notes:
    """What the reader of the numbers has to know, each once."""

    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)


@dataclass
class _Steps:
    advance: Advance
    total: int
    done: int = 0

    def next(self, what: str) -> None:
        self.advance(self.done, self.total, what)
        self.done += 1


@dataclass
class _Seat:
    """A contender at one shape: what launches its calls, and what it took, round by round."""

    contender: Contender
    run: Callable[[int], Any] | None = None
    refused: str | None = None
    kernels: dict[str, list[float]] = field(default_factory=dict)
    sums: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)

    def prepare(self, inputs: Inputs, clocks: Clocks) -> None:
        """Allocate, and make a few calls. A peer that refuses is left out; a plan that does is an error."""
        try:
            self.run = self.contender.prepare(inputs)
            for number in range(_WARM_CALLS):
                self.run(number)
            clocks.wait()
        except Exception as error:
            if not isinstance(self.contender, Peer) or isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            self.run, self.refused = None, _one_line(error)

    def turn(self, inputs: Inputs, clocks: Clocks, notes: _Notes) -> None:
        if self.run is None:
            return
        inputs.restore()
        recorded = clocks.kernels(self.run, inputs.calls)
        stages = _by_stage(recorded, self.contender.stages, inputs.calls)
        if stages:
            for name, times in stages.items():
                self.kernels.setdefault(name, []).append(median(times))
            self.sums.append(median([sum(times) for times in zip(*stages.values(), strict=True)]))
        elif recorded:
            notes.add("torch.profiler lost kernels of some rounds; those rounds are left out of the kernels' times")
        else:
            notes.add("torch.profiler recorded no kernels here (CUPTI), so there are times of whole calls only")
        inputs.restore()
        self.calls.append(clocks.call_us(self.run, inputs.calls))

    def measured(self) -> Measured:
        return Measured(
            name=self.contender.name,
            plan_id=self.contender.plan_id,
            build_id=self.contender.build_id,
            kernels_us={name: Stat(tuple(values)) for name, values in self.kernels.items()},
            gpu_us=Stat(tuple(self.sums)) if self.sums else None,
            call_us=Stat(tuple(self.calls)) if self.calls else None,
            refused=self.refused,
        )


def _result(
    request: Request,
    shape: Shape,
    contenders: Sequence[Contender],
    clocks: Clocks,
    notes: _Notes,
    steps: _Steps,
    mhz: list[int],
) -> Result:
    """All rounds of one shape."""
    inputs = make(shape, request, clocks.device)
    seats = [_Seat(contender) for contender in contenders]
    for seat in seats:
        seat.prepare(inputs, clocks)
        if seat.refused is not None:
            notes.add(f"{seat.contender.name} refused {shape}: {seat.refused}")
    floors: list[float] = [] if request.floor is None else [request.floor]
    for number in range(request.repeats):
        steps.next(str(shape))
        if request.floor is None:
            floors += _floor(shape.batch * shape.s_k, clocks, notes)
        for seat in seats if number % 2 == 0 else reversed(seats):
            seat.turn(inputs, clocks, notes)
        now = clocks.clock_mhz()
        if now is not None:
            mhz.append(now)
    measured = [seat.measured() for seat in seats]
    return Result(
        shape=shape,
        plans=tuple(entry for entry in measured if entry.plan_id is not None),
        peer=next((entry for entry in measured if entry.plan_id is None), None),
        floor_ns=Stat(tuple(floors)) if floors else None,
    )


def _floor(keys: int, clocks: Clocks, notes: _Notes) -> list[float]:
    try:
        return [clocks.floor_ns(keys)]
    except DriverError as error:
        notes.add(f"the floor of a pair was not measured: {error}")
        return []


def _by_stage(recorded: Recorded, stages: Mapping[str, str], calls: int) -> dict[str, list[float]]:
    """Microseconds of each stage in each call. Empty if some were lost: then no call's are known."""
    by_name: dict[str, list[float]] = {}
    for symbol, elapsed in recorded:
        by_name.setdefault(stages.get(symbol, symbol[:_LONGEST_NAME]), []).append(elapsed)
    if any(len(times) % calls for times in by_name.values()):
        return {}
    found = {}
    for name, times in by_name.items():
        each = len(times) // calls
        found[name] = [sum(times[call * each : (call + 1) * each]) for call in range(calls)]
    return found


def _host(
    request: Request,
    topk: int,
    plans: Mapping[tuple[str, int], PlanContender],
    peer: Peer | None,
    clocks: Clocks,
    notes: _Notes,
    steps: _Steps,
) -> list[HostTimes]:
    """Host times of the plans of one topk and of the peer, with few rows."""
    inputs = make(Shape(1, _HOST_ROWS, topk, topk, "uniform"), request, clocks.device)
    contenders: list[Contender] = [plans[backend, topk] for backend in request.backends]
    if peer is not None:
        contenders.append(peer)
    functions: list[tuple[str, str, Callable[[int], Any]]] = []
    for contender in contenders:
        try:
            calls = contender.host_calls(inputs)
            for call in calls.values():
                call(0)
            clocks.wait()
        except Exception as error:
            if not isinstance(contender, Peer):
                raise
            notes.add(f"{contender.name} refused a call of topk={topk} with {_HOST_ROWS} rows: {_one_line(error)}")
            continue
        functions += [(contender.name, name, call) for name, call in calls.items()]
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(request.repeats):
        steps.next(f"host time, topk={topk}")
        for owner, name, call in functions if number % 2 == 0 else reversed(functions):
            times = clocks.host_us(call, _HOST_CALLS)
            found.setdefault(owner, {}).setdefault(name, []).append(median(times))
    return [
        HostTimes(contender.name, topk, {name: Stat(tuple(v)) for name, v in found[contender.name].items()})
        for contender in contenders
        if contender.name in found
    ]


def _require_room(request: Request, shape: Shape, clocks: Clocks, plans: Sequence[PlanContender]) -> None:
    workspace = sum(plan.workspace_bytes(shape.batch, shape.s_k) for plan in plans)
    needed = bytes_of(shape, request.heads) + workspace + _SPARE_BYTES
    free = clocks.free_bytes()
    if needed > free:
        raise _no_room(shape, f"it takes about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")


def _no_room(shape: Shape, rule: str) -> UnsupportedError:
    return UnsupportedError(str(shape), rule, "give a smaller --batch, --s-q or --s-k")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
