"""The v2 backend of the GPU at hand: its precision, what of it is reproducible, and launches side by side.

Plans come from the layers, built on another machine: ``dsa-plan precompile --topk all``, and with ``--deterministic``.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

import dsa_cases  # noqa: E402

import dsa_planner  # noqa: E402
from dsa_planner import envelope  # noqa: E402
from dsa_planner.kernels import oracle  # noqa: E402

CAPABILITY = torch.cuda.get_device_capability()
BACKENDS = [name for name in ("sm90_v2", "sm100_v2") if envelope.rows_for_capability(name, CAPABILITY)]
if not BACKENDS:
    pytest.skip(f"no v2 backend for compute capability {CAPABILITY}", allow_module_level=True)
(BACKEND,) = BACKENDS
pytestmark = pytest.mark.gpu

FP32, BF16 = torch.float32, torch.bfloat16
NAMES = ("d_index_q", "d_weights", "d_index_k")


def run(case: dsa_cases.Case, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The score gradient and the outputs of a call."""
    dtypes = (more.pop("dk_dtype", FP32), more.pop("dw_dtype", FP32))
    inputs, result = case.inputs(), dsa_cases.outputs(case, *dtypes)
    dsa_planner.indexer_backward(**inputs, **case.scalars(), **result, backend=BACKEND, **more)
    torch.cuda.synchronize()
    return inputs["attn_score"], result


def rms(case: dsa_cases.Case, score_grad: torch.Tensor, result: dict[str, torch.Tensor]) -> dict[str, float]:
    exact = dsa_cases.expected_gradients(case, score_grad)
    return {name: oracle.rms_error(result[name], getattr(exact, name)) for name in NAMES}


@pytest.mark.parametrize("topk", range(128, 2049, 128))
def test_every_topk_is_as_precise_as_its_stores(topk: int) -> None:
    for dw_dtype, dk_dtype, ids in ((FP32, FP32, "mixed"), (BF16, BF16, "flat"), (FP32, BF16, "valid")):
        case = dsa_cases.make(3, 171, 700, topk, seed=topk, device="cuda", ids=ids, sm_scale=0.3)
        found = rms(case, *run(case, dw_dtype=dw_dtype, dk_dtype=dk_dtype))
        assert found["d_index_q"] < 1.70e-3
        assert found["d_weights"] < (2e-7 if dw_dtype is FP32 else 1.70e-3)
        assert found["d_index_k"] < (1e-5 if dk_dtype is FP32 else 1.72e-3)


@pytest.mark.parametrize("topk", [128, 512, 1024, 2048])
def test_precision_with_8192_queries(topk: int) -> None:
    for seed in range(5):
        case = dsa_cases.make(1, 8192, 4096, topk, seed=seed, device="cuda", ids="valid")
        found = rms(case, *run(case))
        print(f"topk={topk} seed={seed} " + " ".join(f"{name} {value:.3e}" for name, value in found.items()))
        assert found["d_index_q"] <= 1.70e-3
        assert found["d_weights"] <= 1.2e-7
        assert found["d_index_k"] <= 2e-4


def test_all_slots_of_the_largest_topk_are_different_keys() -> None:
    case = dsa_cases.make(1, 256, 2048, 2048, seed=1, device="cuda", ids="distinct")
    assert case.valid().float().mean() > 0.98
    found = rms(case, *run(case))
    assert found["d_index_q"] < 1.70e-3
    assert found["d_weights"] < 2e-7
    assert found["d_index_k"] < 1e-5


@pytest.mark.parametrize("topk", [256, 384])
def test_twenty_seeds_at_the_shapes_that_are_known_to_race(topk: int) -> None:
    """A persistent kernel that stages ids in two slots by row loses d_index_k here, by 1e-2 and in some runs only."""
    for seed in range(20):
        case = dsa_cases.make(1, 512, 4096, topk, seed=seed, device="cuda")
        found = rms(case, *run(case))
        assert found["d_index_q"] < 1.70e-3
        assert found["d_weights"] < 2e-7
        assert found["d_index_k"] < 1e-5


@pytest.mark.parametrize("topk", [128, 512, 2048])
def test_d_index_q_and_d_weights_are_bitwise_stable(topk: int) -> None:
    case = dsa_cases.make(2, 700, 1500, topk, seed=2, device="cuda")
    _, first = run(case)
    for _ in range(20):
        _, again = run(case)
        assert torch.equal(first["d_index_q"], again["d_index_q"])
        assert torch.equal(first["d_weights"], again["d_weights"])
        assert oracle.rms_error(again["d_index_k"], first["d_index_k"].double()) < 1e-6


