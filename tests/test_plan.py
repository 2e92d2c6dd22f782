"""The runtime against a driver made of Python: what is loaded, checked, packed and launched. No GPU."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dsa_cases  # noqa: E402
import fake_driver  # noqa: E402
from dsa_cases import outputs  # noqa: E402

import dsa_planner  # noqa: E402
from dsa_planner import device_memory, launch_record, streams  # noqa: E402
from dsa_planner.cache.planfile import PlanFile  # noqa: E402
from dsa_planner.cache.writable import WritableLayer  # noqa: E402
from dsa_planner.launch_record import LaunchRecord  # noqa: E402
from dsa_planner.plan import Plan  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16)


def test_a_launch_hands_every_kernel_its_parameters(fake: fake_driver.FakeDriver, compiled: PlanFile) -> None:
    plan = dsa_planner.load_plan(128)
    case = dsa_cases.make(3, 50, 77, 128, loss_coeff=3.0)
    tensors = {**case.inputs(), **outputs(case, torch.bfloat16)}
    workspace = torch.empty(plan.workspace_bytes(3, 77), dtype=torch.uint8)
    plan.launch(**tensors, sm_scale=0.5, loss_coeff=3.0, workspace=workspace, stream=77)

    record = LaunchRecord.parse(compiled.launch)
    assert [launch.symbol for launch in fake.launches] == [
        "dsa_score_grad_0",
        "dsa_gradients_1",
        "dsa_round_d_index_k_2",
    ]
    assert {launch.stream for launch in fake.launches} == {77}
    assert [(launch.grid, launch.block, launch.shared_bytes) for launch in fake.launches] == [
        (19, 256, 0),
        (132, 512, 232448),
        (15, 256, 0),
    ]
    address = {name: tensor.data_ptr() for name, tensor in tensors.items()} | {"dk_accum": workspace.data_ptr()}
    numbers = {"rows": 150, "keys": 231, "s_q": 50, "id_limit": 77, "id_offset": 77}
    for launch in fake.launches:
        for name, value in fake_driver.by_name(launch, record).items():
            if name == "sm_scale":
                assert value == 0.5
            elif name == "loss_scale":
                assert value == pytest.approx(3.0 / 150)
            elif isinstance(value, tuple):
                assert value[0] == address[name]
            else:
                assert value == (numbers | address)[name], name
    assert fake.shared_limits == {"dsa_gradients_1": 232448}
    for name, encode in zip(("index_q", "d_index_q"), fake.encodes, strict=True):
        assert encode[1:4] == (2, tensors[name].data_ptr(), [128, 150 * 64])
        assert [int(stride) for stride in encode[4]] == [256]
        assert [int(size) for size in encode[5]] == [64, 64]
        assert encode[8] == fake_driver.real.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B


def test_an_fp32_d_index_k_is_the_accumulator_and_needs_no_rounding(
    fake: fake_driver.FakeDriver, compiled: PlanFile
) -> None:
    plan = dsa_planner.load_plan(128)
    assert plan.workspace_bytes(1, 9, "fp32") == 0
    assert plan.workspace_bytes(2, 9) == 4 * 2 * 9 * 128
    case = dsa_cases.make(1, 4, 9, 128)
    tensors = {**case.inputs(), **outputs(case)}
    plan.launch(**tensors)
    assert len(fake.launches) == 2
    record = LaunchRecord.parse(compiled.launch)
    for launch in fake.launches:
        assert fake_driver.by_name(launch, record)["dk_accum"] == tensors["d_index_k"].data_ptr()


def test_global_ids_have_one_limit_and_no_offset(fake: fake_driver.FakeDriver, compiled: PlanFile) -> None:
    case = dsa_cases.make(3, 5, 11, 128)
    dsa_planner.load_plan(128).launch(**case.inputs(), **outputs(case), topk_indices_global=True)
    values = fake_driver.by_name(fake.launches[1], LaunchRecord.parse(compiled.launch))
    assert (values["id_limit"], values["id_offset"]) == (33, 0)


def test_what_changes_between_launches_is_packed_again(fake: fake_driver.FakeDriver, compiled: PlanFile) -> None:
    plan = dsa_planner.load_plan(128)
    record = LaunchRecord.parse(compiled.launch)
    case, other = dsa_cases.make(1, 6, 20, 128), dsa_cases.make(2, 9, 31, 128)
    tensors, others = {**case.inputs(), **outputs(case)}, {**other.inputs(), **outputs(other)}

    def launched(given: dict[str, torch.Tensor], **scalars: Any) -> dict[str, Any]:
        fake.launches.clear()
        plan.launch(**given, **scalars)
        values = [fake_driver.by_name(launch, record) | {"stream": launch.stream} for launch in fake.launches[:2]]
        return values[0] | values[1]

    start = launched(tensors)
    assert launched(tensors) == start
    assert len(fake.encodes) == 2, "nothing changed, so the tensor maps stand"
    assert launched(tensors, sm_scale=0.25)["sm_scale"] == 0.25
    assert launched(tensors, loss_coeff=12.0)["loss_scale"] == 2.0
    assert launched(tensors, stream=5)["stream"] == 5
    assert launched(tensors) == start
    moved = {**tensors, "weights": tensors["weights"].clone()}
    assert launched(moved) == start | {"weights": moved["weights"].data_ptr()}
    assert len(fake.encodes) == 4, "the other stream has tensor maps of its own; here another tensor moved"
    moved = {**tensors, "index_q": tensors["index_q"].clone()}
    assert launched(moved)["index_q"] == (moved["index_q"].data_ptr(), 1)
    assert len(fake.encodes) == 4
    assert fake.moves == [moved["index_q"].data_ptr()], "an address is all that changed"
    shaped = launched(others)
    assert (shaped["rows"], shaped["keys"], shaped["id_limit"]) == (18, 62, 31)
    assert fake.encodes[-1][3] == [128, 18 * 64]
    again = {"index_q": (tensors["index_q"].data_ptr(), 7), "d_index_q": (tensors["d_index_q"].data_ptr(), 8)}
    assert launched(tensors) == start | again


def test_an_extent_alone_makes_a_new_tensor_map(fake: fake_driver.FakeDriver) -> None:
    plan = dsa_planner.load_plan(128)
    case = dsa_cases.make(1, 6, 20, 128)
    given = {**case.inputs(), **outputs(case)}
    plan.launch(**given)
    per_row = ("index_q", "weights", "attn_score", "index_score", "topk_indices", "d_index_q", "d_weights")
    plan.launch(**{name: tensor[:, :3] if name in per_row else tensor for name, tensor in given.items()})
    assert [encode[2:4] for encode in fake.encodes] == [
        (given[name].data_ptr(), [128, rows * 64]) for rows in (6, 3) for name in ("index_q", "d_index_q")
    ]


@pytest.mark.parametrize(
    ("s_q", "s_k", "symbols"),
    [
        (0, 9, ["dsa_score_grad_0"]),
        (5, 0, ["dsa_score_grad_0", "dsa_gradients_1"]),
        (0, 0, []),
    ],
)
def test_empty_extents_launch_only_what_has_work(
    fake: fake_driver.FakeDriver, s_q: int, s_k: int, symbols: list[str]
) -> None:
    case = dsa_cases.make(2, s_q, s_k, 128)
    dsa_planner.load_plan(128).launch(**case.inputs(), **outputs(case))
    assert [launch.symbol for launch in fake.launches] == symbols


def test_another_current_context_is_put_back_even_after_an_error(fake: fake_driver.FakeDriver) -> None:
    plan = dsa_planner.load_plan(128)
    case = dsa_cases.make(1, 2, 3, 128)
    fake.current_context = 0xBAD  # or none, as in a new thread; the driver encodes no tensor map in it
    plan.launch(**case.inputs(), **outputs(case))
    assert (fake.current_context, fake.pushed) == (0xBAD, [])
    fake.launch_status = fake_driver.real.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(dsa_planner.DriverError, match=r"launching the kernels of <Plan .*CUDA_ERROR_LAUNCH_FAILED"):
        plan.launch(**case.inputs(), **outputs(case))
    assert (fake.current_context, fake.pushed) == (0xBAD, [])


def test_a_refused_launch_leaves_nothing_behind(fake: fake_driver.FakeDriver, compiled: PlanFile) -> None:
    """Whatever goes wrong while a launch is packed, the next one is packed as if it had not been."""
    plan = dsa_planner.load_plan(128)
    record = LaunchRecord.parse(compiled.launch)
    case = dsa_cases.make(1, 6, 20, 128)
    given = {**case.inputs(), **outputs(case)}
    plan.launch(**given)
    first = [fake_driver.by_name(launch, record) for launch in fake.launches]

    def fail(*arguments: Any) -> tuple[Any, ...]:
        return (fake_driver.real.CUresult.CUDA_ERROR_INVALID_VALUE, None)

    moved = {**given, "index_q": given["index_q"].clone()}
    other = dsa_cases.make(1, 7, 20, 128)
    for function, arguments, message in (
        ("cuTensorMapReplaceAddress", moved, "moving a tensor map"),
        ("cuTensorMapEncodeTiled", {**other.inputs(), **outputs(other)}, "encoding a tensor map"),
        ("cuGraphInstantiate", given, "making the graph of a launch"),
    ):
        works = getattr(fake, function)
        setattr(fake, function, fail)
        with pytest.raises(dsa_planner.DriverError, match=message):
            plan.launch(**arguments)
        setattr(fake, function, works)
    assert not fake.executables, "the graphs of blocks that failed are freed"
    assert not any(fake.graphs)
    plan.launch(**given)
    fake.graph_status = fake_driver.real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(dsa_planner.DriverError, match=r"changing the graph of a launch.*DSA_PLAN_LAUNCH=kernels"):
        plan.launch(**moved)
    fake.graph_status = fake_driver.SUCCESS
    with pytest.raises(dsa_planner.UnsupportedError, match="they share memory"):
        plan.launch(**{**given, "d_weights": given["weights"]})
    for wrong in ({"sm_scale": 1e39}, {"loss_coeff": 10**400}, {"sm_scale": -1.0}):
        with pytest.raises(dsa_planner.UnsupportedError):
            plan.launch(**given, **wrong)
    fake.launches.clear()
    plan.launch(**given)
    again = [fake_driver.by_name(launch, record) for launch in fake.launches]
    for before, after in zip(first, again, strict=True):
        for name in ("index_q", "d_index_q"):  # encoded again, so with another number
            before.pop(name, None), after.pop(name, None)
        assert before == after


def test_the_workspace_a_plan_asks_for(fake: fake_driver.FakeDriver) -> None:
    plan = dsa_planner.load_plan(128)
    assert plan.workspace_bytes(2, 9, torch.bfloat16) == plan.workspace_bytes(2, 9, "bf16") == 4 * 2 * 9 * 128
    assert plan.workspace_bytes(2, 9, torch.float32) == plan.workspace_bytes(2, 9, "fp32") == 0
    with pytest.raises(dsa_planner.UnsupportedError, match="d_index_k='bfloat16'"):
        plan.workspace_bytes(1, 1, "bfloat16")
    with pytest.raises(dsa_planner.UnsupportedError, match="d_index_k='fp16'"):
        plan.workspace_bytes(1, 1, torch.float16)
    with pytest.raises(dsa_planner.UnsupportedError, match="batch=-1: batch must be a count"):
        plan.workspace_bytes(-1, 1)


def test_extents_beyond_what_kernels_count(fake: fake_driver.FakeDriver) -> None:
    plan = dsa_planner.load_plan(128)
    for batch, s_q, s_k in ((0, 5, 2**31), (0, 2**31, 5), (2**31, 0, 0), (1, 2**24 + 1, 5), (2**15, 1, 2**15 + 1)):
        like = {"bf16": torch.bfloat16, "fp32": torch.float32, "int32": torch.int32}

        def empty(dtype: str, *shape: int, like: dict[str, torch.dtype] = like) -> torch.Tensor:
            return torch.empty(shape, dtype=like[dtype], device="meta" if 0 not in shape else "cpu")

        tensors = {
            "index_q": empty("bf16", batch, s_q, 64, 128),
            "weights": empty("bf16", batch, s_q, 64),
            "index_k": empty("bf16", batch, s_k, 128),
            "attn_score": empty("fp32", batch, s_q, 128),
            "index_score": empty("fp32", batch, s_q, 128),
            "topk_indices": empty("int32", batch, s_q, 128),
            "grad_loss": torch.ones(1),
            "d_index_q": empty("bf16", batch, s_q, 64, 128),
            "d_weights": empty("bf16", batch, s_q, 64),
            "d_index_k": empty("fp32", batch, s_k, 128),
        }
        with pytest.raises(dsa_planner.UnsupportedError, match="must be at most 1073741824; split the batch"):
            plan.launch(**tensors)


def test_a_driver_that_lost_its_context_is_an_error(fake: fake_driver.FakeDriver) -> None:
    """As in a forked child."""
    plan = dsa_planner.load_plan(128)
    case = dsa_cases.make(1, 2, 3, 128)
    fake.cuCtxGetCurrent = lambda: (fake_driver.real.CUresult.CUDA_ERROR_NOT_INITIALIZED, None)  # type: ignore[method-assign]
    with pytest.raises(dsa_planner.DriverError, match="CUDA_ERROR_NOT_INITIALIZED"):
        plan.launch(**case.inputs(), **outputs(case))


@pytest.mark.parametrize("function", ["cuLibraryLoadData", "cuKernelGetParamInfo", "cuKernelGetFunction"])
def test_a_driver_that_is_too_old_says_so(fake: fake_driver.FakeDriver, function: str) -> None:
    def missing(*arguments: Any) -> None:
        raise RuntimeError(f'Function "{function}" not found')  # as cuda.bindings does

    setattr(fake, function, missing)
    with pytest.raises(dsa_planner.DriverError, match=f"the driver has no {function}, so it is older than CUDA 12.4"):
        dsa_planner.load_plan(128)


def test_kernels_are_launched_as_one_graph(fake: fake_driver.FakeDriver) -> None:
    plan = dsa_planner.load_plan(128)
    case = dsa_cases.make(1, 6, 20, 128)
    given = {**case.inputs(), **outputs(case)}
    scratch = torch.empty(plan.workspace_bytes(1, 20), dtype=torch.uint8)
    rounded = {**given, "d_index_k": torch.empty_like(case.index_k), "workspace": scratch}
    for _ in range(3):
        plan.launch(**given, stream=5)
    assert fake.graph_launches == [0, 0, 0]
    assert len(fake.launches) == 6
    plan.launch(**rounded, stream=5)
    plan.launch(**given, stream=5)
    plan.launch(**rounded, stream=5)
    assert fake.graph_launches[3:] == [1, 0, 1], "one for each set of kernels"
    plan.launch(**given, stream=6)
    assert fake.graph_launches[6:] == [2], "one for each stream: the launches of one graph wait for each other"


@pytest.mark.parametrize("seed", range(4))
def test_graphs_hand_over_what_kernels_do(
    fake: fake_driver.FakeDriver, compiled: PlanFile, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever changes from launch to launch, and whether it is captured in between."""
    monkeypatch.setattr(streams, "allocating_on", lambda handle, device: nullcontext())
    monkeypatch.setattr(device_memory, "_is_private", lambda address, device: True)
    record = LaunchRecord.parse(compiled.launch)
    graph, kernels = Plan(compiled, 0), Plan(compiled, 0, "kernels")
    draw = random.Random(seed)
    calls = []
    for batch, s_q, s_k in ((1, 6, 20), (2, 6, 20), (1, 7, 20), (1, 6, 21), (1, 0, 20), (1, 6, 0), (1, 0, 0)):
        case = dsa_cases.make(batch, s_q, s_k, 128)
        workspace = torch.empty(graph.workspace_bytes(batch, s_k) + 16, dtype=torch.uint8)
        for _ in range(2):  # with other addresses
            given = {name: tensor.clone() for name, tensor in case.inputs().items()}
            calls += [{**given, **outputs(case, dtype), "workspace": workspace} for dtype in DTYPES]
    for _ in range(150):
        given = dict(draw.choice(calls))
        scratch = draw.random() < 0.3
        if scratch:
            del given["workspace"]
        scalars = {"sm_scale": draw.choice((0.5, 1.0)), "topk_indices_global": draw.random() < 0.2}
        stream = draw.choice((0, 5, 6))
        fake.capturing = {5} if draw.random() < 0.2 else set()
        found = []
        for plan in (graph, kernels):
            fake.launches.clear()
            plan.launch(**given, **scalars, stream=stream)
            for launch in fake.launches:
                values = fake_driver.by_name(launch, record)
                if scratch and given["d_index_k"].dtype is torch.bfloat16:
                    del values["dk_accum"]  # each has its own
                maps = {name: value for name, value in values.items() if isinstance(value, tuple)}
                for name, (address, encoding) in maps.items():
                    assert fake.encodes[encoding - 1][3] == [128, 64 * values["rows"]]
                    maps[name] = address
                found.append((plan, launch.symbol, launch.grid, launch.block, launch.stream, values | maps))
        assert [entry[1:] for entry in found if entry[0] is graph] == [
            entry[1:] for entry in found if entry[0] is kernels
        ]
    assert len(fake.graph_launches) > 50


