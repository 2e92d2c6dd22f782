"""The answer of a measurement: statistics over rounds, JSON, and rows of tables. Standard library only.

Units are in the names: _us, _ns, tb_s (10^12 bytes a second), tflops (10^12 operations a second).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dsa_planner.bench.request import Request, Shape

if TYPE_CHECKING:
    from dsa_planner.bench.gpu import Facts

__all__ = ["HostTimes", "Measured", "Report", "Result", "Stat", "as_json", "host_table", "lines", "median", "table"]

Rows = list[list[str]]
_SHORT = 12  # digits of an id
_FLOPS_OF_A_PAIR = 6  # three products, of a multiplication and an addition, for each head and dimension


@dataclass(frozen=True)
class Stat:
    """A number that was measured once a round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return _quantile(self.rounds, 0.5)

    @property
    def p10(self) -> float:
        return _quantile(self.rounds, 0.1)

    @property
    def p90(self) -> float:
        return _quantile(self.rounds, 0.9)

    def as_json(self) -> dict[str, Any]:
        return {
            "median": _rounded(self.median),
            "p10": _rounded(self.p10),
            "p90": _rounded(self.p90),
            "min": _rounded(min(self.rounds)),
            "max": _rounded(max(self.rounds)),
            "rounds": [_rounded(value) for value in self.rounds],
        }


@dataclass(frozen=True)
class Measured:
    """One contender with one shape.

    ``kernels_us`` are by stage, for the peer by the kernel's own name; empty where CUPTI recorded none. ``gpu_us`` is
    their sum; ``call_us`` is a call among calls back to back, with what lies between its kernels. ``refused`` says why
    there are no times.
    """

    name: str
    plan_id: str | None = None
    build_id: str | None = None
    kernels_us: Mapping[str, Stat] = field(default_factory=dict)
    gpu_us: Stat | None = None
    call_us: Stat | None = None
    refused: str | None = None

    @property
    def best_us(self) -> float | None:
        """The time that is compared: the sum of the kernels, or the call where there are none."""
        stat = self.gpu_us or self.call_us
        return None if stat is None else stat.median


@dataclass(frozen=True)
class Result:
    """All contenders with one shape; ``floor_ns`` is the least time of a pair."""

    shape: Shape
    plans: tuple[Measured, ...]
    peer: Measured | None
    floor_ns: Stat | None

    def ns_a_pair(self, measured: Measured) -> float | None:
        return None if measured.best_us is None else measured.best_us * 1e3 / self.shape.pairs

    def faster_by(self, measured: Measured) -> float | None:
        """How many times the time of a plan the peer takes."""
        if self.peer is None or self.peer.best_us is None or not measured.best_us:
            return None
        if (self.peer.gpu_us is None) != (measured.gpu_us is None):  # two clocks
            return None
        return self.peer.best_us / measured.best_us


@dataclass(frozen=True)
class HostTimes:
    """Host time of one call, by function, of a plan (``topk`` says which) or of the peer."""

    name: str
    topk: int
    times_us: Mapping[str, Stat]


@dataclass(frozen=True)
class Report:
    """Everything that was measured."""

    request: Request
    facts: Facts
    clocks_mhz: tuple[int, ...]
    copy_tb_s: Stat
    matmul_tflops: Stat
    host: tuple[HostTimes, ...]
    results: tuple[Result, ...]
    notes: tuple[str, ...]


def median(values: Sequence[float]) -> float:
    return _quantile(values, 0.5)


def as_json(report: Report) -> dict[str, Any]:
    """The answer as one JSON value; docs/commands.md has its fields."""
    request = report.request
    return {
        "device": {
            **asdict(report.facts),
            "ordinal": request.device,
            "clock_mhz": list(report.clocks_mhz) or None,
        },
        "options": {
            "heads": request.heads,
            "d_weights": request.d_weights,
            "d_index_k": request.d_index_k,
            "deterministic": request.deterministic,
            "repeats": request.repeats,
        },
        "limits": {"copy_tb_s": report.copy_tb_s.as_json(), "matmul_tflops": report.matmul_tflops.as_json()},
        "host": [
            {
                "name": entry.name,
                "topk": entry.topk,
                "host_us": {name: stat.as_json() for name, stat in entry.times_us.items()},
            }
            for entry in report.host
        ],
        "results": [_result(result, request) for result in report.results],
        "notes": list(report.notes),
    }


def _result(result: Result, request: Request) -> dict[str, Any]:
    return {
        **asdict(result.shape),
        "pairs": result.shape.pairs,
        "floor_ns_a_pair": None if result.floor_ns is None else result.floor_ns.as_json(),
        "plans": [_measured(result, plan, request) for plan in result.plans],
        "peer": None if result.peer is None else _measured(result, result.peer, request),
    }