@pytest.mark.parametrize("topk", [128, 1024])
def test_the_deterministic_mode_gives_the_same_d_index_k_each_time(topk: int) -> None:
    case = dsa_cases.make(1, 600, 1500, topk, seed=3, device="cuda")
    score_grad, first = run(case, deterministic=True)
    assert rms(case, score_grad, first)["d_index_k"] < 1e-5
    for _ in range(20):
        _, again = run(case, deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in NAMES)
    _, usual = run(case)
    assert torch.equal(first["d_index_q"], usual["d_index_q"])
    assert torch.equal(first["d_weights"], usual["d_weights"])


@pytest.mark.parametrize("topk", [128, 256, 384, 1024, 2048])
def test_stage_1_gives_the_same_bits_as_the_default_backend(topk: int) -> None:
    case = dsa_cases.make(1, 400, 900, topk, seed=4, device="cuda")
    score_grad, result = run(case, dw_dtype=BF16, dk_dtype=BF16)
    inputs = case.inputs()
    default = dsa_planner.indexer_backward(**inputs, **case.scalars())
    assert torch.equal(score_grad, inputs["attn_score"])
    for name in NAMES:
        one, other = result[name].double().flatten(), default[name].double().flatten()
        assert float(one @ other / (one.norm() * other.norm())) >= 0.999996


def test_local_and_global_ids_give_the_same_bits() -> None:
    case = dsa_cases.make(3, 257, 900, 512, seed=5, device="cuda")
    grad, local = run(case)
    global_grad, flat = run(case.as_global())
    assert torch.equal(grad, global_grad)
    assert torch.equal(local["d_index_q"], flat["d_index_q"])
    assert torch.equal(local["d_weights"], flat["d_weights"])


def test_two_streams_take_turns_and_do_not_share_a_counter() -> None:
    plan = dsa_planner.load_plan(256, backend=BACKEND, d_weights="fp32")
    lanes = []
    for seed in range(2):
        case = dsa_cases.make(1, 512 + 100 * seed, 4096, 256, seed=seed, device="cuda")
        score_grad, right = run(case)
        lanes.append((case, score_grad, right, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(20):
        launched = []
        for case, score_grad, right, stream in lanes:
            inputs, result = case.inputs(), dsa_cases.outputs(case, dw_dtype=FP32)
            stream.wait_stream(torch.cuda.current_stream())
            plan.launch(**inputs, **case.scalars(), **result, stream=stream)
            launched.append((inputs, result, score_grad, right))
        torch.cuda.synchronize()
        for inputs, result, score_grad, right in launched:
            assert torch.equal(inputs["attn_score"], score_grad)
            assert torch.equal(result["d_index_q"], right["d_index_q"])
            assert torch.equal(result["d_weights"], right["d_weights"])
            assert oracle.rms_error(result["d_index_k"], right["d_index_k"].double()) < 1e-6


def test_two_host_threads_on_their_per_thread_default_streams() -> None:
    """One handle, a stream for each thread; memory is the caller's, since torch cannot order its reuse there."""
    plan = dsa_planner.load_plan(256, backend=BACKEND, d_weights="fp32")
    lanes = []
    for seed in range(2):
        case = dsa_cases.make(1, 512, 4096, 256, seed=10 + seed, device="cuda")
        rounds = [(case.inputs(), dsa_cases.outputs(case, dw_dtype=FP32)) for _ in range(10)]
        workspace = torch.empty(plan.workspace_bytes(1, 4096, "fp32"), dtype=torch.uint8, device="cuda")
        lanes.append((case, rounds, workspace, run(case)[1]))
    torch.cuda.synchronize()
    barrier, failures = threading.Barrier(2), []

    def work(case: dsa_cases.Case, rounds: list[Any], workspace: torch.Tensor) -> None:
        try:
            barrier.wait()
            for inputs, result in rounds:
                plan.launch(**inputs, **case.scalars(), **result, workspace=workspace, stream=2)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=lane[:3]) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failures
    for _, rounds, _, right in lanes:
        for _, result in rounds:
            assert torch.equal(result["d_index_q"], right["d_index_q"])
            assert torch.equal(result["d_weights"], right["d_weights"])
            assert oracle.rms_error(result["d_index_k"], right["d_index_k"].double()) < 1e-6


def test_more_keys_than_workers_have_planes_for() -> None:
    case = dsa_cases.make(1, 300, 131_072, 512, seed=6, device="cuda", ids="valid")
    score_grad, first = run(case, deterministic=True)
    assert rms(case, score_grad, first)["d_index_k"] < 1e-5
    _, again = run(case, deterministic=True)
    assert torch.equal(first["d_index_k"], again["d_index_k"])
