"""Clocks without a GPU: they run what they are to time, on the CPU, and tell canned times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsa_planner.bench.gpu import Facts, Recorded
from dsa_planner.errors import DriverError

Run = Callable[[int], Any]
PLAN_KERNELS = (("dsa_score_grad_0", 20.0), ("dsa_gradients_1", 100.0), ("dsa_round_d_index_k_2", 4.0))


class FakeClocks:
    """``taken`` has, in order, who was timed how: the clock, and what a call of it launched."""

    device = "cpu"

    def __init__(self, launched: Callable[[], list[tuple[str, float]]]) -> None:
        self._launched = launched
        self.taken: list[tuple[str, list[str]]] = []
        self.free = 1 << 40
        self.records = True
        self.has_floor = True
        self.drift = 0.0
        """Added to each kernel, more from time to time."""

    def facts(self) -> Facts:
        return Facts("Fake GPU", "9.0", 132, "550.1", "12.4", "2.11.0")

    def free_bytes(self) -> int:
        return self.free

    def clock_mhz(self) -> int | None:
        return 1980

    def wait(self) -> None:
        self._launched()

    def kernels(self, run: Run, calls: int) -> Recorded:
        found = self._time("kernels", run, calls)
        self.drift += 1.0
        return [(name, elapsed + self.drift) for name, elapsed in found] if self.records else []

    def call_us(self, run: Run, calls: int) -> float:
        return 5.0 + sum(elapsed for _, elapsed in self._time("call", run, calls)) / calls

    def host_us(self, run: Run, calls: int) -> list[float]:
        self._time("host", run, calls)
        return [25.0] * calls

    def copy_tb_s(self) -> float:
        return 4.3

    def matmul_tflops(self) -> float:
        return 780.0

    def floor_ns(self, keys: int) -> float:
        if not self.has_floor:
            raise DriverError("assembling the kernel of the floor", "the CUDA driver answered X", "see its error codes")
        return 0.1 if keys <= 32768 else 0.2

    def _time(self, clock: str, run: Run, calls: int) -> list[tuple[str, float]]:
        self._launched()
        for number in range(calls):
            run(number)
        found = self._launched()
        self.taken.append((clock, sorted({name for name, _ in found})))
        return found
