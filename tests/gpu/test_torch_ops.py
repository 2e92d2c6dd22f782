"""The torch operators on a GPU: opcheck, gradients against fp64, compilation, graphs, checkpoints, DDP."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

import dsa_cases  # noqa: E402
import written_out  # noqa: E402

import dsa_planner  # noqa: E402
from dsa_planner import envelope, torch_ops  # noqa: E402, F401
from dsa_planner.kernels import oracle  # noqa: E402

CAPABILITY = torch.cuda.get_device_capability()
BACKENDS = [name for name in ("sm90_v2", "sm100_v2") if envelope.rows_for_capability(name, CAPABILITY)]
if not BACKENDS:
    pytest.skip(f"no v2 backend for compute capability {CAPABILITY}", allow_module_level=True)
(BACKEND,) = BACKENDS
pytestmark = pytest.mark.gpu

TOPK = 128
FP32, BF16 = torch.float32, torch.bfloat16
indexer_loss = dsa_planner.indexer_loss


def case_of(seed: int = 0, rows: int = 50, keys: int = 300, **more: Any) -> dsa_cases.Case:
    case = dsa_cases.make(2, rows, keys, TOPK, seed=seed, device="cuda", sm_scale=0.4, loss_coeff=2.0, **more)
    case.attn_score.copy_(case.attn_score / case.attn_score.sum(-1, keepdim=True).clamp(min=1e-6))
    return case


def leaves(case: dsa_cases.Case, w: torch.dtype = FP32, k: torch.dtype = FP32) -> list[torch.Tensor]:
    tensors = case.index_q.clone(), case.weights.to(w), case.index_k.to(k)
    return [tensor.requires_grad_() for tensor in tensors]


def loss_of(case: dsa_cases.Case, tensors: list[torch.Tensor], **more: Any) -> torch.Tensor:
    options = {"backend": BACKEND, **more}
    return indexer_loss(*tensors, case.attn_score, case.topk_indices, 0.4, 2.0, case.topk_indices_global, **options)[0]


@pytest.mark.parametrize("flat", [False, True], ids=["local", "global"])
@pytest.mark.parametrize("backend", ["default", BACKEND])
def test_opcheck(backend: str, flat: bool) -> None:
    case = case_of(rows=9, keys=40, ids="valid")
    case = case.as_global() if flat else case
    more: dict[str, Any] = {"backend": backend}
    if backend == BACKEND:  # the default backend's d_index_k varies in its last bits, and so does that of this one
        more["deterministic"] = True
    arguments = (*case.inputs().values(), 0.4, 2.0, 128, flat)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.dsa_planner.indexer_backward, arguments, more, test_utils=utils)
    if backend == BACKEND:
        torch.library.opcheck(torch.ops.dsa_planner.indexer_backward, arguments, more)
        tensors = leaves(case)
        torch.library.opcheck(
            torch.ops.dsa_planner.indexer_loss,
            (*tensors, case.attn_score, case.topk_indices, 0.4, 2.0, flat),
            more,
        )


@pytest.mark.parametrize(("w", "k"), [(FP32, FP32), (BF16, BF16), (FP32, BF16), (BF16, FP32)])
def test_gradients_are_those_of_the_written_out_loss(w: torch.dtype, k: torch.dtype) -> None:
    for seed, ids in enumerate(("mixed", "valid", "flat")):
        case = case_of(seed, ids=ids)
        tensors = leaves(case, w, k)
        loss = loss_of(case, tensors)
        (3.0 * loss).backward()
        exact = [tensor.detach().to(BF16).double().requires_grad_() for tensor in tensors]
        written = written_out.loss(*exact, case.attn_score, case.topk_indices, 0.4, 2.0, case.topk_indices_global)
        (3.0 * written).backward()
        assert float(loss) == pytest.approx(float(written), rel=1e-5)
        limits = (1.75e-3, 2e-5 if w is FP32 else 1.75e-3, 2e-5 if k is FP32 else 1.75e-3)
        for tensor, reference, limit in zip(tensors, exact, limits, strict=True):
            assert tensor.grad is not None
            assert tensor.grad.dtype == tensor.dtype
            error = oracle.rms_error(tensor.grad, reference.grad)
            assert error < limit, (ids, tuple(tensor.shape), error)


def test_two_backwards_with_retain_graph_agree_bitwise() -> None:
    case = case_of(4)
    for deterministic in (False, True):
        tensors = leaves(case)
        loss = loss_of(case, tensors, deterministic=deterministic)
        attn = case.attn_score.clone()
        first = torch.autograd.grad(loss, tensors, retain_graph=True)
        second = torch.autograd.grad(loss, tensors)
        assert torch.equal(attn, case.attn_score), "the caller's attn_score is not consumed"
        agree = [torch.equal(one, other) for one, other in zip(first, second, strict=True)]
        assert agree[:2] == [True, True]
        if deterministic:
            assert agree[2]
        else:
            assert oracle.rms_error(second[2], first[2].double()) < 1e-6


def test_torch_compile_with_fullgraph() -> None:
    case = case_of(5)

    def step(q: torch.Tensor, w: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return loss_of(case, [q * 1.0, w * 2.0, k], deterministic=True) * 0.5

    expected = leaves(case)
    step(*expected).backward()
    for mode in (None, "reduce-overhead"):
        compiled = torch.compile(step, fullgraph=True, mode=mode)
        for _ in range(4):
            tensors = leaves(case)
            compiled(*tensors).backward()
            for one, other in zip(tensors, expected, strict=True):
                assert one.grad is not None
                assert torch.equal(one.grad, other.grad)


def test_compiled_indexer_backward_mutates_its_argument() -> None:
    case = case_of(6)

    def step(attn: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = {**case.inputs(), "attn_score": attn}
        found = torch.ops.dsa_planner.indexer_backward(*inputs.values(), 0.4, backend=BACKEND, deterministic=True)
        return *found, attn * 2

    attn, expected_attn = case.attn_score.clone(), case.attn_score.clone()
    expected = step(expected_attn)
    found = torch.compile(step, fullgraph=True)(attn)
    assert torch.equal(attn, expected_attn)
    assert not torch.equal(attn, case.attn_score)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_graph_of_forward_and_backward() -> None:
    case = case_of(7)
    tensors = leaves(case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(loss_of(case, tensors), tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = loss_of(case, tensors)
        found = torch.autograd.grad(loss, tensors)
    for seed in (8, 9):
        other = case_of(seed)
        with torch.no_grad():
            for mine, new in zip(
                (*tensors, case.attn_score),
                (other.index_q, other.weights, other.index_k, other.attn_score),
                strict=True,
            ):
                mine.copy_(new)
            case.topk_indices.copy_(other.topk_indices)
        graph.replay()
        eager_loss = loss_of(case, tensors)
        eager = torch.autograd.grad(eager_loss, tensors)
        assert torch.equal(loss, eager_loss)
        assert torch.equal(found[0], eager[0])
        assert torch.equal(found[1], eager[1])
        assert oracle.rms_error(found[2], eager[2].double()) < 1e-6


def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    case = case_of(10)
    plain, checkpointed = leaves(case), leaves(case)
    loss_of(case, plain, deterministic=True).backward()
    loss = checkpoint(lambda *given: loss_of(case, list(given), deterministic=True), *checkpointed, use_reentrant=False)
    loss.backward()
    for one, other in zip(plain, checkpointed, strict=True):
        assert torch.equal(one.grad, other.grad)


def test_memory_of_the_forward_is_bounded() -> None:
    from dsa_planner import loss

    case = dsa_cases.make(1, 2000, 5000, 2048, device="cuda", ids="valid")
    tensors = (case.index_q, case.weights, case.index_k, case.attn_score, case.topk_indices)
    indexer_loss(*tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, score = indexer_loss(*tensors)
    peak = torch.cuda.max_memory_allocated() - before - score.nbytes
    print(f"{peak / 2**20:.0f} MiB beyond the results")
    assert peak <= loss.CHUNK_BYTES


RANK = """
import os, sys, time
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
task, rank, backend = sys.argv[2], int(os.environ["RANK"]), sys.argv[3]
torch.cuda.set_device(rank % torch.cuda.device_count())
if task == "require":
    import dsa_planner
    dist.init_process_group("gloo")
    dsa_planner.require([{"topk": 128}], group=dist.group.WORLD)
    if rank == 1:
        os.environ["DSA_PLAN_PATH"] = os.environ["DSA_PLAN_CACHE_DIR"] = os.environ["EMPTY"]
    dist.barrier()
    start = time.perf_counter()
    try:
        dsa_planner.require([{"topk": 128}, {"topk": 512}, {"topk": 1024, "backend": backend}], group=dist.group.WORLD)
        print("no error")
    except dsa_planner.RequirementError as error:
        print(f"{time.perf_counter() - start:.2f}|{error}")
