"""What a training job relies on for months: graphs, threads, streams that come and go, memory, failures.

Every launch is compared, on the GPU, with one that ran alone. d_index_q and d_weights are compared bit for bit;
d_index_k is a sum of atomic adds, so it is compared within its rounding.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

import dsa_cases  # noqa: E402
from cuda.bindings import driver as cu  # noqa: E402

import dsa_planner  # noqa: E402
from dsa_planner import device_memory, driver, envelope, modules, operators  # noqa: E402
from dsa_planner.locate import find_plan  # noqa: E402
from dsa_planner.plan import Plan  # noqa: E402

CAPABILITY = torch.cuda.get_device_capability()
BACKENDS = [name for name in ("sm90_v2", "sm100_v2") if envelope.rows_for_capability(name, CAPABILITY)]
if not BACKENDS:
    pytest.skip(f"no v2 backend for compute capability {CAPABILITY}", allow_module_level=True)
(BACKEND,) = BACKENDS
pytestmark = pytest.mark.gpu

TOPK, KEYS = 128, 700
FP32, BF16 = torch.float32, torch.bfloat16
Tensors = dict[str, torch.Tensor]


def plan_of(launch: str = "graph", topk: int = TOPK, **more: Any) -> Plan:
    """A plan that no other test has launched."""
    arch = operators.load_plan(topk).config["arch"]
    config = envelope.plan_config({"backend": BACKEND, "arch": arch, "topk": topk, "d_weights": "fp32"})
    return Plan(find_plan(config), 0, launch, **more)


class Lane:
    """A case with buffers of its own, and what a launch of it alone gives.

    ``wrong`` counts, on the GPU, the comparisons that failed.
    """

    def __init__(self, plan: Plan, seed: int, rows: int = 48, dk_dtype: torch.dtype = FP32, keys: int = KEYS) -> None:
        self.case = dsa_cases.make(1, rows, keys, plan.config["topk"], seed=seed, device="cuda", ids="valid")
        self.plan = plan
        self.tensors: Tensors = {**self.case.inputs(), **dsa_cases.outputs(self.case, dk_dtype, FP32)}
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.right = self.alone()
        self.clear()

    def alone(self) -> Tensors:
        """The results of a launch with no other one beside it."""
        torch.cuda.synchronize()
        self.launch()
        torch.cuda.synchronize()
        return {name: self.tensors[name].clone() for name in ("d_index_q", "d_weights", "d_index_k")}

    def clear(self) -> None:
        for name in self.right:
            self.tensors[name].fill_(7.0)

    def launch(self, **more: Any) -> None:
        self.tensors["attn_score"].copy_(self.case.attn_score)
        self.plan.launch(**self.tensors, **more)

    def compare(self, right: Tensors | None = None) -> None:
        """On torch's current stream."""
        right = right or self.right
        for name in ("d_index_q", "d_weights"):
            self.wrong += (self.tensors[name] != right[name]).any()
        exact, found = right["d_index_k"].float(), self.tensors["d_index_k"].float()
        limit = 1e-5 if self.tensors["d_index_k"].dtype is FP32 else 1e-2
        self.wrong += ~((found - exact).norm() <= limit * exact.norm())


