"""``dsa-plan bench`` as a user runs it, without a GPU; what it measures is in tests/bench and tests/gpu."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, Command

pytest.importorskip("torch")

from dsa_planner.bench import report, request, run
from dsa_planner.bench.gpu import Facts
from dsa_planner.bench.report import HostTimes, Measured, Report, Result, Stat
from dsa_planner.cli import bench


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


def canned(wanted: request.Request, *progress: Any) -> Report:
    """A report of one plan and the peer with each shape."""
    times = {"gradients": Stat((100.0, 101.0))}
    results = []
    for shape in wanted.shapes:
        plan = Measured("default", "ab" * 32, "cd" * 32, times, Stat((120.0, 121.0)), Stat((125.0,)))
        results.append(Result(shape, (plan,), Measured("cuDNN frontend", call_us=Stat((200.0,))), Stat((0.1,))))
    return Report(
        wanted, Facts("Fake GPU", "9.0", 132, "550.1", "12.4", "2.11.0"), (), Stat((4.3,)), Stat((780.0,)),
        (HostTimes("default", 128, {"launch": Stat((19.0,))}),), tuple(results), ("a note",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--topk", "1000"],
            "topk=1000: backend default for sm_90a takes topk a multiple of 128 from 128 to 2048; nea",
        ),
        (["--ids", "zipf"], "--ids 'zipf': it has to be uniform, sorted, window, shared or sinks; nearest is "),
        (["--s-q", "1,,2"], "--s-q '1,,2': it has to be a list separated by commas, without empty entries; remove the"),
        (["--plot", "a.pdf"], "--plot a.pdf: the picture is a PNG; give for example --plot a.png"),
        (["--colour"], "No such option: --colour"),
    ],
    ids=" ".join,
)
def test_a_wrong_request_is_one_line_and_exit_code_2(command: Command, arguments: list[str], message: str) -> None:
    assert command.refused("bench", *arguments, code=2).startswith(message)


def test_without_a_driver_it_is_one_line_and_exit_code_6(command: Command) -> None:
    from dsa_planner.driver import cu

    try:
        cu.cuInit(0)
    except RuntimeError:
        assert "there is no NVIDIA driver on this machine" in command.refused("bench", code=6)
    else:
        pytest.skip("this machine has a driver")


@pytest.mark.parametrize(("module", "arguments"), [("matplotlib", ["--plot", "a.png"]), ("torch", [])])
def test_a_package_that_is_not_installed_is_exit_code_4(command: Command, module: str, arguments: list[str]) -> None:
    (command.home / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder; find = PathFinder.find_spec\n"
        f"PathFinder.find_spec = lambda n, *a, **k: None if n.partition('.')[0] == {module!r} else find(n, *a, **k)\n"
    )
    line = command.refused("bench", *arguments, code=4, PYTHONPATH=f"{ROOT}:{command.home}")
    assert line.startswith(f"package {module}: ")
    assert "needs it and it is not installed; pip install 'dsa-planner[" in line


def test_the_table_stands_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    found = canned(request.parse({"topk": "128,2048"}))
    bench.answer(found, json=False)
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:7] == ["plan", "backend", "topk", "B", "S_q", "S_k", "ids"]
    assert len({line.index("uniform") for line in out[1:5]}) == 1
    assert len(out[1:5]) == 4
    assert ["default", "128", "19.0"] in [line.split()[:3] for line in out]
    assert out[-3:] == report.lines(found)


def test_only_the_answer_goes_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dsa_planner.cli import main

    monkeypatch.setattr(bench, "measure", canned)
    main.bench(topk="128", json=True)
    out, err = capsys.readouterr()
    assert json.loads(out)["results"][0]["plans"][0]["gpu_us"]["median"] == 120.5
    assert err == "dsa-plan: a note\n"
    assert run.measure is not canned
