"""The command as a user runs it: a process, its two streams and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, Command

import dsa_planner
from dsa_planner import envelope
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.writable import WritableLayer


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.fixture
def filled(command: Command, compiled: PlanFile) -> Command:
    """The command with a layer that holds the plan for topk 128."""
    WritableLayer(command.layer, 1 << 30).publish(compiled)
    return command


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_precompile_builds_and_then_hits(command: Command) -> None:
    first = command("precompile", "--topk", "128,256", "--backend", "default", "--arch", "sm_90a")
    header, *plans, summary = rows(first.stdout)
    assert header == [
        "plan",
        "backend",
        "arch",
        "topk",
        "d_weights",
        "registers",
        "spills",
        "shared",
        "bytes",
        "seconds",
        "status",
    ]
    assert [row[1:5] + row[6:8] + [row[10]] for row in plans] == [
        ["default", "sm_90a", "128", "bf16", "0", "233472", "built"],
        ["default", "sm_90a", "256", "bf16", "0", "233472", "built"],
    ]
    assert summary == ["2", "built;", "layer", str(command.layer)]
    assert first.stderr == ""
    before = {path: path.read_bytes() for path in command.layer.rglob("*.dsaplan")}
    assert len(before) == 2
    second = command("precompile", "--topk", "128,256", "--backend", "default", "--arch", "sm_90a")
    assert [row[10] for row in rows(second.stdout)[1:3]] == ["hit", "hit"]
    assert {path: path.read_bytes() for path in command.layer.rglob("*.dsaplan")} == before


def test_precompile_without_arch_and_backend_covers_every_row_and_names_what_it_leaves_out(filled: Command) -> None:
    out = filled("precompile", "--topk", "128", "--dry-run")
    found = {tuple(row[1:3]): " ".join(row[10:]) for row in rows(out.stdout)[1:-1]}
    assert found == {
        (row.backend, row.arch): f"only with --arch {row.arch}"
        if not row.preferred
        else "hit"
        if (row.backend, row.arch) == ("default", "sm_90a")
        else "missing"
        for row in envelope.ENVELOPE
    }
    left_out = sum(not row.preferred for row in envelope.ENVELOPE)
    assert f"1 hit, 5 missing, {left_out} not available" in out.stdout


def test_precompile_json(filled: Command) -> None:
    found = json.loads(filled("precompile", "--topk", "128", "--backend", "default", "--json", "--dry-run").stdout)
    plan, other = found["plans"]
    assert (other["status"], other["config"]["arch"]) == ("missing", "sm_100f")
    assert plan["status"] == "hit"
    assert plan["config"] == envelope.plan_config({"arch": "sm_90a", "topk": 128})
    assert plan["layer"] == str(filled.layer)
    assert [kernel["name"] for kernel in plan["kernels"]] == ["score_grad", "gradients", "round_d_index_k"]
    assert {kernel["spill_store_bytes"] for kernel in plan["kernels"]} == {0}
    assert found["counts"] == {"hit": 1, "built": 0, "missing": 1, "failed": 0}
    assert {row["reason"] for row in found["not_available"]} == {"only with --arch sm_100a"}


def test_precompile_dry_run_compiles_nothing(command: Command) -> None:
    out = command("precompile", "--topk", "all", "--dry-run")
    assert len([row for row in rows(out.stdout) if row[-1] == "missing"]) == 6 * 16
    assert not command.layer.exists()


REFUSED: list[tuple[list[str], str]] = [
    (
        ["--topk", "1000"],
        "topk=1000: backend default for sm_90a takes topk a multiple of 128 from 128 to 2048; nearest is 1024",
    ),
    (
        ["--topk", "0"],
        "topk=0: backend default for sm_90a takes topk a multiple of 128 from 128 to 2048; nearest is 128",
    ),
    (["--topk", "64"], "topk=64: backend default for sm_90a takes topk"),
    (
        ["--topk", "4096"],
        "topk=4096: backend default for sm_90a takes topk a multiple of 128 from 128 to 2048; nearest is 2048",
    ),
    (["--topk", "128,1000"], "topk=1000: "),
    (
        ["--topk", "128,x"],
        "--topk 'x': it has to be a whole number; give for example --topk 1024",
    ),
    (
        ["--topk", "128,,256"],
        "--topk '128,,256': it has to be a list separated by commas, without empty entries; remove the extra comma",
    ),
    (["--topk", ""], "--topk '': it has to be a list"),
    (["--topk", "-128"], "topk=-128: backend default for sm_90a takes topk"),
    (["--topk", "9" * 5000], "--topk '" + "9" * 116 + "...: it has to be a whole number of at most 9 digits; "),
    (["--topk", "99999999999"], "--topk '99999999999': it has to be a whole number of at most 9 digits; give for"),
    (["--topk", "all,128"], "--topk 'all,128': 'all' means every topk, so it stands alone; give --topk all, or"),
    (
        ["--topk", "128", "--jobs", "9999999999"],
        "--jobs '9999999999': it has to be a whole number of at least 1 and at",
    ),
    (["--topk", "128", "--arch", ""], "--arch '': it has to be a list separated by commas, without empty entries"),
    (["--topk", "128", "--backend", ""], "--backend '': it has to be a list separated by commas, without empty"),
    (["--topk", "128", "--d-weights", ""], "--d-weights '': it has to be a list separated by commas, without empty"),
    (["--topk", "\u0661"], "--topk '\u0661': it has to be a whole number"),
    (
        ["--topk", "128", "--jobs", "0"],
        "--jobs '0': it has to be a whole number of at least 1; give for example --jobs 4",
    ),
    (["--topk", "128", "--timeout", "x"], "--timeout 'x': it has to be a whole number of at least 1"),
    (["--topk", "128", "--heads", "64.0"], "--heads '64.0': it has to be a whole number"),
    (["--topk", "128", "--backend", "fast"], "backend='fast': it is not a backend; nearest is default"),
    (
        ["--topk", "128", "--arch", "sm_80"],
        "arch='sm_80': it is not an arch; nearest is sm_90a (there are sm_90a, sm_100f",
    ),
    (["--topk", "128", "--arch", "sm_90a,"], "--arch 'sm_90a,': it has to be a list"),
    (["--topk", "128", "--d-weights", "fp16"], "d_weights='fp16': backend default for sm_90a takes d_weights bf16"),
    (["--topk", "128", "--heads", "16"], "heads=16: backend default for sm_90a takes heads 64 or 32; nearest is 32"),
    (
        ["--topk", "128", "--heads", "32", "--backend", "sm100_v2"],
        "heads=32: backend sm100_v2 for sm_100f takes heads 64; nearest is 64",
    ),
    (["--topk", "128", "--backend", "default", "--deterministic"], "deterministic=True: backend default for sm_90a"),
    (
        ["--topk", "128", "--backend", "sm90_v2", "--heads", "32"],
        "heads=32: backend sm90_v2 for sm_90a takes heads 64; nearest is 64",
    ),
    (["--topk", "128", "--backend", "default,sm90_v2", "--heads", "32"], "heads=32: backend sm90_v2 for sm_90a takes"),
    (
        ["--topk", "128", "--backend", "sm90_v2", "--arch", "sm_100f"],
        "--backend sm90_v2 --arch sm_100f: the envelope has no",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(a)[:40] for a, _ in REFUSED])
def test_precompile_refuses_in_one_line_and_does_nothing(command: Command, arguments: list[str], message: str) -> None:
    assert command.refused("precompile", *arguments, code=2).startswith(message)
    assert not command.layer.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["precompile"], "Missing option '--topk'; see dsa-plan precompile --help"),
        (["precompile", "--topk"], "Option '--topk' requires an argument; see dsa-plan"),
        (["precompile", "--topk", "128", "--colour"], "No such option: --colour; see dsa-plan precompile --help"),
        (["precompile", "--topk", "128", "128"], "Got unexpected extra argument"),
        (["compile"], "No such command 'compile'"),
        (["show"], "Missing argument '"),
        (["show", ""], "plan '': it needs one digit of an id at least; give digits that dsa-plan list shows"),
        (["show", "0", "--build", ""], "--build '': it needs one digit of an id at least; give digits that dsa-plan"),
        (["show", "0", "--extract", "cubin", "--json"], "--extract cubin --json: a section is not JSON"),
        (["show", "0", "-o", "x"], "--output x: only --extract writes a file"),
        (["explain", "--heads", "64"], "explain without --topk: a request needs a topk"),
        (["explain", "--arch", ""], "--arch '': it has to be a list separated by commas, without empty entries"),
        (["explain", "--backend", ""], "--backend '': it has to be a list separated by commas, without empty"),
        (["explain", "--d-weights", ""], "--d-weights '': it has to be a list separated by commas, without empty"),
        (["explain", "--topk", "128", "--arch", ""], "--arch '': it has to be a list separated by commas, without"),
        (["explain", "--topk", ""], "--topk '': it has to be a whole number"),
        (["explain", "--topk", "x"], "--topk 'x': it has to be a whole number"),
        (["explain", "--topk", "128", "--backend", "fast"], "backend='fast': it is not a backend"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_are_one_line_and_exit_code_2(command: Command, arguments: list[str], message: str) -> None:
    line = command.refused(*arguments, code=2).replace("python -m dsa_planner.cli.main", "dsa-plan")
    assert line.startswith(message)


def test_a_bare_command_prints_its_help(command: Command) -> None:
    assert "Commands:" in command(code=2).stderr


def test_version(command: Command) -> None:
    assert command("--version").stdout == f"dsa-plan {dsa_planner.__version__}\n"


def without(tmp_path: Path, package: str, module: str) -> str:
    """A PYTHONPATH on which a package is not installed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m; every = m.distributions\n"
        f"m.distributions = lambda **k: [d for d in every(**k) if {package!r} not in (d.metadata['Name'] or '')]\n"
        "from importlib.machinery import PathFinder; find = PathFinder.find_spec\n"
        f"PathFinder.find_spec = lambda n, *a, **k: None if n.partition('.')[0] == {module!r} else find(n, *a, **k)\n"
    )
    return f"{ROOT}:{tmp_path}"