def test_a_launch_under_capture_is_of_kernels(fake: fake_driver.FakeDriver, compiled: PlanFile) -> None:
    """And what it packs is known to the graph of the stream's next launch."""
    plan = dsa_planner.load_plan(128)
    case = dsa_cases.make(1, 6, 20, 128)
    given = {**case.inputs(), **outputs(case)}
    plan.launch(**given, stream=5)
    first = list(fake.launches)
    fake.capturing = {5}
    plan.launch(**given, stream=5, sm_scale=0.25)
    assert len(fake.graph_launches) == 1
    assert len(fake.graphs) == 1
    captured = fake.launches[2:]
    fake.capturing = set()
    plan.launch(**given, stream=5, sm_scale=0.25)
    assert len(fake.graph_launches) == 2
    assert fake.launches[4:] == captured != first
    plan.launch(**given, stream=5)
    assert fake.launches[6:] == first


def test_kernels_can_be_launched_one_by_one(fake: fake_driver.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dsa_cases.make(1, 6, 20, 128)
    given = {**case.inputs(), **outputs(case)}
    monkeypatch.setenv("DSA_PLAN_LAUNCH", "kernels")
    plan = dsa_planner.load_plan(128)
    plan.launch(**given, stream=5)
    assert [launch.stream for launch in fake.launches] == [5, 5]
    assert not fake.graphs
    fake.launch_status = fake_driver.real.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(dsa_planner.DriverError, match=r"launching score_grad of <Plan .*CUDA_ERROR_LAUNCH_FAILED"):
        plan.launch(**given, stream=5)


def test_kernels_of_two_threads_do_not_take_turns(fake: fake_driver.FakeDriver, compiled: PlanFile) -> None:
    """With one workspace on one stream, where the order of the stream is all that keeps two launches apart."""
    plan = Plan(compiled, 0, "kernels")
    case = dsa_cases.make(1, 6, 20, 128)
    workspace = torch.empty(plan.workspace_bytes(1, 20), dtype=torch.uint8)
    launch = fake.cuLaunchKernelEx
    order: list[tuple[int, str]] = []

    def slow(config: Any, function: int, parameters: int, extra: int) -> Any:
        order.append((threading.get_ident(), fake.kernels[function].symbol))
        time.sleep(0.001)
        return launch(config, function, parameters, extra)

    fake.cuLaunchKernelEx = slow  # type: ignore[method-assign]

    def work() -> None:
        given = {**case.inputs(), **outputs(case, torch.bfloat16)}
        for _ in range(10):
            plan.launch(**given, workspace=workspace, stream=5)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order) == 90
    assert all(len({thread for thread, _ in order[at : at + 3]}) == 1 for at in range(0, 90, 3))


