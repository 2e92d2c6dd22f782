"""Proofs pass for right plans, fail for wrong ones, and say why."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

numpy = pytest.importorskip("numpy")
pytest.importorskip("ziglang")

from changed_plans import changed  # noqa: E402

from dsa_planner import errors, verify  # noqa: E402
from dsa_planner.cache.planfile import PlanFile  # noqa: E402
from dsa_planner.kernels import cases, oracle  # noqa: E402
from dsa_planner.settings import Settings  # noqa: E402

SMALL = cases.Case(2, 3, 50, "local", "bf16", seed=1)


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings((), tmp_path_factory.mktemp("machine"), 1 << 30)


def run(plan: PlanFile, settings: Settings, schedule: str = "inorder", case: cases.Case = SMALL) -> verify.Outcome:
    return verify.run_in_machine(plan, case, verify.parse_schedule(schedule), settings=settings)


@pytest.mark.parametrize("schedule", ["inorder", "random:1", "random:2", "late:1"])
def test_a_right_plan_passes_under_every_schedule(compiled: PlanFile, settings: Settings, schedule: str) -> None:
    for case in verify.default_cases(4, 0):
        outcome = run(compiled, settings, schedule, case)
        assert outcome.problems == ()
        assert outcome.passed
        assert outcome.findings == 0
        assert outcome.errors["attn_score"] < 1e-6
        assert 1e-3 < outcome.errors["d_index_q"] < 4e-3
        assert outcome.rows_per_second > 0


def test_a_seed_gives_the_same_run_and_schedules_agree_where_the_order_of_sums_is_fixed(
    compiled: PlanFile, settings: Settings
) -> None:
    first = run(compiled, settings, "random:7")
    again, other = run(compiled, settings, "random:7"), run(compiled, settings, "late:8")
    for name in ("attn_score", "d_index_q", "d_weights", "d_index_k"):
        assert numpy.array_equal(first.results[name], again.results[name])
        if name != "d_index_k":
            assert numpy.array_equal(first.results[name], other.results[name])
    executed = [int(sum(c.sum() for c in o.profile["gradients"].opcodes.values())) for o in (first, again, other)]
    assert executed[0] == executed[1] != executed[2]


def test_local_and_global_ids_give_the_same_bits(compiled: PlanFile, settings: Settings) -> None:
    case = cases.Case(2, 3, 50, "local", "fp32", seed=4)
    call = cases.make(case, 128, 64, 128)
    ids = call.arrays["topk_indices"]
    valid = (ids >= 0) & (ids < 50)
    local = run(compiled, settings, case=case)
    flat = numpy.where(valid, ids + numpy.arange(2, dtype=numpy.int32)[:, None, None] * 50, -1)

    def as_flat(case: cases.Case, *shape: int) -> cases.Call:
        return cases.Call(case, {**call.arrays, "topk_indices": flat.astype(numpy.int32)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "make", as_flat)
        found = run(compiled, settings, case=cases.Case(2, 3, 50, "global", "fp32", seed=4))
    assert found.passed
    for name in ("attn_score", "d_index_q", "d_weights"):
        assert numpy.array_equal(local.results[name], found.results[name])


WRONG = {
    "an open gate": ("setp.gt.f32", "setp.ge.f32", "d_index_q"),
    "a wrong comparison of ids": ("setp.lt.u32", "setp.le.u32", ""),
    "a missing proxy fence": ("fence.proxy.async.shared::cta;", "", "missing proxy fence"),
    "a missing barrier of the warp": ("bar.warp.sync \t-1;", "", "race"),
    "a sum without its last term": ("\tadd.f32 ", "\tsub.f32 ", "rms error"),
    "a wait for the other phase": ("], 0, 10000000", "], 1, 10000000", ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_fails(compiled: PlanFile, settings: Settings, name: str) -> None:
    old, new, word = WRONG[name]
    outcomes = [run(changed(compiled, old, new), settings, s) for s in ("inorder", "random:1")]
    assert not all(outcome.passed for outcome in outcomes)
    assert any(word in problem for outcome in outcomes for problem in outcome.problems)


def test_a_deadlock_says_where_every_warp_waits_and_on_what(compiled: PlanFile, settings: Settings) -> None:
    plan = changed(compiled, first(compiled, r"mbarrier\.arrive\.shared\.b64 %rd\d+, \[%r\d+\+160\], %r\d+;"), "", 1)
    outcome = run(plan, settings, case=cases.Case(1, 8, 100))
    assert len(outcome.problems) == 32, "16 warps of 2 CTAs"
    for warp in range(16):
        (line,) = [p for p in outcome.problems if p.endswith(f"CTA 1, warp {warp}; 1x")]
        assert line.startswith("deadlock: waits for ")
        assert "mbarrier.try_wait.parity.shared.b64" in line or "bar.sync" in line
    assert any("4 arrivals and 0 bytes to come)" in problem for problem in outcome.problems)


def test_a_loop_without_end_is_ended(compiled: PlanFile, settings: Settings) -> None:
    outcome = run(changed(compiled, "@P1 bra.uni DONE;", ""), settings)
    assert outcome.problems[0].startswith("no end, or a limit of the machine")
    assert outcome.seconds < 60


def test_a_row_that_is_left_out_shows(compiled: PlanFile, settings: Settings) -> None:
    """Outputs are poisoned, so it does not matter what was in memory before."""
    store = first(compiled, r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\.tile\.bulk_group [^;]*;")
    plan = changed(compiled, store, "", 1)
    outcome = run(plan, settings)
    assert any("d_index_q: rms error nan" in problem for problem in outcome.problems)


def test_a_plan_without_ptx_or_with_unknown_ptx_is_refused(compiled: PlanFile, settings: Settings) -> None:
    manifest = compiled.manifest
    bare = PlanFile.build(manifest["identity"], manifest["build"], manifest["kernels"], {"cubin": compiled.cubin})
    with pytest.raises(errors.UnsupportedError, match="no PTX to execute"):
        run(bare, settings)
    with pytest.raises(errors.UnsupportedError, match=r"line \d+: opcode frobnicate.b32 is not known: frobnicate"):
        run(changed(compiled, "elect.sync ", "frobnicate.b32 ", 1), settings)


def first(plan: PlanFile, pattern: str) -> str:
    """The first place in the plan's PTX that looks so."""
    found = re.search(pattern, plan.sections["ptx"].decode())
    assert found
    return found.group()


