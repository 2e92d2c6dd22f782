"""Launches as graphs of the runtime's own: the same results as of single kernels, on any stream, beside any capture."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

import dsa_cases  # noqa: E402

from dsa_planner import envelope, operators  # noqa: E402
from dsa_planner.locate import find_plan  # noqa: E402
from dsa_planner.plan import Plan  # noqa: E402

CAPABILITY = torch.cuda.get_device_capability()
if not envelope.rows_for_capability("default", CAPABILITY):
    pytest.skip(f"no backend for compute capability {CAPABILITY}", allow_module_level=True)
pytestmark = pytest.mark.gpu

TOPK = 256
NAMES = ("attn_score", "d_index_q", "d_weights", "d_index_k")


def new_plan(launch: str = "graph") -> Plan:
    """A plan that no other test has launched."""
    arch = operators.load_plan(TOPK).config["arch"]
    return Plan(find_plan(envelope.plan_config({"backend": "default", "arch": arch, "topk": TOPK})), 0, launch)


def tensors(case: dsa_cases.Case, dk_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {**case.inputs(), **dsa_cases.outputs(case, dk_dtype)}


def case_of(rows: int, seed: int) -> dsa_cases.Case:
    """Every key is selected at most twice, so that the order of additions does not matter and bits can be compared."""
    case = dsa_cases.make(1, rows, TOPK * rows, TOPK, seed=seed, device="cuda", ids="valid")
    ids = torch.arange(TOPK * rows, device="cuda", dtype=torch.int32).reshape(1, rows, TOPK)
    case.topk_indices.copy_(ids.flip(1) if seed % 2 else ids)
    return case


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in NAMES)


@pytest.mark.parametrize("dk_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_graph_gives_the_bits_of_its_kernels(dk_dtype: torch.dtype) -> None:
    """With shapes, addresses, scalars and streams that change from launch to launch."""
    graph, kernels = new_plan(), new_plan("kernels")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    cases = [case_of(rows, seed) for seed, rows in enumerate((5, 300, 77))]
    torch.cuda.synchronize()
    launched = []
    for number in range(30):
        case, stream = cases[number * 7 % 3], streams[number % 3]
        scalars = {"sm_scale": (0.1, 1.0)[number % 2], "loss_coeff": 3.0}
        with torch.cuda.stream(stream):
            one, other = tensors(case, dk_dtype), tensors(case, dk_dtype)
            graph.launch(**one, **scalars)
            kernels.launch(**other, **scalars)
        launched.append((one, other))
    torch.cuda.synchronize()
    assert all(same(one, other) for one, other in launched)
    assert all(not tensor.isnan().any() for one, _ in launched for tensor in one.values())


def test_capture_and_eager_launches_on_one_stream() -> None:
    plan, reference = new_plan(), new_plan("kernels")
    stream = torch.cuda.Stream()
    case = case_of(40, 1)
    first, captured, second, expected = (tensors(case) for _ in range(4))
    reference.launch(**expected)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        plan.launch(**first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        plan.launch(**captured)
    with torch.cuda.stream(stream):
        plan.launch(**second)
    torch.cuda.synchronize()
    assert same(first, expected)
    assert same(second, expected)
    assert torch.equal(captured["attn_score"], case.attn_score), "a capture runs nothing"
    for _ in range(3):
        captured["attn_score"].copy_(case.attn_score)
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, expected)


def test_a_first_launch_beside_the_capture_of_another_thread() -> None:
    """A capture forbids unsafe calls to all threads, and one of them would end it."""
    capturing, launching = new_plan(), new_plan()
    case = case_of(20, 0)
    captured, eager, expected = (tensors(case) for _ in range(3))
    scratch = torch.zeros(1 << 20, device="cuda")
    new_plan("kernels").launch(**expected)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(side):
                for _ in range(3):
                    eager["attn_score"].copy_(case.attn_score)
                    launching.launch(**eager)
        except BaseException as error:
            failures.append(error)

    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scratch.add_(1)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        capturing.launch(**captured)
    assert not failures, failures
    torch.cuda.synchronize()
    assert same(eager, expected)
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, expected)


def test_launches_of_one_graph_on_many_streams_and_threads() -> None:
    """More streams than a plan keeps graphs for, each from a thread of its own."""
    plan = new_plan()
    case = case_of(60, 1)
    expected = tensors(case)
    new_plan("kernels").launch(**expected)
    torch.cuda.synchronize()
    found: list[dict[str, torch.Tensor]] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                mine = [tensors(case) for _ in range(4)]
                for given in mine:
                    plan.launch(**given)
                torch.cuda.current_stream().synchronize()
            found.extend(mine)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert len(found) == 96
    assert all(same(given, expected) for given in found)