@pytest.mark.parametrize(("package", "module"), [("nvidia-cutlass-dsl", "cutlass"), ("pyelftools", "elftools")])
def test_no_compiler_is_exit_code_4(filled: Command, tmp_path: Path, package: str, module: str) -> None:
    absent = without(tmp_path, package, module)
    line = filled.refused("precompile", "--topk", "128", code=4, PYTHONPATH=absent)
    assert (
        line
        == f"package {package}: compiling a plan needs it and it is not installed; pip install 'dsa-planner[compile]'"
    )
    assert "1 plan" in filled("list", PYTHONPATH=absent).stdout
    (plan,) = json.loads(filled("list", "--json", PYTHONPATH=absent).stdout)
    assert plan["plan_id"] in filled("show", plan["plan_id"], PYTHONPATH=absent).stdout
    assert "supported: " in filled("explain", "--topk", "128", PYTHONPATH=absent).stdout


def test_layers_that_cannot_be_written_are_exit_code_5(command: Command) -> None:
    (command.home / "file").touch()
    for place in (command.home / "file", command.home / "file" / "below", Path("/proc/none")):
        line = command.refused("precompile", "--topk", "128", code=5, DSA_PLAN_CACHE_DIR=str(place))
        assert line.startswith(f"cannot write {place}")
        assert "set DSA_PLAN_CACHE_DIR to " in line
    line = command.refused("precompile", "--topk", "128", code=5, DSA_PLAN_CACHE_DIR="none")
    assert line.startswith("no writable layer: ")


