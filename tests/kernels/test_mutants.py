"""What verify notices of plans with one fault each (``ptx_mutants.py``), and that a fault never hangs the machine."""

from __future__ import annotations

import time

import numpy as np
import pytest

pytest.importorskip("ziglang")

from ptx_mutants import CASES, DESCRIPTORS, EQUIVALENT, MISSED, MUTANTS, judge, mutate

from dsa_planner import envelope, verify
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.compiler import compile_plan
from dsa_planner.settings import Settings

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


@pytest.fixture(scope="module")
def plans() -> dict[int, PlanFile]:
    return {topk: compile_plan(envelope.plan_config({"arch": "sm_90a", "topk": topk})).plan for topk in (128, 256)}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings((), tmp_path_factory.mktemp("machine"), 1 << 30)


def test_a_mutant_differs_from_the_plan_in_its_place_alone(plans: dict[int, PlanFile]) -> None:
    assert len(BY_NAME) == len(MUTANTS)
    for plan in plans.values():
        lines = plan.sections["ptx"].decode().split("\n")
        for mutant in MUTANTS:
            changed = mutate(plan, mutant)
            assert changed.plan_id == plan.plan_id
            assert changed.sections == mutate(plan, mutant).sections
            found = changed.sections["ptx"].decode().split("\n")
            assert len(found) == len(lines)
            assert 1 <= sum(one != other for one, other in zip(lines, found, strict=True)) <= 32


def test_verify_notices_every_fault_that_is_not_listed_with_a_reason(
    plans: dict[int, PlanFile], settings: Settings
) -> None:
    """Every other mutant is one of the other plan. Those that pass go through all cases under all schedules."""
    verdicts = {
        mutant.name: judge(mutate(plans[128 if number % 2 else 256], mutant), settings)
        for number, mutant in enumerate(MUTANTS)
    }
    passed = {name for name, verdict in verdicts.items() if verdict.by is None}
    assert passed == EQUIVALENT.keys() | MISSED.keys()
    assert {verdict.by for verdict in verdicts.values()} == {None, "detector", "values", "deadlock", "limit"}


def test_the_plans_themselves_pass(plans: dict[int, PlanFile], settings: Settings) -> None:
    for plan in plans.values():
        assert judge(plan, settings).by is None


def test_a_kernel_that_loops_for_ever_is_stopped_and_said_to(plans: dict[int, PlanFile], settings: Settings) -> None:
    for name in ("row-step-zero", "zero-for-ever"):
        start = time.monotonic()
        verdict = judge(mutate(plans[128], BY_NAME[name]), settings, schedules=["inorder"])
        assert verdict.by == "limit"
        assert verdict.problem.startswith("no end")
        assert time.monotonic() - start < 60


def test_a_key_of_nan_times_zero_is_nan(plans: dict[int, PlanFile], settings: Settings) -> None:
    """An invalid slot has A = 0. Were its K row not zero too, a NaN there would reach d_index_q."""
    case = next(case for case in CASES if case.unused_keys == "nan")
    mutant = mutate(plans[128], BY_NAME["gather-negative"])
    outcome = verify.run_in_machine(mutant, case, verify.parse_schedule("inorder"), settings=settings)
    assert outcome.findings == 0
    assert np.isnan(outcome.errors["d_index_q"])


def test_a_descriptor_with_a_base_offset_is_refused(plans: dict[int, PlanFile], settings: Settings) -> None:
    for name in DESCRIPTORS:
        verdict = judge(mutate(plans[128], BY_NAME[f"descriptor-{name}-base"]), settings, schedules=["inorder"])
        assert verdict.problem.startswith("descriptor: line ")
        assert "wgmma.mma_async" in verdict.problem
