"""Memory of launches without a workspace: who owns it, and for how long. A driver made of Python; no GPU."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dsa_cases  # noqa: E402
import fake_driver  # noqa: E402
from dsa_cases import outputs  # noqa: E402

import dsa_planner  # noqa: E402
from dsa_planner import device_memory, driver, streams  # noqa: E402
from dsa_planner.cache.planfile import PlanFile  # noqa: E402
from dsa_planner.launch_record import LaunchRecord  # noqa: E402
from dsa_planner.plan import Plan  # noqa: E402

FP32, BF16 = torch.float32, torch.bfloat16


class Launcher:
    """Launches a plan, and says which addresses its counter and its accumulator had."""

    def __init__(self, fake: fake_driver.FakeDriver, file: PlanFile) -> None:
        self.fake, self.plan, self.record = fake, Plan(file, 0), LaunchRecord.parse(file.launch)
        self._given: dict[Any, Any] = {}

    def __call__(self, stream: int, dk: torch.dtype = FP32, keys: int = 20) -> tuple[int, int]:
        if (dk, keys) not in self._given:
            case = dsa_cases.make(1, 2, keys, 128)
            self._given[dk, keys] = {**case.inputs(), **outputs(case, dk, FP32)}
        given = self._given[dk, keys]
        self.fake.launches.clear()
        self.plan.launch(**given, stream=stream)
        seen = [fake_driver.by_name(launch, self.record) for launch in self.fake.launches[:2]]
        assert seen[0]["ticket"] == seen[1]["ticket"]
        assert seen[0]["dk_accum"] == seen[1]["dk_accum"]
        return seen[0]["ticket"], seen[0]["dk_accum"]


def stats() -> dict[str, int]:
    return device_memory.memory_of(driver.device(0)).stats()


def test_a_counter_belongs_to_a_stream_and_not_to_its_handle(
    fake: fake_driver.FakeDriver, compiled_v2: PlanFile
) -> None:
    launch = Launcher(fake, compiled_v2)
    first, second = launch(5)[0], launch(6)[0]
    assert second - first == device_memory.COUNTER_BYTES
    assert launch(5)[0] == first
    assert launch(6)[0] == second
    fake.stream_ids[5] = 77  # the stream was destroyed, and another one has its handle
    third = launch(5)[0]
    assert third not in (first, second)
    fake.stream_ids[8] = 5  # nothing of a stream that is gone is given to another
    assert launch(8)[0] == first, "the same id is the same stream, whatever its handle"
    assert launch(0)[0] == launch(1)[0], "two names of the default stream"
    fake.stream_ids[2] = 1001
    mine = launch(2)[0]
    fake.stream_ids[2] = 1002
    assert launch(2)[0] != mine, "every thread has a stream of handle 2"
    assert fake.slabs == [device_memory.COUNTERS * device_memory.COUNTER_BYTES]
    assert stats() == {
        "streams": 6, "counters": 6, "slab_bytes": 1 << 20, "scratch_streams": 0, "scratch_bytes": 0,
        "launches_on_lent_memory": 0,
    }  # fmt: skip
    assert not fake.pool_history


def test_streams_beyond_the_slab_are_lent_a_counter(
    fake: fake_driver.FakeDriver, compiled_v2: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "COUNTERS", 3)
    launch = Launcher(fake, compiled_v2)
    owned = [launch(stream)[0] for stream in (5, 6, 7)]
    for stream in (8, 9, 8):
        address, _ = launch(stream)
        assert address not in owned
        assert fake.pool_history[-2:] == [("take", address, stream), ("give", address, stream)]
    assert [launch(stream)[0] for stream in (5, 6, 7)] == owned
    assert stats()["streams"] == stats()["counters"] == 3, "nothing is remembered of further streams"
    assert stats()["launches_on_lent_memory"] == 3
    assert not fake.pool


def test_scratch_stays_with_the_stream_and_grows_in_its_order(
    fake: fake_driver.FakeDriver, compiled_v2: PlanFile
) -> None:
    launch = Launcher(fake, compiled_v2)
    ticket, first = launch(5, BF16)
    assert launch(5, BF16) == (ticket, first)
    assert launch(5, BF16, 15)[1] == first
    larger = launch(5, BF16, 21)[1]
    assert larger != first
    assert launch(5, BF16)[1] == larger
    assert fake.pool_history == [("take", first, 5), ("take", larger, 5), ("give", first, 5)]
    assert len({larger, launch(6, BF16)[1], launch(0, BF16)[1]}) == 3, "each stream has its own"
    assert launch(0, BF16)[1] == launch(1, BF16)[1]
    fake.stream_ids[5] = 77
    assert launch(5, BF16)[1] != larger, "another stream of that handle"


def test_few_streams_keep_scratch_and_none_too_much(
    fake: fake_driver.FakeDriver, compiled_v2: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "KEEPING_STREAMS", 2)
    launch = Launcher(fake, compiled_v2)
    for stream in (5, 6):
        launch(stream, BF16)
    assert stats()["scratch_streams"] == 2
    history = len(fake.pool_history)
    _, lent = launch(7, BF16)
    assert fake.pool_history[history:] == [("take", lent, 7), ("give", lent, 7)]
    monkeypatch.setattr(device_memory, "MOST_KEPT_BYTES", 4 * 40 * 128)
    _, lent = launch(5, BF16, 41)
    assert fake.pool_history[-1] == ("give", lent, 5)
    assert stats()["scratch_streams"] == 2
    assert stats()["launches_on_lent_memory"] == 2


def test_lent_memory_comes_back_when_the_launch_fails(
    fake: fake_driver.FakeDriver, compiled_v2: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "COUNTERS", 0)
    launch = Launcher(fake, compiled_v2)
    fake.launch_status = fake_driver.real.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(dsa_planner.DriverError, match="CUDA_ERROR_LAUNCH_FAILED"):
        launch(5)
    assert not fake.pool
    assert [what for what, _, _ in fake.pool_history] == ["take", "give"]


def test_without_memory_torchs_cache_is_emptied_first(
    fake: fake_driver.FakeDriver, compiled_v2: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    launch = Launcher(fake, compiled_v2)
    fake.out_of_memory = 1
    launch(5, BF16)
    assert emptied == [None]
    fake.out_of_memory = 2
    with pytest.raises(
        dsa_planner.DriverError,
        match=r"scratch of 51456 bytes on cuda:0: the CUDA driver answered CUDA_ERROR_OUT_OF_MEMORY; free memory, or",
    ):
        launch(5, BF16, 100)
    launch(5, BF16)


def test_counters_without_memory(
    fake: fake_driver.FakeDriver, compiled_v2: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[None] = []

    def empty() -> None:
        emptied.append(None)
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    take, pools = fake.cuMemAlloc, []
    fake.cuMemAlloc = lambda size: (fake_driver.real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)  # type: ignore[method-assign]
    make = fake.cuMemPoolCreate
    fake.cuMemPoolCreate = lambda properties: (pools.append(0), make(properties))[1]  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(
            dsa_planner.DriverError, match=r"row counters of 1048576 bytes on cuda:0: .*free memory, or"
        ):
            Plan(compiled_v2, 0)
    assert len(emptied) == 3
    assert len(pools) == 1
    fake.cuMemAlloc = take  # type: ignore[method-assign]
    Launcher(fake, compiled_v2)(5)


def test_the_lock_of_a_stream_is_released_whatever_fails(
    fake: fake_driver.FakeDriver, compiled_v2: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "MOST_KEPT_BYTES", 0)
    launch = Launcher(fake, compiled_v2)

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(device_memory.DeviceMemory, "give_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launch(5, BF16)
    assert not device_memory.memory_of(driver.device(0)).of(5).lock.locked()
    launch(5, BF16)


def test_a_stream_that_the_driver_does_not_know(fake: fake_driver.FakeDriver, compiled_v2: PlanFile) -> None:
    launch = Launcher(fake, compiled_v2)
    fake.cuStreamGetId = lambda stream: (fake_driver.real.CUresult.CUDA_ERROR_INVALID_HANDLE, None)  # type: ignore[method-assign]
    with pytest.raises(dsa_planner.DriverError, match="stream 0x5: the CUDA driver answered CUDA_ERROR_INVALID_HANDLE"):
        launch(5)


def test_under_capture_memory_is_the_graphs(
    fake: fake_driver.FakeDriver, compiled_v2: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One counter a launch, from torch's allocator; and none where it would not stay with the graph."""
    monkeypatch.setattr(streams, "allocating_on", lambda handle, device: nullcontext())
    held: list[torch.Tensor] = []  # so that nothing else gets their memory
    new_empty = torch.Tensor.new_empty

    def noted(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        held.append(new_empty(self, *arguments, **options))
        return held[-1]

    monkeypatch.setattr(torch.Tensor, "new_empty", noted)
    pools: list[Any] = []

    def snapshot() -> list[dict[str, Any]]:
        pools.append(pool)
        return [
            {"device": 1, "address": 0, "total_size": 1 << 62, "segment_pool_id": (9, 9)},
            {"device": 0, "address": held[-1].data_ptr() - 512, "total_size": 4096, "segment_pool_id": pool},
        ]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    launch = Launcher(fake, compiled_v2)
    own, _ = launch(5)
    fake.capturing, pool = {5, 6}, (0, 1)
    found = [launch(stream)[0] for stream in (5, 5, 6)]
    assert len({own, *found}) == 4
    assert pools == [(0, 1)], "looked at once a capture"
    fake.capturing = set()
    assert launch(5)[0] == own

    device_memory._private_captures.clear()
    fake.capturing, pool = {5}, (0, 0)
    before = len(fake.launches)
    with pytest.raises(dsa_planner.CaptureError, match=r"was not begun by torch.*pass a workspace that lives as long"):
        launch(5)
    assert len(fake.launches) in (0, before)

    def unsupported() -> None:
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", unsupported)
    launch(5)

    def none(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        assert fake.capture_mode == fake_driver.real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(torch.Tensor, "new_empty", none)
    with pytest.raises(dsa_planner.CaptureError, match=r"torch's allocator gave no memory \(out of memory\); pass a w"):
        launch(5)
    fake.capturing = {2}
    with pytest.raises(
        dsa_planner.CaptureError, match=r"captured stream 0x2: .*not each thread's stream; pass a works"
    ):
        launch(2)
    assert not fake.pool_history


def test_threads_on_one_stream_do_not_lose_each_others_scratch(
    fake: fake_driver.FakeDriver, compiled_v2: PlanFile
) -> None:
    """Scratch that another thread replaces must not be given back before the launch that reads its address."""
    plan = Plan(compiled_v2, 0)
    record = LaunchRecord.parse(compiled_v2.launch)
    events: list[tuple[str, int]] = []
    give, launch = fake.cuMemFreeAsync, fake.cuGraphLaunch

    def noted_give(address: int, stream: int) -> Any:
        events.append(("give", address))
        return give(address, stream)

    def noted_launch(executable: int, stream: int) -> Any:
        first = fake.executables[executable][0]
        events.append(("launch", fake_driver.by_name(first, record)["dk_accum"]))
        return launch(executable, stream)

    fake.cuMemFreeAsync, fake.cuGraphLaunch = noted_give, noted_launch  # type: ignore[method-assign]

    def work(first: int) -> None:
        for keys in range(first, 60, 4):
            case = dsa_cases.make(1, 2, keys, 128)
            plan.launch(**case.inputs(), **outputs(case, BF16, FP32), stream=5)

    threads = [threading.Thread(target=work, args=(10 + number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gone: set[int] = set()
    assert len(events) > 50
    for what, address in events:
        assert address not in gone or what == "give"
        if what == "give":
            gone.add(address)
        else:
            gone.discard(address)


def test_two_devices_do_not_mix(monkeypatch: pytest.MonkeyPatch, layer: Path, compiled_v2: PlanFile) -> None:
    fake = fake_driver.FakeDriver(devices=2)
    fake_driver.install(monkeypatch, fake)
    record = LaunchRecord.parse(compiled_v2.launch)
    case = dsa_cases.make(1, 2, 20, 128)
    given = {**case.inputs(), **outputs(case, FP32, FP32)}
    plans, tickets = [Plan(compiled_v2, ordinal) for ordinal in range(2)], []
    for ordinal in (0, 1, 0):
        fake.launches.clear()
        fake.launch_contexts.clear()
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor, ordinal=ordinal: ordinal)
        plans[ordinal].launch(**given, stream=0)
        assert fake.launch_contexts == [fake_driver.CONTEXT + ordinal] * 2
        assert fake.current_context == fake_driver.CONTEXT, "what was current is put back"
        tickets.append(fake_driver.by_name(fake.launches[0], record)["ticket"])
        with pytest.raises(dsa_planner.DeviceMismatchError, match=f"this launch runs on cuda:{1 - ordinal}"):
            plans[1 - ordinal].launch(**given, stream=0)
    assert tickets[0] == tickets[2] != tickets[1]
    assert len(fake.slabs) == 2
    assert plans[0]._module is not plans[1]._module
    with pytest.raises(dsa_planner.DeviceMismatchError, match=r"device 1: <Plan .* was loaded for cuda:0"):
        plans[0].prepare(1)
    assert plans[1].prepare("cuda:1") is plans[1]
