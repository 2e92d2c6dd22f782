"""The run side never imports the build side's packages, and the build side never imports torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dsa_planner

ROOT = Path(dsa_planner.__file__).resolve().parents[1]
BUILD_ONLY = {"cutlass", "pydantic", "typer", "click", "rich", "diskcache", "filelock", "elftools"}
NOT_INSTALLED = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {banned!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def modules_after(statement: str, banned: set[str] = frozenset()) -> set[str]:  # type: ignore[assignment]
    """Top-level names in sys.modules of a fresh process after a statement, with some packages made absent."""
    script = NOT_INSTALLED.format(banned=banned) + statement
    script += "\nimport json; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, cwd="/"
    )
    assert out.returncode == 0, out.stderr
    return set(json.loads(out.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "statement",
    [
        "import dsa_planner",
        "from dsa_planner import indexer_backward, load_plan, Plan",
        "from dsa_planner import indexer_loss, require, torch_ops; indexer_backward = None",
        "from dsa_planner import PlanNotFoundError; from dsa_planner.locate import find_plan, search_path",
        "from dsa_planner.kernels import catalogue, oracle; from dsa_planner.cache import layer, listing, planfile, search",
        "from dsa_planner import envelope, identity; identity.plan_id_of(envelope.plan_config({'topk':128,'arch':'sm_90a'}))",
        "from dsa_planner.bench import __main__, contenders, plot, report, request, run",
    ],
)
def test_the_run_side_needs_none_of_the_build_sides_packages(statement: str) -> None:
    if "indexer_backward" in statement or "bench" in statement:
        pytest.importorskip("torch")
    assert not modules_after(statement, BUILD_ONLY) & BUILD_ONLY


def test_importing_the_package_imports_nothing_heavy() -> None:
    for statement in ("import dsa_planner", "import dsa_planner; assert dsa_planner.stats()['plans'] == []"):
        assert not modules_after(statement) & (BUILD_ONLY | {"torch", "cuda", "numpy"})


def test_a_run_side_process_finds_a_plan_without_the_build_side(layer: Path) -> None:
    statement = (
        f"import os; os.environ['DSA_PLAN_PATH'] = {str(layer)!r}; os.environ['DSA_PLAN_CACHE_DIR'] = 'none'\n"
        "from dsa_planner import envelope; from dsa_planner.locate import find_plan\n"
        "assert find_plan(envelope.plan_config({'topk': 128, 'arch': 'sm_90a'})).cubin[:4] == b'\\x7fELF'"
    )
    assert not modules_after(statement, BUILD_ONLY) & (BUILD_ONLY | {"torch"})


@pytest.mark.parametrize(
    "statement",
    [
        "from dsa_planner import PlanConfig, Planner",
        "from dsa_planner import compiler, planner, toolchain, cubin",
        "from dsa_planner.cli import main, render, request",
        "from dsa_planner.bench import __main__, floor, plot, report, request",
    ],
)
def test_the_build_side_needs_no_torch(statement: str) -> None:
    assert "torch" not in modules_after(statement, {"torch"})


def test_the_kernels_need_no_torch() -> None:
    statement = "import dsa_planner.kernels.indexer_backward_sm90"
    assert "torch" not in modules_after(statement, {"torch"})


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level
    }
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dsa_planner"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_point_one_way() -> None:
    """cli -> dsa_planner -> cache, kernels; the leaf ``errors`` is open to all."""
    for folder, allowed in (("cache", "dsa_planner.cache"), ("kernels", "dsa_planner.kernels")):
        for path in sorted((ROOT / folder).glob("*.py")):
            ours = {name for name in imports_of(path) if name.startswith("dsa_planner")}
            beyond = {n for n in ours if not n.startswith((allowed, "dsa_planner.errors"))}
            assert not beyond, f"{folder}/{path.name} imports {sorted(beyond)}"
    for path in sorted([*(ROOT / "dsa_planner").glob("*.py"), *(ROOT / "dsa_planner" / "bench").glob("*.py")]):
        assert not {n for n in imports_of(path) if n.startswith("dsa_planner.cli")}, path.name
