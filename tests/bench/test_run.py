"""The rounds: everybody's turn, what becomes of the numbers, and what stops a measurement. No GPU."""

from __future__ import annotations

import json
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fake_driver  # noqa: E402
from fake_clocks import PLAN_KERNELS, FakeClocks  # noqa: E402

from dsa_planner import errors  # noqa: E402
from dsa_planner.bench import __main__ as plain  # noqa: E402
from dsa_planner.bench import contenders, report, request, run  # noqa: E402
from dsa_planner.bench.inputs import make  # noqa: E402
from dsa_planner.bench.request import Shape  # noqa: E402

SMALL = {"topk": "128", "s_q": "6", "s_k": "130", "repeats": "4"}


class Bench:
    """A driver and clocks without a GPU, and a peer made of Python."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = fake_driver.FakeDriver()
        fake_driver.install(monkeypatch, self.driver)
        self.peer_launches: list[str] = []
        self.peer_error: Exception | None = None
        self.clocks = FakeClocks(self._launched)

    def _launched(self) -> list[tuple[str, float]]:
        found = [(launch.symbol, dict(PLAN_KERNELS)[launch.symbol]) for launch in self.driver.launches]
        found += [(name, 125.0) for name in self.peer_launches]
        self.driver.launches.clear()
        self.peer_launches.clear()
        return found

    def peer(self) -> contenders.Peer:
        def wrapper(*inputs: Any, sm_scale: float, **outputs: Any) -> None:
            if self.peer_error is not None:
                raise self.peer_error
            assert len(inputs) == 7
            self.peer_launches += ["Memset (Device)", "peer_kernel"]

        return contenders.Peer(wrapper)

    def run(self, peer: contenders.Peer | str | None = None, **options: str) -> report.Report:
        return run.run(request.parse({**SMALL, **options}), self.clocks, peer)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, layer: Path) -> Bench:
    return Bench(monkeypatch)


def test_stages_calls_and_pairs(bench: Bench) -> None:
    found = bench.run()
    (result,) = found.results
    (plan,) = result.plans
    assert list(plan.kernels_us) == ["score_grad", "gradients", "round_d_index_k"]
    assert plan.kernels_us["gradients"].rounds == (101.0, 102.0, 103.0, 104.0)
    assert plan.gpu_us is not None
    assert plan.gpu_us.rounds == (127.0, 130.0, 133.0, 136.0)
    assert plan.call_us is not None
    assert plan.call_us.median == 129.0
    assert result.ns_a_pair(plan) == pytest.approx(131.5e3 / (6 * 128))
    assert result.floor_ns is not None
    assert result.floor_ns.rounds == (0.1,) * 4
    assert found.host[0].times_us["launch"].median == 25.0
    assert list(found.host[0].times_us) == [
        "launch", "launch_moved", "indexer_backward", "indexer_backward_moved"
    ]  # fmt: skip
    assert found.clocks_mhz == (1980,) * 4


def test_host_times_are_of_the_same_buffers_and_of_moved_ones(bench: Bench) -> None:
    asked = request.parse(SMALL)
    plan = contenders.PlanContender(asked, "default", 128)
    calls = plan.host_calls(make(Shape(1, 6, 130, 128, "uniform"), asked, "cpu"))
    for name, several in (("launch", False), ("launch_moved", True)):
        bench.driver.launches.clear()
        for number in range(4):
            calls[name](number)
        attn_scores = [launch.ints()[0] for launch in bench.driver.launches if "score_grad" in launch.symbol]
        assert len(attn_scores) == 4
        assert all((one != other) is several for one, other in pairwise(attn_scores)), name


def test_a_fp32_d_index_k_takes_no_third_kernel(bench: Bench) -> None:
    (result,) = bench.run(d_index_k="fp32").results
    assert list(result.plans[0].kernels_us) == ["score_grad", "gradients"]


def test_plan_and_peer_take_turns_and_the_order_is_reversed_each_round(bench: Bench) -> None:
    found = bench.run(bench.peer())
    turns = ["peer" if "peer_kernel" in names else "plan" for clock, names in bench.clocks.taken if clock == "kernels"]
    assert turns == ["plan", "peer", "peer", "plan", "plan", "peer", "peer", "plan"]
    clocks = [clock for clock, _ in bench.clocks.taken]
    assert clocks.index("kernels") > max(place for place, clock in enumerate(clocks) if clock == "host")
    (result,) = found.results
    assert result.peer is not None
    assert list(result.peer.kernels_us) == ["Memset (Device)", "peer_kernel"]
    ratio = result.faster_by(result.plans[0])
    assert ratio is not None
    assert 1.8 < ratio < 2.0
    assert [entry.name for entry in found.host] == ["default", contenders.PEER]


def test_a_peer_that_refuses_is_a_note_and_the_plans_are_measured(bench: Bench) -> None:
    bench.peer_error = ValueError("not for\nthis GPU")
    found = bench.run(bench.peer())
    (result,) = found.results
    assert result.peer is not None
    assert (result.peer.refused, result.peer.call_us) == ("ValueError: not for this GPU", None)
    assert result.faster_by(result.plans[0]) is None
    assert result.plans[0].gpu_us is not None
    assert any("cuDNN frontend refused topk=128 B=1 S_q=6 S_k=130 uniform ids: ValueError" in n for n in found.notes)
    assert report.table(found)[2][1] == contenders.PEER


def test_a_peer_that_is_not_there_is_one_note(bench: Bench) -> None:
    found = bench.run("it is not installed")
    assert found.notes == ("it is not installed",)
    assert found.results[0].peer is None


def test_without_cupti_there_are_times_of_calls(bench: Bench) -> None:
    bench.clocks.records = False
    found = bench.run()
    (plan,) = found.results[0].plans
    assert (plan.kernels_us, plan.gpu_us) == ({}, None)
    assert plan.best_us == 129.0
    assert found.notes == ("torch.profiler recorded no kernels here (CUPTI), so there are times of whole calls only",)
    json.dumps(report.as_json(found))


def test_a_round_of_which_kernels_were_lost_is_left_out() -> None:
    recorded = [("a", 1.0), ("b", 2.0)] * 10
    assert run._by_stage(recorded, {"a": "first"}, 10) == {"first": [1.0] * 10, "b": [2.0] * 10}
    assert run._by_stage(recorded, {}, 5) == {"a": [2.0] * 5, "b": [4.0] * 5}
    assert run._by_stage(recorded[:-1], {}, 10) == {}


def test_a_floor_that_is_given_is_not_measured_and_one_that_cannot_be_is_a_note(bench: Bench) -> None:
    bench.clocks.has_floor = False
    given = bench.run(floor="0.141")
    assert given.results[0].floor_ns == report.Stat((0.141,))
    assert given.notes == ()
    found = bench.run()
    assert found.results[0].floor_ns is None
    assert found.notes[0].startswith("the floor of a pair was not measured: assembling the kernel of the floor: ")


def test_a_missing_plan_stops_everything_before_it_begins(bench: Bench) -> None:
    with pytest.raises(
        errors.PlanNotFoundError, match="dsa-plan precompile --backend default --arch sm_90a --topk 256"
    ):
        bench.run(topk="128,256", s_k="256")
    assert bench.clocks.taken == []


def test_a_shape_that_does_not_fit_is_refused_before_anything_is_measured(bench: Bench) -> None:
    bench.clocks.free = 3 << 30
    with pytest.raises(errors.UnsupportedError) as refused:
        bench.run(s_q="6,100000")
    assert str(refused.value).startswith("topk=128 B=1 S_q=100000 S_k=130 uniform ids: it takes about ")
    assert str(refused.value).endswith("and 3.0 GiB are free; give a smaller --batch, --s-q or --s-k")
    assert bench.clocks.taken == []


def test_progress_counts_every_step(bench: Bench) -> None:
    steps: list[tuple[int, int, str]] = []
    wanted = request.parse({**SMALL, "ids": "uniform,window"})
    run.run(wanted, bench.clocks, None, lambda *step: steps.append(step))
    assert [done for done, _, _ in steps] == list(range(16))
    assert {total for _, total, _ in steps} == {16}


def test_the_peer_is_found_or_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    assert "cuDNN frontend is not installed" in str(contenders.find_peer())
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "cudnn", types.ModuleType("cudnn"))
    assert "cannot be imported, so it is not measured beside the plans (ImportError: " in str(contenders.find_peer())
    module: Any = types.ModuleType("cudnn")
    module.DSA = types.SimpleNamespace(indexer_backward_wrapper=print)
    monkeypatch.setitem(sys.modules, "cudnn", module)
    assert isinstance(contenders.find_peer(), contenders.Peer)


def test_the_plain_command_prints_tables_and_writes_json(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "measure", lambda wanted, advance: run.run(wanted, bench.clocks, "no peer", advance))
    target = tmp_path / "answer.json"
    arguments = [word for name, value in SMALL.items() for word in ("--" + name.replace("_", "-"), value)]
    assert plain.main([*arguments, "--json", str(target)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split()[:3] == ["plan", "backend", "topk"]
    assert out.splitlines()[1].split()[1:7] == ["default", "128", "1", "6", "130", "uniform"]
    assert err.splitlines()[-1] == "bench: no peer"
    assert json.loads(target.read_text())["results"][0]["plans"][0]["name"] == "default"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--topk", "100"], 2, "bench: topk=100: "),
        (
            ["--json", "none/a.json"],
            2,
            "bench: --json none/a.json: there is no folder none; name a file in one that is",
        ),
    ],
)
def test_the_plain_command_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert plain.main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert len(err.splitlines()) == 1
