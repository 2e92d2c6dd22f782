"""The GEMM stages, executed by the PTX machine: right under every schedule, reproducible, within their budgets."""

from __future__ import annotations

import difflib
import functools
import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

numpy = pytest.importorskip("numpy")
pytest.importorskip("ziglang")

from cuda_tools import tool  # noqa: E402
from gemm_stage import errors, gemm_stage, softmax_call  # noqa: E402

from dsa_planner import envelope, verify  # noqa: E402
from dsa_planner.cache.planfile import PlanFile  # noqa: E402
from dsa_planner.compiler import compile_plan  # noqa: E402
from dsa_planner.kernels import cases  # noqa: E402
from dsa_planner.launch_record import LaunchRecord  # noqa: E402
from dsa_planner.settings import Settings  # noqa: E402

HOPPER, BLACKWELL = "sm_90a", "sm_100f"
V2 = {"arch": BLACKWELL, "backend": "sm100_v2"}
V2_FP32 = {**V2, "d_weights": "fp32"}
IN_ORDER = {**V2_FP32, "deterministic": True}
DEFAULT = {"arch": BLACKWELL, "backend": "default"}
HEADS_32 = {**DEFAULT, "heads": 32}
HOPPER_V2 = {"arch": HOPPER, "backend": "sm90_v2"}
HOPPER_V2_FP32 = {**HOPPER_V2, "d_weights": "fp32"}
HOPPER_IN_ORDER = {**HOPPER_V2_FP32, "deterministic": True}
HOPPER_DEFAULT = {"arch": HOPPER, "backend": "default"}
HOPPER_HEADS_32 = {**HOPPER_DEFAULT, "heads": 32}
REPRODUCIBLE = ("attn_score", "d_index_q", "d_weights")


@functools.cache
def compiled_plan(topk: int, items: tuple[tuple[str, Any], ...]) -> PlanFile:
    return compile_plan(envelope.plan_config({"topk": topk, **dict(items)})).plan


def named(config: dict[str, Any]) -> str:
    return "-".join(str(value) for value in config.values())


def plan_for(topk: int, config: dict[str, Any]) -> PlanFile:
    return compiled_plan(topk, tuple(config.items()))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings((), tmp_path_factory.mktemp("machine"), 1 << 30)


def run(plan: PlanFile, case: cases.Case, schedule: str, settings: Settings) -> verify.Outcome:
    outcome = verify.run_in_machine(plan, case, verify.parse_schedule(schedule), settings=settings)
    assert outcome.problems == ()
    return outcome


# --- every schedule -----------------------------------------------------------------------------------------------------

SWEEP = [
    *((topk, config, 5) for topk in (128, 256, 384) for config in (DEFAULT, V2, V2_FP32, IN_ORDER)),
    *((128, HEADS_32, 5), (384, HEADS_32, 2)),
    *((topk, config, 2) for topk in (640, 1024, 2048) for config in (DEFAULT, V2_FP32)),
    (2048, IN_ORDER, 1),
    *((128, config, 3) for config in (HOPPER_DEFAULT, HOPPER_V2, HOPPER_V2_FP32, HOPPER_IN_ORDER, HOPPER_HEADS_32)),
    *((topk, HOPPER_V2_FP32, 2) for topk in (256, 384)),
    *((1024, config, 1) for config in (HOPPER_DEFAULT, HOPPER_V2_FP32)),
]


@pytest.mark.parametrize(("topk", "config", "schedules"), SWEEP, ids=[f"{t}-{named(c)}" for t, c, _ in SWEEP])
def test_every_schedule_gives_the_right_answer_and_the_same_bits(
    topk: int, config: dict[str, Any], schedules: int, settings: Settings
) -> None:
    """Three rows a CTA on three SMs. d_index_k depends on the order of its adds, unless that is fixed."""
    plan = plan_for(topk, config)
    names = ("inorder", f"random:{topk}", f"late:{topk}", f"random:{topk + 1}", f"late:{topk + 1}")[:schedules]
    same = (*REPRODUCIBLE, "d_index_k") if plan.config["deterministic"] else REPRODUCIBLE
    for case in verify.pairwise_cases(plan.config, 9, topk):
        outcomes = [run(plan, case, name, settings) for name in names]
        for other, name in itertools.product(outcomes[1:], same):
            assert numpy.array_equal(outcomes[0].results[name], other.results[name]), (case, name)


