from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_planner import CompileError, compiler, envelope, toolchain
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.compiler import compile_plan
from dsa_planner.identity import compiler_options, plan_id_of
from dsa_planner.kernels import catalogue

ROOT = Path(catalogue.__file__).resolve().parents[1]


def test_the_plan_says_what_it_is_and_who_built_it(compiled: PlanFile, config: dict[str, object]) -> None:
    assert compiled.plan_id == plan_id_of(config)
    assert compiled.build_id == toolchain.installed().build_id
    assert compiled.config == config
    assert [kernel["name"] for kernel in compiled.manifest["kernels"]] == ["score_grad", "gradients", "round_d_index_k"]
    assert compiled.sections["ptx"].startswith(b"//")
    assert b".target sm_90a" in compiled.sections["ptx"]


def test_arch_is_always_given_to_the_compiler(compiled: PlanFile) -> None:
    options = "--gpu-arch sm_90a --opt-level 3 --keep-cubin --keep-ptx"
    assert compiler_options("sm_90a", {"opt-level": 3}) == options
    assert compiled.manifest["identity"]["options"] == options


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
    toolchain.installed()  # its id is that of the real worker
    monkeypatch.setattr(toolchain, "WORKER", path)


def answer() -> str:
    """The end of a worker that has CUBIN and PTX to give."""
    genuine = next(path for path in toolchain.installed().files if path.endswith("/cutlass/__init__.py"))
    return (
        'open("plan.cubin", "wb").write(CUBIN); open("plan.ptx", "w").write(PTX)\n'
        f"print(json.dumps({{'compiler': {genuine!r}}}))\n"
    )


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
        ("os.write(2, b'\\xff broken\\n'); raise SystemExit(3)", "failed with exit code 3: \ufffd broken"),
    ],
)
def test_a_failing_compiler_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object], text: str, message: str
) -> None:
    stand_in(monkeypatch, tmp_path, text)
    assert message in refused(config)


def with_sources(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, bytes]], object]) -> catalogue.Kernel:
    """Have the catalogue give another set of sources, for a kernel that the compiler will be asked for."""
    kernel = catalogue.load("indexer_backward_sm90")
    sources = dict(kernel.sources)
    change(sources)
    changed = dataclasses.replace(kernel, sources=sources, source_digest=catalogue.digest_sources(sources))
    monkeypatch.setattr(catalogue, "load", lambda name: changed)
    return changed


def test_a_source_that_the_plan_id_does_not_cover_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, object]
) -> None:
    with_sources(monkeypatch, lambda sources: sources.pop("score_grad.py"))
    assert "ModuleNotFoundError: No module named 'dsa_planner.kernels.score_grad'" in refused(config)
    for line in (b"from dsa_planner.kernels import catalogue\n", b"from dsa_planner import envelope\n"):
        monkeypatch.undo()
        with_sources(monkeypatch, lambda sources, line=line: sources.update({"score_grad.py": line}))
        assert "ImportError: cannot import name" in refused(config)


