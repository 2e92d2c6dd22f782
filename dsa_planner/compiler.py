"""Compile one plan: a subprocess for the compiler, and the checks on what it returns.

The result is a pure function of the plan's identity and the compiler packages. Everything else that could change it
is shut out: the child gets a private directory, a fixed environment without CUTE_DSL_* variables, an explicit arch,
and kernel modules of fixed names, written out from the very bytes that the plan id digests; no other module of this
package is within its reach. It reports which compiler it imported, which must be the one that the build id names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_planner import cubin as cubin_reader
from dsa_planner import envelope, toolchain
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.errors import CompileError, remedy_of
from dsa_planner.identity import identity_of, kernel_of
from dsa_planner.kernels import catalogue
from dsa_planner.launch_record import PARAMETER_BYTES, LaunchRecord

__all__ = ["DEFAULT_TIMEOUT", "Compiled", "compile_plan"]

DEFAULT_TIMEOUT = 300.0
STOP_SECONDS = 0.2  # within which a compilation notices that it is to stop
STALE_SECONDS = 24 * 3600  # after which a compilation's folder is one that a killed command left
_PREFIX = "dsa-plan-"
_SOURCES = "sources"
_SCRUBBED_PREFIXES = ("CUTE_", "CUTLASS_", "PYTHONHASHSEED", "NVVM_", "MLIR_", "LLVM_")


@dataclass(frozen=True)
class Compiled:
    """A compiled plan and the seconds that it took."""

    plan: PlanFile
    seconds: float


def compile_plan(
    config: Mapping[str, Any], timeout: float = DEFAULT_TIMEOUT, stop: threading.Event | None = None
) -> Compiled:
    """Compile a plan.

    Safe to call from several threads at once: each call runs its own process.

    Args:
        config: the config; fields that are left out have their defaults.
        timeout: seconds that the compiler may take.
        stop: ends the compilation when it is set, from another thread.

    Raises:
        UnsupportedError: the config lies outside the envelope, or this version does not build its row yet.
        CompilerMissingError: nvidia-cutlass-dsl is not installed.
        CompileError: the compiler failed, took longer than ``timeout`` seconds, was stopped, or returned something else
        than the plan.
    """
    identity = identity_of(config)
    config = identity["config"]
    tools = toolchain.installed()
    toolchain.verify()
    label = f"plan {config['backend']} {config['arch']} topk={config['topk']}"
    started = time.monotonic()
    try:
        _remove_stale_folders()
        with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            _run_worker(kernel_of(config), identity, folder, timeout, stop or threading.Event(), label)
            cubin, ptx = (folder / "plan.cubin").read_bytes(), (folder / "plan.ptx").read_bytes()
    except OSError as error:
        remedy = remedy_of(error, "free memory or disk space, or set TMPDIR to another folder")
        raise CompileError(label, f"the compiler cannot be run ({error})", remedy) from None
    kernels = _checked_kernels(config, identity["launch"], cubin, ptx, label)
    build = {"id": tools.build_id, "packages": tools.packages}
    plan = PlanFile.build(identity, build, kernels, {"cubin": cubin, "ptx": ptx})
    return Compiled(plan, time.monotonic() - started)


def _remove_stale_folders() -> None:
    """Remove what killed commands of this user left beside the folder that is to be made, best effort.

    The temporary folder is everybody's, so what goes must be named as ours are, and have in it what ours have.
    """
    own = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")  # as tempfile makes them
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if not own.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
                    continue
                found = entry.stat(follow_symlinks=False)
                old = time.time() - found.st_mtime > STALE_SECONDS
                if old and found.st_uid == os.geteuid() and _package_in(Path(entry.path)).is_dir():
                    shutil.rmtree(entry.path, ignore_errors=True)


def _package_in(folder: Path) -> Path:
    """Where a compilation's folder has the kernel sources."""
    return folder / _SOURCES / "dsa_planner" / "kernels"


def _write_sources(kernel: catalogue.Kernel, folder: Path) -> None:
    """A package ``dsa_planner.kernels`` with the kernel's sources and nothing else."""
    package = _package_in(folder)
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    for name, content in kernel.sources.items():
        (package / name).write_bytes(content)


