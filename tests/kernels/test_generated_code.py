"""What the compiler made of the kernels, read from the plan's PTX: the instructions that the design rests on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from cuda_tools import tool

from dsa_planner import envelope
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.compiler import compile_plan


@pytest.fixture(scope="module", params=[128, 2048])
def topk(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module", params=["default", "sm90_v2"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def terms(backend: str) -> int:
    """bf16 numbers that stand for A."""
    return 1 if backend == "default" else 2


@pytest.fixture(scope="module")
def plan(topk: int, backend: str) -> PlanFile:
    return compile_plan(envelope.plan_config({"arch": "sm_90a", "topk": topk, "backend": backend})).plan


@pytest.fixture(scope="module")
def entries(plan: PlanFile) -> dict[str, str]:
    _, *found = re.split(r"(?=\.visible \.entry )", plan.sections["ptx"].decode())
    return {re.search(r"entry dsa_(\w+?)_\d+\(", text).group(1): text for text in found}  # type: ignore[union-attr]


def count(text: str, pattern: str) -> int:
    return len(re.findall(pattern, text))


def test_subnormals_are_kept(entries: dict[str, str]) -> None:
    """exp(-100) is a subnormal of fp32: flushed to zero, every slot would pass the threshold of stage 1."""
    assert not [name for name, text in entries.items() if ".ftz" in text]
    assert "0f0000001B" in entries["score_grad"]


def test_stage_1_moves_16_bytes_an_access(entries: dict[str, str], topk: int) -> None:
    text = entries["score_grad"]
    assert count(text, r"ld\.global\.v4\.\w+") == 2 * topk // 128
    assert count(text, r"st\.global\.v4\.\w+") == topk // 128 + 1, "the row, and the accumulator"
    assert count(text, r"ld\.global\.(?!v4)") == 1, "grad_loss alone"


def test_stage_2_has_three_contractions_a_tile(entries: dict[str, str], terms: int) -> None:
    text = entries["gradients"]
    assert count(text, r"wgmma\.mma_async\S*m64n64k16\.f32\.bf16\.bf16") == 2 * 8  # S: 64 x 64 x 128; first, and next
    assert count(text, r"wgmma\.mma_async\S*m64n128k16\.f32\.bf16\.bf16") == 8 * terms  # dK, dQ: 64 x 128 x 64 each


def test_stage_2_gathers_scatters_and_stores_in_bulk(entries: dict[str, str], terms: int) -> None:
    text = entries["gradients"]
    gathers = 16 * 3  # half a tile: a tile's first half, that of the tile after the last, and any second half
    assert count(text, r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 16, %r\d+;") == gathers
    assert count(text, r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32 .*, 512;") == 2 * 16
    assert count(text, r"cp\.async\.bulk\.tensor\.2d\.shared::cta\.global") == 2
    assert count(text, r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta") == 2
    assert count(text, r"cp\.async\.bulk\.shared::cta\.global.* 128,") == 1
    assert not count(text, r"\bred\.")
    assert count(text, r"\batom\.") == (2 if terms == 2 else 0), "tickets"


def test_stage_2_gives_registers_to_those_who_compute(entries: dict[str, str]) -> None:
    text = entries["gradients"]
    assert count(text, r"setmaxnreg\.dec\.sync\.aligned\.u32\s+40;") == 1
    assert count(text, r"setmaxnreg\.inc\.sync\.aligned\.u32\s+216;") == 1


def test_the_assembler_waits_for_no_product_that_is_not_needed(plan: PlanFile, tmp_path: Path) -> None:
    """ptxas waits after every wgmma where it cannot follow their registers, at a third of the speed."""
    path = tmp_path / "plan.cubin"
    path.write_bytes(plan.cubin)
    text = subprocess.run([tool("nvdisasm"), "-c", str(path)], capture_output=True, text=True, check=True).stdout
    waits = count(text, r"WARPGROUP\.DEPBAR")
    assert waits == plan.sections["ptx"].count(b"wgmma.wait_group")
    assert not count(text, r"\b(LDL|STL)\b")


def test_nothing_lives_in_local_memory(entries: dict[str, str], plan: PlanFile) -> None:
    assert not [name for name, text in entries.items() if ".local" in text]
    assert {kernel["spill_store_bytes"] + kernel["stack_bytes"] for kernel in plan.manifest["kernels"]} == {0}