def test_what_is_compiled_is_what_the_plan_id_digests_whatever_the_files_have_become(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object], compiled: PlanFile
) -> None:
    """A long-lived process whose installation is replaced, and one that reaches its package by a relative path."""
    copy = tmp_path / "copy" / "dsa_planner"
    shutil.copytree(Path(catalogue.__file__).parents[1], copy, ignore=shutil.ignore_patterns("__pycache__"))
    script = (
        "import sys; sys.path.insert(0, 'copy'); from pathlib import Path\n"
        "from dsa_planner import envelope, compiler; from dsa_planner.kernels import catalogue\n"
        "assert str(Path(catalogue.__file__).resolve()).startswith(sys.argv[1])\n"
        "config = envelope.plan_config({'topk': 128, 'arch': 'sm_90a'}); compiler.identity_of(config)\n"
        "source = Path(catalogue.__file__).parent / 'score_grad.py'\n"
        "source.write_text(source.read_text().replace('- p[e] * total', '+ p[e] * total'))\n"
        "sys.stdout.buffer.write(compiler.compile_plan(config).plan.encode())"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=tmp_path, capture_output=True, check=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "+ p[e] * total" in (copy / "kernels" / "score_grad.py").read_text()
    assert out.stdout == compiled.encode()


def test_another_compiler_than_the_installed_one_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    """A folder of that name where Python looks first, as in the working folder of ``python -m``."""
    (genuine,) = [path for path in toolchain.installed().files if path.endswith("/cutlass/__init__.py")]
    shim = tmp_path / "cutlass" / "__init__.py"
    shim.parent.mkdir()
    shim.write_text(f"__path__.append({str(Path(genuine).parent)!r}); exec(open({genuine!r}).read())\n")
    script = (
        "import sys; sys.path.insert(0, ''); from dsa_planner import envelope, compiler\n"
        "compiler.compile_plan(envelope.plan_config({'topk': 128, 'arch': 'sm_90a'}))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert out.returncode == 1
    last = out.stderr.splitlines()[-1]
    assert f"plan default sm_90a topk=128: {shim} was imported as the compiler, which is not a file of" in last


def test_the_compiler_that_answers_must_be_the_one_that_the_build_id_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object]
) -> None:
    stand_in(monkeypatch, tmp_path, "print(json.dumps({'compiler': '/elsewhere/cutlass/__init__.py'}))")
    message = refused(config)
    assert (
        "/elsewhere/cutlass/__init__.py was imported as the compiler, which is not a file of the installed" in message
    )
    for text in ("print(7)", "print('{}')", "print('{\"compiler\": 7}')", "print('[' * 10**5)"):
        stand_in(monkeypatch, tmp_path, text)
        assert "the compiler answered" in refused(config)


def test_a_stop_ends_a_compilation_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object]
) -> None:
    """Also one that ignores every signal that can be ignored, or that is itself stopped."""
    for text in (
        "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]\n",
        "os.kill(os.getpid(), 19)\n",
    ):
        stand_in(monkeypatch, tmp_path, text + "time.sleep(600)")
        stop = threading.Event()
        threading.Timer(1.0, stop.set).start()
        started = time.monotonic()
        with pytest.raises(CompileError, match="it was stopped"):
            compile_plan(config, 60.0, stop)
        assert time.monotonic() - started < 10


def test_a_compiler_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, runpy, sys, time\nrequest = json.load(sys.stdin)\n"
        f"runpy.run_path({str(toolchain.WORKER)!r})['end_with'](request['parent'])\ntime.sleep(600)"
    )
    script = (
        "from pathlib import Path; from dsa_planner import envelope, compiler, toolchain\n"
        f"toolchain.installed(); toolchain.WORKER = Path({str(worker)!r})\n"
        "compiler.compile_plan(envelope.plan_config({'topk': 128, 'arch': 'sm_90a'}))"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment)

    def children() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if str(path.readlink()).startswith(str(tmp_path)) and "Z" not in (path.parent / "stat").read_text():
                    found.append(path.parent.name)
            except OSError:
                pass
        return found

    deadline = time.monotonic() + 60
    while not (begun := children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert begun
    time.sleep(0.5)  # until it has read its request
    parent.kill()
    parent.wait()
    for _ in range(200):
        if not children():
            return
        time.sleep(0.05)
    pytest.fail("the compiler outlives its parent")


def test_folders_that_killed_commands_left_are_removed_and_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object]
) -> None:
    temporary = tmp_path / "tmp"

    def folder(name: str, age: float = compiler.STALE_SECONDS + 60) -> Path:
        sources = temporary / name / "sources" / "dsa_planner" / "kernels"
        sources.mkdir(parents=True)
        (sources / "score_grad.py").touch()
        os.utime(temporary / name, (time.time() - age,) * 2)
        return temporary / name

    gone = [folder("dsa-plan-abcd_123"), folder("dsa-plan-00000000")]
    kept = [
        folder("dsa-plan-young_00", age=compiler.STALE_SECONDS - 60), folder("dsa-plan-of-mine"), folder("my-abcd1234"),
        folder("dsa-plan-abcd1234x"),
    ]  # fmt: skip
    notes = temporary / "dsa-plan-baseline"
    notes.mkdir()
    (notes / "results").touch()
    os.utime(notes, (1, 1))
    away = folder("away").rename(tmp_path / "away")
    link = temporary / "dsa-plan-link0000"
    link.symlink_to(away)
    os.utime(link, (1, 1), follow_symlinks=False)
    file = temporary / "dsa-plan-file0000"
    file.touch()
    os.utime(file, (1, 1))
    kept += [notes, away, link, file]
    if os.geteuid() == 0:
        kept.append(folder("dsa-plan-foreign0"))
        os.chown(kept[-1], 65534, 65534)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    stand_in(monkeypatch, tmp_path, "sys.exit('enough')")
    assert "enough" in refused(config)
    assert [path.name for path in gone if path.exists()] == []
    assert [path.name for path in kept if not path.exists()] == []
    assert len(list(temporary.iterdir())) == len(kept) - 1, "the one folder of this compilation is gone too"


