"""The options of ``dsa-plan bench``: what they mean, and what is refused before anything runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dsa_planner import errors
from dsa_planner.bench import request as requests


def test_the_defaults_are_the_shapes_of_the_readme() -> None:
    found = requests.parse({})
    assert found.backends == ("default",)
    assert [(s.batch, s.s_q, s.s_k, s.topk, s.ids) for s in found.shapes] == [
        (1, 4096, 4096, topk, "uniform") for topk in (128, 1024, 2048)
    ]
    assert (found.peer, found.floor, found.repeats, found.device) == (True, None, 7, 0)


def test_lists_are_combined() -> None:
    found = requests.parse({"topk": "128,256", "s_q": "8,16", "s_k": "512", "ids": "uniform,window", "batch": "2"})
    assert len(found.shapes) == len(set(found.shapes)) == 8
    assert {shape.pairs for shape in found.shapes} == {2 * s_q * topk for s_q in (8, 16) for topk in (128, 256)}


def test_a_backend_of_any_arch_is_taken() -> None:
    """Which arch it is, the GPU decides."""
    found = requests.parse({"backend": "sm100_v2", "topk": "128", "d_weights": "fp32"}, deterministic=True)
    assert found.plan_options("sm100_v2", 128) == {
        "topk": 128, "backend": "sm100_v2", "heads": 64, "d_weights": "fp32", "deterministic": True,
    }  # fmt: skip


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"topk": "1000"}, "topk=1000: backend default for sm_90a takes topk a multiple of 128 from 128 to 2048; nearest is"),
    ({"topk": "128,"}, "--topk '128,': it has to be a list separated by commas, without empty entries; remove the"),
    ({"topk": "x"}, "--topk 'x': it has to be a whole number of at least 1; give for example --topk 2048"),
    ({"backend": "fast"}, "backend='fast': it is not a backend; nearest is default"),
    ({"d_weights": "fp32"}, "d_weights='fp32': backend default for sm_90a takes d_weights bf16; nearest is bf16"),
    ({"d_weights": "fp16"}, "--d-weights 'fp16': it has to be bf16 or fp32; nearest is bf16"),
    ({"d_index_k": "fp16"}, "--d-index-k 'fp16': it has to be bf16 or fp32; nearest is bf16"),
    ({"heads": "16"}, "heads=16: backend default for sm_90a takes heads"),
    ({"batch": "0"}, "--batch '0': it has to be a whole number of at least 1; give for example --batch 1"),
    ({"s_q": "0"}, "--s-q '0': it has to be a whole number of at least 1; give for example --s-q 4096"),
    ({"s_k": "1024", "topk": "2048"}, "--s-k 1024 with --topk 2048: the topk keys of a row are distinct, so there have "),
    ({"s_q": "99999999"}, "--batch 1 --s-q 99999999 --s-k 4096: B * S_q * H and B * S_k must be at most 1073741824; "),
    ({"ids": "zipf"}, "--ids 'zipf': it has to be uniform, sorted, window, shared or sinks; nearest is"),
    ({"repeats": "0"}, "--repeats '0': it has to be a whole number of at least 1; give for example --repeats 7"),
    ({"device": "-1"}, "--device '-1': it has to be a whole number of at least 0; give for example --device 0"),
    ({"floor": "0"}, "--floor '0': it has to be a positive number; give for example --floor 0.141"),
    ({"floor": "nan"}, "--floor 'nan': it has to be a positive number"),
    ({"floor": "1e999"}, "--floor '1e999': it has to be a positive number"),
    ({"floor": "x"}, "--floor 'x': it has to be a positive number"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[" ".join(map(str, g.items())) for g, _ in REFUSED])
def test_a_wrong_option_is_refused_with_the_nearest_right_one(given: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.UnsupportedError) as refused:
        requests.parse(given)
    assert str(refused.value).startswith(message)


def test_deterministic_is_refused_where_no_arch_has_it() -> None:
    with pytest.raises(errors.UnsupportedError, match="deterministic=True: backend default for sm_90a takes"):
        requests.parse({}, deterministic=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.txt", "the picture is a PNG; give for example --plot a.png"),
        ("none/a.png", "there is no folder "),
        ("", "PNG"),
    ],
)
def test_a_picture_that_could_not_be_written_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=message):
        requests.parse({}, plot=tmp_path / name)


@pytest.mark.parametrize(("package", "extra"), [("matplotlib", "plot"), ("torch", "torch")])
def test_a_package_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, extra: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(errors.PackageMissingError, match=rf"package {package}: .*pip install 'dsa-planner\[{extra}\]'"):
        requests.require_packages() if package == "torch" else requests.parse({}, plot=tmp_path / "a.png")


def test_every_option_has_its_words() -> None:
    assert set(requests.DEFAULTS) < set(requests.HELP)
    assert all(name in requests.HELP["ids"] for name in requests.IDS)
