"""The clocks of a measurement, on torch's current stream of one GPU.

Three clocks, each for what it can see:

* kernels: their own times as CUPTI records them (torch.profiler). Two events around one kernel of 20 us would mostly
  time themselves;
* calls: events around a section of calls, which wait behind a kernel that only lets time pass until all are queued, so
  that the GPU runs them back to back however slowly the host launches;
* host: the wall clock around one call. The queue is emptied before it could fill, so that the GPU never holds the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dsa_planner import streams
from dsa_planner.bench import floor
from dsa_planner.driver import device as open_device
from dsa_planner.driver import invoke
from dsa_planner.errors import DriverError

__all__ = ["Clocks", "Facts", "Gpu", "Recorded"]

Run = Callable[[int], Any]
"""Launches call number n of a section."""
Recorded = list[tuple[str, float]]
"""Kernels in the order in which they started: name, microseconds."""
_HOLD_CYCLES = 10_000_000  # about 5 ms, for the host to queue a section
_QUEUED_CALLS = 50
_COPY_BYTES = 1 << 30
_MATRIX = 8192


@dataclass(frozen=True)
class Facts:
    """What a measurement was made on."""

    name: str
    capability: str
    multiprocessors: int
    driver: str | None
    cuda: str
    torch: str


class Clocks(Protocol):
    """What the rounds ask of a GPU; the tests have one without."""

    device: str

    def facts(self) -> Facts: ...
    def free_bytes(self) -> int: ...
    def clock_mhz(self) -> int | None: ...
    def wait(self) -> None: ...
    def kernels(self, run: Run, calls: int) -> Recorded: ...
    def call_us(self, run: Run, calls: int) -> float: ...
    def host_us(self, run: Run, calls: int) -> list[float]: ...
    def copy_tb_s(self) -> float: ...
    def matmul_tflops(self) -> float: ...
    def floor_ns(self, keys: int) -> float: ...


class Gpu:
    """The clocks of a CUDA device.

    Args:
        ordinal: the device.

    Raises:
        DriverError: there is no driver, or torch cannot use the GPU.
        DeviceMismatchError: there is no such device.
    """

    def __init__(self, ordinal: int) -> None:
        self._target = open_device(ordinal)
        if not torch.cuda.is_available():
            raise DriverError(
                f"device {ordinal}", f"torch {torch.__version__} cannot use it", "install a torch with CUDA for it"
            )
        self.ordinal = ordinal
        self.device = f"cuda:{ordinal}"
        self._profiled = False
        self._floor: tuple[Callable[[int, int, int, int], None], int] | None = None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it torch's current device."""
        with torch.cuda.device(self.ordinal):
            yield

    def facts(self) -> Facts:
        target = self._target
        version = int(invoke("reading the driver's version", "cuDriverGetVersion"))
        return Facts(
            name=target.name,
            capability=".".join(map(str, target.capability)),
            multiprocessors=target.multiprocessors,
            driver=_driver_version(),
            cuda=f"{version // 1000}.{version % 1000 // 10}",
            torch=str(torch.__version__),
        )

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.ordinal)[0])

    def clock_mhz(self) -> int | None:
        """The SM clock now, or None where torch cannot read it."""
        try:
            return int(torch.cuda.clock_rate(self.ordinal))
        except Exception:  # it needs NVML and its Python package, and some virtual GPUs refuse
            return None

    def wait(self) -> None:
        torch.cuda.synchronize(self.ordinal)

    def kernels(self, run: Run, calls: int) -> Recorded:
        """The kernels, copies and fills that ``calls`` calls run; empty where torch.profiler records none."""
        from torch.profiler import ProfilerActivity, profile, supported_activities

        if ProfilerActivity.CUDA not in supported_activities():  # type: ignore[no-untyped-call]
            return []
        if not self._profiled:  # the first one of a process sets CUPTI up, and may miss what runs meanwhile
            with profile(activities=[ProfilerActivity.CUDA]):
                torch.zeros(1, device=self.device)
                self.wait()
            self._profiled = True
        self.wait()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for number in range(calls):
                run(number)
            self.wait()
        found = [
            (event.time_range.start, str(event.name), float(event.time_range.elapsed_us()))
            for event in recorded.events() or ()
            if event.device_type.name == "CUDA"
        ]
        return [(name, elapsed) for _, name, elapsed in sorted(found)]

    def call_us(self, run: Run, calls: int) -> float:
        """Microseconds of a call, of ``calls`` calls back to back."""
        event: Any = torch.cuda.Event
        first, last = event(enable_timing=True), event(enable_timing=True)
        hold = getattr(torch.cuda, "_sleep", None)  # not part of torch's documented interface
        self.wait()
        if hold is not None:
            hold(_HOLD_CYCLES)
        first.record()
        for number in range(calls):
            run(number)
        last.record()
        self.wait()
        return float(first.elapsed_time(last)) * 1e3 / calls

    def host_us(self, run: Run, calls: int) -> list[float]:
        """Microseconds that each of ``calls`` calls holds the host."""
        times = []
        for number in range(calls):
            if number % _QUEUED_CALLS == 0:
                self.wait()
            start = time.perf_counter_ns()
            run(number)
            times.append((time.perf_counter_ns() - start) / 1e3)
        self.wait()
        return times

    def copy_tb_s(self) -> float:
        """TB/s, read and written, of a copy on the device."""
        source = torch.empty(min(_COPY_BYTES, self.free_bytes() // 4), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        target.copy_(source)
        return 2 * source.nbytes / self.call_us(lambda _: target.copy_(source), 10) / 1e6

    def matmul_tflops(self) -> float:
        """TFLOP/s of a bf16 matrix product of 8192^3, of random numbers: zeros would need less power."""
        left, right = (torch.randn(_MATRIX, _MATRIX, device=self.device).bfloat16() for _ in range(2))
        out = torch.matmul(left, right)
        return 2 * _MATRIX**3 / self.call_us(lambda _: torch.matmul(left, right, out=out), 10) / 1e6

    def floor_ns(self, keys: int) -> float:
        """Nanoseconds of a pair at least, with so many keys: see ``floor``.

        Raises:
            DriverError: the driver does not assemble the kernel.
        """
        if self._floor is None:
            self._floor = floor.launcher(self.ordinal)
        launch, pairs = self._floor
        rows = torch.ones(keys, floor.KEY_BYTES, dtype=torch.uint8, device=self.device)
        sums = torch.zeros(keys, floor.SUM_BYTES, dtype=torch.uint8, device=self.device)
        stream = streams.current_handle(self.ordinal)

        def run(_: int) -> None:
            launch(rows.data_ptr(), sums.data_ptr(), keys, stream)

        run(0)
        return self.call_us(run, 3) * 1e3 / pairs


def _driver_version() -> str | None:
    """The version of NVIDIA's kernel module, where the system tells it."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip() or None
    except OSError:
        return None
