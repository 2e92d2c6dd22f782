"""The container recipe, without a container engine: a read-only root, another user, no home, and no compiler."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT, Command

from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.writable import WritableLayer

JOB = """
import sys
from dsa_planner import PlanNotFoundError, envelope, layer_counts
from dsa_planner.locate import find_plan
plan = find_plan(envelope.plan_config({"topk": 128, "arch": "sm_90a"}))
print(plan.plan_id, plan.cubin[:4], layer_counts())
try:
    find_plan(envelope.plan_config({"topk": 256, "arch": "sm_90a"}))
except PlanNotFoundError as error:
    print("missing:", error.remedy)
assert not {"cutlass", "diskcache", "pydantic", "typer", "filelock"} & set(sys.modules)
"""
AS_ANYBODY = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "--no-new-privs", "--inh-caps=-all"]
WRITES = {
    "mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "rename", "renameat", "renameat2", "link", "linkat", "symlink",
    "symlinkat", "truncate", "ftruncate", "fallocate", "utimensat", "utime", "utimes", "futimesat", "flock", "fsync",
    "fdatasync", "chmod", "fchmod", "fchmodat", "chown", "fchown", "lchown", "fchownat", "mknod", "mknodat", "setxattr",
    "pwrite64", "pwritev", "writev", "sendfile", "copy_file_range", "creat",
}  # fmt: skip


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


def open_to_all(tmp_path: Path) -> None:
    for folder in (*list(tmp_path.parents)[:-2], tmp_path):
        folder.chmod(folder.stat().st_mode | 0o055)


def runs_as_anybody(python: str) -> bool:
    """Whether an unprivileged user can run an interpreter that is new enough."""
    script = "import sys, ctypes, json, hashlib; sys.exit(sys.version_info < (3, 10))"
    return (
        shutil.which("setpriv") is not None
        # Through env, because setpriv itself still may enter every folder when it starts a program.
        and subprocess.run([*AS_ANYBODY, "env", python, "-c", script], capture_output=True).returncode == 0
    )


def in_read_only_root(tmp_path: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a read-only root, as a user that the system does not know, with no home and nothing else set."""
    candidates = (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3")
    python = next((path for path in candidates if os.path.exists(path) and runs_as_anybody(path)), None)
    if os.geteuid() != 0 or python is None:
        pytest.skip("it needs root, setpriv, and a Python of at least 3.10 that every user may run")
    application = tmp_path / "application"
    if not application.exists():
        for name in ("", "kernels", "cache", "cli"):
            shutil.copytree(
                ROOT / (name or "dsa_planner"), application / "dsa_planner" / name,
                ignore=shutil.ignore_patterns("__pycache__", "kernels", "cache", "cli"), dirs_exist_ok=True,
            )  # fmt: skip
    root = tmp_path / "root"
    root.mkdir(exist_ok=True)
    variables = " ".join(shlex.quote(f"{name}={value}") for name, value in environment.items())
    steps = (
        f"mount --bind / {root} && mount -o remount,bind,ro {root} && cd {root} && "
        f"exec chroot . {' '.join(AS_ANYBODY)} "
        f"env -i PYTHONPATH={application} {variables} {python} -c {shlex.quote(script)}"
    )
    out = subprocess.run(["unshare", "-m", "sh", "-c", steps], capture_output=True, text=True)
    if "unshare failed" in out.stderr or "mount:" in out.stderr:
        pytest.skip(f"this machine lets no test mount: {out.stderr.strip()}")
    return out


def test_a_job_in_a_read_only_root_without_home_finds_the_exported_plan(
    tmp_path: Path, command: Command, compiled: PlanFile
) -> None:
    WritableLayer(command.layer, 1 << 30).publish(compiled)
    command("export", "plans")
    open_to_all(tmp_path)
    for settings in ({"DSA_PLAN_CACHE_DIR": "none"}, {}, {"HOME": "/nonexistent"}, {"DSA_PLAN_CACHE_DIR": "/cache"}):
        out = in_read_only_root(tmp_path, JOB, DSA_PLAN_PATH=str(tmp_path / "plans"), **settings)
        assert out.returncode == 0, out.stderr
        first, second = out.stdout.splitlines()
        assert first.startswith(f"{compiled.plan_id} b'\\x7fELF' {{'{tmp_path / 'plans'}': {{'hits': 1")
        assert second.startswith("missing: run 'dsa-plan precompile --backend default --arch sm_90a --topk 256'")
        assert "Traceback" not in out.stderr


def test_a_private_layer_that_was_copied_as_it_was_is_named(
    tmp_path: Path, command: Command, compiled: PlanFile
) -> None:
    """A writable layer is its owner's alone; what an image needs is an export."""
    WritableLayer(command.layer, 1 << 30).publish(compiled)
    open_to_all(tmp_path)
    out = in_read_only_root(tmp_path, JOB, DSA_PLAN_PATH=str(command.layer), DSA_PLAN_CACHE_DIR="none")
    assert out.returncode == 1
    assert "(Permission denied)" in out.stderr
    assert "PlanNotFoundError" in out.stderr


def test_the_commands_of_the_recipe_work(tmp_path: Path, command: Command) -> None:
    recipe = (ROOT / "docs" / "Containerfile").read_text()
    assert f"```dockerfile\n{recipe}```" in (ROOT / "docs" / "containers.md").read_text()
    commands = re.findall(r"^RUN (dsa-plan .*)$", recipe, re.M)
    assert [line.split()[1] for line in commands] == ["precompile", "export", "verify-bundle"]
    for line in commands:
        line = line.replace("/opt/plans", str(tmp_path / "opt" / "plans"))
        line = line.replace("128,1024,2048 --arch sm_90a,sm_100f", "128 --arch sm_90a")  # fewer, to take less time
        out = command(*shlex.split(line)[1:])
    assert "3 intact plans" in out.stdout
    (arguments,) = re.findall(r"^ENV (.*)$", recipe, re.M)
    settings = dict(entry.split("=", 1) for entry in arguments.split())
    assert settings == {"DSA_PLAN_PATH": "/opt/plans", "DSA_PLAN_CACHE_DIR": "none"}


@pytest.mark.parametrize("present", [False, True])
def test_a_warm_start_writes_creates_and_locks_nothing(
    tmp_path: Path, command: Command, compiled: PlanFile, present: bool
) -> None:
    """Up to the first call of the driver, with the default writable layer."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    pytest.importorskip("cuda.bindings")
    WritableLayer(command.layer, 1 << 30).publish(compiled)
    command("export", "plans")
    home = tmp_path / "home"
    home.mkdir()
    own = home / ".cache" / "dsa-planner"
    if present:
        own.parent.mkdir()
        command.layer.rename(own)
    script = (
        "from dsa_planner import envelope; from dsa_planner.locate import find_plan\n"
        "plan = find_plan(envelope.plan_config({'topk': 128, 'arch': 'sm_90a'}))\n"
        "from dsa_planner.driver import cu\n"
        "import os; os.stat('/first-call-of-the-driver') if os.path.exists('/first-call-of-the-driver') else None\n"
        "cu.cuInit(0)\n"
    )
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "DSA_PLAN_PATH": str(tmp_path / "plans"),
    }
    python = [sys.executable, "-c", script]
    subprocess.run(python, env=environment, capture_output=True)  # compiles the bytecode
    log = tmp_path / "calls"
    before = [(path, path.stat().st_mtime_ns) for path in sorted(home.rglob("*"))]
    traced = ["strace", "-f", "-o", str(log), "-e", "trace=%file,%desc,%network", *python]
    if subprocess.run(traced, env=environment, capture_output=True).returncode not in (0, 1):
        pytest.skip("strace may not trace here")
    calls = log.read_text().splitlines()
    assert any(str(tmp_path / "plans") in line and ".dsaplan" in line for line in calls)
    (end,) = [number for number, line in enumerate(calls) if "first-call-of-the-driver" in line]
    assert [line for line in calls[:end] if is_write(line)] == []
    assert [line for line in calls[:end] if str(own) in line] == [], "the writable layer is not even looked at"
    assert [(path, path.stat().st_mtime_ns) for path in sorted(home.rglob("*"))] == before


def is_write(line: str) -> bool:
    """Whether a line of strace is a call that writes, creates or locks. Refused calls count too."""
    found = re.match(r"(?:\d+ +)?(\w+)\((.*)", line)
    if found is None:
        return False
    call, arguments = found.groups()
    if call in WRITES:
        return True
    if call.startswith("open") and '"/dev/null"' not in arguments:
        return bool(re.search(r"\bO_(WRONLY|RDWR|CREAT|TRUNC|APPEND|TMPFILE)\b", arguments))
    if call == "write":
        return not arguments.startswith(("1,", "2,"))
    return call == "fcntl" and "F_SETLK" in arguments


def test_the_search_for_writes_finds_them(tmp_path: Path) -> None:
    assert is_write('12 openat(AT_FDCWD, "/x", O_WRONLY|O_CREAT|O_CLOEXEC, 0666) = 3')
    assert is_write("12 flock(3, LOCK_EX) = 0")
    assert is_write('mkdir("/x", 0777) = -1 EEXIST (File exists)')
    assert is_write('write(3, "x", 1) = 1')
    assert not is_write('write(1, "x", 1) = 1')
    assert not is_write('12 openat(AT_FDCWD, "/x", O_RDONLY|O_CLOEXEC) = 3')
