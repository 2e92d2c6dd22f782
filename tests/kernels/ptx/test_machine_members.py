"""Member masks: a lane that executes is in its own mask, and the lanes that it names are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

numpy = pytest.importorskip("numpy")
pytest.importorskip("ziglang")

from ptx_snippets.framework import kernel  # noqa: E402

from dsa_planner.kernels.ptx.decode import decode  # noqa: E402
from dsa_planner.kernels.ptx.machine import Buffer, Schedule, pack_parameters  # noqa: E402
from dsa_planner.kernels.ptx.parser import parse  # noqa: E402

if TYPE_CHECKING:
    from dsa_planner.kernels.ptx.machine import Finding, Machine

SETUP = """
.reg .pred %p<8>;
.reg .b32 %r<8>;
.reg .b64 %d<4>;
mov.u32 %r0, %tid.x;
setp.lt.u32 %p0, %r0, 16;
setp.lt.u32 %p3, %r0, 8;
setp.ne.u32 %p4, %r0, 31;
mov.u32 %r3, 0;
"""
END = """
DONE: ld.param.u64 %d0, [out];
mad.wide.u32 %d0, %r0, 4, %d0;
st.global.b32 [%d0], %r3;
"""
EXCHANGES = {
    "shfl": "shfl.sync.bfly.b32 %r3, %r0, 1, 31, MASK;",
    "vote": "vote.sync.ballot.b32 %r3, %p3, MASK;",
    "vote of predicates": "vote.sync.any.pred %p5, %p3, MASK;",
    "elect": "elect.sync %r3|%p5, MASK;",
    "redux": "redux.sync.add.u32 %r3, %r0, MASK;",
}
SCHEDULES = ("inorder", "random:1", "late:1")


def run(vm: Machine, body: str, schedule: str = "inorder") -> tuple[list[Finding], list[int]]:
    program = decode(parse(kernel(["out"], SETUP + body + END)).kernels["snippet"])
    out = Buffer(numpy.zeros(32, numpy.uint32), 0)
    parameters = pack_parameters(program, [out.address])
    result = vm.launch(program, 1, 32, 0, parameters, [out], Schedule.parse(schedule), instruction_limit=100_000)
    return result.findings, out.array.tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize(
    ("before", "mask", "lanes"),
    [
        ("", "0x0000ffff", "0xffff0000"),  # the upper lanes are not in the mask
        ("@!%p0 bra DONE;", "0x000000ff", "0x0000ff00"),
        ("@!%p0 ret;", "0x0001ffff", "0x00010000"),  # lane 16 has exited
        ("@%p0", "-1", "0xffff0000"),  # the upper lanes pass by
    ],
    ids=["all-and-half-a-mask", "half-and-a-quarter", "one-that-has-exited", "a-false-predicate"],
)
def test_a_mask_that_does_not_name_those_who_are_there_is_found(
    vm: Machine, name: str, before: str, mask: str, lanes: str, schedule: str
) -> None:
    line = EXCHANGES[name].replace("MASK", mask)
    findings, _ = run(vm, f"{before} {line}", schedule)
    assert findings
    assert findings[0].kind == "convergence"
    assert line.split(";")[0] in findings[0].now
    assert findings[0].where.endswith(f"lanes {lanes}")


@pytest.mark.parametrize("name", EXCHANGES)
def test_lanes_that_wait_for_one_that_never_comes_are_found(vm: Machine, name: str) -> None:
    """The upper lanes wait at a barrier of the whole warp for the lower ones, and those for the upper ones."""
    findings, _ = run(vm, f"@!%p0 bra APART;\n{EXCHANGES[name].replace('MASK', '-1')}\nAPART: bar.warp.sync -1;")
    assert [finding.kind for finding in findings] == ["convergence"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups_with_masks_of_their_own_execute_one_instruction_apart(vm: Machine, schedule: str) -> None:
    masks = "selp.b32 %r1, 0x0000ffff, 0xffff0000, %p0;\n"
    findings, out = run(vm, f"{masks}redux.sync.max.u32 %r3, %r0, %r1;", schedule)
    assert (findings, out) == ([], [15] * 16 + [31] * 16)
    findings, out = run(vm, f"{masks}vote.sync.ballot.b32 %r3, %p4, %r1;", schedule)
    assert (findings, out) == ([], [0xFFFF] * 16 + [0x7FFF0000] * 16)
    findings, out = run(vm, f"{masks}elect.sync %r3|%p5, %r1;", schedule)
    assert (findings, out) == ([], [0] * 16 + [16] * 16)
    findings, out = run(vm, f"{masks}bar.warp.sync %r1;\nmov.u32 %r3, 1;", schedule)
    assert (findings, out) == ([], [1] * 32)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups_may_come_to_one_instruction_at_different_times(vm: Machine, schedule: str) -> None:
    body = """
    mov.u32 %r1, 0x0000ffff;
    @%p0 bra MEET;
    mov.u32 %r1, 0xffff0000;
    nanosleep.u32 5;
    MEET: redux.sync.min.u32 %r3, %r0, %r1;
    """
    assert run(vm, body, schedule) == ([], [0] * 16 + [16] * 16)


def test_a_lane_at_a_barrier_of_the_warp_is_in_its_own_mask(vm: Machine) -> None:
    findings, _ = run(vm, "bar.warp.sync 0x0000ffff;")
    assert [finding.kind for finding in findings] == ["convergence"]
    assert findings[0].where.endswith("lanes 0xffff0000")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_barrier_of_the_warp_whose_predicate_is_false_is_passed(vm: Machine, schedule: str) -> None:
    """The upper lanes do not wait, and are not waited for."""
    assert run(vm, "@%p0 bar.warp.sync 0x0000ffff;\nmov.u32 %r3, 1;", schedule) == ([], [1] * 32)
    findings, _ = run(vm, "@%p0 bar.warp.sync -1;\nbar.sync 0;", schedule)
    assert findings


def test_findings_name_registers_lanes_and_barriers(vm: Machine) -> None:
    """What is no address is not shown as one."""
    findings, _ = run(vm, "mov.u32 %r5, 33;\nbar.sync 1, %r5;")
    assert findings[0].where == "CTA 0, warp 0, barrier 1 of 33 threads"
    findings, _ = run(vm, "trap;")
    assert findings[0].where == "CTA 0, warp 0, lanes 0xffffffff"