def test_a_full_cache_folder_is_exit_code_5_and_nothing_is_half_written(command: Command) -> None:
    command.layer.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k,mode=700", "none", str(command.layer)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        out = command("precompile", "--topk", "128", code=5)
        assert "No space left on device; free some space or set DSA_PLAN_CACHE_DIR to another folder" in out.stderr
        assert rows(out.stdout)[1][-1] == "failed"
        assert list(command.layer.rglob("*.dsaplan")) == []
        assert list((command.layer / "tmp").iterdir()) == []
    finally:
        subprocess.run(["umount", str(command.layer)], check=True)


def test_home_unset_works_or_is_one_line(command: Command, compiled: PlanFile) -> None:
    del command.environment["HOME"], command.environment["DSA_PLAN_CACHE_DIR"]
    out = command("list")
    assert "plans in " in out.stdout
    image = command.home / "image"
    WritableLayer(image, 1 << 30).publish(compiled)
    hopper = ("--topk", "128", "--arch", "sm_90a", "--backend", "default")
    out = command("precompile", *hopper, DSA_PLAN_PATH=str(image), DSA_PLAN_CACHE_DIR="none")
    assert "1 hit" in out.stdout


def test_list_shows_every_layer_and_what_is_wrong(filled: Command, compiled: PlanFile) -> None:
    image = filled.home / "image"
    WritableLayer(image, 1 << 30).publish(compiled)
    path = next(image.rglob("*.dsaplan"))
    path.write_bytes(path.read_bytes()[:-1])
    out = filled("list", code=5, DSA_PLAN_PATH=f"{image}:{filled.home / 'missing'}")
    header, damaged, good, *_ = out.stdout.splitlines()
    assert header.split() == [
        "plan",
        "build",
        "backend",
        "arch",
        "topk",
        "d_weights",
        "bytes",
        "used",
        "layer",
        "state",
    ]
    assert "its digest does not match its content" in damaged
    assert good.split()[2:6] == ["default", "sm_90a", "128", "bf16"]
    assert good.rstrip().endswith("intact")
    assert f"1 plan, 1 damaged in {image}, {filled.home / 'missing'}, {filled.layer}" in out.stdout
    found = json.loads(filled("list", "--json", code=5, DSA_PLAN_PATH=str(image)).stdout)
    assert [(row["layer"], row["writable"]) for row in found] == [(str(image), False), (str(filled.layer), True)]
    assert found[0]["problem"]
    assert found[1]["config"]["topk"] == 128


