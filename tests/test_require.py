"""require: all plans of a job or one error; and what a process counts. A driver made of Python."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dsa_cases  # noqa: E402
import fake_driver  # noqa: E402
from dsa_cases import outputs  # noqa: E402

import dsa_planner  # noqa: E402
from dsa_planner import requirements  # noqa: E402
from dsa_planner.cache.planfile import PlanFile  # noqa: E402
from dsa_planner.cache.writable import WritableLayer  # noqa: E402


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, layer: Path) -> fake_driver.FakeDriver:
    fake = fake_driver.FakeDriver()
    fake_driver.install(monkeypatch, fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return fake


def test_plans_that_are_all_there_come_back_loaded(
    fake: fake_driver.FakeDriver, layer: Path, compiled_v2: PlanFile
) -> None:
    WritableLayer(layer, 1 << 30).publish(compiled_v2)
    from dsa_planner import PlanConfig

    configs: list[Any] = [
        {"topk": 128},
        {"topk": 128, "backend": "sm90_v2", "d_weights": "fp32"},
        PlanConfig(topk=128, arch="sm_90a"),
    ]
    plans = dsa_planner.require(configs)
    assert [plan.config["backend"] for plan in plans] == ["default", "sm90_v2", "default"]
    assert plans[0] is plans[2] is dsa_planner.load_plan(128)
    assert len(fake.kernels) == 6
    assert len(fake.slabs) == 1, "nothing is left to be taken at the first launch"
    assert dsa_planner.require({"topk": 128}, device="cuda:0") == [plans[0]]
    assert dsa_planner.require([]) == []


def test_one_error_lists_all_that_is_wrong(fake: fake_driver.FakeDriver, layer: Path, compiled: PlanFile) -> None:
    damaged = next(layer.rglob("*.dsaplan"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    configs: list[Any] = [
        {"topk": 128}, {"topk": 256}, {"topk": 100}, {"topk": 512, "backend": "sm100_v2"}, {"backend": "default"},
        {"topk": 128, "headz": 64}, {"topk": "128"}, 7,
    ]  # fmt: skip
    with pytest.raises(dsa_planner.RequirementError) as error:
        dsa_planner.require(configs)
    problems = error.value.problems
    for problem, expected in zip(
        problems,
        [
            r"topk=128: plan .*unusable: .*",
            r"topk=256: plan .*it is not in .*dsa-plan precompile --backend default --arch sm_90a --topk 256",
            r"topk=100: topk=100: backend default for sm_90a takes topk a multiple of 128",
            r"backend=sm100_v2 topk=512: backend sm100_v2 on Fake GPU .*it runs on compute capability 10",
            r"backend=default: required plan .*topk has no default",
            r"headz=64 topk=128: field 'headz': a plan config has no such field; nearest is heads",
            r"topk=128: topk='128': topk must be an integer",
            r"7: required plan 7: it is no mapping of config fields",
        ],
        strict=True,
    ):
        assert re.match(expected, problem), problem
    assert str(error.value).startswith("8 required plans: topk=128: plan")
    assert "\n" not in str(error.value)
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.problems, str(again)) == (problems, str(error.value))


def test_nothing_keeps_the_other_ranks_waiting(fake: fake_driver.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a config is, this rank answers."""
    from dsa_planner import PlanConfig

    gathered: list[Any] = []
    monkeypatch.setattr(requirements, "_gathered", lambda mine, group: [gathered.append(mine), mine][1:])

    class Broken:
        def model_dump(self) -> None:
            raise OSError("gone")

        def __repr__(self) -> str:
            raise OSError("gone")

    def generator() -> Any:
        yield {"topk": 128}
        raise TypeError("in the middle")

    for configs, message in (
        ([PlanConfig], "it is no mapping of config fields"),
        ([Broken()], "OSError: gone"),
        ([{"topk": 10**5000}], "backend default for sm_90a takes topk"),
        ([{"topk": Broken()}], "topk must be an integer"),
        ([{Broken(): 1}], "a plan config has no such field"),
        (generator(), r"configs: they could not be listed \(TypeError: in the middle\)"),
    ):
        gathered.clear()
        with pytest.raises(dsa_planner.RequirementError, match=message):
            dsa_planner.require(configs, group=object())
        assert len(gathered) == 1, message


