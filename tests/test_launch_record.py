from __future__ import annotations

import copy
from typing import Any

import pytest

from dsa_planner import envelope
from dsa_planner.kernels import catalogue
from dsa_planner.launch_record import LAUNCH_VALUES, TENSORS, LaunchRecord, compile_expression, holds

VALUES = {name: number for number, name in enumerate(LAUNCH_VALUES, start=2)}
CONFIG = envelope.plan_config({"arch": "sm_90a", "topk": 128})
RECORD = catalogue.load("indexer_backward_sm90").launch_for(CONFIG)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", lambda v: 7),
        ("rows", lambda v: v["rows"]),
        ("rows * heads + 1", lambda v: v["rows"] * v["heads"] + 1),
        ("(rows + keys) // 2", lambda v: (v["rows"] + v["keys"]) // 2),
        ("ceil_div(rows, 2)", lambda v: -(-v["rows"] // 2)),
        ("min(multiprocessors, max(rows, 1))", lambda v: min(v["multiprocessors"], max(v["rows"], 1))),
    ],
)
def test_expressions_compute(text: str, expected: Any) -> None:
    for rows in (0, 1, 7, 2**31):
        values = {**VALUES, "rows": rows}
        assert compile_expression(text)(values) == expected(values)


@pytest.mark.parametrize(
    "text",
    [
        "", "rows +", "unknown", "rows.real", "rows[0]", "__import__('os')", "min(rows)", "min(rows, 1, 2)", "print(rows, 1)",
        "rows - 1", "rows / 2", "rows ** 2", "-rows", "1.5", "'a'", "True", "lambda: 1", "min(rows, key=1)", "rows; keys",
        "1" + " + 1" * 3000, "-" * 100_000 + "1", "(" * 90 + "1" + ")" * 90 + "." * 100, 7, None, ["rows"],
        "sm_scale", "values", "ceil_div", "(rows, keys)", "rows if keys else 1", "min(*rows)", "f'{rows}'", "rows := 1",
    ],
)  # fmt: skip
def test_nothing_outside_the_language_compiles(text: Any) -> None:
    with pytest.raises(ValueError, match="expression"):
        compile_expression(text)


def test_the_shipped_record_parses() -> None:
    record = LaunchRecord.parse(RECORD)
    assert [kernel.name for kernel in record.kernels] == ["score_grad", "gradients", "round_d_index_k"]
    assert [holds(kernel.when, {"d_index_k": "fp32"}) for kernel in record.kernels] == [True, True, False]
    assert all(holds(kernel.when, {"d_index_k": "bf16"}) for kernel in record.kernels)
    assert record.buffers[0].otherwise == "d_index_k"


def grids(**changes: int) -> list[int]:
    values = {"rows": 8192, "keys": 4096, "heads": 64, "head_dim": 128, "multiprocessors": 132, **changes}
    record = LaunchRecord.parse(RECORD)
    record.complete(values)
    return [kernel.grid(values) for kernel in record.kernels]


def test_grids_of_the_shipped_record() -> None:
    assert grids() == [1024, 132, 256]
    assert grids(rows=1) == [64, 1, 256]
    assert grids(rows=7, keys=1) == [1, 7, 1]
    assert grids(rows=7, multiprocessors=78, keys=10**6) == [624, 7, 624]
    assert grids(rows=0) == [64, 0, 256], "nothing to compute, but d_index_k must be zeroed"
    assert grids(rows=100, keys=0) == [13, 100, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("buffers"), "missing"),
        (lambda r: r.update(more=1), "unknown"),
        (lambda r: r["kernels"][0].pop("grid"), "missing"),
        (lambda r: r["kernels"][0].update(colour=1), "unknown"),
        (lambda r: r["kernels"][0].update(block=-1), "block"),
        (lambda r: r["kernels"][0].update(block=True), "block"),
        (lambda r: r["kernels"][0].update(shared_bytes="x"), "shared_bytes"),
        (lambda r: r["kernels"][0].update(grid="rows("), "expression"),
        (lambda r: r["kernels"][0]["parameters"][0].update(type="int64"), "none of"),
        (lambda r: r["kernels"][0]["parameters"][0].update(name="sm_scale"), "no pointer of that name"),
        (lambda r: r["kernels"][0]["parameters"][4].update(name="rows"), "no float32 of that name"),
        (lambda r: r["kernels"][0]["parameters"][5].update(name="loss_scale"), "no int32 of that name"),
        (lambda r: r["kernels"][1]["parameters"][0].update(box=[64]), "2 extents and a box of 1"),
        (lambda r: r["kernels"][1]["parameters"][0].update(extents=["head_dim", "x"]), "expression"),
        (lambda r: r["buffers"][0].update({"else": "nothing"}), "no tensor"),
        (lambda r: r["kernels"].append(7), "not an object"),
        (lambda r: r.update(kernels=5), "kernels is 5, not a list"),
        (lambda r: r.update(buffers={}), "buffers is {}, not a list"),
        (lambda r: r["kernels"].append(r["kernels"][0]), "two kernels have one name"),
        (lambda r: r["kernels"][0].update(block=0), "block is 0, not a number from 1 to 1024"),
        (lambda r: r["kernels"][0].update(name=["x"]), "not a name"),
        (lambda r: r["kernels"][0].update(grid=7), "has to be text"),
        (lambda r: r["kernels"][0].update(parameters="xy"), "not a list"),
        (lambda r: r["kernels"][0]["parameters"][0].update(type=["pointer"]), "none of"),
        (lambda r: r["kernels"][0]["parameters"][0].update(box=[1]), "unknown"),
        (lambda r: r["kernels"][1]["parameters"][0].pop("extents"), "missing"),
        (lambda r: r["kernels"][1]["parameters"][0].update(box=["x", "y"]), "box"),
        (lambda r: r["kernels"][1]["parameters"][0].update(box=[64, 257]), "box"),
        (lambda r: r["kernels"][1]["parameters"][0].update(swizzle_bytes="x"), "swizzle_bytes"),
        (lambda r: r["kernels"][1]["parameters"][0].update(swizzle_bytes=48), "swizzle_bytes"),
        (lambda r: r["kernels"][1]["parameters"][0].update(element="fp8"), "element"),
        (lambda r: r["kernels"][2].update(when={"colour": "red"}), "when"),
        (lambda r: r["kernels"][2].update(when={"d_index_k": "fp16"}), "when"),
        (lambda r: r["kernels"][2].update(when=["d_index_k"]), "when"),
        (lambda r: r["buffers"][0].update(name=3), "not a name"),
        (lambda r: r["buffers"][0].update({"else": ["d_index_k"]}), "no tensor"),
    ],
)
def test_a_malformed_record_is_refused(change: Any, message: str) -> None:
    record = copy.deepcopy(dict(RECORD))
    change(record)
    with pytest.raises(ValueError, match=message):
        LaunchRecord.parse(record)


def test_every_pointer_of_the_contract_reaches_a_kernel() -> None:
    names = {parameter.name for kernel in LaunchRecord.parse(RECORD).kernels for parameter in kernel.parameters}
    assert set(TENSORS) <= names