def test_a_file_in_the_place_of_a_plans_folder_is_exit_code_5_and_precompile_builds_the_plan(
    filled: Command, compiled: PlanFile
) -> None:
    folder = next(filled.layer.rglob("*.dsaplan")).parent
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.touch()
    out = filled("list", code=5)
    assert out.stderr == f"dsa-plan: {folder}: it is not a folder; skipped\n"
    assert folder.is_file()
    out = filled("precompile", "--topk", "128", "--backend", "default", "--arch", "sm_90a")
    assert "1 built" in out.stdout
    assert "1 plan " in filled("list").stdout


def test_list_does_not_count_as_use(filled: Command) -> None:
    path = next(filled.layer.rglob("*.dsaplan"))
    os.utime(path, (1, 1))
    filled("list")
    assert path.stat().st_mtime == 1


def test_show_by_prefix(filled: Command, compiled: PlanFile) -> None:
    text = filled("show", compiled.plan_id[:6]).stdout
    for part in (compiled.plan_id, compiled.build_id, "nvidia-cutlass-dsl ", "dsa_gradients_1", "232448"):
        assert part in text
    found = json.loads(filled("show", compiled.plan_id, "--json").stdout)
    assert found["manifest"] == json.loads(json.dumps(dict(compiled.manifest)))


def test_show_extracts_sections(filled: Command, compiled: PlanFile) -> None:
    assert filled("show", compiled.plan_id, "--extract", "ptx").stdout.encode() == compiled.sections["ptx"]
    target = filled.home / "plan.cubin"
    assert filled("show", compiled.plan_id, "--extract", "cubin", "-o", str(target)).stdout == ""
    assert target.read_bytes() == compiled.cubin
    line = filled.refused("show", compiled.plan_id, "--extract", "sass", code=2)
    assert line == "--extract sass: this plan has the sections cubin and ptx; name one of them"
    for bad, reason in (("/proc/none", ""), (".", "Is a directory"), ("missing/x", "No such file or directory")):
        line = filled.refused("show", compiled.plan_id, "--extract", "cubin", "-o", bad, code=5)
        assert line.startswith(f"cannot write {bad}: {reason}")
    assert sorted(path.name for path in filled.home.iterdir()) == ["layer", "plan.cubin"]