def test_a_group_that_is_none_or_not_ours(fake: fake_driver.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        dsa_planner.RequirementError, match=r"the ranks could not compare \(.*; look for a rank that failed"
    ):
        dsa_planner.require([{"topk": 128}], group=object())
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: -1)
    with pytest.raises(dsa_planner.RequirementError, match="this process is not in the group; call require only on"):
        dsa_planner.require([{"topk": 128}], group=object())


def test_an_arch_that_the_device_does_not_run(fake: fake_driver.FakeDriver) -> None:
    with pytest.raises(dsa_planner.RequirementError, match="arch='sm_100f': the plan for cuda:0 is of sm_90a"):
        dsa_planner.require([{"topk": 128, "arch": "sm_100f"}])


def others(answers: list[tuple[list[str], list[tuple[str, str]]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks, with their answers; this one is rank 0."""
    monkeypatch.setattr(requirements, "_gathered", lambda mine, group: [mine, *answers])


def test_ranks_compare_files(fake: fake_driver.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = dsa_planner.load_plan(128).file_sha256
    others([(["topk=128"], [(mine, "")])] * 3, monkeypatch)
    assert len(dsa_planner.require([{"topk": 128}], group=object())) == 1
    others([(["topk=128"], [(mine, "")]), (["topk=128"], [("f" * 64, "")])], monkeypatch)
    with pytest.raises(dsa_planner.RequirementError) as error:
        dsa_planner.require([{"topk": 128}], group=object())
    assert error.value.problems == (
        f"topk=128: ranks have different files (ranks 0-1 {mine[:12]}, rank 2 ffffffffffff)",
    )


def test_what_several_ranks_say_is_said_once(fake: fake_driver.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = dsa_planner.load_plan(128).file_sha256
    gone = (["topk=128"], [("", "it is not in /x")])
    others([gone, gone, (["topk=128"], [(mine, "")]), gone, (["topk=256"], [(mine, "")])], monkeypatch)
    with pytest.raises(dsa_planner.RequirementError) as error:
        dsa_planner.require([{"topk": 128}], group=object())
    assert error.value.problems == (
        "ranks 1-2, 4: topk=128: it is not in /x",
        "rank 5: it asks for other plans than rank 0",
    )
    assert str(error.value).startswith("1 required plans on 6 ranks: ranks 1-2, 4: ")


def test_two_processes_fail_alike_in_seconds(tmp_path: Path, layer: Path) -> None:
    """Over gloo; without a GPU every rank has the same problem."""
    import subprocess
    import sys

    script = (
        "import sys, torch.distributed as d, dsa_planner\n"
        f"d.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=int(sys.argv[1]), world_size=2)\n"
        "try: dsa_planner.require([{'topk': 128}], device=0, group=d.group.WORLD)\n"
        "except dsa_planner.RequirementError as error: print(error)\n"
        "d.destroy_process_group()\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert said[0] == said[1]
    assert said[0].startswith("1 required plans on 2 ranks: ranks 0-1: topk=128: ")


def test_a_missing_plan_is_compiled_where_the_settings_say_so(
    fake: fake_driver.FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DSA_PLAN_CACHE_DIR", str(tmp_path / "writable"))
    with pytest.raises(dsa_planner.PlanNotFoundError):
        dsa_planner.load_plan(256)
    monkeypatch.setenv("DSA_PLAN_COMPILE", "missing")
    (plan,) = dsa_planner.require([{"topk": 256}])
    assert plan.config["topk"] == 256
    assert len(list((tmp_path / "writable").rglob("*.dsaplan"))) == 1
    monkeypatch.setenv("DSA_PLAN_CACHE_DIR", "none")
    with pytest.raises(dsa_planner.CacheError, match="no writable layer"):
        dsa_planner.load_plan(384)


def test_what_a_process_counts(fake: fake_driver.FakeDriver, layer: Path) -> None:
    plan = dsa_planner.load_plan(128)
    case = dsa_cases.make(1, 2, 20, 128)
    for _ in range(3):
        plan.launch(**case.inputs(), **outputs(case, torch.bfloat16))
    found = dsa_planner.stats()
    assert found["plans"] == [
        {
            "plan_id": plan.plan_id, "build_id": plan.build_id, "device": 0, "backend": "default", "topk": 128,
            "launches": 3, "captured": 0, "loaded": True, "stays": False,
        }
    ]  # fmt: skip
    assert found["devices"][0]["modules"] == 1
    assert found["devices"][0]["scratch_bytes"] == plan.workspace_bytes(1, 20)
    assert found["layers"][str(layer)]["hits"] >= 1
    assert found["synchronisations"] == 0
    json.dumps(found)
