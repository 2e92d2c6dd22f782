"""The torch operators without a GPU: the forward, and the wiring of the backward with the oracle in the kernels' place."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dsa_cases  # noqa: E402
import written_out  # noqa: E402

import dsa_planner  # noqa: E402
from dsa_planner import loss as reference  # noqa: E402
from dsa_planner import operators, torch_ops  # noqa: E402
from dsa_planner.kernels import oracle  # noqa: E402

FP32, BF16 = torch.float32, torch.bfloat16
TOPK = 128


@pytest.fixture
def oracle_backward(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """``indexer_backward`` computed by the oracle; the calls that were made."""
    calls: list[dict[str, Any]] = []

    def backward(q: Any, w: Any, k: Any, attn: Any, score: Any, ids: Any, grad: Any, *scalars: Any, **more: Any) -> Any:
        calls.append({"grad_loss": grad, "scalars": scalars, **more})
        sm_scale, loss_coeff, block, flat = scalars
        assert (q.dtype, w.dtype, k.dtype, attn.dtype, ids.dtype) == (BF16, BF16, BF16, FP32, torch.int32)
        assert block == 128
        assert all(tensor.is_contiguous() for tensor in (q, w, k, attn, score, ids))
        attn.copy_(oracle.score_gradient(attn, score, float(grad), loss_coeff))
        found = vars(oracle.gradients(q, w, k, attn, ids, sm_scale, flat))
        outputs = {"d_index_q": torch.empty_like(q), "d_weights": more["d_weights"], "d_index_k": more["d_index_k"]}
        outputs = {
            name: torch.empty_like(like) if outputs[name] is None else outputs[name]
            for name, like in zip(outputs, (q, w, k), strict=True)
        }
        for name, output in outputs.items():
            output.copy_(found[name])
        return outputs

    monkeypatch.setattr(operators, "indexer_backward", backward)
    return calls


def case_of(seed: int = 0, rows: int = 6, keys: int = 40, **more: Any) -> dsa_cases.Case:
    return dsa_cases.make(2, rows, keys, TOPK, seed=seed, sm_scale=0.4, loss_coeff=2.0, **more)


def leaves(case: dsa_cases.Case, w: torch.dtype = BF16, k: torch.dtype = BF16) -> list[torch.Tensor]:
    return [t.clone().requires_grad_() for t in (case.index_q, case.weights.to(w), case.index_k.to(k))]


def arguments(case: dsa_cases.Case, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    return (*tensors, case.attn_score, case.topk_indices, 0.4, 2.0, case.topk_indices_global)


@pytest.mark.parametrize("ids", ["mixed", "valid", "flat"])
def test_the_forward_is_the_written_out_loss(ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(1, ids=ids)
    case.topk_indices[0, 2] = -1  # a query without keys
    whole = dsa_planner.indexer_loss(*arguments(case, [case.index_q, case.weights, case.index_k]))
    exact = [tensor.double() for tensor in (case.index_q, case.weights, case.index_k)]
    score = written_out.index_score(*exact, case.topk_indices, 0.4, case.topk_indices_global)
    score[0, 2] = 0.0
    torch.testing.assert_close(whole[1].double(), score, rtol=2e-5, atol=1e-12)
    assert (whole[0].shape, whole[0].dtype, whole[1].dtype) == ((), FP32, FP32)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 1 << 20)
    assert reference.rows_of_a_chunk(TOPK, 64, 128) == 7
    chunked = dsa_planner.indexer_loss(*arguments(case, [case.index_q, case.weights, case.index_k]))
    torch.testing.assert_close(chunked[0], whole[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(chunked[1], whole[1], rtol=1e-5, atol=1e-12)
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[0, 2] = False
    terms = case.attn_score.double().clamp(min=written_out.EPS)
    counts = (score >= written_out.EPS) & keep[..., None]
    exact_loss = 2.0 / 12 * (terms * (terms.log() - score.masked_fill(~counts, 1.0).log()) * counts).sum()
    assert float(whole[0]) == pytest.approx(float(exact_loss), rel=1e-5)


def test_what_is_not_a_number_shows_in_the_loss() -> None:
    for name in ("attn_score", "index_q", "index_k", "weights"):
        case = case_of(2, ids="valid")
        getattr(case, name).view(-1)[3] = float("nan")
        value, _ = dsa_planner.indexer_loss(*arguments(case, [case.index_q, case.weights, case.index_k]))
        assert value.isnan(), name


def test_empty_extents() -> None:
    for rows, keys in ((0, 5), (3, 0), (0, 0)):
        case = dsa_cases.make(2, rows, keys, TOPK)
        value, score = dsa_planner.indexer_loss(*arguments(case, [case.index_q, case.weights, case.index_k]))
        assert float(value) == 0.0
        assert score.shape == (2, rows, TOPK)
        assert not score.any()


@pytest.mark.parametrize("flat", [False, True], ids=["local", "global"])
def test_the_oracle_passes_gradcheck(flat: bool) -> None:
    """In fp64: the oracle's gradients are those of the written-out loss by finite differences."""
    generator = torch.Generator().manual_seed(2)  # no head score lies within a step of 0, where the loss has a kink
    shapes = (2, 3, 4, 8), (2, 3, 4), (2, 9, 8)
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    attn = torch.rand(2, 3, 12, generator=generator, dtype=torch.float64)
    ids = torch.randint(-2, 20 if flat else 11, (2, 3, 12), generator=generator, dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda *given: written_out.Oracle.apply(*given, attn, ids, 0.5, 2.0, flat), exact)