def test_the_cases_of_a_sweep_combine_any_two_values_of_any_two_factors() -> None:
    factors = list(zip(*verify.PAIRWISE, strict=True))
    for one, other in itertools.combinations(factors, 2):
        assert set(zip(one, other, strict=True)) == set(itertools.product(set(one), set(other)))
        assert len(set(one)) == len(set(other)) == 2
    config = envelope.plan_config({"arch": BLACKWELL, "topk": 128})
    assert len(verify.pairwise_cases(config, 9, 0)) == len(verify.PAIRWISE), "the backend has one d_weights"
    halves = [
        verify.pairwise_cases({**config, "backend": "sm100_v2", "d_weights": dtype}, 9, 0) for dtype in ("bf16", "fp32")
    ]
    assert [len(half) for half in halves] == [3, 3]
    assert {case.batch * case.s_q for half in halves for case in half} == {9}
    assert {case.multiprocessors for half in halves for case in half} == {3}


@pytest.mark.parametrize("config", [V2, HOPPER_V2], ids=["sm_100f", "sm_90a"])
def test_one_plan_serves_a_hundred_shapes(config: dict[str, Any], settings: Settings) -> None:
    plan = plan_for(128, config)
    g = numpy.random.default_rng(5)
    for number in range(100):
        case = cases.Case(
            int(g.integers(1, 4)), int(g.integers(1, 6)), int(g.integers(1, 300)), str(g.choice(["local", "global"])),
            str(g.choice(["bf16", "fp32"])), float(g.uniform(0.1, 2)), seed=number,
            multiprocessors=int(g.integers(1, 6)),
        )  # fmt: skip
        run(plan, case, f"random:{number}", settings)


@pytest.mark.parametrize("config", [DEFAULT, V2, IN_ORDER, HOPPER_DEFAULT, HOPPER_V2, HOPPER_IN_ORDER], ids=named)
@pytest.mark.parametrize(("s_q", "s_k"), [(3, 0), (0, 5)])
def test_empty_extents(config: dict[str, Any], s_q: int, s_k: int, settings: Settings) -> None:
    """Without keys the gradients of queries and weights are zero; without queries that of the keys is."""
    for dtype in ("bf16", "fp32"):
        outcome = run(plan_for(128, config), cases.Case(2, s_q, s_k, d_index_k=dtype), "random:1", settings)
        assert not any(numpy.asarray(outcome.results[name]).any() for name in verify.OUTPUTS)


# --- ids ----------------------------------------------------------------------------------------------------------------


def rerun_with(call: cases.Call, plan: PlanFile, settings: Settings) -> verify.Outcome:
    """Run a call that was drawn and then changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "make", lambda case, *shape: call)
        return run(plan, call.case, "random:1", settings)


@pytest.mark.parametrize("config", [DEFAULT, V2_FP32, HOPPER_V2_FP32], ids=named)
def test_local_and_global_ids_give_the_same_bits(config: dict[str, Any], settings: Settings) -> None:
    call = cases.make(cases.Case(2, 3, 50, "local", "fp32", seed=4), 256, 64, 128)
    ids = call.arrays["topk_indices"]
    flat = numpy.where((ids >= 0) & (ids < 50), ids + numpy.arange(2, dtype=numpy.int32)[:, None, None] * 50, -1)
    other = cases.Call(
        cases.Case(2, 3, 50, "global", "fp32", seed=4), {**call.arrays, "topk_indices": flat.astype(numpy.int32)}
    )
    local, found = (rerun_with(c, plan_for(256, config), settings) for c in (call, other))
    for name in REPRODUCIBLE:
        assert numpy.array_equal(local.results[name], found.results[name])


@pytest.mark.parametrize("config", [DEFAULT, V2, IN_ORDER, HOPPER_V2, HOPPER_IN_ORDER], ids=named)
def test_a_local_id_that_is_too_large_reaches_no_key_of_the_next_batch_element(
    config: dict[str, Any], settings: Settings
) -> None:
    """Batch elements 0 and 1 select nothing but keys that would be the next element's, were the offset added first."""
    call = cases.make(cases.Case(3, 2, 40, "local", "fp32", seed=6), 128, 64, 128)
    call.arrays["topk_indices"][:2] = 40 + numpy.arange(128) % 40
    outcome = rerun_with(call, plan_for(128, config), settings)
    for name in ("d_index_q", "d_weights"):
        assert not outcome.results[name][:2].any()
        assert outcome.results[name][2].any()
    assert not outcome.results["d_index_k"][:2].any()
    selected = numpy.unique(call.arrays["topk_indices"][2])
    untouched = numpy.setdiff1d(numpy.arange(40), selected)
    assert not outcome.results["d_index_k"][2][untouched].any()


