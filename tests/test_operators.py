"""indexer_backward: its signature, and what it refuses. No GPU: refusals come before any kernel would run."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dsa_cases  # noqa: E402
import fake_driver  # noqa: E402

import dsa_planner  # noqa: E402


@pytest.fixture
def arguments() -> dict[str, Any]:
    case = dsa_cases.make(2, 6, 40, 128)
    return {
        **case.inputs(),
        "d_index_q": torch.zeros_like(case.index_q),
        "d_weights": torch.zeros_like(case.weights),
        "d_index_k": torch.zeros_like(case.index_k),
    }


def test_the_signature_is_that_of_the_peers_wrapper() -> None:
    signature = inspect.signature(dsa_planner.indexer_backward)
    plain = [(p.name, p.default) for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    empty = inspect.Parameter.empty
    assert plain == [
        *((name, empty) for name in ("index_q", "weights", "index_k", "attn_score", "index_score", "topk_indices")),
        ("grad_loss", empty), ("sm_scale", 1.0), ("loss_coeff", 1.0), ("block_I", 128), ("topk_indices_global", False),
        ("d_index_q", None), ("d_weights", None), ("d_index_k", None), ("stream", None),
    ]  # fmt: skip
    keyword_only = [(p.name, p.default) for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert keyword_only == [
        ("backend", "default"), ("workspace", None), ("deterministic", False), ("deterministic_dk_planes", 96),
        ("audit", None),
    ]  # fmt: skip


def test_outputs_come_back_in_order_and_are_the_callers_where_given(
    fake: fake_driver.FakeDriver, arguments: dict[str, Any]
) -> None:
    result = dsa_planner.indexer_backward(**arguments, deterministic_dk_planes=3)
    assert list(result) == ["d_index_q", "d_weights", "d_index_k"]
    assert all(result[name] is arguments[name] for name in result)
    mine = {name: value for name, value in arguments.items() if name != "d_weights"}
    result = dsa_planner.indexer_backward(**mine)
    assert result["d_index_q"] is arguments["d_index_q"]
    assert (result["d_weights"].dtype, result["d_weights"].shape) == (torch.bfloat16, (2, 6, 64))
    assert len(fake.launches) == 6


def test_positional_arguments_work(fake: fake_driver.FakeDriver, arguments: dict[str, Any]) -> None:
    names = list(inspect.signature(dsa_planner.indexer_backward).parameters)[:7]
    dsa_planner.indexer_backward(*(arguments[name] for name in names), 0.5, 2.0, 128, True)
    assert len(fake.launches) == 3


def narrow(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with other strides."""
    return torch.stack([tensor, tensor], -1)[..., 0]


