from __future__ import annotations

import pytest

from dsa_planner import envelope
from dsa_planner.errors import UnsupportedError
from dsa_planner.kernels import catalogue

GOOD = {"arch": "sm_90a", "topk": 1024}


def refused(request: dict[str, object]) -> str:
    with pytest.raises(UnsupportedError) as error:
        envelope.plan_config(request)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_value_that_cannot_be_printed_is_refused_all_the_same() -> None:
    assert refused({**GOOD, "topk": 10**5000}) == (
        "topk=<int that cannot be printed>: backend default for sm_90a takes topk a multiple of 128 from 128 to 2048; "
        "nearest is 2048"
    )
    long = refused({**GOOD, "backend": "x" * 10_000})
    assert len(long) < 300
    assert "\n" not in refused({**GOOD, "arch": "a\nb\r\0"})


@pytest.mark.parametrize("request_", ["sm_90a", ["sm_90a"], 7, None, [("arch",)], {"sm_90a"}])
def test_what_is_no_mapping_is_refused_by_name(request_: object) -> None:
    with pytest.raises(UnsupportedError) as error:
        envelope.plan_config(request_)  # type: ignore[arg-type]
    assert str(error.value) == (
        f"plan config {request_!r}: it is no mapping of config fields; "
        'give for example {"arch": "sm_90a", "topk": 1024}'
    )


def test_defaults_are_filled_in_and_fields_ordered() -> None:
    assert envelope.plan_config(GOOD) == {
        "operator": "indexer_backward",
        "backend": "default",
        "arch": "sm_90a",
        "heads": 64,
        "head_dim": 128,
        "topk": 1024,
        "d_weights": "bf16",
        "deterministic": False,
    }
    assert tuple(envelope.plan_config(dict(reversed(GOOD.items())))) == envelope.PLAN_FIELDS


@pytest.mark.parametrize("topk", range(128, 2049, 128))
def test_every_multiple_of_128_up_to_2048_is_supported(topk: int) -> None:
    for row in envelope.ENVELOPE:
        assert envelope.plan_config({"backend": row.backend, "arch": row.arch, "topk": topk})["topk"] == topk


@pytest.mark.parametrize(
    ("topk", "nearest"), [(1000, 1024), (0, 128), (64, 128), (4096, 2048), (-5, 128), (1088, 1152)]
)
def test_a_wrong_topk_names_value_rule_and_nearest(topk: int, nearest: int) -> None:
    assert refused({**GOOD, "topk": topk}) == (
        f"topk={topk}: backend default for sm_90a takes topk a multiple of 128 from 128 to 2048; nearest is {nearest}"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "sm100v2"}, "backend='sm100v2': it is not a backend; nearest is sm100_v2 (there are default, "),
        (
            {"arch": "sm_80"},
            "arch='sm_80': it is not an arch; nearest is sm_90a (there are sm_90a, sm_100f or sm_100a)",
        ),
        ({"backend": "sm100_v2"}, "arch='sm_90a': backend sm100_v2 is not built for it; nearest is sm_100"),
        (
            {"backend": "sm90_v2", "arch": "sm_100f"},
            "arch='sm_100f': backend sm90_v2 is not built for it; nearest is sm_90a",
        ),
        (
            {"heads": 48},
            "heads=48: backend default for sm_90a takes heads 64 or 32; nearest is 64 (there are 64 or 32)",
        ),
        ({"head_dim": 64}, "head_dim=64: backend default for sm_90a takes head_dim 128; nearest is 128"),
        ({"d_weights": "fp16"}, "d_weights='fp16': backend default for sm_90a takes d_weights bf16; nearest is bf16"),
        ({"d_weights": "fp32"}, "d_weights='fp32': backend default for sm_90a takes d_weights bf16; nearest is bf16"),
        (
            {"deterministic": True},
            "deterministic=True: backend default for sm_90a takes deterministic false; nearest is ",
        ),
        ({"operator": "indexer"}, "operator='indexer': it is not an operator; nearest is indexer_backward"),
        ({"top_k": 128}, "field 'top_k': a plan config has no such field; nearest is topk"),
        ({"topk": "128"}, "topk='128': topk must be an integer; give topk as an integer"),
        ({"topk": True}, "topk=True: topk must be an integer; give topk as an integer"),
        ({"topk": 128.0}, "topk=128.0: topk must be an integer"),
        ({"deterministic": 1}, "deterministic=1: deterministic must be true or false"),
        ({"backend": None}, "backend=None: backend must be a string"),
        ({"arch": ["sm_90a"]}, "arch=['sm_90a']: arch must be a string"),
    ],
)
def test_every_other_field_is_refused_in_the_same_way(change: dict[str, object], message: str) -> None:
    assert refused({**GOOD, **change}).startswith(message)


