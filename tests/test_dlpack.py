"""Arrays of other libraries as arguments. The arrays here wrap tensors of the CPU and say that they are on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dsa_cases  # noqa: E402
import fake_driver  # noqa: E402
from dsa_cases import outputs  # noqa: E402

import dsa_planner  # noqa: E402
from dsa_planner.launch_record import TENSORS  # noqa: E402


class Array:
    """An array of a library with DLPack; ``streams`` are those that its library was told of."""

    device = (2, 0)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.streams = tensor, []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.streams.append(stream)
        return self.tensor.__dlpack__()


class CuPyArray(Array):
    __module__ = "cupy"


class JaxArray(Array):
    __module__ = "jaxlib._jax"


def tensors() -> dict[str, Any]:
    case = dsa_cases.make(1, 2, 20, 128)
    return {**case.inputs(), **outputs(case)}


@pytest.mark.parametrize(("stream", "told"), [(0, 1), (1, 1), (2, 2), (77, 77), (None, 1)])
def test_any_input_may_be_an_array_of_another_library(
    fake: fake_driver.FakeDriver, stream: int | None, told: int
) -> None:
    plan, given = dsa_planner.load_plan(128), tensors()
    plan.launch(**given, stream=stream)
    expected = [launch.ints() for launch in fake.launches]
    fake.launches.clear()
    written = ("attn_score", "d_index_q", "d_index_k")
    arrays = {
        name: (CuPyArray if name in written else JaxArray)(given[name]) for name in TENSORS if name != "d_weights"
    }
    plan.launch(**{**given, **arrays}, stream=stream)
    assert len(fake.launches) == len(expected) > 0
    for launch, before in zip(fake.launches, expected, strict=True):
        same = [one == other for one, other in zip(launch.ints(), before, strict=True)]
        assert same.count(False) <= 2, "all but tensor maps, which were encoded again"
    assert all(array.streams == [told] for array in arrays.values())


def test_the_operator_takes_them_and_returns_the_callers_outputs(fake: fake_driver.FakeDriver) -> None:
    given = tensors()
    for chosen in (("index_q",), ("index_k", "d_index_k"), ("attn_score",), tuple(TENSORS)):
        arrays = {name: CuPyArray(given[name]) for name in chosen}
        found = dsa_planner.indexer_backward(**{**given, **arrays})
        for name, output in found.items():
            assert output is arrays.get(name, given[name])
        inputs = {name: value for name, value in {**given, **arrays}.items() if not name.startswith("d_")}
        found = dsa_planner.indexer_backward(**inputs)
        assert all(isinstance(output, torch.Tensor) for output in found.values())


def test_a_workspace_may_be_cupys(fake: fake_driver.FakeDriver) -> None:
    plan, given = dsa_planner.load_plan(128), tensors()
    given["d_index_k"] = given["d_index_k"].bfloat16()
    memory = torch.empty(plan.workspace_bytes(1, 20), dtype=torch.uint8)
    plan.launch(**given, workspace=CuPyArray(memory))
    assert memory.data_ptr() in fake.launches[0].ints()
    with pytest.raises(dsa_planner.UnsupportedError, match=r"workspace of type jaxlib\.JaxArray: the launch writes it"):
        plan.launch(**given, workspace=JaxArray(memory))


@pytest.mark.parametrize("name", ["attn_score", "d_index_q", "d_weights", "d_index_k"])
def test_what_is_written_is_no_array_that_does_not_change(fake: fake_driver.FakeDriver, name: str) -> None:
    given = tensors()
    wrong = {**given, name: JaxArray(given[name])}
    for call in (dsa_planner.load_plan(128).launch, dsa_planner.indexer_backward):
        with pytest.raises(
            dsa_planner.UnsupportedError,
            match=rf"{name} of type jaxlib\.JaxArray: the launch writes it.*as a torch tensor or a CuPy array",
        ):
            call(**wrong)
    assert not fake.launches
    assert wrong[name].streams == []


def test_what_does_not_come_through_is_named(fake: fake_driver.FakeDriver) -> None:
    plan, given = dsa_planner.load_plan(128), tensors()

    class Broken(JaxArray):
        def __dlpack__(self, *, stream: int | None = None) -> Any:
            raise BufferError("it is\nsharded")

    class OnCpu(JaxArray):
        device = (1, 0)

    with pytest.raises(
        dsa_planner.UnsupportedError,
        match=r"weights of type .*does not come through DLPack \(BufferError: it is sharded\)",
    ):
        plan.launch(**{**given, "weights": Broken(given["weights"])})
    with pytest.raises(
        dsa_planner.DeviceMismatchError, match=r"index_q of type .* on DLPack device \(1, 0\).*move index_q to a GPU"
    ):
        dsa_planner.indexer_backward(**{**given, "index_q": OnCpu(given["index_q"])})

    class Half:
        def __dlpack__(self) -> None: ...

    for name in ("index_q", "weights", "workspace"):
        with pytest.raises(
            dsa_planner.UnsupportedError, match=rf"{name} of type Half: it must be a dense torch tensor"
        ):
            dsa_planner.indexer_backward(**{**given, "d_index_k": given["d_index_k"].bfloat16(), name: Half()})

    class Odd(JaxArray):
        device = ("gpu", 0)  # type: ignore[assignment]

    with pytest.raises(
        dsa_planner.UnsupportedError, match=r"index_q of type .*does not come through DLPack \(ValueError"
    ):
        dsa_planner.indexer_backward(**{**given, "index_q": Odd(given["index_q"])})
    with pytest.raises(dsa_planner.UnsupportedError, match="index_k of dtype fp64"):
        plan.launch(**{**given, "index_k": JaxArray(given["index_k"].double())})
    with pytest.raises(dsa_planner.UnsupportedError, match="weights of type list: it must be a dense torch tensor"):
        plan.launch(**{**given, "weights": [1.0], "index_k": JaxArray(given["index_k"])})
