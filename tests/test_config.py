from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter, ValidationError

from dsa_planner import PlanConfig, UnsupportedError, envelope
from dsa_planner.identity import plan_id_of


def test_a_config_is_complete_frozen_and_hashable() -> None:
    config = PlanConfig(arch="sm_90a", topk=1024)
    assert config.model_dump() == envelope.plan_config({"arch": "sm_90a", "topk": 1024})
    assert tuple(config.model_dump()) == envelope.PLAN_FIELDS
    assert config == PlanConfig(topk=1024, arch="sm_90a")
    assert len({config, PlanConfig(topk=1024, arch="sm_90a")}) == 1
    with pytest.raises(ValidationError, match="frozen"):
        config.topk = 128  # type: ignore[misc]


def test_the_model_and_the_table_have_the_same_fields_and_defaults() -> None:
    assert tuple(PlanConfig.model_fields) == envelope.PLAN_FIELDS
    defaults = {name: field.default for name, field in PlanConfig.model_fields.items() if not field.is_required()}
    assert defaults == dict(envelope.DEFAULTS)


@pytest.mark.parametrize(
    "change", [{"topk": 1000}, {"backend": "x"}, {"arch": "sm_80"}, {"colour": "red"}, {"topk": "8"}]
)
def test_a_refusal_is_the_envelopes_whichever_way_the_model_is_made(change: dict[str, object]) -> None:
    request = {"arch": "sm_90a", "topk": 128, **change}
    with pytest.raises(UnsupportedError) as expected:
        envelope.plan_config(request)
    with pytest.raises(UnsupportedError) as error:
        PlanConfig(**request)
    assert str(error.value) == str(expected.value)
    for validate, given in (
        (PlanConfig.model_validate, request),
        (PlanConfig.model_validate_strings, request),
        (PlanConfig.model_validate_json, json.dumps(request)),
    ):
        with pytest.raises(UnsupportedError) as validated:
            validate(given)  # type: ignore[arg-type]
        assert str(validated.value) == str(expected.value)
    with pytest.raises(ValidationError) as nested:  # validation as part of other models keeps pydantic's own error
        TypeAdapter(list[PlanConfig]).validate_python([request])
    assert str(expected.value) in str(nested.value)


def test_a_key_that_is_no_text_is_an_unknown_field() -> None:
    for validate in (PlanConfig.model_validate, PlanConfig.model_validate_strings):
        with pytest.raises(UnsupportedError, match="field 1: a plan config has no such field"):
            validate({1: 2})


@pytest.mark.parametrize("given", [7, None, [1], "x" * 10_000, ["sm_90a"]])
def test_what_is_no_mapping_is_refused_in_one_line(given: object) -> None:
    for validate in (PlanConfig.model_validate, PlanConfig.model_validate_strings):
        with pytest.raises(UnsupportedError, match=r"^plan config ") as error:
            validate(given)
        assert len(str(error.value).splitlines()) == 1
        assert len(str(error.value)) < 500


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", '"\n"', b"\xff", '{"arch": "sm_90a"', "[" * 10_000, 7])
def test_json_that_is_no_object_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^plan config ") as error:
        PlanConfig.model_validate_json(text)
    assert len(str(error.value).splitlines()) == 1
    assert str(error.value).endswith('; give for example {"arch": "sm_90a", "topk": 1024}')


def test_every_way_of_pydantic_to_make_one_makes_the_same() -> None:
    config = PlanConfig(arch="sm_90a", topk=256)
    assert PlanConfig.model_validate(config) is config
    assert PlanConfig.model_validate({"arch": "sm_90a", "topk": 256}, strict=True) == config
    assert PlanConfig.model_validate_strings({"arch": "sm_90a", "topk": 256}) == config
    assert PlanConfig.model_validate_json(b'{"arch": "sm_90a", "topk": 256}') == config


def test_json_goes_in_and_out() -> None:
    config = PlanConfig(arch="sm_90a", topk=256)
    assert TypeAdapter(PlanConfig).validate_json(config.model_dump_json()) == config


def test_the_plan_id_is_that_of_the_run_side() -> None:
    config = PlanConfig(arch="sm_90a", topk=256)
    assert config.plan_id == plan_id_of(config.model_dump())
    with pytest.raises(UnsupportedError, match="topk=1000"):  # a copy that pydantic does not check
        config.model_copy(update={"topk": 1000}).plan_id  # noqa: B018