class WithoutMemory(torch.Tensor):
    """As distributed and fake tensors are: a shape, a device, and the address 0."""

    def data_ptr(self) -> int:
        return 0

    def __new__(cls, like: torch.Tensor) -> WithoutMemory:
        return torch.Tensor._make_subclass(cls, like)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "topk 1000": (
        {name: lambda a, n=name: a[n].new_zeros(2, 6, 1000) for name in ("attn_score", "index_score", "topk_indices")},
        "topk=1000: backend default for sm_90a takes topk a multiple of 128 from 128 to 2048; nearest is 1024",
    ),
    "topk 64": (
        {name: lambda a, n=name: a[n].new_zeros(2, 6, 64) for name in ("attn_score", "index_score", "topk_indices")},
        "topk=64: backend default for sm_90a takes topk a multiple of 128 from 128 to 2048; nearest is 128",
    ),
    "topk 0": (
        {name: lambda a, n=name: a[n].new_zeros(2, 6, 0) for name in ("attn_score", "index_score", "topk_indices")},
        "topk=0: backend default for sm_90a takes topk a multiple of 128 from 128 to 2048; nearest is 128",
    ),
    "heads 48": (
        {
            "index_q": lambda a: a["index_q"][:, :, :48].contiguous(),
            "weights": lambda a: a["weights"][:, :, :48].contiguous(),
        },
        "heads=48: backend default for sm_90a takes heads 64 or 32; nearest is 64",
    ),
    "head_dim 64": (
        {"index_q": lambda a: a["index_q"][..., :64].contiguous()},
        "head_dim=64: backend default for sm_90a takes head_dim 128; nearest is 128",
    ),
    "fp32 d_index_q": (
        {"d_index_q": lambda a: a["d_index_q"].float()},
        "d_index_q of dtype fp32: backend default for sm_90a takes d_index_q in bf16; pass d_index_q in bf16",
    ),
    "fp32 d_weights": (
        {"d_weights": lambda a: a["d_weights"].float()},
        "d_weights='fp32': backend default for sm_90a takes d_weights bf16; nearest is bf16",
    ),
    "fp16 d_weights": (
        {"d_weights": lambda a: a["d_weights"].half()},
        "d_weights='fp16': backend default for sm_90a takes d_weights bf16; nearest is bf16",
    ),
    "fp16 d_index_k": (
        {"d_index_k": lambda a: a["d_index_k"].half()},
        "d_index_k of dtype fp16: backend default for sm_90a takes d_index_k in bf16 or fp32; pass d_index_k in bf16",
    ),
    "index_k of rank 2": (
        {"index_k": lambda a: a["index_k"].reshape(-1, 128)},
        "index_k of shape (80, 128): its shape is (B, S_k, D), of rank 3; reshape index_k",
    ),
    "index_q of rank 3": (
        {"index_q": lambda a: a["index_q"][0]},
        "index_q of shape (6, 64, 128): it is of rank 4; reshape index_q",
    ),
    "another batch": (
        {"index_k": lambda a: a["index_k"][:1]},
        "index_k of shape (1, 40, 128): with this plan and these index_q and index_k it is (B, S_k, D) = (2, 40, 128)",
    ),
    "another S_q": (
        {"weights": lambda a: a["weights"][:, :5].contiguous()},
        "weights of shape (2, 5, 64): with this plan and these index_q and index_k it is (B, S_q, H) = (2, 6, 64)",
    ),
    "another topk of one tensor": (
        {"index_score": lambda a: a["index_score"].new_zeros(2, 6, 256)},
        "index_score of shape (2, 6, 256): with this plan and these index_q and index_k it is (B, S_q, topk) = (2, 6, 128)",
    ),
    "d_index_k of another S_k": (
        {"d_index_k": lambda a: a["d_index_k"][:, :39].contiguous()},
        "d_index_k of shape (2, 39, 128): with this plan and these index_q and index_k it is (B, S_k, D) = (2, 40, 128)",
    ),
    "int64 ids": (
        {"topk_indices": lambda a: a["topk_indices"].long()},
        "topk_indices of dtype int64: backend default for sm_90a takes topk_indices in int32; pass topk_indices in int32",
    ),
    "bf16 attn_score": (
        {"attn_score": lambda a: a["attn_score"].bfloat16()},
        "attn_score of dtype bf16: backend default for sm_90a takes attn_score in fp32; pass attn_score in fp32",
    ),
    "fp16 index_q": (
        {"index_q": lambda a: a["index_q"].half()},
        "index_q of dtype fp16: backend default for sm_90a takes index_q in bf16; pass index_q in bf16",
    ),
    "two losses": (
        {"grad_loss": lambda a: torch.zeros(2)},
        "grad_loss of shape (2,): with this plan and these index_q and index_k it is (1) = (1,); pass grad_loss of that shape",
    ),
    "strided index_q": (
        {"index_q": lambda a: narrow(a["index_q"])},
        "index_q of strides (98304, 16384, 256, 2): it must be contiguous; pass index_q.contiguous()",
    ),
    "strided d_weights": (
        {"d_weights": lambda a: narrow(a["d_weights"])},
        "d_weights of strides (768, 128, 2): it must be contiguous; pass d_weights.contiguous()",
    ),
    "misaligned weights": (
        {"weights": lambda a: a["weights"].new_zeros(2 * 6 * 64 + 1)[1:].view(2, 6, 64)},
        "weights at address 0x",
    ),
    "overlap of an output with an input": (
        {"d_index_k": lambda a: a["index_k"]},
        "index_k and d_index_k: they share memory, and the launch writes one of them; pass separate buffers",
    ),
    "overlap of attn_score and index_score": (
        {"index_score": lambda a: a["attn_score"]},
        "attn_score and index_score: they share memory, and the launch writes one of them; pass separate buffers",
    ),
    "sm_scale beyond fp32": ({"sm_scale": lambda a: 1e39}, "sm_scale=1e+39: sm_scale must be positive, between"),
    "loss_coeff beyond fp32": ({"loss_coeff": lambda a: 1e-60}, "loss_coeff=1e-60: loss_coeff must be 0, or of a size"),
    "ids neither local nor global": (
        {"topk_indices_global": lambda a: "False"},
        "topk_indices_global='False': it must be True or False; pass bool(topk_indices_global)",
    ),
    "an integer for deterministic": (
        {"deterministic": lambda a: 0},
        "deterministic=0: deterministic must be true or false; give deterministic as true or false",
    ),
    "the negative bit": (
        {"grad_loss": lambda a: torch.tensor([1 + 0.75j]).conj().imag},
        "grad_loss with the negative bit: its memory holds the negated values; pass grad_loss.resolve_neg()",
    ),
    "a negated view": (
        {"index_score": lambda a: torch._neg_view(a["index_score"])},
        "index_score with the negative bit: its memory holds the negated values",
    ),
    "a sparse tensor": (
        {"index_score": lambda a: a["index_score"].to_sparse()},
        "index_score of type Tensor: it must be a dense torch tensor",
    ),
    "a nested tensor": (
        {"index_q": lambda a: torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)])},
        "index_q of type Tensor: it must be a dense torch tensor",
    ),
    "a tensor without memory": (
        {"index_k": lambda a: WithoutMemory(a["index_k"])},
        "index_k without memory: it has elements and no address; pass a plain tensor: index_k.to_local()",
    ),
    "a boolean stream": ({"stream": lambda a: True}, "stream of type bool: it is neither a torch stream"),
    "a stream of text": ({"stream": lambda a: "5"}, "stream of type str: it is neither"),
    "a stream of a tensor": ({"stream": lambda a: torch.tensor(4)}, "stream of type Tensor: it is neither"),
    "a stream of a float": ({"stream": lambda a: 3.5}, "stream of type float: it is neither"),
    "a negative stream": ({"stream": lambda a: -1}, "stream -1: it is neither"),
    "a stream beyond 64 bits": ({"stream": lambda a: 2**64}, "stream 18446744073709551616: it is neither"),
    "a list": (
        {"index_k": lambda a: [1, 2]},
        "index_k of type list: it must be a dense torch tensor; pass a torch.Tensor",
    ),
    "None": ({"index_score": lambda a: None}, "index_score of type NoneType: it must be a dense torch tensor"),
    "no index_q": ({"index_q": lambda a: None}, "index_q of type NoneType: it must be a dense torch tensor"),
    "sm_scale 0": ({"sm_scale": lambda a: 0.0}, "sm_scale=0.0: sm_scale must be positive"),
    "block_I 64": (
        {"block_I": lambda a: 64},
        "block_I=64: backend default for sm_90a takes block_I 128; nearest is 128",
    ),
    "backend": ({"backend": lambda a: "sm80"}, "backend='sm80': it is not a backend; nearest is sm"),
    "deterministic": (
        {"deterministic": lambda a: True},
        "deterministic=True: backend default for sm_90a takes deterministic false",
    ),
    "stream": ({"stream": lambda a: object()}, "stream of type object: it is neither a torch stream"),
    "small workspace": ({"workspace": lambda a: torch.zeros(8)}, "workspace of 32 bytes: this launch needs 40960"),
    "no workspace tensor": ({"workspace": lambda a: 7}, "workspace of type int: it must be a dense torch tensor"),
    "overlapping workspace": (
        {"workspace": lambda a: a["index_q"]},
        "index_q and workspace: they share memory, and the launch writes one of them",
    ),
}


