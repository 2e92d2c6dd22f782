from __future__ import annotations

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
    with pytest.raises(ValidationError) as nested:  # validation as part of other models keeps pydantic's own error
        PlanConfig.model_validate(request)
    assert str(expected.value) in str(nested.value)


def test_json_goes_in_and_out() -> None:
    config = PlanConfig(arch="sm_90a", topk=256)
    assert TypeAdapter(PlanConfig).validate_json(config.model_dump_json()) == config


def test_the_plan_id_is_that_of_the_run_side() -> None:
    config = PlanConfig(arch="sm_90a", topk=256)
    assert config.plan_id == plan_id_of(config.model_dump())
    with pytest.raises(UnsupportedError, match="topk=1000"):  # a copy that pydantic does not check
        config.model_copy(update={"topk": 1000}).plan_id  # noqa: B018


def test_a_config_that_is_not_built_yet_has_no_plan_id() -> None:
    with pytest.raises(UnsupportedError, match="does not build it yet"):
        PlanConfig(backend="sm100_v2", arch="sm_100f", topk=128).plan_id  # noqa: B018
