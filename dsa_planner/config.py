"""PlanConfig: what one plan is compiled for. Build side; the run side uses ``envelope.plan_config`` directly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsa_planner import envelope
from dsa_planner.errors import UnsupportedError, shown
from dsa_planner.identity import plan_id_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PlanConfig"]


class PlanConfig(BaseModel):
    """A validated, immutable plan config.

    Only ``arch`` and ``topk`` have no default. Every field is checked against the support envelope; shapes of a
    launch are not part of it.

    Raises:
        UnsupportedError: an unknown field, or a value outside the envelope; it names the nearest supported one. As a
            part of another model it gives pydantic's ValidationError, which quotes it.

    Example:
        >>> PlanConfig(arch="sm_90a", topk=1024).backend
        'default'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    operator: str = Field(default="indexer_backward", description="the operation")
    backend: str = Field(default="default", description="the implementation of it")
    arch: str = Field(description="compilation target, for example sm_90a")
    heads: int = Field(default=64, description="indexer heads, H")
    head_dim: int = Field(default=128, description="dimensions of a head, D")
    topk: int = Field(description="selected keys of a query")
    d_weights: str = Field(default="bf16", description="dtype of the d_weights output")
    deterministic: bool = Field(default=False, description="d_index_k bitwise reproducible")

    def __init__(self, **request: Any) -> None:
        super().__init__(**envelope.plan_config(request))

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """A config from a mapping of its fields.

        Raises:
            UnsupportedError: as for the class, or it is no such mapping.
        """
        with _one_refusal(obj):
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """A config from a JSON object of its fields.

        Raises:
            UnsupportedError: as for the class, or it is no such object.
        """
        with _one_refusal(json_data):
            return super().model_validate_json(json_data, **options)

    @classmethod
    def model_validate_strings(cls, obj: Any, **options: Any) -> Self:
        """A config from a mapping of its fields. Numbers must be numbers here too: nothing is converted.

        Raises:
            UnsupportedError: as for the class, or it is no such mapping.
        """
        with _one_refusal(obj):
            return super().model_validate_strings(obj, **options)

    @property
    def plan_id(self) -> str:
        """The plan id, 64 hexadecimal digits.

        Raises:
            UnsupportedError: this version does not build the config's backend and arch yet.
        """
        return plan_id_of(self.model_dump())


@contextmanager
def _one_refusal(given: object) -> Iterator[None]:
    """Give the envelope's refusal in the place of pydantic's report of several lines about it."""
    if isinstance(given, Mapping):
        envelope.plan_config(given)
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, UnsupportedError):
            raise cause from None
        raise UnsupportedError(
            f"plan config {shown(given)}", first["msg"], 'give for example {"arch": "sm_90a", "topk": 1024}'
        ) from None