@pytest.mark.parametrize("warm", [False, True], ids=["first-call", "warm"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name_with_attn_score_untouched(
    fake: fake_driver.FakeDriver, arguments: dict[str, Any], name: str, warm: bool
) -> None:
    """Whether the plan is already loaded, with shapes of the last call at hand, must make no difference."""
    if warm:
        dsa_planner.indexer_backward(**arguments)
        fake.launches.clear()
    changes, message = BAD[name]
    bad = {**arguments, **{key: change(arguments) for key, change in changes.items()}}
    before = bad["attn_score"].clone()
    with pytest.raises(dsa_planner.DsaPlannerError) as error:
        dsa_planner.indexer_backward(**bad)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ValueError)
    assert fake.launches == []
    assert torch.equal(bad["attn_score"], before)


@pytest.mark.parametrize("name", [n for n in BAD if not {"backend", "deterministic"} & set(BAD[n][0])])
def test_plan_launch_refuses_the_same(fake: fake_driver.FakeDriver, arguments: dict[str, Any], name: str) -> None:
    plan = dsa_planner.load_plan(128)
    plan.launch(**arguments)
    fake.launches.clear()
    changes, _ = BAD[name]
    bad = {**arguments, **{key: change(arguments) for key, change in changes.items()}}
    with pytest.raises(dsa_planner.UnsupportedError) as error:
        plan.launch(**bad)
    assert "\n" not in str(error.value)
    assert fake.launches == []


TENSORS = (
    "index_q", "weights", "index_k", "attn_score", "index_score", "topk_indices", "grad_loss", "d_index_q", "d_weights",
    "d_index_k",
)  # fmt: skip
WRONG: dict[str, Any] = {
    "rank": lambda t: t[None, None],
    "dtype": lambda t: t.long() if t.dtype is torch.int32 else t.double(),
    "strides": narrow,
    "negative bit": torch._neg_view,
    "device": lambda t: t.clone(),
}


FP32 = ("attn_score", "index_score", "grad_loss", "d_index_k")
PAIRS = [
    (name, what)
    for name in TENSORS
    for what in WRONG
    if (name, what) not in (("grad_loss", "rank"), ("grad_loss", "strides"))  # one element is as good in any form
    and (what != "negative bit" or name in FP32)
]


@pytest.mark.parametrize("warm", [False, True], ids=["first-call", "warm"])
@pytest.mark.parametrize(("name", "what"), PAIRS)
def test_every_property_of_every_tensor_is_checked_at_every_launch(
    fake: fake_driver.FakeDriver,
    arguments: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    what: str,
    warm: bool,
) -> None:
    """At the first one, and after one that went well, with which the next ones are compared."""
    arguments["d_index_k"] = arguments["d_index_k"].float()
    value = WRONG[what](arguments[name])
    plan = dsa_planner.load_plan(128)
    if warm:
        plan.launch(**arguments)
        dsa_planner.indexer_backward(**arguments)
        fake.launches.clear()
    if what == "device":
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 1 if tensor is value else 0)
    for call in (plan.launch, dsa_planner.indexer_backward):
        with pytest.raises(dsa_planner.DsaPlannerError):
            call(**{**arguments, name: value})
    assert fake.launches == []


