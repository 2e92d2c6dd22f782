"""The PTX machine against a GPU: the same plan, the same inputs, the same bits.

Where the order of a sum is fixed (the score gradient, d_index_q, d_weights) every bit agrees; d_index_k is a sum of
atomic adds, so it agrees bit for bit where a key gets at most two terms, and to the last rounding elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("ziglang")
if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

from dsa_planner import envelope, verify  # noqa: E402
from dsa_planner.cache.planfile import PlanFile  # noqa: E402
from dsa_planner.kernels import cases, oracle  # noqa: E402
from dsa_planner.locate import find_plan  # noqa: E402
from dsa_planner.settings import Settings  # noqa: E402

ROWS = [row for row in envelope.rows_for_capability("default", torch.cuda.get_device_capability()) if row.kernel]
if not ROWS:
    pytest.skip("the default backend has no kernel for this GPU yet", allow_module_level=True)
pytestmark = pytest.mark.gpu

FOLDER = Path(os.environ.get("DSA_PLAN_CACHE_DIR", "") or "~/.cache/dsa-planner").expanduser()


def plan_of(topk: int) -> PlanFile:
    return find_plan({"backend": "default", "arch": ROWS[0].arch, "topk": topk})


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("topk", [128, 384, 1024, 2048])
def test_the_machine_and_the_gpu_give_the_same_bits(topk: int, number: int) -> None:
    plan = plan_of(topk)
    case = verify.default_cases(16, 5)[number]
    settings = Settings((), FOLDER, 1 << 30)
    ours = verify.run_in_machine(plan, case, verify.parse_schedule("random:3"), settings=settings)
    theirs = verify.run_on_device(plan, case)
    assert ours.problems == theirs.problems == ()
    same = {
        name: float((ours.results[name] == theirs.results[name]).mean())
        for name in ("attn_score", "d_index_q", "d_weights", "d_index_k")
    }
    print(f"topk={topk} {case}: equal bits {same}")
    for name in ("attn_score", "d_index_q", "d_weights"):
        different = numpy.argwhere(ours.results[name] != theirs.results[name])
        assert not len(different), f"{name} differs at {different[:5].tolist()}"
    if case.d_index_k == "fp32":
        found = theirs.results["d_index_k"].astype(float)
        assert oracle.rms_error(ours.results["d_index_k"], found) < 1e-6


@pytest.mark.parametrize("topk", [128, 1024])
def test_keys_with_at_most_two_terms_get_the_same_bits(topk: int) -> None:
    plan = plan_of(topk)
    case = cases.Case(1, 1, 3 * topk, "local", "fp32", seed=11)
    settings = Settings((), FOLDER, 1 << 30)
    ours = verify.run_in_machine(plan, case, verify.parse_schedule("inorder"), settings=settings)
    theirs = verify.run_on_device(plan, case)
    ids = cases.make(case, topk, 64, 128).arrays["topk_indices"].ravel()
    counts = numpy.bincount(ids[(ids >= 0) & (ids < case.s_k)], minlength=case.s_k)
    keys = (counts == 1) | (counts == 2)
    assert keys.sum() > topk / 2
    assert numpy.array_equal(ours.results["d_index_k"][0, keys], theirs.results["d_index_k"][0, keys])
