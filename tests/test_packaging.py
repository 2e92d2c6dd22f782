"""What gets installed is what lies in the tree: no more, no less, and nothing under a foreign name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dsa_planner

ROOT = Path(dsa_planner.__file__).resolve().parents[1]
FOLDERS = {
    "dsa_planner": "dsa_planner",
    "kernels": "dsa_planner/kernels",
    "cache": "dsa_planner/cache",
    "cli": "dsa_planner/cli",
}


def tree() -> set[str]:
    """The files of the packages, under their installed names."""
    found = set()
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".json", ".c", ".h") or path.name == "py.typed":
                found.add(f"{package}/{path.relative_to(ROOT / folder)}")
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would ship, so that building leaves nothing in the tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode != 0:
        pytest.skip("this is not a git checkout")
    target = tmp_path_factory.mktemp("source")
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if not name or not (path.is_symlink() or path.is_file()):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            (target / name).symlink_to(path.readlink())
        else:
            (target / name).write_bytes(path.read_bytes())
    return target


def build(source: Path, kind: str) -> Path:
    """Build with the installed setuptools, through its PEP 517 interface."""
    script = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    out = subprocess.run(
        [sys.executable, "-c", script, str(source / "out")], cwd=source, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return source / "out" / out.stdout.splitlines()[-1]


def test_the_wheel_holds_the_tree_and_nothing_else(source: Path) -> None:
    with zipfile.ZipFile(build(source, "wheel")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert names == tree()
        (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        assert "dsa-plan = dsa_planner.cli.main:main" in wheel.read(entry_points).decode()
        (metadata,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
        text = wheel.read(metadata).decode()
        assert f"Version: {dsa_planner.__version__}\n" in text
        assert "torch==" not in text


def test_the_sdist_builds_the_same_wheel(source: Path, tmp_path: Path) -> None:
    with tarfile.open(build(source, "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    with zipfile.ZipFile(build(unpacked, "wheel")) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == tree()


@pytest.mark.parametrize("target", ["precompile", "test", "lint"])
@pytest.mark.parametrize("old", ["PYTHON", "VENV"])
def test_make_says_which_python_is_needed(tmp_path: Path, target: str, old: str) -> None:
    """Of the Python that would make the environment, and of one that an older one was made with."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    python = tmp_path / ("old" if old == "PYTHON" else "venv/bin/python")
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac\n')
    python.chmod(0o755)
    used = python if old == "PYTHON" else sys.executable
    out = subprocess.run(
        ["make", "-s", target, f"PYTHON={used}", f"VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True, text=True
    )
    assert out.returncode == 2
    line, _ = out.stderr.splitlines()  # the other is make's own
    assert line == (
        f"{python}, Python 3.9.2: Python 3.10 or newer is needed; make clean, then for example make PYTHON=python3.12"
    )


def test_the_links_lead_to_the_folders() -> None:
    for name in ("kernels", "cache", "cli"):
        link = ROOT / "dsa_planner" / name
        if (ROOT / name).is_dir():
            assert link.is_symlink()
            assert link.resolve() == (ROOT / name).resolve()


def test_every_kernel_lists_sources_that_ship() -> None:
    from dsa_planner.kernels import catalogue

    for path in (ROOT / "kernels").glob("*.json"):
        kernel = catalogue.load(path.stem)
        assert set(kernel.sources) <= {file.name for file in (ROOT / "kernels").glob("*.py")}
        assert f"{path.stem}.py" in kernel.sources