@pytest.mark.parametrize(("w", "k"), [(BF16, BF16), (FP32, FP32), (BF16, FP32), (FP32, BF16)])
def test_the_backward_returns_gradients_in_the_dtypes_of_its_inputs(
    oracle_backward: list[dict[str, Any]], w: torch.dtype, k: torch.dtype
) -> None:
    case = case_of(3, ids="mixed")
    tensors = leaves(case, w, k)
    backend = "sm90_v2" if w is FP32 else "default"
    before = case.attn_score.clone()
    value, score = dsa_planner.indexer_loss(*arguments(case, tensors), backend=backend)
    assert not score.requires_grad
    (3.0 * value).backward()
    assert torch.equal(before, case.attn_score)
    exact = [tensor.detach().to(BF16).double().requires_grad_() for tensor in tensors]
    (3.0 * written_out.loss(*exact, *arguments(case, []))).backward()
    for tensor, other in zip(tensors, exact, strict=True):
        assert tensor.grad is not None
        assert tensor.grad.dtype == tensor.dtype
        assert oracle.rms_error(tensor.grad, other.grad) < (1e-5 if tensor.dtype is FP32 else 2e-3)
    (call,) = oracle_backward
    assert float(call["grad_loss"]) == 3.0
    assert call["scalars"] == (0.4, 2.0, 128, False)
    assert call["backend"] == backend


def test_two_backwards_of_one_forward(oracle_backward: list[dict[str, Any]]) -> None:
    case = case_of(4)
    tensors = leaves(case)
    value, _ = dsa_planner.indexer_loss(*arguments(case, tensors))
    first = torch.autograd.grad(value, tensors, retain_graph=True)
    second = torch.autograd.grad(value, tensors)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_opcheck(oracle_backward: list[dict[str, Any]]) -> None:
    case = case_of(5, rows=2)
    backward = torch.ops.dsa_planner.indexer_backward
    torch.library.opcheck(backward, (*case.inputs().values(), 0.4, 2.0, 128, False))
    torch.library.opcheck(
        backward,
        (*case.inputs().values(),),
        {"backend": "sm90_v2", "d_weights_dtype": FP32, "d_index_k_dtype": FP32, "deterministic": True},
    )
    torch.library.opcheck(torch.ops.dsa_planner.indexer_loss, arguments(case, leaves(case)))
    torch.library.opcheck(
        torch.ops.dsa_planner.indexer_loss, arguments(case, leaves(case, FP32, FP32)), {"backend": "sm90_v2"}
    )


def test_compilation_without_graph_breaks(oracle_backward: list[dict[str, Any]]) -> None:
    case = case_of(6)

    def step(q: torch.Tensor, w: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return dsa_planner.indexer_loss(*arguments(case, [q * 1, w * 2, k]))[0] * 0.5

    expected, found = leaves(case), leaves(case)
    step(*expected).backward()
    torch.compile(step, fullgraph=True, backend="aot_eager")(*found).backward()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.grad, other.grad)


def test_inputs_that_are_not_contiguous(oracle_backward: list[dict[str, Any]]) -> None:
    case = case_of(7)
    expected, found = leaves(case), leaves(case)
    dsa_planner.indexer_loss(*arguments(case, expected))[0].backward()
    wide = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in found]
    rest = [torch.stack([t, t], -1)[..., 0] for t in (case.attn_score, case.topk_indices)]
    dsa_planner.indexer_loss(*wide, *rest, 0.4, 2.0)[0].backward()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast_does_not_reach_inside(dtype: torch.dtype) -> None:
    case = case_of(11)
    given = arguments(case, [case.index_q, case.weights, case.index_k])
    plain = dsa_planner.indexer_loss(*given)
    with torch.autocast("cpu", dtype=dtype):
        found = dsa_planner.indexer_loss(*given)
    assert torch.equal(plain[0], found[0])
    assert torch.equal(plain[1], found[1])


def test_transposed_targets(oracle_backward: list[dict[str, Any]]) -> None:
    for batch in (1, 2):
        case = dsa_cases.make(batch, 6, 40, TOPK)
        expected, found = leaves(case), leaves(case)
        dsa_planner.indexer_loss(*expected, case.attn_score, case.topk_indices)[0].backward()
        turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (case.attn_score, case.topk_indices)]
        value, score = dsa_planner.indexer_loss(*found, *turned)
        value.backward()
        assert score.is_contiguous()
        assert all(torch.equal(one.grad, other.grad) for one, other in zip(found, expected, strict=True))