def new_stream() -> int:
    status, stream = cu.cuStreamCreate(1)  # non-blocking
    assert status == cu.CUresult.CUDA_SUCCESS
    return int(stream)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def capture(lanes: list[Lane]) -> Any:
    """A graph in which two lanes run side by side on streams that were forked inside the capture."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        lanes[0].launch()
        with torch.cuda.stream(side):
            lanes[1].launch()
        main.wait_stream(side)
    return graph


def test_10000_replays_beside_eager_launches() -> None:
    plan = plan_of()
    scales = (1.0, -2.0, 0.5)
    groups = [[Lane(plan, 10 * g + n, 40 + 9 * n, (FP32, BF16)[n]) for n in range(2)] for g in range(2)]
    eager = [Lane(plan, 100 + n, 30 + 11 * n, (BF16, FP32)[n % 2]) for n in range(3)]
    expected: dict[tuple[int, float], Tensors] = {}
    for number, scale in itertools.product(range(4), scales):
        lane = groups[number // 2][number % 2]
        lane.tensors["grad_loss"].fill_(scale)
        expected[number, scale] = lane.alone()
    graphs = [capture(lanes) for lanes in groups]
    streams = [torch.cuda.Stream() for _ in graphs]
    eager_streams = [torch.cuda.Stream() for _ in eager]
    torch.cuda.synchronize()
    for replay in range(5_000):
        if replay == 2_500:
            torch.cuda.synchronize()
            graphs[0].reset()
            graphs[0] = capture(groups[0])
        scale = scales[replay % 3]
        for g, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for lane in groups[g]:
                    lane.tensors["grad_loss"].fill_(scale)
                graphs[g].replay()
                for n, lane in enumerate(groups[g]):
                    lane.compare(expected[2 * g + n, scale])
        lane, stream = eager[replay % 3], eager_streams[replay % 3]
        with torch.cuda.stream(stream):
            lane.launch()
            lane.compare()
    torch.cuda.synchronize()
    assert [int(lane.wrong) for lane in (*groups[0], *groups[1], *eager)] == [0] * 7


def test_8_threads_with_4_streams_each() -> None:
    """torch's, a foreign one, the thread's own default stream, and the default stream of all."""
    plan = plan_of()
    failures: list[BaseException] = []
    calls = 20
    lanes = [[[Lane(plan, 40 * t + 4 * s, 24 + t) for _ in range(calls)] for s in range(4)] for t in range(8)]
    torch.cuda.synchronize()
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            torch.cuda.set_device(0)
            handles = [torch.cuda.Stream(), new_stream(), 2, (0, 1)[number % 2]]
            barrier.wait()
            for _ in range(500 // calls):
                for mine in lanes[number]:
                    for lane in mine:
                        lane.tensors["attn_score"].copy_(lane.case.attn_score)
                        lane.clear()
                torch.cuda.current_stream().synchronize()
                for turn in range(calls):
                    for mine, stream in zip(lanes[number], handles, strict=True):
                        plan.launch(**mine[turn].tensors, stream=stream)
                for stream in handles:
                    cu.cuStreamSynchronize(stream if isinstance(stream, int) else stream.cuda_stream)
                for mine in lanes[number]:
                    for lane in mine:
                        lane.compare()
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failures, failures
    assert sum(int(lane.wrong) for mine in lanes for streams in mine for lane in streams) == 0


def test_100000_streams_created_and_dropped() -> None:
    plan = plan_of("kernels")
    lanes = [Lane(plan, seed, 9) for seed in range(8)]
    memory = device_memory.memory_of(driver.device(0))
    torch.cuda.synchronize()
    free = []
    for batch in range(100_000 // len(lanes)):
        for lane in lanes:
            lane.tensors["attn_score"].copy_(lane.case.attn_score)
        torch.cuda.current_stream().synchronize()
        handles = [new_stream() for _ in lanes]
        for lane, handle in zip(lanes, handles, strict=True):
            plan.launch(**lane.tensors, stream=handle)
        for handle in handles:
            cu.cuStreamDestroy(handle)  # with its launch in flight
        if batch % 10 == 0:
            torch.cuda.synchronize()
            for lane in lanes:
                lane.compare()
                lane.clear()
        if batch % 1_250 == 0:
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
    torch.cuda.synchronize()
    print("free MiB:", [value >> 20 for value in free], memory.stats())
    assert sum(int(lane.wrong) for lane in lanes) == 0
    assert memory.stats()["streams"] == memory.stats()["counters"] == device_memory.COUNTERS
    assert memory.stats()["launches_on_lent_memory"] > 30_000
    assert max(free) - min(free) <= 64 << 20


@pytest.mark.parametrize("dk_dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("own", [True, False], ids=["no workspace", "workspace"])
def test_1000_steady_launches_allocate_nothing_and_wait_for_nothing(dk_dtype: torch.dtype, own: bool) -> None:
    plan = plan_of()
    lane = Lane(plan, 1, 16, dk_dtype)
    needed = plan.workspace_bytes(1, KEYS, dk_dtype)
    more = {} if own else {"workspace": torch.empty(needed, dtype=torch.uint8, device="cuda")}
    plan.launch(**lane.tensors, **more)
    torch.cuda.synchronize()
    before = {name: value for name, value in torch.cuda.memory_stats().items() if "alloc" in name or "segment" in name}
    free = torch.cuda.mem_get_info()[0]
    waits = dsa_planner.stats()["synchronisations"]
    for _ in range(10):
        torch.cuda._sleep(400_000_000)  # 0.2 s
        start = time.perf_counter()
        for _ in range(100):
            plan.launch(**lane.tensors, **more)
        assert time.perf_counter() - start < 0.1, "a launch waited for the GPU"
        torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    assert {name: after[name] for name in before} == before
    assert torch.cuda.mem_get_info()[0] == free
    assert dsa_planner.stats()["synchronisations"] == waits


def test_a_poisoned_workspace_counter_and_scratch_do_no_harm() -> None:
    plan = plan_of()
    for dk_dtype in (FP32, BF16):
        lane = Lane(plan, 3, 60, dk_dtype)
        workspace = torch.full((plan.workspace_bytes(1, KEYS, dk_dtype),), 0xFF, dtype=torch.uint8, device="cuda")
        lane.launch(workspace=workspace)
        lane.compare()
        mine = plan._memory.of(0)
        torch.cuda.synchronize()
        cu.cuMemsetD8(mine.counter, 0xFF, 16)
        if mine.scratch:
            cu.cuMemsetD8(mine.scratch, 0xFF, mine.scratch_bytes)
        lane.clear()
        lane.launch()
        lane.compare()
        assert int(lane.wrong) == 0


def test_a_launch_that_failed_between_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("kernels")
    lane = Lane(plan, 4, 60, BF16)
    works, calls = cu.cuLaunchKernelEx, itertools.count()

    def fail(*arguments: Any) -> Any:
        return (cu.CUresult.CUDA_ERROR_LAUNCH_FAILED,) if next(calls) % 3 else works(*arguments)

    monkeypatch.setattr(cu, "cuLaunchKernelEx", fail)
    with pytest.raises(dsa_planner.DriverError, match="launching gradients"):
        lane.launch()
    monkeypatch.undo()
    lane.clear()
    lane.launch()
    lane.compare()
    assert int(lane.wrong) == 0


KILLED = """
import os, signal, sys, torch
sys.path.insert(0, sys.argv[1])
import dsa_cases, dsa_planner
case = dsa_cases.make(1, 4096, 4096, 1024, device="cuda", ids="valid")
torch.cuda.synchronize()
print("ready", flush=True)
while True:
    dsa_planner.indexer_backward(**case.inputs(), backend=sys.argv[2])
