"""The clocks of a GPU, with torch's CUDA made of Python: what they time, and in which order. tests/gpu has real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_driver
import pytest

torch = pytest.importorskip("torch")

from dsa_planner import errors  # noqa: E402
from dsa_planner.bench import gpu  # noqa: E402


class Event:
    """An event of a timeline, on which a call takes 100 us."""

    log: list[str]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0

    def record(self) -> None:
        self.log.append("event")
        self.at = self.log.count("call")

    def elapsed_time(self, end: Event) -> float:
        return 0.1 * (end.at - self.at)


class Profile:
    """A profiler that records the kernel of each call, out of order, and what the host did."""

    log: list[str]

    def __init__(self, activities: list[Any]) -> None:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]

    def __enter__(self) -> Profile:
        self.log.append("profile")
        self.first = self.log.count("call")
        return self

    def __exit__(self, *error: object) -> None:
        self.last = self.log.count("call")

    def events(self) -> list[Any]:
        def event(kind: str, number: int, name: str) -> Any:
            span = SimpleNamespace(start=10.0 * number, elapsed_us=lambda: 20.0 + number)
            return SimpleNamespace(name=name, device_type=SimpleNamespace(name=kind), time_range=span)

        numbers = range(self.first, self.last)
        return [event("CPU", n, "cuLaunchKernelEx") for n in numbers] + [
            event("CUDA", n, "k") for n in reversed(numbers)
        ]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    fake_driver.install(monkeypatch, fake_driver.FakeDriver())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: found.append("hold"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {torch.profiler.ProfilerActivity.CUDA})
    Event.log = Profile.log = found
    return found


@pytest.fixture
def clocks(log: list[str]) -> gpu.Gpu:
    found = gpu.Gpu(0)
    found.device = "cpu"
    return found


def test_calls_wait_until_all_are_queued_between_two_events(clocks: gpu.Gpu, log: list[str]) -> None:
    assert clocks.call_us(lambda number: log.append("call"), 4) == pytest.approx(100.0)
    assert log == ["wait", "hold", "event", *["call"] * 4, "event", "wait"]


def test_host_time_is_of_a_queue_that_never_fills(clocks: gpu.Gpu, log: list[str]) -> None:
    times = clocks.host_us(lambda number: log.append("call"), 120)
    assert len(times) == 120
    assert 0 < sorted(times)[60] < 1000
    assert log == ["wait", *["call"] * 50, "wait", *["call"] * 50, "wait", *["call"] * 20, "wait"]


def test_kernels_are_those_of_the_gpu_in_the_order_of_their_start(clocks: gpu.Gpu, log: list[str]) -> None:
    assert clocks.kernels(lambda number: log.append("call"), 3) == [("k", 20.0), ("k", 21.0), ("k", 22.0)]
    assert log == ["profile", "wait", "wait", "profile", *["call"] * 3, "wait"], "the first profile is for CUPTI itself"
    clocks.kernels(lambda number: log.append("call"), 1)
    assert log.count("profile") == 3


def test_without_cupti_no_kernels_are_recorded(
    clocks: gpu.Gpu, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {torch.profiler.ProfilerActivity.CPU})
    assert clocks.kernels(lambda number: log.append("call"), 3) == []
    assert log == []


def test_what_a_clock_that_cannot_be_read_gives(clocks: gpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1980)
    assert clocks.clock_mhz() == 1980

    def refuses(device: int) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "clock_rate", refuses)
    assert clocks.clock_mhz() is None


def test_a_torch_without_cuda_is_a_driver_error(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(errors.DriverError, match=r"device 0: torch .* cannot use it; install a torch with CUDA for it"):
        gpu.Gpu(0)
    with pytest.raises(errors.DeviceMismatchError, match="device 3: this process sees 1 devices"):
        gpu.Gpu(3)
