"""Statistics, tables, JSON and the picture, from canned measurements."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from dsa_planner import errors
from dsa_planner.bench import plot, report, request
from dsa_planner.bench.report import HostTimes, Measured, Report, Result, Stat
from dsa_planner.bench.request import Shape

torch = pytest.importorskip("torch")

from dsa_planner.bench.gpu import Facts  # noqa: E402


def measured(name: str, gradients: float, plan_id: str | None = "a" * 64) -> Measured:
    return Measured(
        name=name,
        plan_id=plan_id,
        build_id=plan_id,
        kernels_us={"score_grad": Stat((20.0,)), "gradients": Stat((gradients, gradients + 2.0, gradients + 100.0))},
        gpu_us=Stat((gradients + 20.0, gradients + 22.0, gradients + 120.0)),
        call_us=Stat((gradients + 30.0,)),
    )


@pytest.fixture
def found() -> Report:
    results = []
    for topk in (1024, 128):
        shape = Shape(1, 8192, 4096, topk, "uniform")
        plans = (measured("default", topk * 1.0), measured("sm90_v2", topk * 1.5))
        results.append(Result(shape, plans, measured("cuDNN frontend", topk * 2.0, None), Stat((0.1, 0.1, 0.2))))
    return Report(
        request=request.parse({"topk": "1024,128", "s_q": "8192", "repeats": "3"}),
        facts=Facts("NVIDIA H200", "9.0", 132, None, "12.4", "2.11.0"),
        clocks_mhz=(1980, 1755),
        copy_tb_s=Stat((4.1, 4.2, 4.3)),
        matmul_tflops=Stat((770.0, 780.0, 790.0)),
        host=(HostTimes("default", 128, {"launch": Stat((19.0,)), "indexer_backward": Stat((39.0,))}),),
        results=tuple(results),
        notes=("a note",),
    )


def test_quantiles_lie_between_the_rounds() -> None:
    stat = Stat((4.0, 1.0, 3.0, 2.0, 5.0))
    assert (stat.median, stat.p10, stat.p90) == (3.0, 1.4, 4.6)
    assert Stat((1.0, 2.0)).median == 1.5
    assert Stat((7.0,)).p90 == 7.0


def test_the_table_has_a_row_for_each_plan_and_the_peer(found: Report) -> None:
    header, *rows = report.table(found)
    assert header == [
        "plan", "backend", "topk", "B", "S_q", "S_k", "ids", "score_grad", "gradients", "kernels", "p10-p90", "call",
        "ns/pair", "Gpairs/s", "TFLOP/s", "floor", "faster by",
    ]  # fmt: skip
    assert len(rows) == 6
    assert rows[0] == [
        "a" * 12, "default", "1024", "1", "8192", "4096", "uniform", "20.0", "1026.0", "1046.0", "1044.4-1124.4",
        "1054.0", "0.125", "8.02", "394", "0.100", "1.98",
    ]  # fmt: skip
    assert rows[2][:2] == ["-", "cuDNN frontend"]
    assert rows[2][-1] == "-"


def test_a_contender_without_times_is_a_row_of_dashes(found: Report) -> None:
    result = Result(found.results[0].shape, (), Measured("cuDNN frontend", refused="no"), None)
    header, row = report.table(Report(**{**vars(found), "results": (result,)}))
    assert set(row[header.index("ids") + 1 :]) == {"-"}


def test_two_clocks_are_not_compared() -> None:
    shape = Shape(1, 8, 128, 128, "uniform")
    by_events = Measured("cuDNN frontend", call_us=Stat((200.0,)))
    plan = measured("default", 100.0)
    assert Result(shape, (plan,), by_events, None).faster_by(plan) is None


def test_json_has_everything(found: Report) -> None:
    answer = json.loads(json.dumps(report.as_json(found)))
    assert answer["device"] == {
        "name": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132, "driver": None, "cuda": "12.4",
        "torch": "2.11.0", "ordinal": 0, "clock_mhz": [1980, 1755],
    }  # fmt: skip
    first = answer["results"][0]
    assert (first["topk"], first["s_q"], first["ids"], first["pairs"]) == (1024, 8192, "uniform", 8192 * 1024)
    plan = first["plans"][0]
    assert plan["kernels_us"]["gradients"] == {
        "median": 1026.0, "p10": 1024.4, "p90": 1104.4, "min": 1024.0, "max": 1124.0, "rounds": [1024.0, 1026.0, 1124.0],
    }  # fmt: skip
    assert plan["ns_a_pair"] == pytest.approx(1046e3 / (8192 * 1024), rel=1e-5)
    assert plan["gradients_ns_a_pair"] == pytest.approx(1026e3 / (8192 * 1024), rel=1e-5)
    assert plan["pairs_a_second"] == round(8192 * 1024 / 1046e-6)
    assert plan["of_floor"] == pytest.approx(plan["ns_a_pair"] / 0.1, rel=1e-5)
    assert plan["peer_slower_by"] == pytest.approx(2070 / 1046, rel=1e-5)
    assert first["peer"]["peer_slower_by"] is None
    assert answer["limits"]["copy_tb_s"]["median"] == 4.2
    assert answer["host"][0]["host_us"]["launch"]["median"] == 19.0
    assert answer["notes"] == ["a note"]


def test_the_lines_below_name_the_gpu_and_its_limits(found: Report) -> None:
    assert report.lines(found) == [
        "microseconds, medians of 3 rounds; 64 heads, bf16 d_weights, bf16 d_index_k",
        "NVIDIA H200, compute capability 9.0, 132 SMs, CUDA 12.4, torch 2.11.0, SM clock 1755 to 1980 MHz",
        "limits: copy 4.20 (4.12-4.28) TB/s, bf16 matrix product 780 (772-788) TFLOP/s; floor is the ns of a pair at "
        "least, measured",
    ]


def test_the_picture_is_a_png_with_a_line_for_each_contender(found: Report, tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    plot.draw(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    series = plot._series(found)
    assert len(series) == 3
    assert [result.shape.topk for result, _ in series["default, S_q=8192 S_k=4096, uniform"]] == [128, 1024]
    with pytest.raises(errors.UnsupportedError, match=r"it cannot be written \(No such file"):
        plot.draw(found, tmp_path / "none" / "a.png")