EXTENTS = {
    "B": {name: 0 for name in TENSORS if name != "grad_loss"},
    "S_q": {name: 1 for name in TENSORS if name not in ("grad_loss", "index_k", "d_index_k")},
    "S_k": {"index_k": 1, "d_index_k": 1},
    "H": {"index_q": 2, "weights": 2, "d_index_q": 2, "d_weights": 2},
    "D": {"index_q": 3, "index_k": 2, "d_index_q": 3, "d_index_k": 2},
    "topk": {"attn_score": 2, "index_score": 2, "topk_indices": 2},
    "one": {"grad_loss": 0},
}
"""By extent: the tensors that have it, and the dimension."""


def mismatches() -> dict[str, tuple[str, ...]]:
    """The tensors whose extent is doubled: one, all others, an input with its output, and all others, and all of a fixed
    one."""
    found = {}
    for extent, dims in EXTENTS.items():
        groups = [{name} for name in dims] + [{name, f"d_{name}"} for name in dims if f"d_{name}" in dims]
        groups += [set(dims) - group for group in groups]
        if extent in ("B", "S_q", "S_k"):
            groups = [group for group in groups if group != set(dims)]
        else:
            groups.append(set(dims))
        for group in filter(None, groups):
            names = tuple(name for name in TENSORS if name in group)
            found[f"{extent} of {' '.join(names)}"] = (extent, *names)
    return found


