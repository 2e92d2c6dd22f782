"""A small measurement on a real GPU, end to end. Needs what launches a plan, and the plan for topk 128."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

from dsa_planner import envelope  # noqa: E402
from dsa_planner.bench import __main__ as plain  # noqa: E402
from dsa_planner.bench import inputs, request  # noqa: E402
from dsa_planner.bench.gpu import Gpu  # noqa: E402

if not envelope.rows_for_capability("default", torch.cuda.get_device_capability()):
    pytest.skip("the default backend has no kernel for this GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu


def test_a_small_measurement_hangs_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "answer.json"
    options = "--topk 128 --s-q 512,4096 --s-k 4096 --ids uniform,window --repeats 3 --json"
    assert plain.main([*options.split(), str(target)]) == 0
    out, err = capsys.readouterr()
    print(out, err)
    answer = json.loads(target.read_text())
    assert answer["device"]["name"] == torch.cuda.get_device_name()
    assert answer["limits"]["copy_tb_s"]["median"] > 0.5
    assert answer["limits"]["matmul_tflops"]["median"] > 100
    assert len(answer["results"]) == 4
    for result in answer["results"]:
        (plan,) = result["plans"]
        assert list(plan["kernels_us"]) == ["score_grad", "gradients", "round_d_index_k"]
        assert plan["gpu_us"]["median"] == pytest.approx(
            sum(stat["median"] for stat in plan["kernels_us"].values()), rel=0.1
        )
        assert plan["gpu_us"]["median"] < 1.1 * plan["call_us"]["median"]
        assert 0.02 < result["floor_ns_a_pair"]["median"] < 2
        if result["s_q"] == 4096:  # of few rows the launch is a large part
            assert plan["call_us"]["median"] < 1.5 * plan["gpu_us"]["median"]
            assert plan["of_floor"] > 0.9
    (times, *_) = answer["host"]
    assert 1 < times["host_us"]["launch"]["median"] < times["host_us"]["indexer_backward"]["median"] < 1000


def test_ids_over_many_keys_take_little_memory() -> None:
    gpu = Gpu(0)
    shape = request.Shape(1, 4096, 131072, 2048, "shared")
    generator = torch.Generator(device=gpu.device).manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = inputs.draw_ids(shape, generator, gpu.device)
    assert torch.cuda.max_memory_allocated() - before < 1 << 30
    in_order = found.sort(-1).values
    assert bool((in_order[..., 1:] > in_order[..., :-1]).all())


def test_the_clocks_agree_on_a_copy() -> None:
    gpu = Gpu(0)
    source = torch.zeros(1 << 28, dtype=torch.uint8, device=gpu.device)
    target = torch.empty_like(source)

    def copy(_: int) -> None:
        target.copy_(source)

    copy(0)
    recorded = [elapsed for _, elapsed in gpu.kernels(copy, 10)]
    assert len(recorded) == 10
    assert sorted(recorded)[5] == pytest.approx(gpu.call_us(copy, 10), rel=0.25)
