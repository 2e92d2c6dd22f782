"""Lanes of one warp that wait for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

numpy = pytest.importorskip("numpy")

from dsa_planner.kernels.ptx.decode import decode  # noqa: E402
from dsa_planner.kernels.ptx.machine import Buffer, Schedule, pack_parameters  # noqa: E402
from dsa_planner.kernels.ptx.parser import parse  # noqa: E402

if TYPE_CHECKING:
    from dsa_planner.kernels.ptx.machine import Machine, Result

PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry half_waits(.param .u64 out) .reqntid 32, 1, 1
{
    .reg .pred %p<4>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<6>;
    .shared .align 8 .b8 barrier[8];
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, barrier;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r2], COUNT;
READY:
    bar.warp.sync -1;
    setp.lt.u32 %p2, %r1, 16;
    @!%p2 bra ARRIVE;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0;
    @!%p3 bra WAIT;
    bra DONE;
ARRIVE:
    mbarrier.arrive.shared.b64 %rd2, [%r2], 1;
DONE:
    bar.warp.sync -1;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    st.global.b32 [%rd4], %r1;
    ret;
}
"""


def run(vm: Machine, count: int, schedule: str) -> tuple[Result, list[int]]:
    program = decode(parse(PTX.replace("COUNT", str(count))).kernels["half_waits"])
    out = Buffer(numpy.zeros(32, numpy.uint32), 0)
    parameters = pack_parameters(program, [out.address])
    result = vm.launch(program, 1, 32, 0, parameters, [out], Schedule.parse(schedule), instruction_limit=100_000)
    return result, out.array.tolist()


@pytest.mark.parametrize("schedule", ["inorder", "random:1", "random:2", "late:1"])
def test_lanes_that_wait_let_those_go_on_that_they_wait_for(vm: Machine, schedule: str) -> None:
    """The waiting lanes have the lower pc, and would run for ever."""
    result, out = run(vm, 16, schedule)
    assert result.findings == []
    assert out == list(range(32))


@pytest.mark.parametrize("schedule", ["inorder", "random:1"])
def test_lanes_that_wait_in_vain_are_a_deadlock(vm: Machine, schedule: str) -> None:
    result, _ = run(vm, 17, schedule)
    (finding,) = result.findings
    assert finding.kind == "deadlock"
    assert "1 arrivals and 0 bytes to come" in finding.before
    assert "mbarrier.try_wait" in finding.now
