"""``dsa-plan verify`` as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("ziglang")

from changed_plans import changed
from command_line import Command

from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.writable import WritableLayer
from dsa_planner.kernels.ptx import build

QUICK = ("--rows", "2", "--schedules", "inorder")


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled machine."""
    folder = tmp_path_factory.mktemp("compiled-machine")
    build.library(folder)
    return folder


@pytest.fixture
def command(tmp_path: Path, machine: Path) -> Command:
    found = Command(tmp_path)
    shutil.copytree(machine, found.layer / "machine")
    return found


@pytest.fixture
def filled(command: Command, compiled: PlanFile) -> Command:
    WritableLayer(command.layer, 1 << 30).publish(compiled)
    return command


def test_a_right_plan_passes(filled: Command, compiled: PlanFile) -> None:
    out = filled("verify", "--rows", "2", "--schedules", "inorder,late:3").stdout.splitlines()
    assert " ".join(out[0].split()) == "plan backend arch topk shape schedule dq dw dk findings rows/s verdict"
    assert len(out) == 1 + 5 * 2 + 1
    assert all(line.startswith(compiled.plan_id[:12]) and line.rstrip().endswith("pass") for line in out[1:-1])
    assert out[-1] == "10 of 10 passed"


def test_json_has_every_run(filled: Command, compiled: PlanFile) -> None:
    answer = json.loads(filled("verify", compiled.plan_id[:8], *QUICK, "--json", "--profile").stdout)
    assert answer["passed"] is True
    assert len(answer["runs"]) == 5
    first = answer["runs"][0]
    assert first["plan_id"] == compiled.plan_id
    assert first["case"]["s_q"] == 2
    assert set(first["errors"]) == {"attn_score", "d_index_q", "d_weights", "d_index_k"}
    counts = first["profile"]["gradients"]
    assert counts["multiply_adds"] == 2 * 3 * 128 * 64 * 128
    assert len(counts["instructions"]["bar.warp.sync"]) == 12


def test_a_wrong_plan_is_exit_code_7_and_the_reason_is_printed(command: Command, compiled: PlanFile) -> None:
    WritableLayer(command.layer, 1 << 30).publish(changed(compiled, "setp.gt.f32", "setp.ge.f32"))
    out = command("verify", *QUICK, code=7)
    assert "FAIL" in out.stdout
    assert "d_index_q: rms error" in out.stdout
    assert json.loads(command("verify", *QUICK, "--json", code=7).stdout)["passed"] is False


def test_rebuild_compares_the_bytes(filled: Command, compiled: PlanFile) -> None:
    out = filled("verify", *QUICK, "--rebuild").stdout
    assert f"{compiled.plan_id[:12]} compiled again: the same bytes" in out
    assert "6 of 6 passed" in out


def test_rebuild_finds_another_cubin(command: Command, compiled: PlanFile) -> None:
    manifest = compiled.manifest
    sections = {**compiled.sections, "cubin": compiled.cubin + b"\0"}
    other = PlanFile.build(manifest["identity"], manifest["build"], manifest["kernels"], sections)
    WritableLayer(command.layer, 1 << 30).publish(other)
    assert "compiled again: another cubin" in command("verify", *QUICK, "--rebuild", code=7).stdout


def test_requests_that_cannot_be_met(filled: Command) -> None:
    assert filled.refused("verify", "ffff", code=3).startswith("plan 'ffff'")
    assert filled.refused("verify", "--topk", "256", code=3).startswith("plans of --topk 256: there are none in")
    assert "it has to be inorder" in filled.refused("verify", "--schedules", "fifo", code=2)
    assert "without empty entries" in filled.refused("verify", "--schedules", "inorder,,late:1", code=2)
    assert "of at least 1" in filled.refused("verify", "--rows", "0", code=2)
    assert "it is not an arch" in filled.refused("verify", "--arch", "sm_80", code=2)
    assert "no NVIDIA driver" in filled.refused("verify", *QUICK, "--device", code=6)


def test_other_ptx_can_be_tried(filled: Command, compiled: PlanFile) -> None:
    text = compiled.sections["ptx"].decode()
    (filled.home / "same.ptx").write_text(text)
    assert "5 of 5 passed" in filled("verify", *QUICK, "--ptx", "same.ptx").stdout
    (filled.home / "other.ptx").write_text(text.replace("fence.proxy.async.shared::cta;", ""))
    assert "missing proxy fence: line" in filled("verify", *QUICK, "--ptx", "other.ptx", code=7).stdout
    assert "it cannot be read" in filled.refused("verify", "--ptx", "none.ptx", code=2)
    (filled.home / "no.ptx").write_text("this is not PTX")
    assert "line 1: 'this is not PTX'" in filled.refused("verify", *QUICK, "--ptx", "no.ptx", code=2)


def test_no_plans_at_all_is_exit_code_3(command: Command) -> None:
    assert command.refused("verify", code=3).startswith("plans: there are none in")