def test_ptx_that_is_not_launched_as_it_asks_is_refused(compiled: PlanFile) -> None:
    block = "requires a block of 128 threads (.reqntid), and is launched with 512"
    assert block in refusal(changed(compiled, ".reqntid 512, 1, 1", ".reqntid 128"))
    assert "requires a block of 192, 2 threads" in refusal(changed(compiled, ".reqntid 512, 1, 1", ".reqntid 192, 2"))
    most = "allows 256 threads in a block (.maxntid), and is launched with 512"
    assert most in refusal(changed(compiled, ".reqntid 512, 1, 1", ".maxntid 128, 2"))
    verify.require_executable(changed(compiled, ".reqntid 512, 1, 1", ".maxntid 256, 2"))
    shared = changed(compiled, ".minnctapersm 1\n{", ".minnctapersm 1\n{\n.shared .b8 more[20000];")
    assert "bytes of shared memory and is launched with 232,448 more, and a CTA has at most 232,448" in refusal(shared)


def test_ptx_of_other_entries_or_parameters_is_refused(compiled: PlanFile) -> None:
    symbol = next(entry["symbol"] for entry in compiled.manifest["kernels"] if entry["name"] == "gradients")
    assert f"it has no entry {symbol}, only " in refusal(changed(compiled, symbol, "other"))
    parameters = changed(compiled, f".entry {symbol}(", f".entry {symbol}(.param .u64 more,")
    assert "is launched with 13 parameters of 128, 128, 8, " in refusal(parameters)
    assert "is not text in UTF-8" in refusal(verify.with_ptx(compiled, b"\xff"))
    assert "it has no entry" in refusal(verify.with_ptx(compiled, b""))


def refusal(plan: PlanFile) -> str:
    with pytest.raises(errors.UnsupportedError) as refused:
        verify.require_executable(plan)
    assert str(refused.value).startswith(f"plan {plan.plan_id[:12]}: its PTX cannot be executed (")
    return str(refused.value)


@pytest.mark.parametrize("missing", ["numpy", "ziglang"])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(errors.VerifierMissingError, match=rf"package {missing}: .*pip install 'dsa-planner\[verify\]'"):
        verify.require_verifier()


