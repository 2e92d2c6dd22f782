"""``dsa-plan verify`` as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("ziglang")

from changed_plans import changed
from command_line import Command

from dsa_planner import errors
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.writable import WritableLayer
from dsa_planner.cli import main, proof, request
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
    # Three products a tile of 64 slots, and S of the tile after each worker's last one.
    assert counts["multiply_adds"] == 64 * 64 * 128 * (2 * 2 * 3 + 2)
    assert len(counts["instructions"]["bar.warp.sync"]) == 16


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
    no = filled.refused("verify", *QUICK, "--ptx", "no.ptx", code=2)
    assert no.startswith("--ptx no.ptx: its PTX cannot be executed (line 1: 'this is not PTX'")
    assert no.endswith("; mend the PTX there")
    (filled.home / "large.ptx").write_bytes(b" " * (1 << 24) + b" ")
    assert "more than 16,777,216 bytes" in filled.refused("verify", *QUICK, "--ptx", "large.ptx", code=2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bra.uni", "bra 5; bra.uni"),
        ("setp.gt.f32", "setp.gt.f32 a|b|c, %r1, %r2; setp.gt.f32"),
        ("ret;", "add.u32 %r1, %r2, " + "9" * 5000 + "; ret;"),
        ("ret;", "{" * 100 + "}" * 100 + " ret;"),
        ("ret;", ".shared .align 0 .b8 x[4]; ret;"),
        ("ret;", "setp.ltu.f32 %r1, %r1, %r1; ret;"),
        ("ret;", "x" * 12_000 + "; ret;"),
        ("(", "(.param .u64 more, "),
    ],
    ids=lambda text: text[:20],
)
def test_ptx_that_the_machine_refuses_is_one_line(filled: Command, compiled: PlanFile, old: str, new: str) -> None:
    (filled.home / "bad.ptx").write_text(compiled.sections["ptx"].decode().replace(old, new, 1))
    line = filled.refused("verify", *QUICK, "--ptx", "bad.ptx", code=2)
    assert line.startswith("--ptx bad.ptx: its PTX cannot be executed (line ")
    assert len(line) < 700


def test_the_ptx_of_every_plan_is_read_before_the_first_run(
    monkeypatch: pytest.MonkeyPatch, compiled: PlanFile, tmp_path: Path
) -> None:
    """The plan that is refused is the last one."""
    last = changed(compiled, "elect.sync ", "frobnicate.b32 ", 1)
    monkeypatch.setattr(request, "chosen_plans", lambda *found: [compiled, last])
    monkeypatch.setattr(proof, "run", lambda *calls: pytest.fail("a run was started"))
    monkeypatch.setenv("DSA_PLAN_CACHE_DIR", str(tmp_path))
    with pytest.raises(errors.UnsupportedError, match=r"opcode frobnicate.b32 is not known"):
        main.verify(schedules="inorder", rows="2", cases="usual", seed="0")


def test_seeds_have_bounds(filled: Command) -> None:
    negative = filled.refused("verify", *QUICK, "--seed", "-1", code=2)
    assert negative.startswith("--seed '-1': it has to be a whole number of at least 0; give for example --seed 0")
    for seed in ("18446744073709551616", "-1"):
        line = filled.refused("verify", "--schedules", f"random:{seed}", code=2)
        assert f"schedule 'random:{seed}': it has to be inorder, random:SEED or late:SEED, SEED from 0 to 18" in line
    filled("verify", "--rows", "1", "--schedules", "random:18446744073709551615")


def test_no_plans_at_all_is_exit_code_3(command: Command) -> None:
    assert command.refused("verify", code=3).startswith("plans: there are none in")