# --- precision ----------------------------------------------------------------------------------------------------------


BOTH_ARCHES = pytest.mark.parametrize(
    ("default", "v2"), [(DEFAULT, V2_FP32), (HOPPER_DEFAULT, HOPPER_V2_FP32)], ids=["sm_100f", "sm_90a"]
)


@BOTH_ARCHES
@pytest.mark.parametrize("topk", [128, 384, 1024])
def test_v2_is_as_precise_as_its_stores(
    topk: int, default: dict[str, Any], v2: dict[str, Any], settings: Settings
) -> None:
    call = softmax_call(topk, 12, 0)
    found = errors(plan_for(topk, v2), call, settings)
    assert found["d_index_q"] < 1.70e-3
    assert found["d_weights"] < 1.2e-7
    assert found["d_index_k"] < 1e-5
    rounded = errors(plan_for(topk, default), call, settings)
    assert 1.8e-3 < rounded["d_index_q"] < 2.4e-3
    assert 1.4e-3 < rounded["d_index_k"] < 1.8e-3
    assert 1.5e-3 < rounded["d_weights"] < 1.7e-3


@BOTH_ARCHES
@pytest.mark.parametrize("topk", [128, 256, 384, 1024, 2048])
def test_stage_1_gives_the_same_bits_with_every_backend(
    topk: int, default: dict[str, Any], v2: dict[str, Any], settings: Settings
) -> None:
    case = cases.Case(1, 2, 100, seed=topk)
    scores = [run(plan_for(topk, config), case, "inorder", settings).results["attn_score"] for config in (default, v2)]
    assert numpy.array_equal(*scores)


@pytest.mark.parametrize("pair", [(DEFAULT, V2), (HOPPER_DEFAULT, HOPPER_V2)], ids=["sm_100f", "sm_90a"])
def test_the_two_backends_point_the_same_way(pair: tuple[dict[str, Any], ...], settings: Settings) -> None:
    """Cosine of their gradients, both as the bf16 that a call gets by default."""
    case = cases.Case(1, 6, 4096, "local", "bf16", seed=1)
    one, other = (run(plan_for(128, config), case, "inorder", settings) for config in pair)
    for name in verify.OUTPUTS:
        x, y = (cases.bf16_values(o.results[name]).astype(numpy.float64).ravel() for o in (one, other))
        assert x @ y / numpy.sqrt((x @ x) * (y @ y)) >= 0.999996


def extreme_call(a: float) -> cases.Call:
    """One row whose A are all ``a``, exactly: weights are 1 and scores positive."""
    call = softmax_call(128, 1, 0)
    call.arrays["attn_score"][...] = a
    call.arrays["weights"][...] = cases.bf16_bits(numpy.float32(1.0))
    for name in ("index_q", "index_k"):
        positive = numpy.abs(call.values(name)) * numpy.float32(2.0**-10 if a > 1 else 2.0**20)
        call.arrays[name] = cases.bf16_bits(positive)
    return call


@BOTH_ARCHES
def test_small_a_fall_back_to_one_rounding(default: dict[str, Any], v2: dict[str, Any], settings: Settings) -> None:
    """Below 1e-35 lo becomes subnormal and then zero; the result is never worse than that of one bf16."""
    for a in (3.3e-35, 3.3e-36, 3.3e-37, 1.2345e-38):
        call = extreme_call(a)
        two, one = (errors(plan_for(128, config), call, settings) for config in (v2, default))
        assert two["d_index_k"] <= one["d_index_k"] * 1.01
    assert errors(plan_for(128, v2), extreme_call(3.3e-33), settings)["d_index_k"] < 2e-5


@pytest.mark.parametrize("config", [V2_FP32, HOPPER_V2_FP32], ids=["sm_100f", "sm_90a"])
def test_a_that_bf16_rounds_to_infinity_gives_nan(config: dict[str, Any], settings: Settings) -> None:
    threshold = 2.0**128 - 2.0**119
    below = numpy.nextafter(numpy.float32(threshold), numpy.float32(0))
    plan = plan_for(128, config)
    assert errors(plan, extreme_call(float(below)), settings)["d_index_k"] < 2e-5
    for a in (threshold, 2.0**128 - 2.0**104):
        call = extreme_call(a)
        found = gemm_stage(plan, call, settings)
        assert numpy.isnan(found["d_index_q"]).all()
        keys = numpy.unique(call.arrays["topk_indices"])
        assert numpy.isnan(found["d_index_k"][0, keys]).all()
        assert not numpy.isnan(found["d_weights"]).any()


