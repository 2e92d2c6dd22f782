"""``dsa-plan verify``: run the cases, and print what came of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dsa_planner import toolchain, verify
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cli.render import SHORT, console, print_json, table
from dsa_planner.compiler import compile_plan
from dsa_planner.settings import Settings
from dsa_planner.threads import available_processors, worker_threads

if TYPE_CHECKING:
    from dsa_planner.kernels.cases import Case
    from dsa_planner.kernels.ptx.machine import Schedule

__all__ = ["run"]

_LONGEST_LIST = 40  # findings of one run that are printed: enough for every warp of a deadlock
_ERRORS = {"dq": "d_index_q", "dw": "d_weights", "dk": "d_index_k"}


def run(
    calls: Sequence[tuple[PlanFile, Case]],
    schedules: Sequence[Schedule],
    device: bool,
    rebuild: bool,
    profile: bool,
    jobs: int | None,
    json: bool,
    settings: Settings,
) -> bool:
    """Verify plans and print the answer; whether all passed."""
    tasks = [partial(_run, plan, case, schedule, settings, profile) for plan, case in calls for schedule in schedules]
    outcomes = list(_in_order(tasks, jobs or available_processors(), enabled=not json))
    if device:
        outcomes += [replace(verify.run_on_device(plan, case), results={}) for plan, case in calls]
    plans = {plan.plan_id: plan for plan, _ in calls}
    rebuilt = {plan_id: _rebuild(plan) for plan_id, plan in plans.items()} if rebuild else {}
    passed = all(outcome.passed for outcome in outcomes) and all(same for same, _ in rebuilt.values())
    if json:
        print_json(_as_json(outcomes, rebuilt, profile))
    else:
        _print(outcomes, rebuilt, profile)
    return passed


def _run(plan: PlanFile, case: Case, schedule: Schedule, settings: Settings, profile: bool) -> verify.Outcome:
    """One run, without what will not be printed: a sweep has thousands."""
    outcome = verify.run_in_machine(plan, case, schedule, settings=settings)
    return replace(outcome, results={}, profile=outcome.profile if profile else {})


def _in_order(tasks: Sequence[Callable[[], verify.Outcome]], jobs: int, enabled: bool) -> Iterator[verify.Outcome]:
    """Run tasks side by side, with a progress bar; the outcomes in the order of the tasks."""
    out = console(stderr=True)
    columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=out, transient=True, disable=not (enabled and out.is_terminal)) as bar,
        worker_threads(jobs) as pool,
    ):
        bar_task = bar.add_task("", total=len(tasks))
        futures = [pool.submit(task) for task in tasks]
        for future in as_completed(futures):
            future.result()
            bar.update(bar_task, advance=1)
    return (future.result() for future in futures)


def _rebuild(plan: PlanFile) -> tuple[bool, str]:
    """Compile a plan again; whether it is the same, and in words."""
    again = compile_plan(plan.config).plan
    if again.build_id != plan.build_id:
        here = toolchain.installed().packages
        return True, f"made by another compiler ({_packages(plan)}; here {', '.join(map(' '.join, here.items()))})"
    if again.encode() == plan.encode():
        return True, "the same bytes"
    parts = [name for name, data in plan.sections.items() if again.sections.get(name) != data] or ["manifest"]
    digests = ", ".join(hashlib.sha256(p.encode()).hexdigest()[:SHORT] for p in (plan, again))
    return False, f"another {' and '.join(parts)} ({digests})"


def _packages(plan: PlanFile) -> str:
    return ", ".join(f"{name} {version}" for name, version in plan.manifest["build"]["packages"].items())


def _print(outcomes: Sequence[verify.Outcome], rebuilt: Mapping[str, tuple[bool, str]], profile: bool) -> None:
    rows = table(
        "plan", "backend", "arch", "topk", "shape", "schedule", *_ERRORS, "findings", "rows/s", "verdict",
        right=("topk", *_ERRORS, "findings", "rows/s"),
    )  # fmt: skip
    for o in outcomes:
        errors = [f"{o.errors[name]:.2e}" if name in o.errors else "-" for name in _ERRORS.values()]
        rows.add_row(
            o.plan_id[:SHORT], o.config["backend"], o.config["arch"], str(o.config["topk"]), str(o.case), o.where,
            *errors, str(o.findings), f"{o.rows_per_second:.0f}", "pass" if o.passed else "FAIL",
        )  # fmt: skip
    out = console()
    out.print(rows)
    for o in outcomes:
        for problem in o.problems[:_LONGEST_LIST]:
            out.print(f"{o.plan_id[:SHORT]} {o.where}, {o.case}: {problem}")
        if len(o.problems) > _LONGEST_LIST:
            out.print(f"{o.plan_id[:SHORT]} {o.where}, {o.case}: and {len(o.problems) - _LONGEST_LIST} more")
    for plan_id, (_, words) in rebuilt.items():
        out.print(f"{plan_id[:SHORT]} compiled again: {words}")
    if profile:
        _print_profiles(outcomes)
    failed = sum(not o.passed for o in outcomes) + sum(not same for same, _ in rebuilt.values())
    total = len(outcomes) + len(rebuilt)
    out.print(f"{total - failed} of {total} passed")


def _print_profiles(outcomes: Sequence[verify.Outcome]) -> None:
    """Executed instructions a row, by opcode and warp, of each plan's first run."""
    seen = set()
    for o in outcomes:
        if o.plan_id in seen or not o.profile:
            continue
        seen.add(o.plan_id)
        queries = o.case.batch * o.case.s_q
        for kernel, counts in o.profile.items():
            warps = len(next(iter(counts.opcodes.values())))
            rows = table(
                "instructions a row", *[f"warp {n}" for n in range(warps)], right=[f"warp {n}" for n in range(warps)]
            )
            for opcode, by_warp in sorted(counts.opcodes.items(), key=lambda item: -int(item[1].sum())):
                if by_warp.sum():
                    rows.add_row(opcode, *(f"{int(count) / queries:.1f}" for count in by_warp))
            out = console()
            out.print(f"\n{o.plan_id[:SHORT]} {kernel}, {o.case}")
            out.print(rows)
            moved = ", ".join(f"{name} {int(value) / queries:.0f}" for name, value in counts.bytes.items())
            out.print(f"bytes a row: {moved}; multiply-adds a row: {counts.macs / queries:.0f}")


def _as_json(
    outcomes: Sequence[verify.Outcome], rebuilt: Mapping[str, tuple[bool, str]], profile: bool
) -> dict[str, Any]:
    runs = []
    for o in outcomes:
        row = {
            "plan_id": o.plan_id,
            "config": dict(o.config),
            "case": vars(o.case),
            "schedule": o.where,
            "errors": dict(o.errors),
            "findings": o.findings,
            "problems": list(o.problems),
            "rows_per_second": round(o.rows_per_second, 1),
            "seconds": round(o.seconds, 4),
            "passed": o.passed,
        }
        if profile:
            row["profile"] = {
                kernel: {
                    "instructions": {name: [int(n) for n in by_warp] for name, by_warp in counts.opcodes.items()},
                    "bytes": dict(counts.bytes),
                    "multiply_adds": counts.macs,
                }
                for kernel, counts in o.profile.items()
            }
        runs.append(row)
    again = {plan_id: {"same": same, "found": words} for plan_id, (same, words) in rebuilt.items()}
    return {
        "runs": runs,
        "rebuilt": again,
        "passed": all(o.passed for o in outcomes) and all(same for same, _ in rebuilt.values()),
    }