"""


def test_the_process_after_one_that_was_killed_mid_launch() -> None:
    lane = Lane(plan_of(), 5)
    for _ in range(3):
        victim = subprocess.Popen(
            [sys.executable, "-c", KILLED, os.path.dirname(dsa_cases.__file__), BACKEND],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert victim.stdout is not None
        assert victim.stdout.readline() == "ready\n"
        time.sleep(0.3)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        lane.clear()
        lane.launch()
        lane.compare()
    assert int(lane.wrong) == 0


def test_a_capture_refuses_what_a_replay_could_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(plan_of(), 6)
    monkeypatch.setattr(operators, "_plans", {})
    given = {name: tensor for name, tensor in lane.tensors.items() if not name.startswith("d_")}
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(graph),
        pytest.raises(dsa_planner.CaptureError, match=r"its plan is not loaded yet.*load_plan"),
    ):
        dsa_planner.indexer_backward(**given, backend=BACKEND)
    operators.load_plan(TOPK, backend=BACKEND)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        dsa_planner.indexer_backward(**given, backend=BACKEND)

    stream = new_stream()
    torch.cuda.synchronize()
    cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    with pytest.raises(dsa_planner.CaptureError, match=r"not begun by torch.*pass a workspace"):
        lane.plan.launch(**lane.tensors, stream=stream)
    workspace = torch.empty(lane.plan.workspace_bytes(1, KEYS, FP32), dtype=torch.uint8, device="cuda")
    lane.plan.launch(**lane.tensors, stream=stream, workspace=workspace)
    status, raw = cu.cuStreamEndCapture(stream)
    assert status == cu.CUresult.CUDA_SUCCESS
    status, executable = cu.cuGraphInstantiate(raw, 0)
    for _ in range(3):
        lane.clear()
        lane.tensors["attn_score"].copy_(lane.case.attn_score)
        torch.cuda.synchronize()
        cu.cuGraphLaunch(executable, stream)
        cu.cuStreamSynchronize(stream)
        lane.compare()
    assert int(lane.wrong) == 0


def test_memory_is_taken_beside_the_capture_of_another_thread() -> None:
    """A capture in torch's default mode ends if any thread allocates in the usual way."""
    plan = plan_of()
    lane = Lane(plan, 7, 30, BF16)
    scratch = torch.zeros(16, device="cuda")
    failures: list[BaseException] = []

    context = cu.cuCtxGetCurrent()[1]
    larger = Lane(plan, 8, 30, BF16, keys=1400)

    def work() -> None:
        try:
            cu.cuCtxSetCurrent(context)
            for stream in (new_stream(), 2):
                for given in (lane.tensors, larger.tensors):
                    plan.launch(**given, stream=stream)
            plan_of(topk=256)
        except BaseException as error:
            failures.append(error)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scratch.add_(1)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not failures, failures
    graph.replay()
    torch.cuda.synchronize()
    assert float(scratch[0]) == 1.0