# --- what the compiler made of it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        DEFAULT, HEADS_32, V2_FP32, IN_ORDER, HOPPER_DEFAULT, HOPPER_HEADS_32, HOPPER_V2, HOPPER_V2_FP32,
        HOPPER_IN_ORDER,
    ],
    ids=named,
)  # fmt: skip
def test_nothing_spills_and_everything_fits(config: dict[str, Any]) -> None:
    """At the ends and in the middle of the range; topk only bounds a loop of stage 2 and unrolls stage 1."""
    for topk in (128, 1152, 2048):
        plan = plan_for(topk, config)
        assert b".local" not in plan.sections["ptx"]
        for kernel in plan.manifest["kernels"]:
            assert kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == kernel["stack_bytes"] == 0
            assert kernel["dynamic_shared_bytes"] <= 232_448


@pytest.mark.parametrize("config", [DEFAULT, HEADS_32, V2_FP32, IN_ORDER], ids=named)
def test_the_blackwell_kernels_have_the_instructions_that_they_are_made_for(config: dict[str, Any]) -> None:
    for topk in (128, 2048):
        plan = plan_for(topk, config)
        text = plan.sections["ptx"].decode()
        assert text.count("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32") == 1
        terms, heads = (1 if plan.config["backend"] == "default" else 2), plan.config["heads"]
        assert text.count("tcgen05.mma.") == 8 + 8 * terms + heads // 16 * terms
        assert text.count(".tile::gather4.") == 4 * 2
        draws, adds = text.count("\tatom."), text.count("\tred.")
        assert draws == text.count("\tatom.global.add.u32") == (2 if "ticket" in str(plan.launch) else 0)
        assert adds == text.count("\tred.relaxed.gpu.global.add.v4.f32") == int(plan.config["deterministic"])


@pytest.mark.parametrize("config", [IN_ORDER, HOPPER_IN_ORDER], ids=["sm_100f", "sm_90a"])
def test_a_reproducible_d_index_k_takes_at_most_a_gibibyte_more(config: dict[str, Any]) -> None:
    record = LaunchRecord.parse(plan_for(128, config).launch)
    (planes,) = [buffer for buffer in record.buffers if buffer.name == "dk_planes"]
    for keys in (0, 1, 4096, 131_072, 2**21 - 1, 2**21, 2**21 + 1, 2**30):
        for multiprocessors in (1, 14, 132, 148, 160):
            values: dict[str, Any] = {"rows": 10_000, "keys": keys, "head_dim": 128, "multiprocessors": multiprocessors}
            record.complete(values)
            assert planes.bytes(values) <= 2**30
            assert 1 <= values["workers"] <= 128
            if keys <= 16_384:
                assert values["workers"] == 128, "the same number of partial sums on every board"


def machine_code(config: dict[str, Any], arch: str, folder: Path) -> list[str]:
    """The instructions of a plan, without addresses and without the numbers of registers."""
    path = folder / f"{arch}.cubin"
    path.write_bytes(compile_plan(envelope.plan_config({"topk": 256, **config, "arch": arch})).plan.cubin)
    text = subprocess.run([tool("nvdisasm"), "-c", str(path)], capture_output=True, text=True, check=True).stdout
    lines = [match[1] for match in re.finditer(r"/\*[0-9a-f]{4,}\*/\s+(.*?) ;", text)]
    assert len(lines) > 1000
    return [re.sub(r"\b(U?[RP])\d+\b", r"\1", line) for line in lines]


@pytest.mark.parametrize("config", [DEFAULT, V2_FP32, IN_ORDER], ids=["default", "v2", "in order"])
def test_a_family_plan_has_the_machine_code_of_an_exact_one(config: dict[str, Any], tmp_path: Path) -> None:
    """What sm_100f gives up for running on two architectures: nothing but the order in which registers are taken."""
    family, exact = (machine_code(config, arch, tmp_path) for arch in ("sm_100f", "sm_100a"))
    assert not list(difflib.unified_diff(family, exact, "sm_100f", "sm_100a", lineterm="", n=0))
    assert not [line for line in family if re.match(r"(@!?\w+ )?(LDL|STL)", line)], "nothing lives in local memory"
