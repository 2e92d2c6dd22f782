"""The dsa-plan command as a process with a home of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dsa_planner

ROOT = Path(dsa_planner.__file__).resolve().parents[1]


class Command:
    """Runs dsa-plan with a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.layer = home / "layer"
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "DSA_PLAN_CACHE_DIR": str(self.layer),
        }

    def __call__(self, *arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        out = self.run(*arguments, **environment)
        assert out.returncode == code, (out.returncode, out.stdout, out.stderr)
        assert "Traceback" not in out.stderr
        return out

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs the command, whatever its exit code."""
        return subprocess.run(
            [sys.executable, "-m", "dsa_planner.cli.main", *arguments],
            env={**self.environment, **environment},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=600,
        )

    def python(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a script as a job would, with the command's settings."""
        return subprocess.run(
            [sys.executable, "-c", script],
            env={**self.environment, **environment}, cwd=self.home, capture_output=True, text=True,
        )  # fmt: skip

    def refused(self, *arguments: str, code: int, **environment: str) -> str:
        """The one line that a refused command prints."""
        out = self(*arguments, code=code, **environment)
        assert out.stdout == ""
        (line,) = out.stderr.splitlines()
        assert line.startswith("dsa-plan: ")
        return line.removeprefix("dsa-plan: ")