def _measured(result: Result, measured: Measured, request: Request) -> dict[str, Any]:
    gradients = measured.kernels_us.get("gradients")
    of_gradients = None if gradients is None else gradients.median * 1e3 / result.shape.pairs
    return {
        "name": measured.name,
        "plan_id": measured.plan_id,
        "build_id": measured.build_id,
        "kernels_us": {name: stat.as_json() for name, stat in measured.kernels_us.items()},
        "gpu_us": None if measured.gpu_us is None else measured.gpu_us.as_json(),
        "call_us": None if measured.call_us is None else measured.call_us.as_json(),
        "ns_a_pair": _rounded(result.ns_a_pair(measured)),
        "gradients_ns_a_pair": _rounded(of_gradients),
        "pairs_a_second": None if measured.best_us is None else round(result.shape.pairs / measured.best_us * 1e6),
        "tflops": _rounded(_tflops(result, measured, request)),
        "of_floor": _rounded(_of_floor(result, measured)),
        "peer_slower_by": None if measured is result.peer else _rounded(result.faster_by(measured)),
        "refused": measured.refused,
    }


def table(report: Report) -> Rows:
    """Header and rows: times of the GPU. Stages are those of the plans; the peer's are in the JSON."""
    stages = list(dict.fromkeys(name for result in report.results for plan in result.plans for name in plan.kernels_us))
    rows = [[
        "plan", "backend", "topk", "B", "S_q", "S_k", "ids", *stages, "kernels", "p10-p90", "call", "ns/pair",
        "Gpairs/s", "TFLOP/s", "floor", "faster by",
    ]]  # fmt: skip
    for result in report.results:
        shape = result.shape
        for entry in (*result.plans, *([result.peer] if result.peer else [])):
            ns = result.ns_a_pair(entry)
            ratio = None if entry is result.peer else result.faster_by(entry)
            spread = entry.gpu_us or entry.call_us
            rows.append([
                "-" if entry.plan_id is None else entry.plan_id[:_SHORT], entry.name, str(shape.topk),
                str(shape.batch), str(shape.s_q), str(shape.s_k), shape.ids,
                *(_us(entry.kernels_us.get(stage)) for stage in stages),
                _us(entry.gpu_us), "-" if spread is None else f"{spread.p10:.1f}-{spread.p90:.1f}", _us(entry.call_us),
                _number(ns, 3), _number(None if ns is None else 1 / ns, 2),
                _number(_tflops(result, entry, report.request), 0),
                _number(None if result.floor_ns is None else result.floor_ns.median, 3), _number(ratio, 2),
            ])  # fmt: skip
    return rows


def host_table(report: Report) -> Rows:
    """Header and rows: host times."""
    functions = ("launch", "launch_moved", "indexer_backward", "indexer_backward_moved")
    rows = [["host", "topk", *[heading for name in functions for heading in (name, "p10-p90")]]]
    for entry in report.host:
        row = [entry.name, str(entry.topk)]
        for name in functions:
            stat = entry.times_us.get(name)
            row += [_us(stat), "-" if stat is None else f"{stat.p10:.1f}-{stat.p90:.1f}"]
        rows.append(row)
    return rows


def lines(report: Report) -> list[str]:
    """What stands below the tables: units, the device and its limits."""
    facts, request = report.facts, report.request
    driver = f"driver {facts.driver}, " if facts.driver else ""
    clocks = report.clocks_mhz
    clock = f", SM clock {min(clocks)} to {max(clocks)} MHz" if clocks else ""
    kind = ", deterministic" if request.deterministic else ""
    return [
        f"microseconds, medians of {request.repeats} rounds; {request.heads} heads, {request.d_weights} d_weights, "
        f"{request.d_index_k} d_index_k{kind}",
        f"{facts.name}, compute capability {facts.capability}, {facts.multiprocessors} SMs, {driver}CUDA {facts.cuda}, "
        f"torch {facts.torch}{clock}",
        f"limits: copy {_spread(report.copy_tb_s, 2)} TB/s, bf16 matrix product {_spread(report.matmul_tflops, 0)} "
        f"TFLOP/s; floor is the ns of a pair at least{_origin(request)}",
    ]


def _origin(request: Request) -> str:
    return ", given by --floor" if request.floor is not None else ", measured"


def _spread(stat: Stat, digits: int) -> str:
    return f"{stat.median:.{digits}f} ({stat.p10:.{digits}f}-{stat.p90:.{digits}f})"


def _tflops(result: Result, measured: Measured, request: Request) -> float | None:
    """Of the three products as the operation defines them; a backend that keeps A in two parts multiplies more."""
    if measured.best_us is None:
        return None
    return _FLOPS_OF_A_PAIR * result.shape.pairs * request.heads * 128 / measured.best_us / 1e6


def _of_floor(result: Result, measured: Measured) -> float | None:
    ns = result.ns_a_pair(measured)
    return None if ns is None or result.floor_ns is None else ns / result.floor_ns.median


def _us(stat: Stat | None) -> str:
    return "-" if stat is None else f"{stat.median:.1f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _quantile(values: Sequence[float], share: float) -> float:
    """With linear interpolation between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