@pytest.mark.parametrize("warm", [False, True], ids=["first-call", "warm"])
@pytest.mark.parametrize("mismatch", mismatches().values(), ids=mismatches())
def test_every_extent_is_checked_at_every_launch(
    fake: fake_driver.FakeDriver, arguments: dict[str, Any], mismatch: tuple[str, ...], warm: bool
) -> None:
    extent, *names = mismatch
    doubled = {name: torch.cat([arguments[name]] * 2, EXTENTS[extent][name]) for name in names}
    plan = dsa_planner.load_plan(128)
    if warm:
        plan.launch(**arguments)
        fake.launches.clear()
    with pytest.raises(dsa_planner.UnsupportedError):
        plan.launch(**{**arguments, **doubled})
    assert fake.launches == []


def test_an_output_that_is_left_out_has_its_own_dtype_whatever_the_last_launch_had(
    fake: fake_driver.FakeDriver, arguments: dict[str, Any]
) -> None:
    dsa_planner.load_plan(128).launch(**{**arguments, "d_index_k": arguments["d_index_k"].float()})
    assert len(fake.launches) == 2
    inputs = {name: arguments[name] for name in TENSORS[:7]}
    assert dsa_planner.indexer_backward(**inputs)["d_index_k"].dtype is torch.bfloat16
    assert len(fake.launches) == 5, "a bf16 d_index_k takes a third kernel"


def test_tensors_on_the_cpu_or_on_two_devices(
    fake: fake_driver.FakeDriver, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dsa_planner.indexer_backward(**arguments)
    fake.launches.clear()
    elsewhere = arguments["index_score"]
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 1 if tensor is elsewhere else 0)
    with pytest.raises(
        dsa_planner.DeviceMismatchError, match="index_score on cpu: this launch runs on cuda:0; move index_"
    ):
        dsa_planner.indexer_backward(**arguments)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: -1)
    with pytest.raises(dsa_planner.DeviceMismatchError, match="index_q on cpu: the operator runs on CUDA devices"):
        dsa_planner.indexer_backward(**arguments)
    assert fake.launches == []


def test_the_per_thread_default_stream_takes_no_memory_from_torch(
    fake: fake_driver.FakeDriver, arguments: dict[str, Any]
) -> None:
    inputs = {name: value for name, value in arguments.items() if not name.startswith("d_")}
    with pytest.raises(dsa_planner.UnsupportedError, match="stream 2, the per-thread default stream: outputs for it"):
        dsa_planner.indexer_backward(**inputs, stream=2)
    dsa_planner.indexer_backward(**arguments, stream=2)
    assert {launch.stream for launch in fake.launches} == {2}
    assert {stream for _, _, stream in fake.pool_history} == {2}, "scratch comes from the driver"


def test_streams_are_taken_as_callers_have_them(fake: fake_driver.FakeDriver, arguments: dict[str, Any]) -> None:
    from cuda.bindings import driver

    class TorchLike:
        cuda_stream = 5

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 6

    given = {**arguments, "d_index_k": arguments["d_index_k"].float()}
    for stream, handle in ((None, 0), (0, 0), (1, 1), (TorchLike(), 5), (Protocol(), 6), (driver.CUstream(7), 7)):
        fake.launches.clear()
        dsa_planner.indexer_backward(**given, stream=stream)
        assert {launch.stream for launch in fake.launches} == {handle}


def test_a_stream_of_another_device_is_refused(fake: fake_driver.FakeDriver, arguments: dict[str, Any]) -> None:
    class Elsewhere:
        cuda_stream = 0
        device = torch.device("cuda:1")

    with pytest.raises(dsa_planner.DeviceMismatchError, match="stream of cuda:1: this launch runs on cuda:0"):
        dsa_planner.indexer_backward(**arguments, stream=Elsewhere())
    fake.contexts[0x77] = fake_driver.CONTEXT + 1
    with pytest.raises(dsa_planner.DeviceMismatchError, match="stream 0x77 of another context: this launch runs on"):
        dsa_planner.indexer_backward(**arguments, stream=0x77)
    fake.cuStreamGetDevice = lambda stream: (fake_driver.SUCCESS, 0)  # type: ignore[method-assign]
    dsa_planner.indexer_backward(**arguments, stream=0x77)
    assert {launch.stream for launch in fake.launches} == {0x77}, "a green context is another context of the device"