def test_cubins_are_unloaded_by_least_use_and_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "_modules", {})
    one = Lane(plan_of(), 8)
    limit = one.plan._module.bytes * 5 // 2
    monkeypatch.setattr(modules, "_modules", {})
    lanes = []
    for topk in (128, 256, 384, 512):
        lanes.append(Lane(plan_of(topk=topk, module_bytes=limit), topk))
        assert modules.module_stats(0)["module_bytes"] <= limit
    assert modules.module_stats(0)["modules"] == 2
    for number in range(40):
        lane = lanes[number * 7 % 4]
        lane.clear()
        lane.launch()
        lane.compare()
        assert modules.module_stats(0)["module_bytes"] <= limit
    assert modules.module_stats(0)["modules_unloaded"] > 20
    graph = torch.cuda.CUDAGraph()
    lanes[0].plan.prepare()
    with torch.cuda.graph(graph):
        lanes[0].launch()
    gone = next(lane for lane in lanes if not lane.plan.stats()["loaded"])
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(dsa_planner.CaptureError, match=r"plan\.prepare\(\)"):
        gone.plan.launch(**gone.tensors)
    for number in range(40):
        lane = lanes[number * 7 % 4]
        lane.clear()
        lane.launch()
        lane.compare()
        lanes[0].clear()
        graph.replay()
        lanes[0].compare()
    assert lanes[0].plan.stats()["loaded"], "a graph uses it"
    assert [int(lane.wrong) for lane in lanes] == [0] * 4


def test_the_audit_names_both_callers() -> None:
    plan = plan_of()
    lanes = [Lane(plan, 20 + n) for n in range(2)]
    workspace = torch.empty(plan.workspace_bytes(1, KEYS, FP32), dtype=torch.uint8, device="cuda")
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        torch.cuda._sleep(200_000_000)
    for lane in lanes:
        lane.tensors["attn_score"].copy_(lane.case.attn_score)
    torch.cuda.current_stream().synchronize()
    plan.launch(**lanes[0].tensors, workspace=workspace, stream=one, audit=True)
    before = lanes[1].tensors["attn_score"].clone()
    with pytest.raises(dsa_planner.AuditError) as found:
        plan.launch(**lanes[1].tensors, workspace=workspace, stream=other, audit=True)
    assert str(found.value).count("test_contract.py:") == 2, str(found.value)
    assert str(found.value).count("test_the_audit_names_both_callers") == 2
    torch.cuda.synchronize()
    assert torch.equal(before, lanes[1].tensors["attn_score"])

    with torch.cuda.stream(one):
        torch.cuda._sleep(200_000_000)
    plan.launch(**lanes[0].tensors, workspace=workspace, stream=one, audit=True)
    other.wait_stream(one)
    plan.launch(**lanes[1].tensors, workspace=workspace, stream=other, audit=True)
    plan.launch(**lanes[0].tensors, stream=one, audit=True)
    plan.launch(**lanes[1].tensors, stream=other, audit=True)
    for lane in lanes:
        torch.cuda.synchronize()
        lane.clear()
        lane.launch(audit=True)
        lane.compare()
    assert [int(lane.wrong) for lane in lanes] == [0, 0]


