"""The operator on a real GPU, against the fp64 oracle.

Runs with the run side alone (torch, cuda.bindings, pytest): plans come from the layers, built on another machine. On a
machine with the compiler, ``dsa-plan precompile --topk all`` makes them.
"""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

import dsa_cases  # noqa: E402

import dsa_planner  # noqa: E402
from dsa_planner import envelope  # noqa: E402
from dsa_planner.kernels import oracle  # noqa: E402

NAN, INF = float("nan"), float("inf")
ROWS = envelope.rows_for_capability("default", torch.cuda.get_device_capability())
if not any(row.kernel for row in ROWS):
    pytest.skip("the default backend has no kernel for this GPU yet", allow_module_level=True)
pytestmark = pytest.mark.gpu


def run(case: dsa_cases.Case, dk_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Call the operator into poisoned outputs; the score gradient that it left in attn_score, and the outputs."""
    inputs = case.inputs()
    outputs = dsa_cases.outputs(case, dk_dtype)
    result = dsa_planner.indexer_backward(**inputs, **case.scalars(), **outputs)
    assert list(result) == ["d_index_q", "d_weights", "d_index_k"]
    assert all(result[name] is outputs[name] for name in result)
    torch.cuda.synchronize()
    return inputs["attn_score"], result


def check_stage_1(case: dsa_cases.Case, score_grad: torch.Tensor) -> None:
    """fp32 against fp64; where the answer is not finite, the same infinity or NaN."""
    want = dsa_cases.expected_score_gradient(case)
    finite = want.isfinite()
    torch.testing.assert_close(score_grad[~finite].double(), want[~finite], rtol=0, atol=0, equal_nan=True)
    assert oracle.rms_error(score_grad[finite], want[finite]) < 1e-6


def check(case: dsa_cases.Case, score_grad: torch.Tensor, result: dict[str, torch.Tensor]) -> dict[str, float]:
    """Compare a call with the oracle; the rms errors against the exact answer.

    The bound is that of the backend's definition, with A rounded to bf16: what is left is the rounding of bf16 stores, and
    1e-4 for an A that fp32 and fp64 round to different bf16 neighbours (about one in 20,000).
    """
    check_stage_1(case, score_grad)
    exact = dsa_cases.expected_gradients(case, score_grad)
    defined = dsa_cases.expected_gradients(case, score_grad, bf16_a=True)
    for name, value in result.items():
        want = getattr(defined, name)
        floor = 0.0 if value.dtype == torch.float32 else oracle.rms_error(want.to(value.dtype), want)
        left = oracle.rms_error(value, want)
        assert left < 1.02 * floor + 1e-4, f"{name}: {left:.3e}; the store alone gives {floor:.3e}"
    return {name: oracle.rms_error(value, getattr(exact, name)) for name, value in result.items()}


@pytest.mark.parametrize("dk_dtype", [torch.float32, torch.bfloat16], ids=["dk-fp32", "dk-bf16"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("s_q", [1, 7, 512, 1000])
@pytest.mark.parametrize("topk", [128, 1024, 2048])
def test_gradients_agree_with_the_oracle(topk: int, s_q: int, batch: int, dk_dtype: torch.dtype) -> None:
    dsa_planner.load_plan(topk)
    case = dsa_cases.make(batch, s_q, 1500, topk, seed=s_q, device="cuda", sm_scale=0.7, loss_coeff=1.3)
    found = check(case, *run(case, dk_dtype))
    words = " ".join(f"{name} {value:.3e}" for name, value in found.items())
    print(f"topk={topk} S_q={s_q} B={batch} {dk_dtype}: {words}")


@pytest.mark.parametrize("topk", range(128, 2049, 128))
def test_every_topk_with_flat_ids_into_every_batch_element(topk: int) -> None:
    dsa_planner.load_plan(topk)
    case = dsa_cases.make(3, 21, 400, topk, seed=topk, device="cuda", ids="flat")
    check(case, *run(case))


@pytest.mark.parametrize("topk", [128, 1024, 2048])
def test_local_and_global_ids_give_the_same_bits(topk: int) -> None:
    dsa_planner.load_plan(topk)
    case = dsa_cases.make(3, 257, 900, topk, seed=5, device="cuda")
    grad, local = run(case)
    global_grad, flat = run(case.as_global())
    assert torch.equal(grad, global_grad)
    assert torch.equal(local["d_index_q"], flat["d_index_q"])
    assert torch.equal(local["d_weights"], flat["d_weights"])
    assert oracle.rms_error(flat["d_index_k"], local["d_index_k"].double()) < 1e-6


@pytest.mark.parametrize("topk", [128, 256, 384, 1024, 2048])
def test_d_index_q_and_d_weights_are_bitwise_stable(topk: int) -> None:
    dsa_planner.load_plan(topk)
    case = dsa_cases.make(1, 512, 4096, topk, seed=6, device="cuda")
    _, first = run(case)
    for _ in range(20):
        _, again = run(case)
        assert torch.equal(first["d_index_q"], again["d_index_q"])
        assert torch.equal(first["d_weights"], again["d_weights"])
        assert oracle.rms_error(again["d_index_k"], first["d_index_k"].double()) < 1e-6


def test_repeated_keys_add_up() -> None:
    dsa_planner.load_plan(128)
    case = dsa_cases.make(2, 64, 3, 128, seed=7, device="cuda", ids="valid")
    check(case, *run(case))


def test_a_row_of_invalid_ids_contributes_nothing_whatever_its_scores_are() -> None:
    dsa_planner.load_plan(128)
    case = dsa_cases.make(1, 4, 64, 128, seed=8, device="cuda", ids="valid")
    case.topk_indices[:, 1] = -1
    case.topk_indices[:, 2] = 64
    case.attn_score[:, 1:3] = 1e30
    score_grad, result = run(case)
    for row in (1, 2):
        assert not result["d_index_q"][:, row].any()
        assert not result["d_weights"][:, row].any()
    check(case, score_grad, result)


def test_a_key_that_no_slot_selects_and_the_scores_of_a_slot_without_key_reach_no_gradient() -> None:
    """Not even as NaN or infinity, and not as key 0, which a kernel might read in place of an invalid one."""
    dsa_planner.load_plan(256)
    for flat in (False, True):
        case = dsa_cases.make(2, 60, 200, 256, seed=15, device="cuda", ids="flat" if flat else "mixed")
        unselected = (case.topk_indices % 200 % 3 == 0) & case.valid()
        case.topk_indices[unselected] = -1
        case.index_k[:, ::3] = torch.tensor([NAN, INF, -INF, NAN], device="cuda").repeat(32)
        without_key = ~case.valid()
        case.index_score[without_key & (case.index_score > 0.003)] = NAN
        case.attn_score[without_key & (case.index_score == 0.0)] = INF
        score_grad, result = run(case)
        assert score_grad.isnan().any()
        assert all(tensor.isfinite().all() for tensor in result.values())
        check(case, score_grad, result)


@pytest.mark.parametrize("where", ["attn_score", "index_score", "index_q", "index_k", "weights", "grad_loss"])
def test_a_nan_of_a_selected_slot_shows_where_the_definition_has_it(where: str) -> None:
    dsa_planner.load_plan(128)
    case = dsa_cases.make(1, 12, 90, 128, seed=16, device="cuda", ids="valid")
    tensor = getattr(case, where)
    if where in ("attn_score", "index_score"):
        case.index_score[0, 5, 17] = 0.01
        tensor[0, 5, 17] = NAN
    elif where == "index_k":
        tensor[0, 31, 3] = NAN
    elif where == "grad_loss":
        tensor.fill_(NAN)
    else:
        tensor[0, 5, 40] = NAN
    score_grad, result = run(case)
    check_stage_1(case, score_grad)
    want = dsa_cases.expected_gradients(case, score_grad)
    for name, value in result.items():
        assert torch.equal(value.isnan(), getattr(want, name).isnan()), name
    assert any(value.isnan().any() for value in result.values())


def test_all_rows_invalid_leaves_d_index_k_zero() -> None:
    dsa_planner.load_plan(128)
    case = dsa_cases.make(2, 9, 64, 128, seed=9, device="cuda", ids="valid")
    case.topk_indices.fill_(2**31 - 1)
    _, result = run(case)
    assert not any(tensor.any() for tensor in result.values())


@pytest.mark.parametrize(("s_q", "s_k"), [(0, 64), (5, 0), (0, 0)])
def test_empty_extents(s_q: int, s_k: int) -> None:
    dsa_planner.load_plan(128)
    case = dsa_cases.make(1, s_q, s_k, 128, device="cuda", ids="mixed")
    _, result = run(case, torch.bfloat16)
    assert not any(tensor.any() for tensor in result.values())


def test_grad_loss_is_read_on_the_device_at_launch() -> None:
    dsa_planner.load_plan(128)
    case = dsa_cases.make(1, 33, 200, 128, seed=10, device="cuda")
    inputs = case.inputs()
    scores = inputs["attn_score"]
    start = scores.clone()
    graph = torch.cuda.CUDAGraph()
    outputs = dsa_cases.outputs(case, torch.float32)
    dsa_planner.indexer_backward(**case.inputs(), **case.scalars())  # load outside the capture
    with torch.cuda.graph(graph):
        scores.copy_(start)
        dsa_planner.indexer_backward(**inputs, **case.scalars(), **outputs)
    for value in (0.75, -2.0):
        case.grad_loss.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        check(case, scores, outputs)


def test_plan_launch_fills_caller_buffers_on_a_side_stream() -> None:
    plan = dsa_planner.load_plan(1024)
    case = dsa_cases.make(2, 100, 777, 1024, seed=11, device="cuda")
    inputs, outputs = case.inputs(), dsa_cases.outputs(case, torch.bfloat16)
    workspace = torch.full((plan.workspace_bytes(2, 777),), 255, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    plan.launch(**inputs, **case.scalars(), **outputs, workspace=workspace, stream=side)
    side.synchronize()
    check(case, inputs["attn_score"], outputs)


def test_outputs_allocated_for_the_caller() -> None:
    dsa_planner.load_plan(128)
    case = dsa_cases.make(2, 40, 300, 128, seed=12, device="cuda")
    inputs = case.inputs()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    result = dsa_planner.indexer_backward(**inputs, **case.scalars(), stream=side)
    side.synchronize()
    assert [(t.dtype, t.shape) for t in result.values()] == [
        (torch.bfloat16, case.index_q.shape),
        (torch.bfloat16, case.weights.shape),
        (torch.bfloat16, case.index_k.shape),
    ]
    check(case, inputs["attn_score"], result)


def test_a_refused_call_leaves_attn_score_untouched() -> None:
    plan = dsa_planner.load_plan(128)
    case = dsa_cases.make(2, 16, 100, 128, seed=13, device="cuda")
    good, outputs = case.inputs(), dsa_cases.outputs(case, torch.float32)
    bad = {
        "d_index_q": {"d_index_q": outputs["d_index_q"].float()},
        "d_weights": {"d_weights": outputs["d_weights"].float()},
        "d_weights half": {"d_weights": outputs["d_weights"].half()},
        "index_k rank": {"index_k": case.index_k.reshape(-1, 128)},
        "cpu": {"weights": case.weights.cpu()},
        "strides": {"attn_score": good["attn_score"].transpose(0, 1).contiguous().transpose(0, 1)},
        "misaligned": {
            "index_k": torch.empty(2 * 100 * 128 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(2, 100, 128)
        },
        "overlap": {"d_index_k": case.index_k},
    }
    for name, change in bad.items():
        arguments = {**good, **outputs, **change}
        before = arguments["attn_score"].clone()
        with pytest.raises(dsa_planner.DsaPlannerError) as refused:
            plan.launch(**arguments, **case.scalars())
        print(f"{name}: {refused.value}")
        with pytest.raises(dsa_planner.DsaPlannerError):
            dsa_planner.indexer_backward(**arguments, **case.scalars())
        torch.cuda.synchronize()
        assert torch.equal(arguments["attn_score"], before), name


def test_200_random_packed_shapes_with_one_plan_a_topk() -> None:
    for topk in (128, 1024, 2048):
        dsa_planner.load_plan(topk)
    generator = torch.Generator().manual_seed(14)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    loaded = dict(dsa_planner.operators._plans)
    worst: dict[str, float] = {}
    for seed in range(200):
        topk = (128, 1024, 2048)[draw(0, 3)]
        case = dsa_cases.make(draw(1, 4), draw(1, 90), draw(1, 3000), topk, seed=seed, device="cuda", sm_scale=0.3)
        if draw(0, 2):
            case = case.as_global()
        for name, value in check(case, *run(case, (torch.float32, torch.bfloat16)[draw(0, 2)])).items():
            worst[name] = max(worst.get(name, 0.0), value)
    print({name: f"{value:.3e}" for name, value in worst.items()})
    assert {id(plan) for plan in dsa_planner.operators._plans.values()} == {id(plan) for plan in loaded.values()}
    assert not {"cutlass", "pydantic", "typer", "rich", "diskcache"} & set(sys.modules), "nothing was compiled"
