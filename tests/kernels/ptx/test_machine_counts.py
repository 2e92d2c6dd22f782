"""An mbarrier counts no further than 2^20 - 1, arrivals or bytes, and a tensor has one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

numpy = pytest.importorskip("numpy")
pytest.importorskip("ziglang")

from ptx_snippets.framework import kernel  # noqa: E402

from dsa_planner.kernels.ptx.decode import decode  # noqa: E402
from dsa_planner.kernels.ptx.machine import Buffer, TensorMap, pack_parameters  # noqa: E402
from dsa_planner.kernels.ptx.parser import parse  # noqa: E402

if TYPE_CHECKING:
    from dsa_planner.kernels.ptx.machine import Finding, Machine

SETUP = """
.reg .pred %p<4>;
.reg .b32 %r<8>;
.reg .b64 %d<4>;
.shared .align 16 .b8 room[32];
.shared .align 8 .b8 barrier[8];
mov.u32 %r0, %tid.x;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra DONE;
ld.param.u64 %d0, [out];
"""


def run(vm: Machine, body: str) -> list[Finding]:
    program = decode(parse(kernel(["out"], SETUP + body + "\nDONE:")).kernels["snippet"])
    out = Buffer(numpy.zeros(32, numpy.uint32), 0)
    return vm.launch(
        program, 1, 32, 0, pack_parameters(program, [out.address]), [out], instruction_limit=10_000
    ).findings


@pytest.mark.parametrize(("more", "kinds"), [("1048575", []), ("1048576", ["mbarrier contract"])])
def test_more_bytes_to_come_than_an_mbarrier_counts_are_found(vm: Machine, more: str, kinds: list[str]) -> None:
    body = (
        f"mbarrier.init.shared.b64 [barrier], 1;\nmov.u32 %r1, {more};\nmbarrier.expect_tx.shared.b64 [barrier], %r1;"
    )
    found = run(vm, body)
    assert [finding.kind for finding in found] == kinds
    assert all("mbarrier.expect_tx" in finding.now and "mbarrier.init" in finding.before for finding in found)


def test_bytes_that_add_up_to_more_are_found(vm: Machine) -> None:
    expect = "mbarrier.expect_tx.shared.b64 [barrier], 1048575;\n"
    assert run(vm, f"mbarrier.init.shared.b64 [barrier], 1;\n{expect}") == []
    (finding,) = run(vm, f"mbarrier.init.shared.b64 [barrier], 1;\n{expect}{expect}")
    assert finding.kind == "mbarrier contract"


@pytest.mark.parametrize(("arrivals", "kinds"), [("1048574", []), ("1048575", ["mbarrier contract"])])
def test_more_arrivals_to_come_than_an_mbarrier_counts_are_found(vm: Machine, arrivals: str, kinds: list[str]) -> None:
    body = f"""
    mbarrier.init.shared.b64 [barrier], {arrivals};
    cp.async.ca.shared.global [room], [%d0], 16;
    cp.async.mbarrier.arrive.shared.b64 [barrier];
    cp.async.wait_all;
    """
    found = run(vm, body)
    assert [finding.kind for finding in found] == kinds


def test_a_tensor_access_has_as_many_coordinates_as_the_map(vm: Machine) -> None:
    text = kernel(
        ["out", "map"],
        SETUP.replace("ld.param.u64 %d0, [out];", "mov.b64 %d1, map;")
        + "mbarrier.init.shared.b64 [barrier], 1;\nfence.mbarrier_init.release.cluster;\n"
        "mbarrier.arrive.expect_tx.shared.b64 _, [barrier], 16;\n"
        "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [room], [%d1, {0}], [barrier];\n"
        "WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [barrier], 0;\n@!%p1 bra WAIT;\nDONE:",
        maps=["map"],
    ).replace(".shared .align 16", ".shared .align 128")
    program = decode(parse(text).kernels["snippet"])
    out = Buffer(numpy.zeros(32, numpy.uint32), 0)
    for extents, strides, box, kinds in (((32,), (), (4,), []), ((8, 4), (32,), (4, 1), ["tensor map"])):
        made = TensorMap(out.address, 4, extents, strides, box)
        parameters = pack_parameters(program, [out.address, made.pack()])
        result = vm.launch(program, 1, 32, 0, parameters, [out], instruction_limit=10_000)
        assert [finding.kind for finding in result.findings] == kinds