def test_arrays_of_other_libraries() -> None:
    cupy, jax = pytest.importorskip("cupy"), pytest.importorskip("jax")
    lane = Lane(plan_of(), 9)
    through_jax = ("index_q", "weights", "index_k", "topk_indices")

    def in_jax(tensor: torch.Tensor) -> Any:
        return jax.dlpack.from_dlpack(tensor)

    mixed: dict[str, Any] = dict(lane.tensors)
    mixed |= {name: in_jax(lane.tensors[name].clone()) for name in through_jax}
    mixed["attn_score"] = cupy.from_dlpack(lane.case.attn_score.clone())
    mixed["index_score"] = cupy.from_dlpack(lane.tensors["index_score"])
    mixed["d_weights"] = cupy.from_dlpack(lane.tensors["d_weights"])
    lane.plan.launch(**mixed)
    lane.compare()
    lane.clear()
    mixed["attn_score"] = cupy.from_dlpack(lane.case.attn_score.clone())
    found = dsa_planner.indexer_backward(**mixed, backend=BACKEND)
    assert found["d_weights"] is mixed["d_weights"]
    lane.compare()
    given = {name: value for name, value in mixed.items() if not name.startswith("d_")}
    given["attn_score"] = cupy.from_dlpack(lane.case.attn_score.clone())
    found = dsa_planner.indexer_backward(**given, backend=BACKEND)
    assert torch.equal(found["d_index_q"], lane.right["d_index_q"])
    assert int(lane.wrong) == 0
    for name in ("attn_score", "d_weights", "d_index_k"):
        with pytest.raises(dsa_planner.UnsupportedError, match=f"{name} of type jax.*: the launch writes it"):
            lane.plan.launch(**{**mixed, name: in_jax(lane.tensors[name].clone())})
    with pytest.raises(dsa_planner.DeviceMismatchError, match=r"weights of type numpy\.ndarray on DLPack device"):
        lane.plan.launch(**{**mixed, "weights": lane.tensors["index_score"].cpu().numpy()})


def test_an_array_that_is_still_being_made_on_another_stream() -> None:
    """As DLPack asks, the launch comes after what makes the array: here CuPy, on a stream of its own."""
    cupy = pytest.importorskip("cupy")
    lane = Lane(plan_of(), 10)
    stream = cupy.cuda.Stream(non_blocking=True)
    source = cupy.from_dlpack(lane.tensors["index_score"].clone())
    torch.cuda.synchronize()
    for _ in range(20):
        lane.tensors["attn_score"].copy_(lane.case.attn_score)
        lane.clear()
        torch.cuda.synchronize()
        with stream:
            late = cupy.zeros(source.shape, dtype=source.dtype)
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                torch.cuda._sleep(20_000_000)
            late[...] = source
            lane.plan.launch(**{**lane.tensors, "index_score": late}, stream=torch.cuda.current_stream())
        torch.cuda.synchronize()
        lane.compare()
    assert int(lane.wrong) == 0


def test_a_forked_child_is_refused() -> None:
    lane = Lane(plan_of(), 11)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answers = []
        for call in (lambda: operators.load_plan(TOPK), lambda: lane.plan.launch(**lane.tensors), lane.plan.prepare):
            try:
                call()
                answers.append("no error")
            except dsa_planner.DriverError as error:
                answers.append(str(error))
            except BaseException as error:
                answers.append(repr(error))
        os.write(writer, "\n".join(answers).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        lines = answers.read().splitlines()
    os.waitpid(child, 0)
    assert len(lines) == 3
    assert all("CUDA does not survive a fork" in line and '"spawn"' in line for line in lines), lines
    lane.launch()
    lane.compare()
    assert int(lane.wrong) == 0
