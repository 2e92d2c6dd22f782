"""Two devices of one host: plans, counters, memory and the current device do not mix."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("torch sees fewer than two CUDA devices", allow_module_level=True)

import dsa_cases  # noqa: E402

import dsa_planner  # noqa: E402
from dsa_planner import envelope  # noqa: E402

CAPABILITY = torch.cuda.get_device_capability()
BACKENDS = [name for name in ("sm90_v2", "sm100_v2") if envelope.rows_for_capability(name, CAPABILITY)]
if not BACKENDS:
    pytest.skip(f"no v2 backend for compute capability {CAPABILITY}", allow_module_level=True)
(BACKEND,) = BACKENDS
pytestmark = pytest.mark.gpu

TOPK = 128
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def device_0_is_current() -> Iterator[None]:
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0
    for device in range(2):
        torch.cuda.synchronize(device)


def case_on(device: int) -> dsa_cases.Case:
    return dsa_cases.make(1, 60, 700, TOPK, seed=3, device=f"cuda:{device}", ids="valid")


def run(case: dsa_cases.Case, dk_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    outputs = dsa_cases.outputs(case, dk_dtype, torch.float32)
    return dsa_planner.indexer_backward(**case.inputs(), **outputs, backend=BACKEND)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name].cpu(), other[name].cpu()) for name in ("d_index_q", "d_weights"))


@pytest.mark.parametrize("dk_dtype", DTYPES, ids=["fp32", "bf16"])
def test_the_same_call_on_both_gives_the_same_bits(dk_dtype: torch.dtype) -> None:
    cases = [case_on(device) for device in range(2)]
    inputs = [case.inputs() for case in cases]
    for name in inputs[0]:
        inputs[1][name].copy_(inputs[0][name])
    found = [run(case, dk_dtype) for case in cases]
    assert same(*found)
    stats = dsa_planner.stats()
    assert {0, 1} <= set(stats["devices"])
    assert {plan["device"] for plan in stats["plans"]} >= {0, 1}


def test_threads_on_both_devices_at_once() -> None:
    cases = [case_on(device) for device in range(2)]
    right = [run(case, torch.float32) for case in cases]
    for device in range(2):
        torch.cuda.synchronize(device)
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            device = number % 2
            for turn in range(200):
                if turn % 2:
                    torch.cuda.set_device(1 - device)  # the tensors say where a launch runs
                found = run(cases[device], DTYPES[turn // 2 % 2])
                torch.cuda.synchronize(device)
                if not same(found, right[device]):
                    wrong.append((number, turn))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors_and_streams_of_the_other_device_are_refused() -> None:
    case = case_on(0)
    given = {**case.inputs(), **dsa_cases.outputs(case, torch.float32, torch.float32)}
    plan = dsa_planner.load_plan(TOPK, backend=BACKEND, d_weights="fp32", device=0)
    before = given["attn_score"].clone()
    for name in given:
        moved = given[name].to("cuda:1")
        with pytest.raises(dsa_planner.DeviceMismatchError, match=rf"{name} on cuda:1.*move {name} to cuda:0"):
            plan.launch(**{**given, name: moved})
    for stream in (torch.cuda.Stream(1), torch.cuda.Stream(1).cuda_stream):
        with pytest.raises(dsa_planner.DeviceMismatchError, match=r"pass a stream of cuda:0"):
            plan.launch(**given, stream=stream)
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda:1")
    with pytest.raises(dsa_planner.DeviceMismatchError, match="workspace on cuda:1"):
        plan.launch(**given, workspace=workspace)
    assert torch.equal(given["attn_score"], before)


def test_a_launch_on_the_device_that_is_not_current() -> None:
    case = case_on(1)
    alone = run(case, torch.bfloat16)
    with torch.cuda.device(1):
        inside = run(case, torch.bfloat16)
    torch.cuda.synchronize(1)
    assert same(alone, inside)


def test_a_plan_of_the_other_device_is_not_prepared() -> None:
    plan = dsa_planner.load_plan(TOPK, backend=BACKEND, device=1)
    assert plan.prepare(1) is plan.prepare("cuda:1") is plan.prepare()
    with pytest.raises(dsa_planner.DeviceMismatchError, match="device 0: <Plan"):
        plan.prepare(0)
