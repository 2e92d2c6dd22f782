from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dsa_planner import CompileError, compiler, envelope, toolchain
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.compiler import compile_plan, compiler_options
from dsa_planner.identity import plan_id_of
from dsa_planner.kernels import catalogue

ROOT = Path(catalogue.__file__).resolve().parents[1]


def test_the_plan_says_what_it_is_and_who_built_it(compiled: PlanFile, config: dict[str, object]) -> None:
    assert compiled.plan_id == plan_id_of(config)
    assert compiled.build_id == toolchain.installed().build_id
    assert compiled.config == config
    assert [kernel["name"] for kernel in compiled.manifest["kernels"]] == ["score_grad", "gradients", "round_d_index_k"]
    assert compiled.sections["ptx"].startswith(b"//")
    assert b".target sm_90a" in compiled.sections["ptx"]


def test_arch_is_always_given_to_the_compiler() -> None:
    assert compiler_options("sm_90a", {"opt-level": 3}) == "--gpu-arch sm_90a --opt-level 3 --keep-cubin --keep-ptx"


def test_building_again_elsewhere_gives_the_same_bytes(
    compiled: PlanFile, config: dict[str, object], tmp_path: Path
) -> None:
    """Another process, folder, hash seed, home and order, with compiler settings of the user in the environment."""
    script = (
        "import sys; from dsa_planner import envelope; from dsa_planner.compiler import compile_plan\n"
        "for topk in (256, 128): plan = compile_plan(envelope.plan_config({'topk': topk, 'arch': 'sm_90a'})).plan\n"
        "sys.stdout.buffer.write(plan.encode())"
    )
    other = tmp_path / "another folder"
    other.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "7",
        "HOME": "/nonexistent",
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_KEEP": "all",
        "CUTE_DSL_ARCH": "sm_100a",
        "CUTE_DSL_DUMP_DIR": str(other),
        "CUTE_DSL_COMPILER_OPT": "warnings",
    }
    out = subprocess.run([sys.executable, "-c", script], env=environment, cwd=other, capture_output=True, check=True)
    assert out.stdout == compiled.encode()
    assert list(other.iterdir()) == [], "the compiler left files behind"


def test_compilations_side_by_side_do_not_mix(compiled: PlanFile) -> None:
    """Kernels of one signature get one dump name from the compiler, so a shared directory would hand out wrong cubins."""
    plans: dict[int, PlanFile] = {}

    def build(topk: int) -> None:
        plans[topk] = compile_plan(envelope.plan_config({"arch": "sm_90a", "topk": topk})).plan

    threads = [threading.Thread(target=build, args=(topk,)) for topk in (128, 256, 384)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert plans[128].encode() == compiled.encode()
    assert len({plan.cubin for plan in plans.values()}) == 3
    for topk, plan in plans.items():
        assert plan.config["topk"] == topk


def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    """Put another worker in the place of the real one."""
    path = tmp_path / "worker.py"
    path.write_text("import json, os, sys, time\nrequest = json.load(sys.stdin)\n" + text)
    monkeypatch.setattr(compiler, "_WORKER", path)


GOOD = 'open("plan.cubin", "wb").write(CUBIN); open("plan.ptx", "w").write(PTX); print(json.dumps({"sources": []}))\n'


def refused(config: dict[str, object], timeout: float = 60.0) -> str:
    with pytest.raises(CompileError) as error:
        compile_plan(config, timeout)
    assert str(error.value).startswith("plan default sm_90a topk=128: ")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_hanging_compiler_is_ended_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object]
) -> None:
    pid_file = tmp_path / "pid"
    stand_in(
        monkeypatch,
        tmp_path,
        "import subprocess; child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); time.sleep(600)\n",
    )
    started = time.monotonic()
    assert "took longer than 2 seconds; raise --timeout" in refused(config, timeout=2.0)
    assert time.monotonic() - started < 20
    state = Path(f"/proc/{pid_file.read_text()}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the compiler's child is still running")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("os.abort()", "the compiler was ended by signal SIGABRT"),
        ("os.kill(os.getpid(), 11)", "the compiler was ended by signal SIGSEGV"),
        ("raise SystemExit(3)", "the compiler failed with exit code 3"),
        ("raise ValueError('no such thing')", "exit code 1: ValueError: no such thing"),
        ("print('hello')", "the compiler answered 'hello"),
    ],
)
def test_a_failing_compiler_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object], text: str, message: str
) -> None:
    stand_in(monkeypatch, tmp_path, text)
    assert message in refused(config)