def _run_worker(
    kernel: catalogue.Kernel,
    identity: Mapping[str, Any],
    folder: Path,
    timeout: float,
    stop: threading.Event,
    label: str,
) -> None:
    config = identity["config"]
    _write_sources(kernel, folder)
    request = {
        "parent": os.getpid(),
        "sys_path": [str(folder / _SOURCES), *(os.path.abspath(entry) for entry in sys.path)],
        "module": kernel.module,
        "config": config,
        "options": identity["options"],
    }
    child = subprocess.Popen(
        [sys.executable, "-B", str(toolchain.WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=_environment(folder, config["arch"]),
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # so that a time-out ends the compiler's own children too
    )
    try:
        out, err = _communicate(child, json.dumps(request), timeout, stop, label)
    except BaseException:
        _kill(child)
        raise
    if child.returncode != 0:
        raise CompileError(label, _failure(child.returncode, err), "mend what it names, or report it")
    try:
        compiler = os.path.realpath(json.loads(out)["compiler"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CompileError(label, f"the compiler answered {out[:200]!r}", "report it") from None
    if compiler not in toolchain.installed().files:
        raise CompileError(
            label,
            f"{compiler} was imported as the compiler, which is not a file of the installed {toolchain.PACKAGE}",
            "remove it from the working folder or PYTHONPATH",
        )


def _communicate(
    child: subprocess.Popen[str], request: str, timeout: float, stop: threading.Event, label: str
) -> tuple[str, str]:
    """What the child prints on its two streams, in at most ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    text: str | None = request
    while not stop.is_set():
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise CompileError(
                label, f"the compiler took longer than {timeout:g} seconds", "raise --timeout, or use fewer jobs"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.communicate(text, timeout=min(remaining, STOP_SECONDS))
        text = None
    raise CompileError(label, "it was stopped", "ask again")


def _environment(folder: Path, arch: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(_SCRUBBED_PREFIXES)}
    env.update(
        CUTE_DSL_DUMP_DIR=str(folder),
        CUTE_DSL_CACHE_DIR=str(folder),
        CUTE_DSL_DISABLE_FILE_CACHING="1",
        CUTE_DSL_ARCH=arch,
        PYTHONHASHSEED="0",
        HOME=str(folder),
        TMPDIR=str(folder),
    )
    return env


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def _failure(code: int, err: str) -> str:
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    last = lines[-1] if lines else "no message"
    how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    return f"the compiler {how}: {last[:400]}"


def _checked_kernels(
    config: Mapping[str, Any], launch: Mapping[str, Any], cubin: bytes, ptx: bytes, label: str
) -> list[dict[str, Any]]:
    """The manifest's kernel entries, after checking that the cubin is what the launch record expects."""

    def wrong(rule: str) -> CompileError:
        return CompileError(label, f"the compiler returned something else than the plan: {rule}", "report it")

    try:
        found = cubin_reader.inspect(cubin)
    except cubin_reader.CubinError as error:
        raise wrong(str(error)) from None
    arch = envelope.ARCHES[config["arch"]]
    if (found.sm, found.accelerated) != (arch.sm, arch.suffix == "a"):
        raise wrong(f"a cubin for sm_{found.sm}{'a' if found.accelerated else ''}, not for {arch.name}")
    if f".target {arch.name}\n".encode() not in ptx.replace(b",", b"\n"):
        raise wrong(f"PTX for another target than {arch.name}")
    record = LaunchRecord.parse(launch)
    by_name = {_stage_of(kernel.symbol): kernel for kernel in found.kernels}
    if set(by_name) != {kernel.name for kernel in record.kernels} or len(by_name) != len(found.kernels):
        raise wrong(f"kernels {sorted(kernel.symbol for kernel in found.kernels)}")
    entries = []
    for expected in record.kernels:
        kernel = by_name[expected.name]
        sizes = [size for _, size in kernel.parameters]
        if sizes != [PARAMETER_BYTES[parameter.type] for parameter in expected.parameters]:
            raise wrong(f"kernel {expected.name} with parameters of {sizes} bytes")
        if kernel.block not in (None, expected.block):
            raise wrong(f"kernel {expected.name} for {kernel.block} threads, not {expected.block}")
        entries.append(
            {
                "name": expected.name,
                "symbol": kernel.symbol,
                "registers": kernel.registers,
                "stack_bytes": kernel.stack_bytes,
                "spill_store_bytes": kernel.spill_store_bytes,
                "spill_load_bytes": kernel.spill_load_bytes,
                "static_shared_bytes": kernel.static_shared_bytes,
                "dynamic_shared_bytes": expected.shared_bytes,
                "parameters": [list(parameter) for parameter in kernel.parameters],
            }
        )
    return entries


def _stage_of(symbol: str) -> str:
    """The record's name of a kernel from its symbol, ``dsa_<name>_<number>``."""
    return symbol.removeprefix("dsa_").rpartition("_")[0]