def test_the_wrapper_refuses_by_name_before_torch_does() -> None:
    case = case_of(12)
    given = dict(
        zip(
            ("index_q", "weights", "index_k", "attn_score", "topk_indices"),
            arguments(case, [case.index_q, case.weights, case.index_k])[:5],
            strict=True,
        )
    )
    for name, value in (("index_q", None), ("weights", [1.0]), ("sm_scale", "1"), ("loss_coeff", 10**400),
                        ("backend", 5), ("deterministic", None), ("topk_indices_global", None)):  # fmt: skip
        with pytest.raises(dsa_planner.UnsupportedError, match=name):
            dsa_planner.indexer_loss(**{**given, name: value})


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "fp32 weights with default": (
        {"weights": lambda a: a["weights"].float()},
        "d_weights='fp32': backend default for sm_90a takes d_weights bf16; nearest is bf16",
    ),
    "fp16 index_k": (
        {"index_k": lambda a: a["index_k"].half()},
        "dtype of index_k='fp16': indexer_loss takes index_k in bf16 or fp32; nearest is",
    ),
    "fp32 index_q": (
        {"index_q": lambda a: a["index_q"].float()},
        "dtype of index_q='fp32': indexer_loss takes index_q in bf16; nearest is bf16",
    ),
    "int64 ids": (
        {"topk_indices": lambda a: a["topk_indices"].long()},
        "dtype of topk_indices='int64': indexer_loss takes topk_indices in int32",
    ),
    "another batch": (
        {"index_k": lambda a: a["index_k"][:1]},
        "index_k of shape (1, 40, 128): with the tensors before it, it is (B, S_k, D) = (2, 40, 128)",
    ),
    "a rank too few": (
        {"weights": lambda a: a["weights"][0]},
        "weights of shape (6, 64): its shape is (B, S_q, H), of rank 3; reshape weights",
    ),
    "topk 100": (
        {name: lambda a, n=name: a[n][..., :100] for name in ("attn_score", "topk_indices")},
        "topk=100: backend default for sm_90a takes topk a multiple of 128",
    ),
    "a negative scale": ({"sm_scale": lambda a: -1.0}, "sm_scale=-1.0: sm_scale must be positive"),
    "no such backend": ({"backend": lambda a: "v2"}, "backend='v2'"),
    "sparse ids": (
        {"topk_indices": lambda a: a["topk_indices"].to_sparse()},
        "topk_indices of type Tensor: it must be a dense torch tensor",
    ),
    "another device": (
        {"index_k": lambda a: a["index_k"].to("meta")},
        "index_k on meta: index_q is on cpu; move index_k to cpu",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(name: str) -> None:
    case = case_of(8)
    good = {n: getattr(case, n) for n in ("index_q", "weights", "index_k", "attn_score", "topk_indices")}
    changes, message = BAD[name]
    with pytest.raises((dsa_planner.UnsupportedError, dsa_planner.DeviceMismatchError)) as error:
        torch_ops._indexer_loss(**{**good, **{key: change(good) for key, change in changes.items()}})
    assert message in str(error.value)


def test_a_cpu_tensor_has_no_gradient_here() -> None:
    case = case_of(9)
    value, _ = dsa_planner.indexer_loss(*arguments(case, leaves(case)))
    with pytest.raises(dsa_planner.DeviceMismatchError, match="index_q on cpu: the operator runs on CUDA devices"):
        value.backward()


def test_importing_the_module_twice_registers_once() -> None:
    assert importlib.import_module("dsa_planner.torch_ops") is torch_ops


def test_the_documented_training_loop_compares_one_loss(oracle_backward: list[dict[str, Any]]) -> None:
    """docs/training_loop.py in small, on the CPU: both ways give the same loss and gradients."""
    source = Path(torch_ops.__file__).resolve().parents[1] / "docs" / "training_loop.py"
    spec = importlib.util.spec_from_file_location("training_loop", source)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    loop.BATCH, loop.S_Q, loop.S_K, loop.HIDDEN = 1, 4, 300, 16
    torch.manual_seed(0)
    queries, keys = torch.randn(1, 4, 16), torch.randn(1, 300, 16)
    ids = torch.rand(1, 4, 300).topk(loop.TOPK).indices.to(torch.int32)
    target = loop.index_score(*loop.Indexer(1)(queries, keys), ids).detach()
    found = []
    for loss in (loop.torch_loss, loop.plan_loss("sm90_v2")):
        student = loop.Indexer(2)
        value = loss(*student(queries, keys), target, ids)
        value.backward()
        found.append((value, [parameter.grad for parameter in student.parameters()]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-8)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert oracle.rms_error(other, one.double()) < 5e-3
