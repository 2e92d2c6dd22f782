"""Calls on a Blackwell device, against a driver made of Python: what is launched, and what is refused before that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dsa_cases  # noqa: E402
import fake_driver  # noqa: E402

import dsa_planner  # noqa: E402
from dsa_planner import envelope  # noqa: E402
from dsa_planner.cache.writable import WritableLayer  # noqa: E402
from dsa_planner.compiler import compile_plan  # noqa: E402

CONFIGS: tuple[dict[str, Any], ...] = (
    {"backend": "sm100_v2", "d_weights": "fp32"},
    {"backend": "sm100_v2", "d_weights": "fp32", "deterministic": True},
    {"backend": "default", "heads": 32},
)


@pytest.fixture(scope="module")
def blackwell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer with a plan of each kind, for topk 128."""
    root = tmp_path_factory.mktemp("blackwell")
    for config in CONFIGS:
        plan = compile_plan(envelope.plan_config({"arch": "sm_100f", "topk": 128, **config})).plan
        WritableLayer(root, 1 << 30).publish(plan)
    return root


@pytest.fixture
def b200(monkeypatch: pytest.MonkeyPatch, blackwell: Path) -> fake_driver.FakeDriver:
    fake = fake_driver.FakeDriver(capability=(10, 0), multiprocessors=148)
    fake_driver.install(monkeypatch, fake)
    monkeypatch.setenv("DSA_PLAN_PATH", str(blackwell))
    return fake


def blackwell_call(dk_dtype: torch.dtype, s_q: int = 50, s_k: int = 77, heads: int = 64) -> dict[str, torch.Tensor]:
    inputs = dsa_cases.make(3, s_q, s_k, 128).inputs()
    inputs["index_q"] = inputs["index_q"][:, :, :heads].contiguous()
    inputs["weights"] = inputs["weights"][:, :, :heads].contiguous()
    return {
        **inputs,
        "d_index_q": torch.empty_like(inputs["index_q"]),
        "d_weights": torch.empty(inputs["weights"].shape, dtype=torch.float32 if heads == 64 else torch.bfloat16),
        "d_index_k": torch.empty_like(inputs["index_k"], dtype=dk_dtype),
    }