def test_extracting_to_a_full_disk_leaves_what_was_there(filled: Command, compiled: PlanFile) -> None:
    full = filled.home / "full"
    full.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(full)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        (full / "old.ptx").write_text("old")
        for name in ("old.ptx", "new.ptx"):
            line = filled.refused("show", compiled.plan_id, "--extract", "ptx", "-o", f"full/{name}", code=5)
            assert line == f"cannot write full/{name}: No space left on device; choose another --output"
        assert {path.name: path.read_text() for path in full.iterdir()} == {"old.ptx": "old"}
    finally:
        subprocess.run(["umount", str(full)], check=True)


def test_extracting_follows_a_link_and_never_replaces_a_pipe(filled: Command, compiled: PlanFile) -> None:
    (filled.home / "real").mkdir()
    (filled.home / "link").symlink_to("real/plan.ptx")
    os.mkfifo(filled.home / "pipe")
    filled("show", compiled.plan_id, "--extract", "ptx", "-o", "link")
    assert (filled.home / "link").is_symlink()
    assert (filled.home / "real" / "plan.ptx").read_bytes() == compiled.sections["ptx"]
    with subprocess.Popen(["cat", "pipe"], cwd=filled.home, stdout=subprocess.PIPE) as reader:
        filled("show", compiled.plan_id, "--extract", "ptx", "-o", "pipe")
        assert reader.communicate()[0] == compiled.sections["ptx"]
    assert (filled.home / "pipe").is_fifo()


def test_show_of_no_plan_is_exit_code_3(filled: Command) -> None:
    for prefix in ("ffff", "zz", "../x", "/"):
        assert filled.refused("show", prefix, code=3).startswith(f"plan {prefix!r}: no intact plan in {filled.layer}")


def test_show_of_an_ambiguous_prefix(filled: Command) -> None:
    from small_plans import small_plan

    for number in range(40):
        WritableLayer(filled.layer, 1 << 30).publish(small_plan(number))
    digits = [row["plan_id"][0] for row in json.loads(filled("list", "--json").stdout)]
    often = max(digits, key=digits.count)  # 41 ids begin with 16 digits
    line = filled.refused("show", often, code=3)
    assert f"{digits.count(often)} plans begin so" in line
    assert line.endswith("give more digits")


def test_show_of_a_damaged_plan_is_one_line_and_exit_code_5(filled: Command, compiled: PlanFile) -> None:
    path = next(filled.layer.rglob("*.dsaplan"))
    whole = path.read_bytes()
    remedy = "mend or delete it, and dsa-plan precompile builds the plan again"
    other = compiled.plan_id[:-1] + ("0" if compiled.plan_id[-1] != "0" else "1")
    misnamed = path.parent.with_name(other) / path.name
    for how in ("damaged", "misnamed", "not a folder"):
        if how == "damaged":
            path.write_bytes(whole[:-1])
            place, plan, reason = path, compiled.plan_id, "its digest does not match its content, so it is damaged"
        elif how == "misnamed":
            path.write_bytes(whole)
            path.parent.rename(misnamed.parent)
            place, plan = misnamed, other
            reason = f"it holds plan {compiled.plan_id}, not plan {other} as its name says"
        else:
            misnamed.parent.rename(filled.home / "away")
            misnamed.parent.touch()
            place, plan, reason = misnamed.parent, other, "it is not a folder"
        for arguments in (["show", plan], ["show", plan.upper(), "--extract", "ptx"]):
            line = filled.refused(*arguments, code=5)
            assert line == f"plan {arguments[1]!r}: {place} cannot be used ({reason}); {remedy}"
    filled("precompile", "--topk", "128", "--backend", "default", "--arch", "sm_90a")
    assert compiled.plan_id in filled("show", compiled.plan_id).stdout


