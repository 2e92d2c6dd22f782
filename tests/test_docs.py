"""The documentation says what the code does."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import dsa_planner
from dsa_planner import envelope, launch_record, settings
from dsa_planner.bench import request as requests
from dsa_planner.cli import main

ROOT = Path(dsa_planner.__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_generated_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, page in generate.PAGES.items():
        assert (ROOT / "docs" / name).read_text() == page(), f"docs/{name} is out of date: make docs"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def commands() -> list[str]:
    """Every dsa-plan command line in the documentation."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        found |= set(re.findall(r"^\$ (?:[A-Z_]+=\S+ )*(dsa-plan [^\n]*)$", text, re.M))
        found |= set(re.findall(r"`(dsa-plan (?!COMMAND|--)[^`]+)`", text))
    return sorted(found)


@pytest.mark.parametrize("line", commands())
def test_documented_commands_are_commands(line: str, tmp_path: Path) -> None:
    """Their options parse: each runs with --help at its end."""
    words = shlex.split(line.replace("PLAN", "0"))
    out = subprocess.run(
        [sys.executable, "-m", "dsa_planner.cli.main", *words[1:], "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert out.returncode == 0, out.stderr
    assert f"Usage: python -m dsa_planner.cli.main {words[1]}" in out.stdout


def plain_commands() -> list[str]:
    """Every command line in the documentation that runs a module of this package."""
    texts = [page.read_text() for page in PAGES]
    return sorted({line for text in texts for line in re.findall(r"^\$ python (-m dsa_planner\.[^\n]*)$", text, re.M)})


@pytest.mark.parametrize("line", plain_commands())
def test_documented_modules_take_their_options(line: str, tmp_path: Path) -> None:
    """As with the commands: each runs with --help at its end."""
    words = shlex.split(line)
    command = [sys.executable, *words, "--help"]
    out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert out.returncode == 0, out.stderr
    assert f"usage: python {' '.join(words[:2])}" in out.stdout


def test_the_distributions_of_ids_are_documented() -> None:
    text = (ROOT / "docs" / "measuring.md").read_text()
    for name, meaning in requests.IDS.items():
        assert f"| {name} | {meaning} |" in text


def test_there_are_documented_commands() -> None:
    assert len(commands()) >= 6
    assert plain_commands()


def test_exit_codes_and_variables_are_documented() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    assert main.__doc__ is not None
    for code, meaning in re.findall(r"^(\d+) +(.+)$", main.__doc__, re.M):
        assert f"| {code} | {meaning} |" in text
    assert {str(code) for _, code in main._EXIT_CODES} <= set(re.findall(r"^\| (\d+) \|", text, re.M))
    for name in re.findall(r"\bDSA_PLAN_[A-Z_]+\b", Path(settings.__file__).read_text()):
        assert f"| {name} |" in text


def test_launch_values_are_documented() -> None:
    text = (ROOT / "docs" / "adding-a-kernel.md").read_text()
    for name in launch_record.LAUNCH_VALUES:
        assert f"`{name}`" in text


def test_every_row_of_the_envelope_is_documented() -> None:
    text = (ROOT / "docs" / "support-envelope.md").read_text()
    for row in envelope.ENVELOPE:
        assert f"| {row.operator} | {row.backend} | {row.arch} |" in text