def test_no_temporary_folder_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object]
) -> None:
    def full(*arguments: object, **keywords: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    assert "the compiler cannot be run ([Errno 28] No space left on device); free memory or disk" in refused(config)


def test_too_many_open_files_is_a_matter_of_the_limit(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, object]
) -> None:
    def too_many(*arguments: object, **keywords: object) -> None:
        raise OSError(24, "Too many open files")

    toolchain.verify()
    monkeypatch.setattr(subprocess, "Popen", too_many)
    message = "the compiler cannot be run ([Errno 24] Too many open files); raise the limit of open files (ulimit -n)"
    assert refused(config).endswith(message)


def test_two_kernels_for_one_entry_of_the_record_or_another_block_size_are_refused(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, object], compiled: PlanFile
) -> None:
    found = compiler.cubin_reader.inspect(compiled.cubin)
    first = found.kernels[0]
    for kernels, message in (
        ((*found.kernels, dataclasses.replace(first, symbol=first.symbol + "0")), "kernels ["),
        ((dataclasses.replace(first, block=64), *found.kernels[1:]), "for 64 threads, not "),
    ):
        changed = dataclasses.replace(found, kernels=kernels)
        monkeypatch.setattr(compiler.cubin_reader, "inspect", lambda data, changed=changed: changed)
        assert message in refused(config)


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
        stand_in(monkeypatch, tmp_path, load + answer())
        text = refused(config)
        assert "returned something else than the plan" in text
        assert any(part in text for part in message.split("|")), text


def test_a_kernel_with_other_parameters_than_the_record_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object], compiled: PlanFile
) -> None:
    (tmp_path / "c").write_bytes(compiled.cubin)
    (tmp_path / "p").write_bytes(compiled.sections["ptx"])
    load = f"CUBIN = open({str(tmp_path / 'c')!r}, 'rb').read()\nPTX = open({str(tmp_path / 'p')!r}).read()\n"
    stand_in(monkeypatch, tmp_path, load + answer())
    assert compile_plan(config).plan == compiled
    monkeypatch.setitem(compiler.PARAMETER_BYTES, "int32", 8)
    assert "kernel score_grad with parameters of [8, 8, 8, 8, 4, 4, 4] bytes" in refused(config)


def test_the_environment_of_a_compilation_is_private(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, object]
) -> None:
    for name in ("CUTE_DSL_LINEINFO", "CUTLASS_X", "NVVM_X", "MLIR_X", "LLVM_X", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, "17")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    stand_in(
        monkeypatch,
        tmp_path,
        "prefixes = ('CUTE_', 'CUTLASS_', 'NVVM_', 'MLIR_', 'LLVM_', 'PYTHONHASHSEED')\n"
        "names = {n: v for n, v in os.environ.items() if n.startswith(prefixes)}\n"
        "here = os.getcwd(); assert names.pop('CUTE_DSL_DUMP_DIR') == here == names.pop('CUTE_DSL_CACHE_DIR')\n"
        "assert os.environ['HOME'] == here == os.environ['TMPDIR'] and os.listdir(here) == ['sources']\n"
        "assert sys.dont_write_bytecode and all(os.path.isabs(path) for path in request['sys_path'])\n"
        "sys.exit(str(sorted(names.items())))\n",
    )
    expected = [("CUTE_DSL_ARCH", "sm_90a"), ("CUTE_DSL_DISABLE_FILE_CACHING", "1"), ("PYTHONHASHSEED", "0")]
    assert str(expected) in refused(config)
