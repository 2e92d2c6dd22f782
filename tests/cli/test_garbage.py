"""No command ends with a traceback, whatever lies in a layer or a bundle."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Command

from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.writable import WritableLayer

COMMANDS = (
    ("list",), ("list", "--json"), ("stats",), ("stats", "--json"), ("show", "0"), ("explain", "--miss", "--topk", "256"),
    ("explain", "--topk", "128", "--json"), ("prune", "--dry-run"), ("prune", "--bytes", "1000"), ("export", "out"),
    ("export", "out.tar", "--all-builds"), ("verify-bundle", "layer"), ("import", "layer"), ("import", "image"),
    ("precompile", "--topk", "128", "--arch", "sm_90a", "--backend", "default", "--dry-run"),
)  # fmt: skip
PLAN = "a" * 64
BUILD = "b" * 64


def garbage(root: Path, good: bytes) -> None:
    """All that can lie where plans do, and beside them."""
    plans = root / "plans-v1"
    plans.mkdir(parents=True, exist_ok=True)
    makers: list[Callable[[Path], object]] = [
        Path.touch, Path.mkdir, os.mkfifo, lambda p: p.symlink_to(p), lambda p: p.symlink_to("/nowhere"),
        lambda p: p.symlink_to("/etc"), lambda p: p.symlink_to("/dev/zero"), lambda p: p.symlink_to("/dev/full"),
        lambda p: p.write_bytes(good), lambda p: p.write_bytes(good[:-1]), lambda p: p.write_bytes(good * 2),
        lambda p: os.close(os.open(p, os.O_CREAT, 0)), lambda p: (p.touch(), os.truncate(p, 1 << 40)),
        lambda p: p.write_bytes(b"\xff" * 5000),
    ]  # fmt: skip
    for number, make in enumerate(makers):
        folder = plans / f"{number:064x}"
        folder.mkdir()
        make(folder / f"{BUILD}.dsaplan")
        make(folder / "other")
        make(plans / f"{number + 100:064x}")
        make(plans / f"note{number}")
        for name in ("tmp", "quarantine", "locks", "index"):
            (root / name).mkdir(exist_ok=True)
            make(root / name / f"x{number}")
    for name in (b"\xff\xfe", b"new\nline", "\u202e".encode(), b"\x1b[31m", b"x" * 255, b"-rf"):
        (plans / os.fsdecode(name)).mkdir()
        (root / os.fsdecode(name)).touch()
        (plans / f"{1:064x}" / os.fsdecode(name)).touch()


@pytest.fixture
def command(tmp_path: Path, compiled: PlanFile) -> Command:
    command = Command(tmp_path)
    WritableLayer(command.layer, 1 << 30).publish(compiled)
    for root in (command.layer, tmp_path / "image"):
        garbage(root, compiled.encode())
    return command


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_no_command_crashes_on_layers_of_garbage(
    command: Command, compiled: PlanFile, arguments: tuple[str, ...]
) -> None:
    out = command.run(*arguments, DSA_PLAN_PATH=str(command.home / "image"))
    assert "Traceback" not in out.stderr
    assert out.returncode in (0, 1, 2, 3, 5), (out.returncode, out.stderr)
    assert all(line.startswith("dsa-plan: ") for line in out.stderr.splitlines())
    assert out.stderr.isascii() or "\u202e" not in out.stderr
    assert "\x1b" not in out.stderr + out.stdout
    if "--json" in arguments:
        json.loads(out.stdout)
    assert WritableLayer(command.layer, 1 << 30).find(compiled.plan_id) == (None if "1000" in arguments else compiled)


@pytest.mark.parametrize("name", ["layer.json", "layer.sig"])
@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir, os.mkfifo, lambda p: p.symlink_to(p), lambda p: p.symlink_to("/dev/zero"),
        lambda p: p.write_bytes(b"\xff"), lambda p: p.write_bytes(b"[" * 100_000),
        lambda p: p.write_bytes(b'{"chosen":{},"format":1,"plans":{"a":1}}'),
        lambda p: p.write_bytes(b'{"chosen":[],"format":1,"plans":[]}'),
        lambda p: (p.touch(), os.truncate(p, 1 << 40)),
    ],
)  # fmt: skip
def test_no_command_crashes_on_a_bundle_with_a_list_of_garbage(
    tmp_path: Path, compiled: PlanFile, name: str, make: Callable[[Path], object]
) -> None:
    from signing_keys import key_pair

    command = Command(tmp_path)
    private, public = key_pair(tmp_path)
    WritableLayer(command.layer, 1 << 30).publish(compiled)
    command("export", "bundle", "--sign", str(private))
    (tmp_path / "bundle" / name).unlink()
    make(tmp_path / "bundle" / name)
    for arguments in (("verify-bundle", "bundle", "--key", str(public)), ("import", "bundle"), ("list",)):
        settings = {"DSA_PLAN_PATH": str(tmp_path / "bundle"), "DSA_PLAN_TRUSTED_KEYS": str(public)}
        out = command.run(*arguments, **settings)
        assert "Traceback" not in out.stderr
        assert out.returncode in (2, 5), (arguments, out.returncode, out.stdout, out.stderr)
    shutil.rmtree(tmp_path / "bundle")