else:
    import dsa_cases, dsa_planner
    from torch import nn
    dist.init_process_group("nccl" if torch.cuda.device_count() > 1 else "gloo")

    class Indexer(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.keys = nn.Linear(32, 128, device="cuda")
            self.weights = nn.Linear(32, 64, device="cuda")
        def forward(self, x, case):
            w, k = self.weights(x[:, : case.index_q.shape[1]]), self.keys(x)
            return dsa_planner.indexer_loss(
                case.index_q, w, k, case.attn_score, case.topk_indices, 0.3, backend=backend, deterministic=True)[0]

    cases = [dsa_cases.make(1, 40, 200, 128, seed=seed, device="cuda", ids="valid") for seed in range(2)]
    xs = [torch.randn(1, 200, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) for seed in range(2)]
    model = nn.parallel.DistributedDataParallel(Indexer(), device_ids=[torch.cuda.current_device()])
    model(xs[rank], cases[rank]).backward()
    alone = Indexer()
    (sum(alone(x, case) for x, case in zip(xs, cases)) / 2).backward()
    worst = max(float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in zip(model.parameters(), alone.parameters()))
    print(f"worst {worst:.2e}")
    assert worst < 1e-5, worst
dist.destroy_process_group()
"""


def ranks(task: str, tmp_path: Any) -> list[str]:
    """What two processes say: each on a device of its own, if there are two."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613", "WORLD_SIZE": "2"}
    environment["EMPTY"] = str(tmp_path)
    arguments = [sys.executable, "-c", RANK, os.path.dirname(dsa_cases.__file__), task, BACKEND]
    processes = [
        subprocess.Popen(
            arguments,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return said


def test_ddp_gives_the_mean_of_the_gradients(tmp_path: Any) -> None:
    print(ranks("ddp", tmp_path))


def test_two_ranks_with_a_missing_plan_fail_alike(tmp_path: Any) -> None:
    answers = [said.strip().splitlines()[-1].split("|", 1) for said in ranks("require", tmp_path)]
    print(answers)
    assert all(float(seconds) < 5 for seconds, _ in answers)
    assert answers[0][1] == answers[1][1]
    assert "rank 1: topk=512: plan" in answers[0][1]
    assert "rank 0" not in answers[0][1]
    assert f"rank 1: backend={BACKEND} topk=1024: plan" in answers[0][1]
