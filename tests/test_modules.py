"""Loaded cubins: shared, held to a limit, and unloaded only when nothing can use them. A driver made of Python."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dsa_cases  # noqa: E402
import fake_driver  # noqa: E402
from dsa_cases import outputs  # noqa: E402

import dsa_planner  # noqa: E402
from dsa_planner import driver, modules, operators  # noqa: E402
from dsa_planner.cache.planfile import PlanFile  # noqa: E402
from dsa_planner.plan import Plan  # noqa: E402


@pytest.fixture
def files(compiled: PlanFile, compiled_v2: PlanFile) -> list[PlanFile]:
    """Plans of four cubins of about one size; two pairs differ in a byte that no kernel has."""
    four = []
    for file in (compiled, compiled_v2):
        for number in range(2):
            sections = {**dict(file.sections), "cubin": file.cubin + bytes(number)}
            four.append(PlanFile(file.manifest, sections))
    return four


def given(backend: str) -> dict[str, Any]:
    case = dsa_cases.make(1, 2, 20, 128)
    dw = torch.float32 if backend == "sm90_v2" else torch.bfloat16
    return {**case.inputs(), **outputs(case, torch.float32, dw)}


def launch(plan: Plan, stream: int = 0) -> None:
    plan.launch(**given(plan.config["backend"]), stream=stream)


def loaded(plans: list[Plan]) -> list[bool]:
    return [bool(plan.stats()["loaded"]) for plan in plans]


def test_a_cubin_is_loaded_once_for_all_plans_that_have_it(fake: fake_driver.FakeDriver, compiled: PlanFile) -> None:
    one, other = Plan(compiled, 0), Plan(compiled, 0)
    assert len(fake.kernels) == 3
    assert one._module is other._module


def test_the_least_recently_launched_are_unloaded(fake: fake_driver.FakeDriver, files: list[PlanFile]) -> None:
    limit = 2 * max(len(file.cubin) for file in files)
    plans = [Plan(file, 0, module_bytes=limit) for file in files[:2]]
    for plan in plans:
        launch(plan)
    launch(plans[0])
    plans.append(Plan(files[2], 0, module_bytes=limit))
    assert loaded(plans) == [True, False, True], "the one that was launched least recently"
    assert fake.unloaded == 1
    assert fake.synchronised == [0], "after its last launch has ended"
    assert modules.module_stats(0)["modules_unloaded"] == 1
    assert modules.module_stats(0)["module_bytes"] <= limit
    executables = len(fake.executables)
    launch(plans[1])
    assert loaded(plans) == [False, True, True], "loaded again when it is launched"
    assert len(fake.executables) == executables, "the graphs of the other went with it"
    plans[0].prepare()
    assert loaded(plans)[0]
    before = len(fake.launches)
    for plan in plans:
        launch(plan)
    assert len(fake.launches) == before + 6


def test_what_was_captured_stays(fake: fake_driver.FakeDriver, files: list[PlanFile]) -> None:
    limit = max(len(file.cubin) for file in files)
    first = Plan(files[0], 0, module_bytes=limit)
    fake.permanent.add(7)
    fake.capturing = {7}
    launch(first, 7)
    fake.capturing = set()
    plans = [first, *(Plan(file, 0, module_bytes=limit) for file in files[1:])]
    assert loaded(plans) == [True, False, False, True]
    assert first.stats() == {"launches": 1, "captured": 1, "loaded": True, "stays": True}


def test_what_was_launched_on_a_stream_of_the_callers_stays(
    fake: fake_driver.FakeDriver, files: list[PlanFile]
) -> None:
    """It may be destroyed with its work under way, and then nothing tells when that ends."""
    limit = max(len(file.cubin) for file in files)
    first = Plan(files[0], 0, module_bytes=limit)
    launch(first, 55)
    plans = [first, *(Plan(file, 0, module_bytes=limit) for file in files[1:])]
    assert loaded(plans) == [True, False, False, True]
    assert 55 not in fake.synchronised


def test_nothing_is_unloaded_while_its_stream_is_captured(fake: fake_driver.FakeDriver, files: list[PlanFile]) -> None:
    limit = max(len(file.cubin) for file in files)
    fake.permanent.add(7)
    first = Plan(files[0], 0, module_bytes=limit)
    launch(first, 7)
    fake.capturing = {7}
    second = Plan(files[1], 0, module_bytes=limit)
    assert loaded([first, second]) == [True, True], "an event on the stream would become part of the capture"
    fake.capturing = set()
    third = Plan(files[2], 0, module_bytes=limit)
    assert loaded([first, second, third]) == [False, False, True]


def test_a_capture_that_begins_while_a_plan_is_to_be_unloaded(
    fake: fake_driver.FakeDriver, files: list[PlanFile]
) -> None:
    """Its thread is between the question whether the stream is captured and the event."""
    limit = max(len(file.cubin) for file in files)
    fake.permanent.add(7)
    first = Plan(files[0], 0, module_bytes=limit)
    launch(first, 7)
    record = fake.cuEventRecord

    def begin(event: int, stream: int) -> Any:
        answer = record(event, stream)
        fake.capturing = {7}
        return answer

    fake.cuEventRecord = begin  # type: ignore[method-assign]
    second = Plan(files[1], 0, module_bytes=limit)
    assert loaded([first, second]) == [True, True]
    assert not fake.synchronised


@pytest.mark.parametrize("function", ["cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuLibraryUnload"])
def test_a_driver_that_refuses_to_unload_leaves_it_loaded(
    fake: fake_driver.FakeDriver, files: list[PlanFile], function: str
) -> None:
    limit = max(len(file.cubin) for file in files)
    first = Plan(files[0], 0, module_bytes=limit)
    launch(first)
    failed = fake_driver.real.CUresult.CUDA_ERROR_LAUNCH_FAILED
    setattr(fake, function, lambda *arguments: (failed, None) if function == "cuEventCreate" else (failed,))
    second = Plan(files[1], 0, module_bytes=limit)
    assert loaded([first, second]) == [True, True]
    launch(first)
    launch(second)


def test_a_plan_that_is_not_unloaded_after_all_can_be_captured(
    fake: fake_driver.FakeDriver, files: list[PlanFile]
) -> None:
    limit = max(len(file.cubin) for file in files)
    fake.permanent.add(7)
    first = Plan(files[0], 0, module_bytes=limit)
    launch(first, 7)
    asked, go = threading.Event(), threading.Event()
    ask = fake.cuEventCreate

    def slow(flags: Any) -> Any:
        asked.set()
        go.wait(20)
        fake.capturing = {7}
        return ask(flags)

    fake.cuEventCreate = slow  # type: ignore[method-assign]
    other = threading.Thread(target=lambda: Plan(files[1], 0, module_bytes=limit))
    other.start()
    assert asked.wait(20)
    assert not first.stats()["loaded"], "somebody is deciding"
    threading.Timer(0.2, go.set).start()
    fake.capturing = {7}
    launch(first, 7)
    other.join()
    assert first.stats() == {"launches": 2, "captured": 1, "loaded": True, "stays": True}


def test_an_unloaded_plan_is_not_loaded_under_capture(fake: fake_driver.FakeDriver, files: list[PlanFile]) -> None:
    limit = max(len(file.cubin) for file in files)
    first = Plan(files[0], 0, module_bytes=limit)
    Plan(files[1], 0, module_bytes=limit)
    assert not first.stats()["loaded"]
    fake.capturing = {7}
    with pytest.raises(
        dsa_planner.CaptureError, match=r"under stream capture: its cubin was unloaded.*call plan\.prepare\(\) before"
    ):
        launch(first, 7)
    assert first.stats() == {"launches": 0, "captured": 0, "loaded": False, "stays": False}
    fake.capturing = set()
    first.prepare(0)
    fake.capturing = {7}
    launch(first, 7)
    assert len(fake.launches) == 2


def test_threads_launch_while_others_are_unloaded(fake: fake_driver.FakeDriver, files: list[PlanFile]) -> None:
    """No launch, and no graph, has functions of a cubin that is gone."""
    limit = max(len(file.cubin) for file in files)
    alive: set[int] = set()
    get, unload, go = fake.cuKernelGetFunction, fake.cuLibraryUnload, fake.cuGraphLaunch
    owner: dict[int, Any] = {}
    current: list[Any] = []
    load = fake.cuLibraryLoadData

    def noted_load(code: bytes, *options: Any) -> Any:
        status, library = load(code, *options)
        current[:] = [library]
        return status, library

    def noted_get(handle: int) -> Any:
        alive.add(handle)
        owner[handle] = current[0]
        return get(handle)

    def noted_unload(library: Any) -> Any:
        for handle in [handle for handle in alive if owner[handle] is library]:
            alive.discard(handle)
        return unload(library)

    wrong: list[int] = []
    graph_functions: dict[int, list[int]] = {}
    add = fake.cuGraphAddKernelNode

    def noted_add(graph: int, before: Any, count: int, node: Any) -> Any:
        graph_functions.setdefault(graph, []).append(int(node.func))
        return add(graph, before, count, node)

    def noted_go(executable: int, stream: int) -> Any:
        wrong.extend(handle for handle in graph_functions[executable] if handle not in alive)
        return go(executable, stream)

    fake.cuLibraryLoadData, fake.cuKernelGetFunction = noted_load, noted_get  # type: ignore[method-assign]
    fake.cuLibraryUnload, fake.cuGraphAddKernelNode = noted_unload, noted_add  # type: ignore[method-assign]
    fake.cuGraphLaunch = noted_go  # type: ignore[method-assign]
    fake.permanent |= {5, 6, 7, 8}
    plans = [Plan(file, 0, module_bytes=limit) for file in files]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(40):
                launch(plans[(number + turn) % 4], 5 + number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert not wrong
    assert len(fake.launches) == 320
    assert fake.unloaded > 10


def test_a_cubin_that_does_not_load_leaves_nothing_behind(fake: fake_driver.FakeDriver, compiled: PlanFile) -> None:
    fake.change_parameters = lambda symbol, found: found[:-1]
    with pytest.raises(dsa_planner.PlanFileError, match="kernel score_grad has parameters"):
        Plan(compiled, 0)
    assert fake.unloaded == 1
    assert modules.module_stats(0)["modules"] == 0


def test_the_first_call_is_refused_under_capture(fake: fake_driver.FakeDriver) -> None:
    case = dsa_cases.make(1, 2, 20, 128)
    inputs, result = case.inputs(), outputs(case)
    fake.capturing = {7}
    with pytest.raises(
        dsa_planner.CaptureError,
        match=r"topk 128 on captured stream 0x7: its plan is not loaded yet.*load_plan\(128, backend='default'\)",
    ):
        dsa_planner.indexer_backward(**inputs, **result, stream=7)
    assert not fake.kernels
    dsa_planner.load_plan(128)
    dsa_planner.indexer_backward(**inputs, **result, stream=7)
    assert len(fake.launches) == 2


def test_a_forked_child_is_refused_with_the_way_out(fake: fake_driver.FakeDriver) -> None:
    plan, arguments = dsa_planner.load_plan(128), given("default")
    reader, writer = os.pipe()
    operators._lock.acquire()  # as another thread of the parent may hold it
    child = os.fork()
    if child == 0:
        said = []
        unready = (fake_driver.real.CUresult.CUDA_ERROR_NOT_INITIALIZED, None)
        fake.cuCtxGetCurrent = lambda: unready  # type: ignore[method-assign]
        for call in (
            lambda: dsa_planner.load_plan(128),
            lambda: plan.launch(**arguments),
            plan.prepare,
            driver.start,
            lambda: driver.device(0),
        ):
            try:
                call()
                said.append("no error")
            except BaseException as error:
                said.append(f"{type(error).__name__} {error}")
        os.write(writer, "\n".join(said).encode())
        os._exit(0)
    operators._lock.release()
    os.close(writer)
    with os.fdopen(reader) as answers:
        lines = answers.read().splitlines()
    os.waitpid(child, 0)
    assert len(lines) == 5
    for line in lines:
        assert line.startswith("DriverError CUDA in process")
        assert 'and CUDA does not survive a fork; start workers with the method "spawn" or "forkserver"' in line


def test_a_child_whose_parent_started_cuda_elsewhere(fake: fake_driver.FakeDriver) -> None:
    fake.cuInit = lambda flags: (fake_driver.real.CUresult.CUDA_ERROR_NOT_INITIALIZED,)  # type: ignore[method-assign]
    with pytest.raises(
        dsa_planner.DriverError, match="the process that forked this one had started CUDA, and CUDA does"
    ):
        dsa_planner.load_plan(128)
