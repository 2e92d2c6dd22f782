from __future__ import annotations

import contextlib
import random
import re
import struct
import subprocess
from pathlib import Path

import pytest
from cuda_tools import tool

from dsa_planner import cubin, envelope
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.compiler import compile_plan
from dsa_planner.cubin import CubinError, CubinKernel


@pytest.fixture(scope="module")
def kernels(compiled: PlanFile) -> dict[str, CubinKernel]:
    return {kernel.symbol: kernel for kernel in cubin.inspect(compiled.cubin).kernels}


def test_target_and_kernels(compiled: PlanFile, kernels: dict[str, CubinKernel]) -> None:
    found = cubin.inspect(compiled.cubin)
    assert (found.sm, found.accelerated) == (90, True)
    assert sorted(kernels) == ["dsa_gradients_1", "dsa_round_d_index_k_2", "dsa_score_grad_0"]


def test_resources_are_those_that_cuobjdump_prints(
    compiled: PlanFile, kernels: dict[str, CubinKernel], tmp_path: Path
) -> None:
    path = tmp_path / "plan.cubin"
    path.write_bytes(compiled.cubin)
    out = subprocess.run(
        [tool("cuobjdump"), "--dump-resource-usage", str(path)], capture_output=True, text=True, check=True
    )
    rows = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", out.stdout + out.stderr)
    assert len(rows) == len(kernels)
    for symbol, *numbers in rows:
        kernel = kernels[symbol]
        assert [kernel.registers, kernel.stack_bytes, kernel.static_shared_bytes, 0] == [int(n) for n in numbers]


def test_parameters_follow_the_signature(kernels: dict[str, CubinKernel]) -> None:
    assert [size for _, size in kernels["dsa_score_grad_0"].parameters] == [8, 8, 8, 8, 4, 4, 4]
    gradients = kernels["dsa_gradients_1"].parameters
    assert [size for _, size in gradients] == [128, 128, *[8] * 6, *[4] * 5]
    offsets = [offset for offset, _ in gradients]
    assert offsets == sorted(offsets)
    assert kernels["dsa_gradients_1"].block == 512


def test_a_block_of_several_dimensions_has_the_product_of_threads(compiled: PlanFile) -> None:
    data, count = compiled.cubin, compiled.cubin.count(struct.pack("<III", 512, 1, 1))
    assert count == 1
    changed = data.replace(struct.pack("<III", 512, 1, 1), struct.pack("<III", 128, 2, 2))
    assert {kernel.symbol: kernel.block for kernel in cubin.inspect(changed).kernels}["dsa_gradients_1"] == 512


def test_nothing_spills(kernels: dict[str, CubinKernel]) -> None:
    for kernel in kernels.values():
        assert (kernel.stack_bytes, kernel.spill_store_bytes, kernel.spill_load_bytes) == (0, 0, 0), kernel.symbol


def test_spills_are_counted_as_ptxas_counts_them(tmp_path: Path) -> None:
    """Stage 1 of a topk that needs 194 registers, assembled for 40: ptxas says how much it spills."""
    plan = compile_plan(envelope.plan_config({"arch": "sm_90a", "topk": 2048})).plan
    head, *entries = re.split(r"(?=\.visible \.entry )", plan.sections["ptx"].decode())
    entry = next(entry for entry in entries if "dsa_score_grad" in entry.partition("(")[0])
    few, count = re.subn(r"\.reqntid 256, 1, 1", ".reqntid 256, 1, 1\n.minnctapersm 6", entry)
    assert count == 1
    (tmp_path / "few.ptx").write_text(head + few)
    out = subprocess.run(
        [tool("ptxas"), "-v", "-arch=sm_90a", str(tmp_path / "few.ptx"), "-o", str(tmp_path / "few.cubin")],
        capture_output=True,
        text=True,
        check=True,
    )
    printed = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", out.stderr)
    assert printed
    (kernel,) = cubin.inspect((tmp_path / "few.cubin").read_bytes()).kernels
    numbers = [kernel.stack_bytes, kernel.spill_store_bytes, kernel.spill_load_bytes]
    assert numbers == [int(number) for number in printed.groups()]
    assert kernel.spill_store_bytes > 0


def test_what_is_no_cubin_is_refused(compiled: PlanFile) -> None:
    for data in (b"", b"\x7fELF", b"#!/bin/sh\n", Path("/bin/true").read_bytes(), compiled.cubin[:5000]):
        with pytest.raises(CubinError):
            cubin.inspect(data)


def test_damaged_cubins_are_refused_or_read_and_never_crash(compiled: PlanFile) -> None:
    draw = random.Random(1)
    for _ in range(300):
        data = bytearray(compiled.cubin)
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        with contextlib.suppress(CubinError):
            cubin.inspect(bytes(data))