@pytest.mark.parametrize("missing", ["arch", "topk"])
def test_what_has_no_default_is_asked_for(missing: str) -> None:
    request = {name: value for name, value in GOOD.items() if name != missing}
    assert refused(request) == f"plan config without {missing}: {missing} has no default; give {missing}"


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        (
            (0.0, 1.0, 128, False),
            "sm_scale=0.0: sm_scale must be positive, between 1.175e-38 and 3.403e+38; use for example 1.0",
        ),
        ((-1.0, 1.0, 128, False), "sm_scale=-1.0: sm_scale must be positive"),
        ((float("nan"), 1.0, 128, False), "sm_scale=nan: sm_scale must be positive"),
        ((float("inf"), 1.0, 128, False), "sm_scale=inf: sm_scale must be positive"),
        ((1e39, 1.0, 128, False), "sm_scale=1e+39: sm_scale must be positive"),
        ((1e-39, 1.0, 128, False), "sm_scale=1e-39: sm_scale must be positive"),
        ((10**400, 1.0, 128, False), "sm_scale=1000"),
        ((True, 1.0, 128, False), "sm_scale=True: sm_scale must be a Python number"),
        (
            (1.0, float("nan"), 128, False),
            "loss_coeff=nan: loss_coeff must be 0, or of a size between 1.175e-38 and 3.403e+38",
        ),
        ((1.0, float("-inf"), 128, False), "loss_coeff=-inf: loss_coeff must be 0, or of a size"),
        ((1.0, -1e40, 128, False), "loss_coeff=-1e+40: loss_coeff must be 0, or of a size"),
        ((1.0, 1e-45, 128, False), "loss_coeff=1e-45: loss_coeff must be 0, or of a size"),
        (("1", 1.0, 128, False), "sm_scale='1': sm_scale must be a Python number; pass float(sm_scale)"),
        ((1.0, 1.0, 64, False), "block_I=64: backend default for sm_90a takes block_I 128; nearest is 128"),
        ((1.0, 1.0, 128, "False"), "topk_indices_global='False': it must be True or False; pass bool(topk_indices"),
        ((1.0, 1.0, 128, 1), "topk_indices_global=1: it must be True or False"),
    ],
)
def test_scalars_of_a_launch(scalars: tuple[float, float, int, bool], message: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        envelope.check_scalars(envelope.ENVELOPE[0], *scalars)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "scalars",
    [
        (1.0, 1.0, 128, False),
        (1, 0, 128, True),
        (1e-30, -3.5, 128, False),
        (3.4028234663852886e38, 2.0**-126, 128, False),
    ],
)
def test_good_scalars_pass(scalars: tuple[float, float, int, bool]) -> None:
    envelope.check_scalars(envelope.ENVELOPE[0], *scalars)


def test_rows_are_unique_and_their_kernels_exist() -> None:
    assert len({(row.operator, row.backend, row.arch) for row in envelope.ENVELOPE}) == len(envelope.ENVELOPE)
    for row in envelope.ENVELOPE:
        assert row.arch in envelope.ARCHES
        assert catalogue.load(row.kernel).sources


def test_devices_are_admitted_by_capability() -> None:
    def arches(backend: str, capability: tuple[int, int]) -> list[str]:
        return [row.arch for row in envelope.rows_for_capability(backend, capability)]

    assert arches("default", (9, 0)) == ["sm_90a"]
    assert arches("default", (10, 0)) == ["sm_100f", "sm_100a"]
    assert arches("sm100_v2", (10, 3)) == ["sm_100f"]
    assert arches("sm100_v2", (9, 0)) == []
    assert arches("default", (8, 0)) == []