def test_few_streams_keep_their_graphs(fake: fake_driver.FakeDriver) -> None:
    plan = dsa_planner.load_plan(128)
    case = dsa_cases.make(1, 6, 20, 128)
    given = {**case.inputs(), **outputs(case)}
    for stream in range(100, 200):
        plan.launch(**given, stream=stream)
    assert len(fake.launches) == 200
    assert len(fake.executables) == sum(graph is not None for graph in fake.graphs) == 64


def test_threads_launch_one_plan_at_once(fake: fake_driver.FakeDriver, compiled: PlanFile) -> None:
    plan = dsa_planner.load_plan(128)
    record = LaunchRecord.parse(compiled.launch)
    cases = [dsa_cases.make(1, 3 + number, 10, 128, seed=number) for number in range(6)]
    given = [{**case.inputs(), **outputs(case)} for case in cases]

    def work(number: int) -> None:
        for _ in range(50):
            plan.launch(**given[number], stream=100 + number // 2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.launches) == 6 * 50 * 2
    for launch in fake.launches:
        values = fake_driver.by_name(launch, record)
        number = values["rows"] - 3
        assert launch.stream == 100 + number // 2
        assert values["attn_score"] == given[number]["attn_score"].data_ptr()
    assert len(fake.executables) == sum(graph is not None for graph in fake.graphs) == 3


def test_a_plan_is_loaded_once(fake: fake_driver.FakeDriver) -> None:
    assert dsa_planner.load_plan(128) is dsa_planner.load_plan(128)
    case = dsa_cases.make(1, 2, 3, 128)
    for _ in range(3):
        dsa_planner.indexer_backward(**case.inputs())
    assert len(fake.kernels) == 3


def test_a_driver_that_sees_other_parameters_is_believed(fake: fake_driver.FakeDriver) -> None:
    changes = [
        lambda symbol, found: found[:-1],
        lambda symbol, found: [*found, (260, 4)],
        lambda symbol, found: [(found[0][0] + 16, found[0][1]), *found[1:]],
        lambda symbol, found: [*found[:-1], (found[-1][0], 8)],
    ]
    for change in changes:
        fake.change_parameters = change
        with pytest.raises(dsa_planner.PlanFileError, match="kernel score_grad has parameters"):
            dsa_planner.load_plan(128)


def test_a_plan_for_another_arch_is_refused_on_this_device(
    monkeypatch: pytest.MonkeyPatch, layer: Path, compiled: PlanFile
) -> None:
    fake_driver.install(monkeypatch, fake_driver.FakeDriver(capability=(8, 0)))
    with pytest.raises(
        dsa_planner.DeviceMismatchError, match=r"backend default on Fake GPU \(compute capability 8\.0\)"
    ):
        dsa_planner.load_plan(128)
    with pytest.raises(dsa_planner.DeviceMismatchError, match=r"for sm_90a on Fake GPU .*: sm_90a runs on 9\.0"):
        dsa_planner.Plan(compiled, 0)


def test_no_gpu_and_no_such_gpu(monkeypatch: pytest.MonkeyPatch, layer: Path) -> None:
    fake_driver.install(monkeypatch, fake_driver.FakeDriver(devices=0))
    with pytest.raises(dsa_planner.DriverError, match="starting CUDA: there is no GPU"):
        dsa_planner.load_plan(128)
    fake_driver.install(monkeypatch, fake_driver.FakeDriver(devices=1))
    with pytest.raises(dsa_planner.DeviceMismatchError, match="device 7: this process sees 1 devices"):
        dsa_planner.load_plan(128, device=7)


def test_a_missing_plan_names_itself_the_layers_and_the_command(fake: fake_driver.FakeDriver, layer: Path) -> None:
    with pytest.raises(dsa_planner.PlanNotFoundError) as error:
        dsa_planner.load_plan(256)
    text = str(error.value)
    assert "topk=256" in text
    assert str(layer) in text
    assert "run 'dsa-plan precompile --backend default --arch sm_90a --topk 256'" in text
    assert isinstance(error.value, LookupError)


def test_no_layer_at_all_is_said_so(fake: fake_driver.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_PLAN_PATH", "")
    monkeypatch.setenv("DSA_PLAN_CACHE_DIR", "none")
    with pytest.raises(dsa_planner.PlanNotFoundError) as error:
        dsa_planner.load_plan(256)
    assert str(error.value).endswith(
        ": there is no layer to look in; set DSA_PLAN_PATH or DSA_PLAN_CACHE_DIR, and run 'dsa-plan precompile "
        "--backend default --arch sm_90a --topk 256' where the compiler is installed"
    )


def test_a_damaged_plan_is_a_missing_plan_with_the_reason(fake: fake_driver.FakeDriver, layer: Path) -> None:
    path = next(layer.rglob("*.dsaplan"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(dsa_planner.PlanNotFoundError, match=f"unusable: {path}: its digest does not match"):
        dsa_planner.load_plan(128)


def test_a_record_that_does_not_fit_the_cubin_is_refused(
    fake: fake_driver.FakeDriver, compiled: PlanFile, tmp_path: Path
) -> None:
    """Such a file can only be made by hand: its digest and plan id are right, and its content is not."""
    for change, message in (
        (lambda m: m["kernels"].reverse(), "its launch record is malformed .its kernels are not those of the manifest"),
        (lambda m: m["kernels"][0].pop("symbol"), "its launch record is malformed"),
        (lambda m: m["kernels"][0].update(parameters=[7]), "its launch record is malformed"),
        (lambda m: m["identity"]["launch"]["kernels"][0].pop("grid"), "its launch record is malformed"),
        (lambda m: m["identity"]["launch"]["kernels"][0]["parameters"].pop(), "has parameters"),
    ):
        import copy

        manifest = copy.deepcopy(dict(compiled.manifest))
        change(manifest)
        with pytest.raises(dsa_planner.PlanFileError, match=message):
            dsa_planner.Plan(dataclasses.replace(compiled, manifest=manifest), 0)


def test_the_writable_layer_serves_the_run_side_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: PlanFile
) -> None:
    fake_driver.install(monkeypatch, fake_driver.FakeDriver())
    monkeypatch.setenv("DSA_PLAN_CACHE_DIR", str(tmp_path / "mine"))
    WritableLayer(tmp_path / "mine", 1 << 30).publish(compiled)
    assert dsa_planner.load_plan(128).plan_id == compiled.plan_id


def test_tensors_of_the_record_are_those_of_the_operator() -> None:
    import inspect

    names = list(inspect.signature(dsa_planner.indexer_backward).parameters)
    assert names[:7] == list(launch_record.TENSORS[:7])