@pytest.mark.parametrize(("stream", "expected"), [(0, "default"), (1, "default"), (55, 55), (9, None), (None, None)])
def test_outputs_come_from_the_launch_streams_pool(
    fake: fake_driver.FakeDriver,
    arguments: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    stream: int | None,
    expected: object,
) -> None:
    """With torch's current stream at 9. ExternalStream(0) would be a new stream of torch's, not the default one."""
    from contextlib import contextmanager

    from dsa_planner import streams

    entered: list[object] = []

    @contextmanager
    def enter(stream: object) -> Any:
        entered.append(stream)
        yield

    monkeypatch.setattr(streams, "_current_handle", lambda device: 9)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    monkeypatch.setattr(torch.cuda, "stream", enter)
    given = {name: value for name, value in arguments.items() if name != "d_weights"}
    dsa_planner.indexer_backward(**given, stream=stream)
    assert entered == ([] if expected is None else [expected])
    assert {launch.stream for launch in fake.launches} == {9 if stream is None else stream}


def test_autograd_is_told_of_the_writes(fake: fake_driver.FakeDriver, arguments: dict[str, Any]) -> None:
    before = {name: tensor._version for name, tensor in arguments.items()}
    dsa_planner.indexer_backward(**arguments)
    written = {name for name, tensor in arguments.items() if tensor._version != before[name]}
    assert written == {"attn_score", "d_index_q", "d_weights", "d_index_k"}
    saved = arguments["attn_score"].clone().requires_grad_()
    loss = (saved * saved).sum()
    dsa_planner.indexer_backward(**{**arguments, "attn_score": saved.detach()})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda", 0), "cuda"])
def test_a_device_by_any_name(fake: fake_driver.FakeDriver, device: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert dsa_planner.load_plan(128, device=device) is dsa_planner.load_plan(128)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"topk": 128.0}, "topk=128.0: topk must be an integer"),
        ({"topk": [128]}, r"topk=\[128\]: topk must be an integer"),
        ({"deterministic": 0}, "deterministic=0: deterministic must be true or false"),
        ({"device": 0.0}, "device=0.0: it is no CUDA device"),
        ({"device": "cpu"}, "device='cpu': it is no CUDA device"),
        ({"device": None}, "device=None: it is no CUDA device"),
    ],
)
def test_a_loaded_plan_does_not_excuse_a_wrong_request(
    fake: fake_driver.FakeDriver, request_: dict[str, Any], message: str
) -> None:
    dsa_planner.load_plan(128)
    with pytest.raises(dsa_planner.UnsupportedError, match=message):
        dsa_planner.load_plan(**{"topk": 128, **request_})


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda")])
@pytest.mark.parametrize(
    "said", [AssertionError("Torch not compiled with CUDA enabled"), RuntimeError("Found no NVIDIA driver\non it.")]
)
def test_a_current_device_that_torch_does_not_have_is_a_driver_error(
    monkeypatch: pytest.MonkeyPatch, layer: Path, device: Any, said: Exception
) -> None:
    """A torch without CUDA, or one whose driver is missing. Without a GPU it is the same as for an ordinal."""

    def current_device() -> int:
        raise said

    def refused(ordinal: Any) -> str:
        with pytest.raises(dsa_planner.DriverError) as error:
            dsa_planner.load_plan(128, device=ordinal)
        return str(error.value)

    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    fake_driver.install(monkeypatch, fake_driver.FakeDriver(devices=0))
    assert refused(device) == refused(0)
    fake_driver.install(monkeypatch, fake_driver.FakeDriver())
    reason = str(said).replace("\n", " ")
    assert refused(device) == (
        f"device={device!r}: torch has no current CUDA device ({reason}); "
        "give the device's ordinal, or use a torch with CUDA"
    )


def test_a_torch_that_has_no_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch, layer: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    from dsa_planner import driver

    monkeypatch.setattr(driver, "_devices", {})
    for device in ("cuda", torch.device("cuda")):
        with pytest.raises(dsa_planner.DriverError, match=r"^(starting CUDA|device=)"):
            dsa_planner.load_plan(128, device=device)


def test_no_driver_is_one_line(monkeypatch: pytest.MonkeyPatch, layer: Path) -> None:
    from dsa_planner import driver

    monkeypatch.setattr(driver, "_devices", {})
    try:
        driver.cu.cuInit(0)
    except RuntimeError:
        with pytest.raises(dsa_planner.DriverError, match="starting CUDA: there is no NVIDIA driver on this machine"):
            dsa_planner.load_plan(128)
    else:
        pytest.skip("this machine has a driver")
