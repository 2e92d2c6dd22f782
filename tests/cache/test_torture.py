"""tests/store_torture.py, for a short while."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "store_torture.py"


def torture(*arguments: str) -> str:
    import dsa_planner

    root = str(Path(dsa_planner.__file__).parents[1])
    out = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
    )
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout


def test_processes_that_are_killed_leave_nothing_torn() -> None:
    assert "exports: nothing torn or wrong" in torture("kills", "--rounds", "150")


def test_many_processes_at_once_see_no_wrong_bytes_and_hold_the_limit() -> None:
    assert "no error, no wrong bytes" in torture("mixed", "--processes", "8", "--seconds", "4")


def test_system_calls_that_fail_lose_nothing() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    if subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True).returncode != 0:
        pytest.skip("strace may not trace here")
    assert "every answer right or its error clear" in torture("faults", "--share", "0.01")