def test_a_compiler_that_fails_is_named(compiled: PlanFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dsa_planner.kernels.ptx import build

    monkeypatch.setattr(build, "_OPTIONS", ("-no-such-option-at-all",))
    with pytest.raises(errors.VerifierMissingError, match="cannot be compiled here"):
        run(compiled, Settings((), tmp_path, 1 << 30))
    assert list((tmp_path / "machine").iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "random",
        "random:",
        "random:-1",
        "random:²",
        "late:x",
        "fifo",
        "inorder:1",
        f"random:{1 << 64}",
        "late:" + "9" * 5000,
    ],
)
def test_unknown_schedules_are_refused(text: str) -> None:
    with pytest.raises(errors.UnsupportedError, match="it has to be inorder, random:SEED or late:SEED, SEED from 0 to"):
        verify.parse_schedule(text)


# --- inputs and comparison --------------------------------------------------------------------------------------------


def test_cases_leave_no_gate_in_doubt_and_hold_what_they_say() -> None:
    for ids in ("local", "global"):
        case = cases.Case(2, 6, 60, ids, seed=3)
        call = cases.make(case, 256, 64, 128)
        indices = call.arrays["topk_indices"]
        limit = 120 if ids == "global" else 60
        valid = (indices >= 0) & (indices < limit)
        assert valid.any()
        for value in (-1, -(2**31), 2**31 - 1):
            assert (indices == value).any()
        assert (indices == limit).any()
        assert ((indices > limit) & (indices < limit + 50)).any()
        offset = 0 if ids == "global" else 60 * numpy.arange(2)[:, None, None]
        keys = call.values("index_k").reshape(-1, 128).astype(float)[numpy.where(valid, indices + offset, 0)]
        scores = numpy.abs(keys @ call.values("index_q").astype(float).swapaxes(-1, -2))[valid]
        assert (scores == 0).any()
        assert scores[scores > 0].min() >= cases.GATE_MARGIN
        again = cases.make(case, 256, 64, 128)
        assert all(numpy.array_equal(call.arrays[name], again.arrays[name]) for name in call.arrays)


def test_bf16_is_rounded_to_nearest_even() -> None:
    values = numpy.array([1.0, 1.00390625, 1.01171875, -1.0039064, numpy.inf, -0.0, 3.4e38], numpy.float32)
    want = numpy.array([1.0, 1.0, 1.015625, -1.0078125, numpy.inf, -0.0, numpy.inf], numpy.float32)
    assert numpy.array_equal(cases.bf16_values(cases.bf16_bits(values)), want)
    assert numpy.isnan(cases.bf16_values(cases.bf16_bits(numpy.array([numpy.nan], numpy.float32))))[0]


@pytest.mark.parametrize("name", ["attn_score", "d_index_q", "d_weights", "d_index_k"])
def test_one_wrong_value_of_any_output_is_caught(compiled: PlanFile, settings: Settings, name: str) -> None:
    call = cases.make(SMALL, 128, 64, 128)
    right = dict(run(compiled, settings).results)
    assert verify.compare(compiled, call, right)[1] == []
    for wrong in (_with(right[name], numpy.nan), _with(right[name], 3.0 * _largest(right[name]))):
        problems = verify.compare(compiled, call, {**right, name: wrong})[1]
        assert any(problem.startswith(f"{name}: rms error") for problem in problems)


def _largest(array: Any) -> float:
    values = cases.bf16_values(array) if array.dtype == numpy.uint16 else array
    return float(numpy.abs(values).max())


def _with(array: Any, value: float) -> Any:
    """A copy with one other element."""
    found = array.copy()
    found.reshape(-1)[7] = cases.bf16_bits([value])[0] if array.dtype == numpy.uint16 else value
    return found


def test_the_comparison_rounds_a_as_the_backend_does(compiled: PlanFile, settings: Settings) -> None:
    """Against the exact A the default backend is 1.7e-3 off; against its own definition next to nothing."""
    case = cases.Case(1, 4, 300, "local", "fp32", seed=9)
    outcome = run(compiled, settings, case=case)
    assert outcome.errors["d_index_k"] > 1e-3
    call = cases.make(case, 128, 64, 128)
    defined = oracle.gradients(
        call.values("index_q"), call.values("weights"), call.values("index_k"), outcome.results["attn_score"],
        call.arrays["topk_indices"], case.sm_scale,
        round_a=lambda a: cases.bf16_values(cases.bf16_bits(a)).astype(float),
    )  # fmt: skip
    assert oracle.rms_error(outcome.results["d_index_k"], defined.d_index_k) < 2e-5
