"""What verify notices of plans with one fault each (``ptx_mutants.py``), and that a fault never hangs the machine."""

from __future__ import annotations

import time

import numpy as np
import pytest

pytest.importorskip("ziglang")

from ptx_mutants import (
    CASES,
    DESCRIPTORS,
    EQUIVALENT,
    EQUIVALENT_FROM_3_TILES,
    MISSED,
    MISSED_FROM_3_TILES,
    MUTANTS,
    judge,
    mutants_of,
    mutate,
)  # fmt: skip

from dsa_planner import envelope, verify
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.compiler import compile_plan
from dsa_planner.settings import Settings

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
PASS = EQUIVALENT.keys() | MISSED.keys()
PASS_FROM_3_TILES = EQUIVALENT_FROM_3_TILES.keys() | MISSED_FROM_3_TILES.keys()


@pytest.fixture(scope="module")
def plans() -> dict[int, PlanFile]:
    """Of ``sm90_v2``, by topk."""
    asked = {"arch": "sm_90a", "backend": "sm90_v2", "d_weights": "fp32"}
    return {topk: compile_plan(envelope.plan_config(asked | {"topk": topk})).plan for topk in (128, 256)}


@pytest.fixture(scope="module")
def default_plan() -> PlanFile:
    return compile_plan(envelope.plan_config({"arch": "sm_90a", "topk": 128})).plan


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings((), tmp_path_factory.mktemp("machine"), 1 << 30)


def test_a_mutant_differs_from_the_plan_in_its_place_alone(plans: dict[int, PlanFile], default_plan: PlanFile) -> None:
    assert len(BY_NAME) == len(MUTANTS)
    for plan in (*plans.values(), default_plan):
        lines = plan.sections["ptx"].decode().split("\n")
        for mutant in mutants_of(plan):
            changed = mutate(plan, mutant)
            assert changed.plan_id == plan.plan_id
            found = changed.sections["ptx"].decode().split("\n")
            assert len(found) == len(lines)
            assert 1 <= sum(one != other for one, other in zip(lines, found, strict=True)) <= 32, mutant.name


def test_a_seed_gives_the_same_place_every_time(plans: dict[int, PlanFile]) -> None:
    for mutant in MUTANTS[::8]:
        assert mutate(plans[128], mutant, 3).sections == mutate(plans[128], mutant, 3).sections


def test_a_mutant_whose_place_is_gone_is_refused(plans: dict[int, PlanFile], default_plan: PlanFile) -> None:
    """In a plan without tickets, and in one with a wait less."""
    with pytest.raises(LookupError):
        mutate(default_plan, BY_NAME["ticket-next-dropped"])
    changed = mutate(plans[128], BY_NAME["wait-q-empty-gather-dropped"])
    with pytest.raises(LookupError, match="0 of 'mbarrier"):
        mutate(changed, BY_NAME["wait-q-empty-gather-dropped"])


def test_verify_notices_the_faults_of_every_kind(plans: dict[int, PlanFile], settings: Settings) -> None:
    """Every sixth fault, and of these every fourth in the plan of four tiles a row. The script makes them all."""
    verdicts = {
        mutant.name: judge(mutate(plans[128 if number % 4 else 256], mutant), settings)
        for number, mutant in enumerate(MUTANTS[::6])
        if mutant.name not in PASS | PASS_FROM_3_TILES
    }
    assert not [name for name, verdict in verdicts.items() if verdict.by is None]
    assert {verdict.by for verdict in verdicts.values()} >= {"detector", "values", "deadlock"}


def test_the_faults_that_are_listed_with_a_reason_pass(plans: dict[int, PlanFile], settings: Settings) -> None:
    """A list is to be mended when the machine learns to notice one. All cases and schedules are for the script."""
    for name in PASS:
        assert judge(mutate(plans[128], BY_NAME[name]), settings, CASES[:3], ["inorder"]).by is None, name
    for name in PASS_FROM_3_TILES:
        assert judge(mutate(plans[256], BY_NAME[name]), settings, CASES[:3], ["inorder"]).by is None, name
        assert judge(mutate(plans[128], BY_NAME[name]), settings, CASES[:3], ["inorder"]).by == "detector", name


def test_the_plans_themselves_pass(plans: dict[int, PlanFile], settings: Settings) -> None:
    for plan in plans.values():
        assert judge(plan, settings).by is None


def test_a_kernel_that_loops_for_ever_is_stopped_and_said_to(plans: dict[int, PlanFile], settings: Settings) -> None:
    """Without looking for races: a ticket that is not drawn gives one row for ever, and each time writes over it."""
    for name in ("ticket-next-dropped", "zero-for-ever"):
        start = time.monotonic()
        verdict = judge(mutate(plans[128], BY_NAME[name]), settings, schedules=["inorder"], detect=False)
        assert verdict.by == "limit"
        assert verdict.problem.startswith("no end")
        assert time.monotonic() - start < 60


def test_a_key_of_nan_times_zero_is_nan(plans: dict[int, PlanFile], settings: Settings) -> None:
    """An invalid slot has A = 0. Were its K row not zero too, a NaN there would reach d_index_q."""
    case = next(case for case in CASES if case.unused_keys == "nan")
    mutant = mutate(plans[128], BY_NAME["gather-fill"])
    outcome = verify.run_in_machine(mutant, case, verify.parse_schedule("inorder"), settings=settings)
    assert outcome.findings == 0
    assert np.isnan(outcome.errors["d_index_q"])


def test_a_descriptor_with_a_base_offset_is_refused(plans: dict[int, PlanFile], settings: Settings) -> None:
    for name in DESCRIPTORS:
        verdict = judge(mutate(plans[128], BY_NAME[f"descriptor-{name}-base"]), settings, schedules=["inorder"])
        assert verdict.problem.startswith("descriptor: line ")
        assert "wgmma.mma_async" in verdict.problem