def test_show_warns_of_what_is_damaged_elsewhere(filled: Command, compiled: PlanFile) -> None:
    image = filled.home / "image"
    WritableLayer(image, 1 << 30).publish(compiled)
    path = next(image.rglob("*.dsaplan"))
    path.write_bytes(b"")
    out = filled("show", compiled.plan_id, DSA_PLAN_PATH=str(image))
    assert compiled.plan_id in out.stdout
    assert out.stderr == f"dsa-plan: {path}: it has 0 bytes, too few for a plan file; skipped\n"
    line = filled.refused(
        "show", compiled.plan_id, "--build", compiled.build_id[:4],
        code=5, DSA_PLAN_PATH=str(image), DSA_PLAN_CACHE_DIR="none",
    )  # fmt: skip
    assert line.startswith(f"plan {compiled.plan_id!r} of build {compiled.build_id[:4]!r}: {path} cannot be used (it ")


def test_show_of_nothing_in_a_missing_layer_is_one_warning_and_one_error(command: Command) -> None:
    missing = command.home / "missing"
    warning, error = command("show", "ffff", code=3, DSA_PLAN_PATH=str(missing)).stderr.splitlines()
    assert warning == f"dsa-plan: {missing}: there is no such folder; skipped"
    assert error.startswith("dsa-plan: plan 'ffff': no intact plan in ")
    line = command.refused("show", "ffff", code=3, DSA_PLAN_CACHE_DIR="none")
    assert line == "plan 'ffff': there is no layer to look in; set DSA_PLAN_PATH or DSA_PLAN_CACHE_DIR"


def test_explain_prints_the_whole_envelope(command: Command) -> None:
    text = command("explain").stdout
    assert len(text.splitlines()) == 1 + len(envelope.ENVELOPE)
    assert json.loads(command("explain", "--json").stdout) == envelope.table()


def test_explain_says_whether_a_request_is_supported_and_compiled(filled: Command, compiled: PlanFile) -> None:
    out = filled("explain", "--topk", "128", "--backend", "default", "--arch", "sm_90a")
    assert out.stdout.startswith("supported: operator=indexer_backward backend=default arch=sm_90a ")
    assert f"plan {compiled.plan_id}; in {filled.layer}" in out.stdout
    out = filled("explain", "--topk", "256")
    lines = out.stdout.splitlines()
    assert lines[0].endswith("not compiled yet")
    assert [line.partition(":")[0] for line in lines] == [
        "supported" for name in envelope.backends() for row in envelope.rows_for(name)
    ]


def test_explain_of_a_refused_request_names_the_nearest(command: Command) -> None:
    out = command("explain", "--topk", "1000", "--backend", "default", "--arch", "sm_90a", code=2)
    reason = "topk=1000: backend default for sm_90a takes topk a multiple of 128 from 128 to 2048; nearest is 1024"
    assert out.stdout == f"refused: {reason}\n"
    assert out.stderr == f"dsa-plan: {reason}\n"
    found = json.loads(command("explain", "--topk", "1000", "--backend", "default", "--json", code=2).stdout)
    assert reason in {row["refused"] for row in found}
    assert {row["plan_id"] for row in found} == {None}


def test_version_of_settings_is_checked(command: Command) -> None:
    line = command.refused("precompile", "--topk", "128", code=2, DSA_PLAN_CACHE_BYTES="1G")
    assert line.startswith("DSA_PLAN_CACHE_BYTES='1G': it has to be a number of bytes")


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['dsa-plan', '--help']\n"
        "from dsa_planner.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.stderr.write(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=True
    )
    assert "precompile" in out.stdout
    assert not {"pydantic", "diskcache", "cutlass", "cuda", "torch", "elftools", "numpy"} & set(out.stderr.split())