@pytest.mark.parametrize("dk_dtype", [torch.bfloat16, torch.float32])
def test_every_launch_has_a_ticket_of_its_own_and_stage_1_zeroes_it(
    b200: fake_driver.FakeDriver, dk_dtype: torch.dtype
) -> None:
    plan = dsa_planner.load_plan(128, backend="sm100_v2", d_weights="fp32")
    tensors = blackwell_call(dk_dtype)
    accumulator = 0 if dk_dtype is torch.float32 else -(-4 * 231 * 128 // 256) * 256
    assert plan.workspace_bytes(3, 77, dk_dtype) == accumulator + 256
    workspace = torch.empty(accumulator + 256, dtype=torch.uint8)
    plan.launch(**tensors, workspace=workspace, stream=7)
    record = plan._record
    score_grad, gradients, *rounding = (fake_driver.by_name(launch, record) for launch in b200.launches)
    assert score_grad["ticket"] == gradients["ticket"] == workspace.data_ptr() + accumulator
    assert len(rounding) == (dk_dtype is torch.bfloat16)
    assert [launch.grid for launch in b200.launches][:2] == [19, 148]
    assert {launch.block for launch in b200.launches[1:2]} == {320}
    maps = {name: gradients[name][0] for name in ("index_q", "index_k")}
    assert maps == {name: tensors[name].data_ptr() for name in maps}
    assert [encode[1:4][2] for encode in b200.encodes] == [[128, 150 * 64], [128, 231]]
    assert [[int(size) for size in encode[5]] for encode in b200.encodes] == [[64, 64], [64, 1]]


def test_two_launches_share_nothing_that_they_write(b200: fake_driver.FakeDriver) -> None:
    """So they may run at the same time, on two streams: counter and accumulator are in each one's own workspace."""
    plan = dsa_planner.load_plan(128, backend="sm100_v2", d_weights="fp32")
    record, written = plan._record, []
    workspaces = [torch.empty(plan.workspace_bytes(3, 77), dtype=torch.uint8) for _ in range(2)]
    calls = [blackwell_call(torch.bfloat16) for _ in range(2)]
    for stream in (7, 8):
        b200.launches.clear()
        plan.launch(**calls[stream - 7], workspace=workspaces[stream - 7], stream=stream)
        assert {launch.stream for launch in b200.launches} == {stream}
        values = {
            name: value for launch in b200.launches for name, value in fake_driver.by_name(launch, record).items()
        }
        outputs = ("attn_score", "d_index_q", "d_weights", "d_index_k", "dk_accum", "ticket")
        written.append({values[name] for name in outputs})
        assert len(written[-1]) == len(outputs)
    assert not written[0] & written[1]


def test_a_reproducible_d_index_k_is_the_sum_of_planes(b200: fake_driver.FakeDriver) -> None:
    plan = dsa_planner.load_plan(128, backend="sm100_v2", d_weights="fp32", deterministic=True)
    plane = 4 * 231 * 128
    assert plan.workspace_bytes(3, 77, "fp32") == 127 * plane
    record = plan._record
    for dk_dtype, last in ((torch.float32, "sum_to_fp32"), (torch.bfloat16, "sum_to_bf16")):
        b200.launches.clear()
        tensors = blackwell_call(dk_dtype)
        plan.launch(**tensors, workspace=torch.empty(128 * (plane + 256), dtype=torch.uint8), stream=7)
        assert [launch.grid for launch in b200.launches] == [19, 128, 29]
        _, gradients, total = (fake_driver.by_name(launch, record) for launch in b200.launches)
        assert f"dsa_{last}_" in b200.launches[2].symbol
        assert (total["workers"], total["keys"], total["d_index_k"]) == (128, 231, tensors["d_index_k"].data_ptr())
        assert gradients["dk_planes"] == total["dk_planes"]
        assert gradients["dk_accum"] == total["dk_accum"]


def test_without_keys_the_map_of_keys_lies_over_other_memory(b200: fake_driver.FakeDriver) -> None:
    """A kernel that gathers nothing but invalid ids needs a map all the same."""
    tensors = blackwell_call(torch.float32, s_k=0)
    plan = dsa_planner.load_plan(128, backend="sm100_v2", d_weights="fp32")
    plan.launch(**tensors, workspace=torch.empty(256, dtype=torch.uint8), stream=7)
    assert [(encode[1:4][1], encode[1:4][2]) for encode in b200.encodes] == [
        (tensors["index_q"].data_ptr(), [128, 150 * 64]),
        (tensors["index_q"].data_ptr(), [128, 1]),
    ]


@pytest.mark.parametrize(("capability", "arch"), [((10, 0), "sm_100f"), ((10, 3), "sm_100f"), ((9, 0), None)])
def test_a_family_plan_runs_on_its_family(
    monkeypatch: pytest.MonkeyPatch, blackwell: Path, capability: tuple[int, int], arch: str | None
) -> None:
    fake_driver.install(monkeypatch, fake_driver.FakeDriver(capability=capability))
    monkeypatch.setenv("DSA_PLAN_PATH", str(blackwell))
    if arch is None:
        with pytest.raises(dsa_planner.DeviceMismatchError, match="sm100_v2"):
            dsa_planner.load_plan(128, backend="sm100_v2", d_weights="fp32")
    else:
        assert dsa_planner.load_plan(128, backend="sm100_v2", d_weights="fp32").config["arch"] == arch


def test_32_heads_run_with_boxes_of_64(b200: fake_driver.FakeDriver) -> None:
    tensors = blackwell_call(torch.bfloat16, heads=32)
    dsa_planner.indexer_backward(**tensors)
    assert [launch.grid for launch in b200.launches] == [19, 148, 15]
    assert [encode[1:4][2] for encode in b200.encodes] == [[128, 150 * 32], [128, 231]]
    assert [int(size) for size in b200.encodes[0][5]] == [64, 64]


# --- what is refused ------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]
V2 = "backend sm100_v2 for sm_100f takes"


def wide(tensor: torch.Tensor, topk: int) -> torch.Tensor:
    return tensor.new_zeros(*tensor.shape[:2], topk)


def of_topk(topk: int) -> dict[str, Change]:
    return {name: lambda a, name=name: wide(a[name], topk) for name in ("attn_score", "index_score", "topk_indices")}


REFUSED: dict[str, tuple[dict[str, Change], str]] = {
    "topk 1000": (of_topk(1000), f"topk=1000: {V2} topk a multiple of 128 from 128 to 2048; nearest is 1024"),
    "topk 2176": (of_topk(2176), f"topk=2176: {V2} topk a multiple of 128 from 128 to 2048; nearest is 2048"),
    "topk 64": (of_topk(64), f"topk=64: {V2} topk a multiple of 128 from 128 to 2048; nearest is 128"),
    "32 heads": (
        {name: lambda a, name=name: a[name][:, :, :32].contiguous() for name in ("index_q", "weights")},
        f"heads=32: {V2} heads 64; nearest is 64",
    ),
    "64 dims": ({"index_q": lambda a: a["index_q"][..., :64].contiguous()}, f"head_dim=64: {V2} head_dim 128"),
    "block_I 64": ({"block_I": lambda a: 64}, f"block_I=64: {V2} block_I 128; nearest is 128"),
    "sm_scale 0": (
        {"sm_scale": lambda a: 0.0},
        "sm_scale=0.0: sm_scale must be positive, between 1.175e-38 and 3.403e+38",
    ),
    "sm_scale -1": ({"sm_scale": lambda a: -1.0}, "sm_scale=-1.0: sm_scale must be positive"),
    "fp32 d_index_q": (
        {"d_index_q": lambda a: a["d_index_q"].float()},
        f"d_index_q of dtype fp32: {V2} d_index_q in bf16; pass d_index_q in bf16",
    ),
    "fp16 d_weights": (
        {"d_weights": lambda a: a["d_weights"].half()},
        f"d_weights='fp16': {V2} d_weights bf16 or fp32; nearest is bf16",
    ),
    "fp16 d_index_k": (
        {"d_index_k": lambda a: a["d_index_k"].half()},
        f"d_index_k of dtype fp16: {V2} d_index_k in bf16 or fp32; pass d_index_k in bf16",
    ),
    "index_k of another batch": (
        {"index_k": lambda a: a["index_k"][:2].contiguous()},
        "index_k of shape (2, 77, 128): with this plan and these index_q and index_k it is (B, S_k, D) = (3, 77, 128)",
    ),
    "index_k of other dims": (
        {"index_k": lambda a: a["index_k"][..., :64].contiguous()},
        "index_k of shape (3, 77, 64): with this plan and these index_q and index_k it is (B, S_k, D) = (3, 77, 128)",
    ),
    "strided ids": (
        {"topk_indices": lambda a: torch.stack([a["topk_indices"]] * 2, -1)[..., 0]},
        "topk_indices of strides (12800, 256, 2): it must be contiguous; pass topk_indices.contiguous()",
    ),
    "int64 ids": ({"topk_indices": lambda a: a["topk_indices"].long()}, f"topk_indices of dtype int64: {V2}"),
    "a number for deterministic": (
        {"deterministic": lambda a: 1},
        "deterministic=1: deterministic must be true or false",
    ),
    "default with an fp32 d_weights": (
        {"backend": lambda a: "default"},
        "d_weights='fp32': backend default for sm_100f takes d_weights bf16; nearest is bf16",
    ),
    "the backend of another architecture": (
        {"backend": lambda a: "sm90_v2"},
        "backend sm90_v2 on Fake GPU (compute capability 10.0): it runs on compute capability 9.0; use another backend or",
    ),
    "a plan that no layer has": (of_topk(256), "plan "),
}


@pytest.mark.parametrize("warm", [False, True], ids=["first-call", "warm"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_call_outside_the_envelope_is_refused_before_any_kernel(
    b200: fake_driver.FakeDriver, name: str, warm: bool
) -> None:
    call = {**blackwell_call(torch.float32), "backend": "sm100_v2"}
    if warm:
        dsa_planner.indexer_backward(**call)
        b200.launches.clear()
    changes, message = REFUSED[name]
    bad = {**call, **{key: change(call) for key, change in changes.items()}}
    before = bad["attn_score"].clone()
    with pytest.raises(dsa_planner.DsaPlannerError) as error:
        dsa_planner.indexer_backward(**bad)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert b200.launches == []
    assert torch.equal(bad["attn_score"], before)