def test_a_source_that_the_plan_id_does_not_cover_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object]
) -> None:
    stand_in(monkeypatch, tmp_path, 'print(json.dumps({"sources": ["score_grad.py", "stray.py"]}))')
    assert "the compilation read stray.py, which indexer_backward_default_sm90.json does not list" in refused(config)


def test_what_comes_back_must_be_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object], compiled: PlanFile
) -> None:
    cubin, ptx = compiled.cubin, compiled.sections["ptx"].decode()
    flags_at = 48  # e_flags of an ELF64 header; its low byte is the SM number
    wrong = [
        (b"", ptx, "not a readable cubin"),
        (Path(sys.executable).read_bytes()[:100000], ptx, "cubin|CUDA"),
        (cubin[:flags_at] + b"\x64" + cubin[flags_at + 1 :], ptx, "a cubin for sm_100a, not for sm_90a"),
        (cubin[: flags_at + 1] + b"\x05" + cubin[flags_at + 2 :], ptx, "a cubin for sm_90, not for sm_90a"),
        (cubin, ptx.replace("sm_90a", "sm_90"), "PTX for another target than sm_90a"),
        (cubin.replace(b"dsa_gradients_1", b"dsa_gradientz_1"), ptx, "kernels "),
    ]
    for number, (bad_cubin, bad_ptx, message) in enumerate(wrong):
        (tmp_path / f"{number}.cubin").write_bytes(bad_cubin)
        (tmp_path / f"{number}.ptx").write_text(bad_ptx)
        load = f"CUBIN = open({str(tmp_path / f'{number}.cubin')!r}, 'rb').read()\n"
        load += f"PTX = open({str(tmp_path / f'{number}.ptx')!r}).read()\n"
        stand_in(monkeypatch, tmp_path, load + GOOD)
        text = refused(config)
        assert "returned something else than the plan" in text
        assert any(part in text for part in message.split("|")), text


def test_a_kernel_with_other_parameters_than_the_record_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object], compiled: PlanFile
) -> None:
    (tmp_path / "c").write_bytes(compiled.cubin)
    (tmp_path / "p").write_bytes(compiled.sections["ptx"])
    load = f"CUBIN = open({str(tmp_path / 'c')!r}, 'rb').read()\nPTX = open({str(tmp_path / 'p')!r}).read()\n"
    stand_in(monkeypatch, tmp_path, load + GOOD)
    assert compile_plan(config).plan == compiled
    monkeypatch.setitem(compiler.PARAMETER_BYTES, "int32", 8)
    assert "kernel score_grad with parameters of [8, 8, 8, 8, 4, 4, 4] bytes" in refused(config)


def test_the_environment_of_a_compilation_is_private(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object]
) -> None:
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    stand_in(
        monkeypatch,
        tmp_path,
        "names = {n: v for n, v in os.environ.items() if n.startswith('CUTE_')}\n"
        "here = os.getcwd(); assert names.pop('CUTE_DSL_DUMP_DIR') == here == names.pop('CUTE_DSL_CACHE_DIR')\n"
        "assert os.environ['HOME'] == here and os.listdir(here) == []\n"
        "sys.exit(str(sorted(names.items())))\n",
    )
    assert "[('CUTE_DSL_ARCH', 'sm_90a'), ('CUTE_DSL_DISABLE_FILE_CACHING', '1')]" in refused(config)