@pytest.mark.parametrize(
    "command_line", [["list"], ["explain"], ["--help"], ["explain", "--topk", "1000"]], ids=" ".join
)
def test_a_reader_that_has_gone_away_is_no_error_of_the_command(filled: Command, command_line: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "dsa_planner.cli.main", *command_line],
        env=filled.environment, cwd=filled.home, stdout=writer, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(writer)
    assert process.returncode == 1
    assert process.stderr == "" or process.stderr.startswith("dsa-plan: topk=1000: ")
    assert len(process.stderr.splitlines()) <= 1


def test_an_answer_that_cannot_be_written_is_one_line(filled: Command) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "dsa_planner.cli.main", "explain"],
            env=filled.environment, cwd=filled.home, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert process.returncode == 1
    assert (
        process.stderr
        == "dsa-plan: cannot use standard output: No space left on device; mend that, or name another place\n"
    )


def test_closed_standard_streams_are_no_error(filled: Command) -> None:
    line = f"{sys.executable} -m dsa_planner.cli.main list >&- 2>&-"
    process = subprocess.run(line, shell=True, env=filled.environment, cwd=filled.home)
    assert process.returncode == 0


def test_a_child_that_dies_before_it_reads_is_a_failed_compilation(command: Command, tmp_path: Path) -> None:
    """Its request is larger than a pipe holds, so that writing it meets a broken pipe."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'compile_worker' in ' '.join(sys.orig_argv): os._exit(3)\n"
    )
    long = ":".join(f"/{'x' * 200}/{number}" for number in range(500))
    path = f"{ROOT}:{tmp_path}:{long}"
    out = command("precompile", "--topk", "128", "--backend", "default", "--arch", "sm_90a", code=1, PYTHONPATH=path)
    assert rows(out.stdout)[1][-1] == "failed"
    assert "the compiler failed with exit code 3: no message; mend what it names, or report it" in out.stderr


@pytest.mark.parametrize("name", ["[/x]", "a[b]:smile:", "[bold]x", "é", "\udcff"])
def test_any_name_of_a_layer_is_printed_as_it_is(command: Command, compiled: PlanFile, name: str) -> None:
    root = command.home / name / "layer"
    WritableLayer(root, 1 << 30).publish(compiled)
    for encoding in ("utf-8", "ascii"):
        out = command("list", DSA_PLAN_CACHE_DIR=str(root), PYTHONIOENCODING=encoding)
        shown = str(root).encode(encoding, "backslashreplace").decode(encoding)
        assert shown in out.stdout
        command("show", compiled.plan_id, DSA_PLAN_CACHE_DIR=str(root), PYTHONIOENCODING=encoding)
        command("precompile", "--topk", "128", DSA_PLAN_CACHE_DIR=str(root), PYTHONIOENCODING=encoding)


def test_a_layer_with_a_line_break_in_its_name_is_refused_in_one_line(command: Command) -> None:
    (command.home / "a\nb").touch()
    line = command.refused("precompile", "--topk", "128", code=5, DSA_PLAN_CACHE_DIR=str(command.home / "a\nb"))
    assert "a\\nb" in line


@pytest.mark.parametrize("place", ["x" * 300, "missing", "file"])
def test_a_layer_that_cannot_be_read_is_named_and_exit_code_5(filled: Command, place: str) -> None:
    (filled.home / "file").touch()
    path = str(filled.home / place)
    out = filled("list", code=5, DSA_PLAN_PATH=path)
    assert out.stderr.startswith(f"dsa-plan: {path}")
    assert "1 plan" in out.stdout
    assert "1 hit" in filled("precompile", "--topk", "128", DSA_PLAN_PATH=path).stdout


def test_precompile_never_says_that_it_holds_what_it_does_not(command: Command, compiled: PlanFile) -> None:
    size = len(compiled.encode())
    limit = str(2 * size - 1)
    out = command(
        "precompile",
        "--topk",
        "128,256",
        "--backend",
        "default",
        "--arch",
        "sm_90a",
        "-j",
        "1",
        code=5,
        DSA_PLAN_CACHE_BYTES=limit,
    )
    assert [row[-1] for row in rows(out.stdout)[1:3]] == ["built", "failed"]
    assert f"it does not fit into the layer's limit of {limit} bytes, beside {size} bytes of plans" in out.stderr
    assert len(json.loads(command("list", "--json").stdout)) == 1
    line = command("precompile", "--topk", "128", code=5, DSA_PLAN_CACHE_BYTES="10", DSA_PLAN_CACHE_DIR="other").stderr
    assert "it does not fit into the layer's limit of 10 bytes; set DSA_PLAN_CACHE_BYTES to " in line


def test_show_and_explain_tell_what_the_index_knows(command: Command) -> None:
    command("precompile", "--topk", "128", "--backend", "default", "--arch", "sm_90a")
    (plan,) = json.loads(command("list", "--json").stdout)
    seconds = json.loads(command("show", plan["plan_id"], "--json").stdout)["seconds"]
    assert 0 < seconds < 60
    assert ["compiled", "in", str(seconds), "s"] in rows(command("show", plan["plan_id"]).stdout)
    command("precompile", "--topk", "256", "--backend", "default", "--arch", "sm_90a", "--timeout", "1", code=1)
    text = command("explain", "--topk", "256").stdout
    assert (
        "not compiled yet; the last attempt failed: plan default sm_90a topk=256: the compiler took longer than 1"
        in text
    )
    (row, *_) = json.loads(command("explain", "--topk", "256", "--json").stdout)
    assert row["last_failure"].endswith("raise --timeout, or use fewer jobs")


def test_the_planted_index_of_a_layer_does_no_harm(command: Command) -> None:
    index = command.layer / "index"
    index.mkdir(parents=True)
    victim = command.home / "victim"
    victim.write_text("precious")
    (index / "cache.db").symlink_to(victim)
    out = command("precompile", "--topk", "128", "--backend", "default", "--arch", "sm_90a")
    assert "1 built" in out.stdout
    assert out.stderr == (
        f"dsa-plan: index {index}: 'cache.db' is not a file of the index, so it is not used; "
        "remove that folder, and it is made anew\n"
    )
    assert victim.read_text() == "precious"


def test_an_index_that_a_full_disk_cut_short_is_made_anew_with_a_warning(command: Command) -> None:
    index = command.layer / "index"
    index.mkdir(parents=True)
    (index / "cache.db").touch()
    out = command("precompile", "--topk", "128", "--backend", "default", "--arch", "sm_90a")
    assert out.stderr == (
        f"dsa-plan: index {index}: it has no table Cache; it is made anew, and the statistics in it are lost\n"
    )
    (plan,) = json.loads(command("list", "--json").stdout)
    assert json.loads(command("show", plan["plan_id"], "--json").stdout)["seconds"] > 0


def heed_signals() -> None:
    """In a child: undo what nohup and background jobs do, whose children ignore signals."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def test_a_terminated_precompile_ends_its_compilations_at_once(command: Command) -> None:
    for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")):
        process = subprocess.Popen(
            [sys.executable, "-m", "dsa_planner.cli.main", "precompile", "--topk", "all", "-j", "2"],
            env={**command.environment, "TMPDIR": str(command.home)}, cwd=command.home,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not list(command.home.glob("dsa-plan-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        started = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - started < 30, "all compilations take minutes"
        assert process.returncode == 128 + number
        assert (
            err.splitlines()[-1] == f"dsa-plan: ended by {name}; what was finished is kept, and nothing is half written"
        )
        assert list(command.home.glob("dsa-plan-*")) == []
        assert list((command.layer / "tmp").iterdir()) == []


def test_an_interrupted_precompile_leaves_nothing_half_written(command: Command) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dsa_planner.cli.main", "precompile", "--topk", "all", "-j", "1"],
        env=command.environment, cwd=command.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=heed_signals,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(command.layer.rglob("*.dsaplan")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "dsa-plan: interrupted; what was finished is kept, and nothing is half written"
    finished: list[Any] = list(command.layer.rglob("*.dsaplan"))
    assert 1 <= len(finished) < 16
    assert list((command.layer / "tmp").iterdir()) == []
    assert len(json.loads(command("list", "--json").stdout)) == len(finished)
